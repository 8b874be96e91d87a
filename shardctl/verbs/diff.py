"""Finds which tensors differ between two checkpoints in any layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardctl.checkpoint.companion_comparison import FileChange, compare_companions
from shardctl.checkpoint.opening import in_file_order, open_checkpoint
from shardctl.checkpoint.record_crcs import checked_reader
from shardctl.execute.interrupt import stop_on_signals
from shardctl.verify.agreement import require_agreement
from shardctl.verify.content import compare_tensors
from shardctl.workers import ExecutionOptions

if TYPE_CHECKING:
    from pathlib import Path

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.manifest import Tensor
    from shardctl.options import SourceOptions
    from shardctl.verify.config_comparison import ConfigChange

Kind = Literal["only_in_a", "only_in_b", "shape", "dtype", "values"]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor that is not the same."""

    tensor: str
    kind: Kind
    a: str
    """What the first checkpoint has, as ``BF16 [2, 3]``; empty if nothing."""
    b: str
    count: int = 0
    """Elements that differ, for kind `values`."""
    size: int = 0
    """Elements of the tensor."""
    first: str = ""
    """The first element that differs, as a box."""


@dataclass(frozen=True, slots=True)
class DiffResult:
    """How two checkpoints differ."""

    a: str
    b: str
    changes: tuple[TensorChange, ...]
    equal: int
    """Tensors whose bits are the same."""
    nbytes: int
    """Bytes compared."""
    warnings: tuple[str, ...]
    """What is odd about either, with its name, and what was not compared."""
    config_changes: tuple[ConfigChange, ...] = ()
    """Settings of the configs that are not the same."""
    file_changes: tuple[FileChange, ...] = ()
    """Side files, such as a tokenizer, that are not the same."""

    @property
    def equal_all(self) -> bool:
        """Whether no tensor, setting or side file differs."""
        return not (self.changes or self.config_changes or self.file_changes)


def diff(
    a: str | Path,
    b: str | Path,
    *,
    source_options_a: SourceOptions | None = None,
    source_options_b: SourceOptions | None = None,
    effort: ExecutionOptions | None = None,
) -> DiffResult:
    """Compare two checkpoints tensor by tensor and bit by bit, by canonical names; their configs and side files too.

    Raises CoverageError for elements that are missing, SourceError for copies of an element that differ, and for
    damaged records of archives.
    """
    effort = effort or ExecutionOptions()
    with (
        open_checkpoint(a, source_options_a) as first,
        open_checkpoint(b, source_options_b) as second,
        stop_on_signals(effort.stop),
    ):
        first.source.heed(effort.stop)
        second.source.heed(effort.stop)
        companions = compare_companions(first, second)
        ours, theirs = first.manifest.tensors, second.manifest.tensors
        require_agreement(list(ours.values()), first.source, effort)
        require_agreement(list(theirs.values()), second.source, effort)
        changes, pairs = [], []
        for name in sorted({*ours, *theirs}):
            kind = _classify_change(ours.get(name), theirs.get(name))
            if kind is None:
                pairs.append((ours[name], theirs[name]))
            else:
                changes.append(
                    TensorChange(name, kind, _format_tensor(ours.get(name)), _format_tensor(theirs.get(name)))
                )
        in_file_order(pairs, first, second)
        differences = compare_tensors(pairs, checked_reader(first), checked_reader(second), effort)
        first.prove()
        second.prove()
        for d in differences:
            tensor = ours[d.tensor]
            text = _format_tensor(tensor)
            changes.append(TensorChange(d.tensor, "values", text, text, d.count, tensor.size, str(d.first)))
        return DiffResult(
            str(a),
            str(b),
            tuple(sorted(changes, key=lambda c: c.tensor)),
            len(pairs) - len(differences),
            sum(t.nbytes for t, _ in pairs),
            (
                *(f"in {name}: {said}" for name, each in ((a, first), (b, second)) for said in _list_warnings(each)),
                *companions.notes,
            ),
            companions.config.changes if companions.config is not None else (),
            companions.files,
        )


def _list_warnings(checkpoint: OpenedCheckpoint) -> tuple[str, ...]:
    return *checkpoint.manifest.warnings, *checkpoint.unverified()


def _classify_change(ours: Tensor | None, theirs: Tensor | None) -> Kind | None:
    if ours is None:
        return "only_in_b"
    if theirs is None:
        return "only_in_a"
    if ours.shape != theirs.shape:
        return "shape"
    return "dtype" if ours.dtype != theirs.dtype else None


def _format_tensor(tensor: Tensor | None) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else ""
