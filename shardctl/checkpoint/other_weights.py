"""Compares weights files that a checkpoint does not use with the tensors of the same names that it has.

Loaders differ in which file they take where two have a tensor: by its name, by the index, or the last one read. If the
values differ, one of these loaders computes something else.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import CASTABLE
from shardctl.base.errors import Interrupted, ShardctlError, format_first_few
from shardctl.libraries import registry as formats
from shardctl.libraries.files.side_files import list_unused_weights
from shardctl.storage.local import LocalSource
from shardctl.verify.content import compare_tensors
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.base.workers import ExecutionOptions
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.tensors.manifest import Tensor

CHECK: Final = "duplicates"


def check_other_weights(checkpoint: OpenedCheckpoint, effort: ExecutionOptions) -> Iterator[CheckFinding]:
    """Yield each file beside the checkpoint's own that has other values of tensors with the same stored names.

    Types that a cast makes equal are compared after it. What cannot be read, or is far away, is a warning.
    """
    folder = checkpoint.source.folder
    for path in list_unused_weights(checkpoint.stored):
        if folder is None:
            message = f"{path} was not compared with the tensors of this checkpoint, because it is on another machine"
            yield CheckFinding("warning", CHECK, message, file=path)
            continue
        try:
            with closing(LocalSource(folder / path)) as source:
                held = formats.scan_checkpoint(source).tensors
                mine = checkpoint.stored.tensors
                pairs = [(mine[name], other) for name, other in held.items() if name in mine]
                differing = _list_differing(pairs, checkpoint, source, effort)
        except Interrupted:
            raise
        except ShardctlError as error:
            message = f"{path} was not compared with the tensors of this checkpoint: {error.message}"
            yield CheckFinding("warning", CHECK, message, file=path)
            continue
        if differing:
            message = (
                f"{path} has other values than this checkpoint in {len(differing):,} of {len(pairs):,} tensors of the "
                f"same names ({format_first_few(differing)}); which values count depends on the loader"
            )
            yield CheckFinding("error", CHECK, message, differing[0], path)


def _list_differing(
    pairs: list[tuple[Tensor, Tensor]], checkpoint: OpenedCheckpoint, source: LocalSource, effort: ExecutionOptions
) -> list[str]:
    """List the tensors of the checkpoint that differ from their namesakes, in the order of the pairs."""
    found = {mine.name for mine, other in pairs if not _can_compare(mine, other)}
    alike = [(mine, other) for mine, other in pairs if mine.name not in found]
    wider = [(other, mine) for mine, other in alike if mine.dtype.bits > other.dtype.bits]
    rest = [(mine, other) for mine, other in alike if mine.dtype.bits <= other.dtype.bits]
    found |= {each.tensor for each in compare_tensors(rest, checkpoint.source, source, effort, "other files")}
    found |= {each.tensor for each in compare_tensors(wider, source, checkpoint.source, effort, "other files")}
    return [mine.name for mine, _ in pairs if mine.name in found]


def _can_compare(mine: Tensor, other: Tensor) -> bool:
    alike = mine.dtype == other.dtype or {mine.dtype.name, other.dtype.name} <= CASTABLE
    return alike and mine.shape == other.shape
