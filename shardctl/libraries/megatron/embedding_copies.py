"""Compares the embedding and the head of layers that predict further tokens with those of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from shardctl.base.errors import format_first_few
from shardctl.libraries.megatron.further_layers import COPIES
from shardctl.libraries.megatron.ranks import TITLE
from shardctl.tensors.bands import BandBuffer, ChunkIndex
from shardctl.tensors.box import Box
from shardctl.tensors.copyplan import cover_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.manifest import Tensor

_COMPARED_ROW_COUNT: Final = 64
"""Rows that are compared of a tensor and what it is a copy of."""


def note_copies(order: PackRequest, count: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List tensors of `count` such layers that Megatron-LM takes from the model itself, and what to say of them.

    Some rows are compared, since a layer that was trained with an embedding or a head of its own would be another.
    """
    left, unlike = [], []
    for index in range(count):
        for own, of in COPIES:
            name = f"model.layers.{order.model.layers + index}.{own}"
            copy = order.have.tensors.get(name)
            model = order.have.tensors.get(order.model.aliases.get(of, of))
            if copy is None or model is None:
                continue
            left.append(name)
            if not _has_same_rows(copy, model, order.read):
                unlike.append(name)
    said = []
    if unlike:
        said.append(
            f"{format_first_few(unlike)} differ from the model's own embedding or head, which {TITLE}'s layers use in "
            "their place: what these layers predict changes; --only mtp --to hf keeps them"
        )
    alike = [name for name in left if name not in unlike]
    if alike:
        said.append(
            f"{format_first_few(alike)} are left behind: {TITLE}'s layers use the model's own embedding and head, with "
            f"which {_COMPARED_ROW_COUNT} rows of each were compared; --complete-from puts them back"
        )
    return tuple(left), tuple(said)


def _has_same_rows(one: Tensor, other: Tensor, read: Callable[[str, int, int], bytes]) -> bool:
    """Return whether rows of two tensors, spread over all of them, have the same bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    rows = sorted({at * (one.shape[0] - 1) // max(_COMPARED_ROW_COUNT - 1, 1) for at in range(_COMPARED_ROW_COUNT)})
    return all(_read_row(one, row, read) == _read_row(other, row, read) for row in rows)


def _read_row(tensor: Tensor, row: int, read: Callable[[str, int, int], bytes]) -> bytes:
    box = Box((row, *(0,) * (len(tensor.shape) - 1)), (1, *tensor.shape[1:]))
    into = np.empty(tensor.dtype.nbytes(box.shape), np.uint8)
    BandBuffer(into.nbytes).read(_RequestReader(read), ChunkIndex(cover_tensor(tensor)), box, into)
    return into.tobytes()


class _RequestReader:
    """Reads as bands do, of what a request reads."""

    def __init__(self, read: Callable[[str, int, int], bytes]) -> None:
        self._read = read

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from an offset."""
        into[:] = self._read(path, offset, len(into))
