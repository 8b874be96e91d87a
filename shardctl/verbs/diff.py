"""Finds which tensors differ between two checkpoints in any layouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardctl.base.amounts import format_file_size, format_plural
from shardctl.base.dtype import CASTABLE, SMALL_FLOATS
from shardctl.base.errors import (
    DestinationError,
    Mismatch,
    SourceError,
    UnsupportedError,
    UsageError,
    format_first_few,
)
from shardctl.base.result_view import ResultView
from shardctl.base.value import value_class
from shardctl.base.workers import ExecutionOptions
from shardctl.checkpoint.companion_comparison import FileChange, compare_companions
from shardctl.checkpoint.opening import in_file_order, open_checkpoint
from shardctl.checkpoint.quantization.dequantizing import dequantize_as
from shardctl.checkpoint.quantization.unexplained_codes import list_plain_floats
from shardctl.checkpoint.record_crcs import checked_reader
from shardctl.checkpoint.state_comparison import PairedStates, pair_states
from shardctl.conversion.engine.interrupt import stop_on_signals
from shardctl.libraries.files.extra_tensors import add_extra_tensors
from shardctl.options import SourceOptions
from shardctl.storage.cloud import is_bucket
from shardctl.storage.hub import is_hub_address
from shardctl.storage.path_overlap import is_same_or_inside
from shardctl.tensors.training import ROOT
from shardctl.verify.agreement import require_agreement
from shardctl.verify.cast_losses import CastLosses
from shardctl.verify.content import WeightChanges, compare_tensors

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.checkpoint.state_comparison import OptimizerChange
    from shardctl.conversion.delta_writing import WrittenDelta
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
    delta: WrittenDelta | None = None
    """The weight delta that was written, if one was requested."""
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
    write: str | Path | None = None,
) -> DiffResult:
    """Compare two checkpoints tensor by tensor and bit by bit, by canonical names; their configs and side files too.

    Quantized weights are compared as numbers if the other checkpoint has numbers, which a warning says. With `write`, a
    weight delta from the first to the second is written to that directory, applied to the first and compared with the
    second before it gets its name; optimizer states are then passed over.

    Raises CoverageError for elements that are missing, SourceError for copies of an element that differ, for damaged
    records of archives, and for tensors between which there is no delta; DestinationError if `write` exists.
    """
    effort = effort or ExecutionOptions()
    if source_options_b is not None and source_options_b is source_options_a:
        source_options_b = replace(source_options_b, apply=())  # the deltas are those of the first
    if write is None:
        return _compare(a, b, source_options_a, source_options_b, effort)
    from shardctl.conversion.delta_writing import publish_delta, stage_delta

    destination = _check_delta_destination(write, a, b)
    source_options_a = source_options_a or SourceOptions()
    source_options_b = replace(source_options_b or SourceOptions(), unpadded=True)
    with stage_delta(destination) as staging:
        found = _compare(a, b, source_options_a, source_options_b, effort, (destination, staging))
        patched = replace(source_options_a, apply=(*source_options_a.apply, str(staging)))
        checked = _compare(a, b, patched, source_options_b, effort, weights_only=True)
        if checked.changes:
            wrong = format_first_few([change.tensor for change in checked.changes])
            raise Mismatch(f"{a} with the delta is not {b}: {wrong} differ")
        publish_delta(staging, destination)
    return found


def _check_delta_destination(write: str | Path, a: str | Path, b: str | Path) -> Path:
    """Return where a delta is written; raises an error for a place that is not a new local directory."""
    if is_bucket(write) or is_hub_address(write):
        raise UsageError(f"--write needs a local directory, and {write} is none", hint="copy the delta afterwards")
    for place in (a, b):
        if not (is_bucket(place) or is_hub_address(place)) and is_same_or_inside(Path(write), Path(place)):
            raise DestinationError(f"{write} is in {place}, which is read", hint="write to another directory")
    return Path(write)


def _require_patchable(
    changes: Sequence[TensorChange], left: OpenedCheckpoint, right: OpenedCheckpoint, *, decoded: bool
) -> None:
    """Raise SourceError if a delta cannot turn the tensors of one checkpoint into those of the other."""
    names = f"{left.source.name} and {right.source.name}"
    if decoded:
        raise SourceError(
            f"one of {names} is quantized and the other is not, and a weight delta changes bytes",
            hint="convert one of them with --quantize or --dtype first",
        )
    for kinds, what in (
        ({"only_in_a"}, f"only {left.source.name} has {{}}"),
        ({"only_in_b"}, f"only {right.source.name} has {{}}"),
        ({"shape", "dtype"}, f"{names} have other shapes or types of {{}}"),
    ):
        found = [
            f"{change.tensor} ({change.a} and {change.b})" if change.a and change.b else change.tensor
            for change in changes
            if change.kind in kinds
        ]
        if found:
            raise SourceError(
                f"{what.format(format_first_few(found))}, and a weight delta changes bytes of tensors that both have",
                hint="publish the whole checkpoint: shardctl reshard",
            )


def _compare(
    a: str | Path,
    b: str | Path,
    source_options_a: SourceOptions | None,
    source_options_b: SourceOptions | None,
    effort: ExecutionOptions,
    delta: tuple[Path, Path] | None = None,
    *,
    weights_only: bool = False,
) -> DiffResult:
    """Compare two checkpoints, and write a delta for a destination into a staging directory, if they are given."""
    with (
        open_checkpoint(a, source_options_a) as left,
        open_checkpoint(b, source_options_b) as right,
        stop_on_signals(effort.stop),
    ):
        if delta is not None:
            from shardctl.conversion.delta_writing import require_base, write_delta

            require_base(left.source, delta[0])
        left.source.set_stop_request(effort.stop)
        right.source.set_stop_request(effort.stop)
        companions = compare_companions(left, right)
        first, second = _decode_beside(left, right, effort), _decode_beside(right, left, effort)
        states = PairedStates() if weights_only or delta is not None else pair_states(first, second)
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
        if delta is not None:
            dtypes = [
                TensorChange(mine.name, "dtype", _format_tensor(mine), _format_tensor(other))
                for mine, other in (*pairs, *narrower)
                if mine.dtype != other.dtype
            ]
            _require_patchable([*changes, *dtypes], left, right, decoded=first is not left or second is not right)
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
        written = None
        if delta is not None:
            written = write_delta(left, right, {change.tensor for change in changes}, *delta, effort)
        return DiffResult(
            str(a),
            str(b),
            tuple(sorted(changes, key=lambda c: c.tensor)),
            values.count(None),
            sum(t.nbytes for t, _ in compared),
            (
                *(f"in {name}: {said}" for name, each in ((a, first), (b, second)) for said in _list_warnings(each)),
                *companions.notes,
                *(written.warnings if written is not None else ()),
                *([f"not compared: {states.uncompared}"] if states.uncompared else ()),
                *(
                    f"{name} is infinite in {format_plural(count, 'element')} in which the wider of the two is finite"
                    for name, count in sorted(losses.overflowed.items())
                ),
            ),
            companions.config.changes if companions.config is not None else (),
            companions.files,
            layers,
            written,
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
