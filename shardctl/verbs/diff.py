"""Finds which tensors differ between two checkpoints in any layouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from shardctl.base.amounts import format_file_size, format_plural
from shardctl.base.dtype import CASTABLE, SMALL_FLOATS
from shardctl.base.errors import SourceError, UnsupportedError, UsageError
from shardctl.base.result_view import ResultView
from shardctl.base.value import value_class
from shardctl.base.workers import ExecutionOptions
from shardctl.checkpoint.companion_comparison import FileChange, compare_companions
from shardctl.checkpoint.opening import in_file_order, open_checkpoint
from shardctl.checkpoint.quantization.dequantizing import dequantize_as
from shardctl.checkpoint.quantization.unexplained_codes import list_plain_floats
from shardctl.checkpoint.record_crcs import checked_reader
from shardctl.checkpoint.state_comparison import pair_states
from shardctl.conversion.engine.interrupt import stop_on_signals
from shardctl.libraries.files.extra_tensors import add_extra_tensors
from shardctl.tensors.training import ROOT
from shardctl.verify.agreement import require_agreement
from shardctl.verify.cast_losses import CastLosses
from shardctl.verify.content import WeightChanges, compare_tensors

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.checkpoint.state_comparison import OptimizerChange
    from shardctl.options import SourceOptions
    from shardctl.tensors.manifest import Tensor
    from shardctl.verify.config_comparison import ConfigChange
    from shardctl.verify.content import LayerChange, TensorDifference
    from shardctl.verify.value_distance import ValueDistance

_Pair = tuple["Tensor", "Tensor"]
Kind = Literal["only_in_a", "only_in_b", "shape", "dtype", "values", "setting"]


@value_class
class TensorChange:
    """One tensor that is not the same, or one setting of an optimizer, for kind `setting`."""

    tensor: str
    kind: Kind
    a: str
    """What the first checkpoint has, as ``BF16 [2, 3]``; empty if nothing."""
    b: str
    count: int = 0
    """Elements that differ, for kind `values`; for kind `dtype` those that differ after the cast."""
    size: int = 0
    """Elements of the tensor."""
    first: str = ""
    """The first element that differs, as a box."""
    distance: ValueDistance | None = None
    """How far the differing elements are apart; None where none differ, or their types are no floats."""
    cast: str = ""
    """The type that one of the two was cast to before the values were compared, for kind `dtype`."""


@value_class
class DiffResult(ResultView):
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
    layers: tuple[LayerChange, ...] = ()
    """The layers whose floating-point weights changed, the one that changed most first."""
    show_all: bool = False
    """Whether the text lists every difference, not only the first 20."""

    @property
    def equal_all(self) -> bool:
        """Whether no tensor, setting or side file differs."""
        return not (self.changes or self.config_changes or self.file_changes)

    @property
    def verdict(self) -> str:
        """The answer in one line: how many tensors differ and how, or that all are equal; then settings and files."""
        states = sum(change.kind == "setting" for change in self.changes)
        tensors = [change for change in self.changes if change.kind != "setting"]
        others = [
            format_plural(count, f"{what} not the same") if count == 1 else f"{count:,} {what}s not the same"
            for count, what in (
                (states, "optimizer setting"),
                (len(self.config_changes), "setting"),
                (len(self.file_changes), "side file"),
            )
            if count
        ]
        compared = f" ({format_file_size(self.nbytes)} compared)"
        if not tensors:
            head = "equal" if not others else "tensors equal"
            return "; ".join([f"{head}: {format_plural(self.equal, 'tensor')}{compared}", *others])
        kinds = Counter(map(self._describe_kind, tensors))
        whole = f"{len(tensors):,} of {format_plural(len(tensors) + self.equal, 'tensor')}"
        parts = [f"{count:,} {kind}" if len(kinds) > 1 else kind for kind, count in kinds.most_common()]
        return "; ".join([f"{whole}: {', '.join(parts)}{compared}", *others])

    def _describe_kind(self, change: TensorChange) -> str:
        """Describe how a tensor differs, as all that differ alike."""
        if change.kind in {"only_in_a", "only_in_b"}:
            return f"only in {self.a if change.kind == 'only_in_a' else self.b}"
        if change.kind == "dtype":
            types = f"{change.a.split(' ')[0]} -> {change.b.split(' ')[0]}"
            if not change.cast:
                return f"{types}, values not compared"
            return f"{types}, {'not equal' if change.count else 'equal'} after rounding"
        return "shape differs" if change.kind == "shape" else "values differ"


def diff(
    a: str | Path,
    b: str | Path,
    *,
    source_options_a: SourceOptions | None = None,
    source_options_b: SourceOptions | None = None,
    effort: ExecutionOptions | None = None,
) -> DiffResult:
    """Compare two checkpoints tensor by tensor and bit by bit, by canonical names; their configs and side files too.

    Quantized weights are compared as numbers if the other checkpoint has numbers, which a warning says.

    Raises CoverageError for elements that are missing, SourceError for copies of an element that differ, and for
    damaged records of archives.
    """
    effort = effort or ExecutionOptions()
    if source_options_b is not None and source_options_b is source_options_a:
        source_options_b = replace(source_options_b, apply=())  # the deltas are those of the first
    with (
        open_checkpoint(a, source_options_a) as left,
        open_checkpoint(b, source_options_b) as right,
        stop_on_signals(effort.stop),
    ):
        left.source.set_stop_request(effort.stop)
        right.source.set_stop_request(effort.stop)
        companions = compare_companions(left, right)
        first, second = _decode_beside(left, right, effort), _decode_beside(right, left, effort)
        states = pair_states(first, second)
        ours = {**add_extra_tensors(first.manifest).tensors, **states.ours}
        theirs = {**add_extra_tensors(second.manifest).tensors, **states.theirs}
        require_agreement(list(ours.values()), first.source, effort, first.find_spec)
        require_agreement(list(theirs.values()), second.source, effort, second.find_spec)
        plain = list_plain_floats(first) | list_plain_floats(second)
        changes, pairs, narrower = (
            [_build_setting_change(each) for each in states.settings],
            list[_Pair](),
            list[_Pair](),
        )
        for name in sorted({*ours, *theirs}):
            mine, other = ours.get(name), theirs.get(name)
            kind = _classify_change(mine, other)
            if mine is not None and other is not None and kind in {None, "dtype"} and _can_compare(mine, other, plain):
                (narrower if _get_common_type(mine, other) is not mine.dtype else pairs).append((mine, other))
            else:
                changes.append(TensorChange(name, kind or "dtype", _format_tensor(mine), _format_tensor(other)))
        in_file_order(pairs, first, second)
        readers = checked_reader(first), checked_reader(second)
        losses, weights = CastLosses(), WeightChanges(weights=ours.keys() - states.ours.keys())
        differences = compare_tensors(pairs, *readers, effort, losses=losses, changes=weights)
        turned = [(other, mine) for mine, other in narrower]
        weights.reversed = True
        differences += compare_tensors(turned, *readers[::-1], effort, "wider types", losses, weights)
        first.prove()
        second.prove()
        layers = weights.summarize(effort)
        compared = [*pairs, *narrower]
        found = {difference.tensor: difference for difference in differences}
        values = [_build_change(mine, other, found.get(mine.name)) for mine, other in compared]
        changes += [change for change in values if change is not None]
        return DiffResult(
            str(a),
            str(b),
            tuple(sorted(changes, key=lambda c: c.tensor)),
            values.count(None),
            sum(t.nbytes for t, _ in compared),
            (
                *(f"in {name}: {said}" for name, each in ((a, first), (b, second)) for said in _list_warnings(each)),
                *companions.notes,
                *([f"not compared: {states.uncompared}"] if states.uncompared else ()),
                *(
                    f"{name} is infinite in {format_plural(count, 'element')} in which the wider of the two is finite"
                    for name, count in sorted(losses.overflowed.items())
                ),
            ),
            companions.config.changes if companions.config is not None else (),
            companions.files,
            layers,
        )


def _build_setting_change(change: OptimizerChange) -> TensorChange:
    return TensorChange(f"{ROOT}.{change.name}", "setting", f"{change.a}{change.where}", change.b)


def _decode_beside(checkpoint: OpenedCheckpoint, other: OpenedCheckpoint, effort: ExecutionOptions) -> OpenedCheckpoint:
    """Return a checkpoint with its quantized weights as numbers, if the other has numbers and this one's are known."""
    try:
        found = dequantize_as(other, checkpoint, effort.threads)
    except (SourceError, UnsupportedError, UsageError):
        return checkpoint
    if found is checkpoint:
        return checkpoint
    note = f"{found.source.notes()[-1]} before they were compared"
    return replace(found, manifest=replace(found.manifest, warnings=(*found.manifest.warnings, note)))


