"""Refuses a conversion that would write many times the bytes of its source, which could fill a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_file_size
from shardctl.base.errors import HostileError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.tensors.copyplan import CopyPlan
    from shardctl.tensors.manifest import Manifest, Tensor

_MAX_EXPANSION_FACTOR: Final = 4
"""Bytes of tensors for one byte of the source. The most that a model in use ties is one embedding in four places (T5:
shared, encoder, decoder, head), which is less than that even if it had nothing else."""
_MOST_DECODED: Final = 32
"""Bytes of values for one byte of codes: eight of one bit each, as F32."""
_EXPANSION_ALLOWANCE_BYTES: Final = 256 << 20
"""Bytes beyond that which are never refused: no disk is filled by so few, and tests and examples repeat more."""


def check_expansion(plan: CopyPlan, encoded: Sequence[Tensor] = ()) -> None:
    """Raise HostileError if the tensors of the result, name by name, are much larger than the files of the source.

    Of quantized weights whose values are written, `encoded` are the arrays: a byte of them holds up to eight elements
    that take four bytes each.

    Casts and the copies of one box on several ranks do not count: they grow with what was asked for, not with what the
    source says.
    """
    limit = compute_expansion_limit(plan.have, encoded)
    if plan.write_bytes <= limit:
        return
    wanted = 0
    for copy in plan.copies:
        boxes = {(chunk.name, chunk.box) for chunk in copy.target.chunks}
        wanted += sum(copy.source.dtype.nbytes(box.shape) for _, box in boxes)
    if wanted > limit:
        stored = _count_stored_bytes(plan.have, encoded)
        raise HostileError(
            f"the source stores {format_file_size(stored)}, but its tensors would take "
            f"{format_file_size(wanted)} when each name is "
            f"written out: more than {_MAX_EXPANSION_FACTOR} times as much",
            hint="many names share one storage, or strides repeat elements; if that is intended, add --allow-expansion",
        )


def compute_expansion_limit(have: Manifest, encoded: Sequence[Tensor] = ()) -> int:
    """Compute the bytes of a result that are never refused as too many."""
    return _MAX_EXPANSION_FACTOR * _count_stored_bytes(have, encoded) + _EXPANSION_ALLOWANCE_BYTES


def _count_stored_bytes(have: Manifest, encoded: Sequence[Tensor]) -> int:
    stored = sum(file.size for file in have.files.values())
    return stored + (_MOST_DECODED // _MAX_EXPANSION_FACTOR - 1) * sum(tensor.nbytes for tensor in encoded)
