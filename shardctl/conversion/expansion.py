"""Refuses a conversion that would write many times the bytes of its source, which could fill a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.amounts import format_file_size
from shardctl.errors import HostileError

if TYPE_CHECKING:
    from shardctl.copyplan import CopyPlan

_FACTOR: Final = 4
"""Bytes of tensors for one byte of the source. The most that a model in use ties is one embedding in four places (T5:
shared, encoder, decoder, head), which is less than that even if it had nothing else."""
_FREE: Final = 256 << 20
"""Bytes beyond that which are never refused: no disk is filled by so few, and tests and examples repeat more."""


def check_expansion(plan: CopyPlan) -> None:
    """Raise HostileError if the tensors of the result, name by name, are much larger than the files of the source.

    Casts and the copies of one box on several ranks do not count: they grow with what was asked for, not with what the
    source says.
    """
    stored = sum(file.size for file in plan.have.files.values())
    limit = _FACTOR * stored + _FREE
    if plan.write_bytes <= limit:
        return
    wanted = 0
    for copy in plan.copies:
        boxes = {(chunk.name, chunk.box) for chunk in copy.target.chunks}
        wanted += sum(copy.source.dtype.nbytes(box.shape) for _, box in boxes)
    if wanted > limit:
        raise HostileError(
            f"the source stores {format_file_size(stored)}, but its tensors would take "
            f"{format_file_size(wanted)} when each name is "
            f"written out: more than {_FACTOR} times as much",
            hint="many names share one storage, or strides repeat elements; if that is meant, add --allow-expansion",
        )