def _list_warnings(checkpoint: OpenedCheckpoint) -> tuple[str, ...]:
    return *checkpoint.manifest.warnings, *checkpoint.list_unverified_files()


def _classify_change(ours: Tensor | None, theirs: Tensor | None) -> Kind | None:
    if ours is None:
        return "only_in_b"
    if theirs is None:
        return "only_in_a"
    if ours.shape != theirs.shape:
        return "shape"
    return "dtype" if ours.dtype != theirs.dtype else None


def _can_compare(mine: Tensor, other: Tensor, plain: Collection[str]) -> bool:
    """Return whether values can be compared, after a cast where types differ; `plain` are small floats without scales.

    No number is cast to a small float.
    """
    kinds = {mine.dtype.name, other.dtype.name}
    if kinds & SMALL_FLOATS and mine.name in plain:
        kinds -= SMALL_FLOATS
    return mine.dtype == other.dtype or (bool(kinds) and kinds <= CASTABLE)


def _get_common_type(mine: Tensor, other: Tensor) -> DType:
    """Return the type that values are compared in: the narrower one, unless it is a small float."""
    small = [tensor.dtype for tensor in (mine, other) if tensor.dtype.name in SMALL_FLOATS]
    if len(small) == 1:
        return other.dtype if mine.dtype in small else mine.dtype
    return other.dtype if mine.dtype.bits > other.dtype.bits else mine.dtype


def _build_change(mine: Tensor, other: Tensor, difference: TensorDifference | None) -> TensorChange | None:
    """Build what is said of a tensor whose values were compared; None if nothing differs."""
    if difference is None and mine.dtype == other.dtype:
        return None
    return TensorChange(
        mine.name,
        "values" if mine.dtype == other.dtype else "dtype",
        _format_tensor(mine),
        _format_tensor(other),
        difference.count if difference is not None else 0,
        mine.size,
        str(difference.first) if difference is not None else "",
        difference.distance if difference is not None else None,
        "" if mine.dtype == other.dtype else _get_common_type(mine, other).name,
    )


def _format_tensor(tensor: Tensor | None) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else ""
