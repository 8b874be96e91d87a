"""Reads parts of stored tensors as numbers to compute with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from shardctl.base.errors import SourceError
from shardctl.tensors.box import Box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import DTypeLike, NDArray

    from shardctl.base.dtype import DType
    from shardctl.tensors.bands import BandBuffer, ByteReader, ChunkIndex
    from shardctl.tensors.tiles import Span

COMPUTABLE: Final[Mapping[str, DTypeLike]] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
"""The types whose numbers F32 holds exactly, and that weights and adapters have."""


def read_elements(reader: ByteReader, buffer: BandBuffer, stored: ChunkIndex, spans: Sequence[Span]) -> NDArray[Any]:
    """Read the elements between the `spans` of each dim of a tensor, in its own type."""
    box = Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))
    dtype = stored.chunks[0].dtype
    into = np.empty(dtype.nbytes(box.shape), np.uint8)
    found = buffer.read(reader, stored, box, into)
    assert found == box.size, f"{stored.chunks[0].name} {box}: read {found} elements"  # noqa: S101
    return into.view(COMPUTABLE[dtype.name]).reshape(box.shape)


def read_numbers(
    reader: ByteReader, buffer: BandBuffer, stored: ChunkIndex, spans: Sequence[Span]
) -> NDArray[np.float32]:
    """Read the same as F32."""
    return read_elements(reader, buffer, stored, spans).astype(np.float32, copy=False)


def round_numbers(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Round to what a narrower type holds."""
    with np.errstate(over="ignore"):
        return values.astype(COMPUTABLE[dtype]).astype(np.float32)


def build_overflow_error(name: str, count: int, dtype: DType) -> SourceError:
    """Build the error that says that what an adapter makes of a tensor is not finite."""
    return SourceError(
        f"the adapter makes {count:,} finite elements of {name} NaN or infinite in {dtype}",
        hint="its scaling (lora_alpha), or its matrices, may be wrong; a base in BF16 or F32 holds larger numbers",
    )
