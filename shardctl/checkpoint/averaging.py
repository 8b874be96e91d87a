"""Makes of an opened checkpoint the weighted sum of it and others: an average, an EMA of a run, an added difference.

What follows, from the plan of a conversion to the comparison of its result, takes it for any other checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardctl import models
from shardctl.base.dtype import CASTABLE
from shardctl.base.errors import SourceError, UnsupportedError, UsageError, format_first_few
from shardctl.base.value import value_class
from shardctl.checkpoint.completing import describe_location
from shardctl.checkpoint.config_files import CONFIG
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.storage import HIDDEN
from shardctl.storage.cloud import is_bucket
from shardctl.storage.hub import is_hub_address
from shardctl.tensors.box import Box
from shardctl.tensors.copyplan import cover_tensor
from shardctl.tensors.manifest import CheckpointFile, Chunk, Region, Tensor, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from fractions import Fraction

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.computed_source import ComputedArray
    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
    from shardctl.storage import Source

_STEP_NUMBER_PATTERN: Final = re.compile(r"(\d+)$")
_NUMBER: Final = re.compile(r"[+-]?(?:\d{1,30}/\d{1,30}|(?:\d{1,30}\.?\d{0,30}|\.\d{1,30})(?:[eE][+-]?\d{1,2})?)")
"""Weights that people write. The limits keep their products with values, and their exact sums, small."""
_DIGITS: Final = re.compile(r"\d+")
_MIN_STEPS: Final = 2
_MIN_DECIMAL_DENOMINATOR: Final = 10**4
"""Denominators from which on messages show decimals."""
_EXACT_MATCH_DTYPES: Final = frozenset({"I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL"})
"""Element types of tensors that must be equal: counters, masks, tables of positions."""


@value_class
class Combination:
    """The checkpoints that are summed, and the weight of each; the first one gives config and tokenizer."""

    first: str | Path
    others: tuple[str | Path, ...]
    weights: tuple[Fraction, ...]
    """Of the first one and of the others, exactly as they were given."""


def parse_combination(path: str | Path, options: ReshardOptions | VerifyOptions) -> Combination | None:
    """Return what is summed for a source; None if nothing is.

    Raises UsageError for options that contradict each other, or weights whose sum is not 1, SourceError for a run
    without two checkpoints.
    """
    ways = [
        flag
        for flag, given in (
            ("--average-with", bool(options.average_with)),
            ("--ema", options.ema is not None),
            ("--add-difference", options.add_difference is not None),
        )
        if given
    ]
    if len(ways) > 1:
        raise UsageError(f"{' and '.join(ways)} are different sums", hint="give one of them")
    if options.average_weights is not None and not options.average_with:
        raise UsageError("--average-weights needs --average-with", hint="name each further checkpoint")
    if options.scale is not None and options.add_difference is None:
        raise UsageError("--scale needs --add-difference", hint="add --add-difference B C, for SRC + scale * (B - C)")
    if options.average_with:
        return Combination(path, tuple(options.average_with), _parse_weights(options))
    if options.ema is not None:
        return _find_run(path, _parse_number("--ema", options.ema))
    if options.add_difference is not None:
        one, scale = _parse_number("--scale", "1"), _parse_number("--scale", options.scale or "1")
        return Combination(path, tuple(options.add_difference), (one, scale, -scale))
    return None


def _parse_number(flag: str, text: str) -> Fraction:
    from fractions import Fraction  # which takes time to import, and few runs need it

    found = _NUMBER.fullmatch(text.strip())
    try:
        return Fraction(found[0] if found is not None else "")
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"{flag} {text:.100} is not a number", hint="write 0.25 or 1/3") from None


def _parse_weights(options: ReshardOptions | VerifyOptions) -> tuple[Fraction, ...]:
    count = len(options.average_with) + 1
    if options.average_weights is None:
        return (_parse_number("--average-weights", f"1/{count}"),) * count
    weights = tuple(_parse_number("--average-weights", text) for text in options.average_weights.split(","))
    if len(weights) != count:
        raise UsageError(
            f"--average-weights has {len(weights)} weights for {count} checkpoints",
            hint="the source's is the first, and then one for each --average-with",
        )
    if sum(weights) != 1:
        raise UsageError(
            f"--average-weights add up to {float(sum(weights)):.10g}, not to 1",
            hint="write thirds as 1/3; for other sums see --add-difference",
        )
    return weights


def _find_run(path: str | Path, decay: Fraction) -> Combination:
    """Return the exponential moving average over the checkpoints of a run, in the order of their steps.

    It begins with the first one: `average = decay * average + (1 - decay) * next`. The newest gives the config.
    """
    if not 0 < decay < 1:
        raise UsageError(f"--ema {float(decay):g} is not between 0 and 1", hint="0.9 gives the newest a weight of 0.1")
    if is_bucket(path) or is_hub_address(path):
        raise UsageError(
            f"--ema needs a local run, and {path} is not one",
            hint="name its checkpoints with --average-with and --average-weights",
        )
    run = Path(path)
    inside = [each for each in run.iterdir() if each.is_dir() and each.name not in HIDDEN] if run.is_dir() else []
    steps = sorted(
        (int(found[1]), each.name, each)
        for each in inside
        if (found := _STEP_NUMBER_PATTERN.search(each.name)) is not None
    )
    if len(steps) < _MIN_STEPS:
        raise SourceError(
            f"{run} has {len(steps)} checkpoints whose names end with a step, and an average needs two",
            hint="give the directory that has the run's checkpoints, such as checkpoint-100 and checkpoint-200",
        )
    series = {_DIGITS.sub("0", name): name for _, name, _ in reversed(steps)}
    if len(series) > 1:
        raise SourceError(
            f"{run} has more than one series of steps, such as {format_first_few(sorted(series.values()))}",
            hint="move what is not a checkpoint of the run elsewhere",
        )
    paths = [path for _, _, path in steps]
    after = [decay ** (len(paths) - 1 - number) for number in range(len(paths))]
    weights = [after[0], *((1 - decay) * each for each in after[1:])]
    return Combination(paths[-1], tuple(paths[:-1]), (weights[-1], *weights[:-1]))


def combine_checkpoints(
    checkpoint: OpenedCheckpoint,
    combination: Combination,
    source_options: SourceOptions,
    threads: int,
    cast: DType | None,
    keep_fp32: str | None,
) -> OpenedCheckpoint:
    """Return the sum of a checkpoint and others, which is computed when tensors are read.

    Each element is rounded once, to the type `cast` if that is given and no name matches `keep_fp32`, else to the type
    that `checkpoint` has. The others may have other layouts and element types. Optimizer states are dropped, and a
    warning lists them.

    Raises:
        SourceError: a checkpoint has other tensors, or other shapes, than the first one.
        UnsupportedError: weights are quantized and not decoded.
    """
    first = _decode(checkpoint, threads, cast)
    opened = [_open_other(first, path, source_options) for path in combination.others]
    for each in (checkpoint, *opened):
        if each.adapter:
            raise UnsupportedError(
                f"{each.source.name} is an adapter, and the product of averaged factors is not the average",
                hint="merge each into the base first: shardctl reshard BASE DST --merge ADAPTER",
            )
    others = [_decode(each, threads, cast) for each in opened]
    for each in others:
        first.resources.enter_context(each.resources)
        _require_same_tensors(first, each)
    keep = re.compile(keep_fp32) if keep_fp32 is not None else None
    return _Sum(first, others, combination.weights, cast, keep).build(threads)


def _open_other(first: OpenedCheckpoint, path: str | Path, source_options: SourceOptions) -> OpenedCheckpoint:
    """Open one of the others, with the first one's config if it has none; `first` closes it."""
    options = replace(source_options, complete_from=None, apply=())
    found = first.resources.enter_context(open_checkpoint(path, options))
    folder = first.source.folder
    if found.config is None and folder is not None and (folder / CONFIG).is_file():
        found = first.resources.enter_context(open_checkpoint(path, replace(options, config=folder / CONFIG)))
    return found


def _decode(checkpoint: OpenedCheckpoint, threads: int, cast: DType | None) -> OpenedCheckpoint:
    """Return a checkpoint whose weights are numbers; raises UnsupportedError if they are quantized and stay so."""
    declared = checkpoint.config is not None and models.find_quantization_config(checkpoint.config) is not None
    if not declared and checkpoint.stored_quantization is None:
        return checkpoint
    if cast is None:
        raise UnsupportedError(
            f"{checkpoint.source.name} is quantized, and codes have no average", hint="add --dtype bf16 to decode it"
        )
    from shardctl.checkpoint.quantization.dequantizing import dequantize_checkpoint

    return dequantize_checkpoint(checkpoint, cast, threads)


def _list_tensors(checkpoint: OpenedCheckpoint) -> dict[str, Tensor]:
    """Map the names of tensors to them, with those that the class does not have."""
    return {**checkpoint.manifest.tensors, **checkpoint.manifest.extra}


def _require_same_tensors(first: OpenedCheckpoint, other: OpenedCheckpoint) -> None:
    mine, theirs = _list_tensors(first), _list_tensors(other)
    for lacking, has in ((first, other), (other, first)):
        held = _list_tensors(lacking)
        missing = [name for name in _list_tensors(has) if name not in held]
        if missing:
            raise SourceError(
                f"{lacking.source.name} does not have {format_first_few(missing)} of {has.source.name}",
                hint="only checkpoints of one model are averaged; --exclude leaves tensors out",
            )
    for name, tensor in mine.items():
        if theirs[name].shape != tensor.shape:
            raise SourceError(
                f"{name} is {list(tensor.shape)} in {first.source.name}, and {list(theirs[name].shape)} in "
                f"{other.source.name}",
                hint="only checkpoints of one model are averaged",
            )


@value_class
class _Sum:
    """Checkpoints with equal tensors, and their weights."""

    first: OpenedCheckpoint
    others: Sequence[OpenedCheckpoint]
    weights: tuple[Fraction, ...]
    cast: DType | None
    keep: re.Pattern[str] | None

    def build(self, threads: int) -> OpenedCheckpoint:
        """Return the first checkpoint with sums in the place of its tensors."""
        from shardctl.checkpoint.computed_source import ComputedSource
        from shardctl.models.adaptation.weighted_sum import count_run_bytes

        arrays: dict[str, ComputedArray] = {}
        tensors: dict[str, Tensor] = {}
        stored: list[Tensor] = []
        files: dict[str, CheckpointFile] = {}
        sources: dict[str, tuple[Source, str]] = {}
        for number, other in enumerate(self.others):
            for path, file in other.manifest.files.items():
                here = _relocate_path(path, number)
                files[here] = replace(file, path=here)
            for path in (*other.manifest.files, *(path for t in _list_tensors(other).values() for path in t.files)):
                here = _relocate_path(path, number)  # a decoded tensor has a path without a file
                sources[here] = (other.source, path)
        others = [_list_tensors(other) for other in self.others]
        for name, tensor in _list_tensors(self.first).items():
            inputs = [_relocate(each[name], number) for number, each in enumerate(others)]
            stored += (tensor, *inputs)
            tensors[name] = self._sum_tensor(tensor, inputs, arrays)
        before = self.first
        extra = {name: tensors.pop(name) for name in before.manifest.extra}
        said = self.describe()
        return replace(
            before,
            source=ComputedSource(
                before.source,
                arrays,
                thread_bytes=threads * count_run_bytes(len(self.weights)),
                note=f"{len(arrays):,} tensors are the sum of {said}",
                others=sources,
            ),
            manifest=replace(
                before.manifest,
                tensors=tensors,
                extra=extra,
                files={**before.manifest.files, **files},
                training=None,
                warnings=(*before.manifest.warnings, *self._list_warnings(), *self._list_dropped_states()),
            ),
            config=self._write_config(),
            remade_config=before.remade_config or self.cast is not None,
            adapted=(*before.adapted, *stored),
            averaged=said,
            inputs={_prefix(number): other for number, other in enumerate(self.others)},
        )

    def describe(self) -> str:
        """Say which checkpoints are summed, with which weights, without the directories that they lie in."""
        names = [describe_location(each.source) for each in (self.first, *self.others)]
        weights = [
            str(weight) if weight.denominator < _MIN_DECIMAL_DENOMINATOR else f"{float(weight):.9g}"
            for weight in self.weights
        ]
        return " + ".join(f"{weight} * {name}" for weight, name in zip(weights, names, strict=True))

    def _sum_tensor(self, tensor: Tensor, others: Sequence[Tensor], arrays: dict[str, ComputedArray]) -> Tensor:
        """Return a tensor that is computed; one without floating-point numbers must be the same everywhere."""
        from shardctl.models.adaptation.weighted_sum import SUMMABLE, WeightedSum
        from shardctl.tensors.bands import ChunkIndex

        inputs = (tensor, *others)
        kinds = {each.dtype.name for each in inputs}
        summed = kinds <= SUMMABLE.keys()
        if not summed and (len(kinds) > 1 or not kinds <= _EXACT_MATCH_DTYPES):
            raise UnsupportedError(
                f"{tensor.name} is {' and '.join(sorted(kinds))}, of which no sum is computed",
                hint="add --dtype bf16 if these are quantized weights, or --exclude to leave the tensor out",
            )
        dtype = self._choose_dtype(tensor) if summed else tensor.dtype
        path = f"{tensor.name} (sum)"
        stored = tuple(ChunkIndex(cover_tensor(each)) for each in inputs)
        arrays[path] = WeightedSum(tensor.name, tensor.shape, stored, self.weights, dtype)
        where = Region(path, 0, compute_dense_strides(dtype, tensor.shape))
        chunk = Chunk(Box.whole(tensor.shape), dtype, where, tensor.chunks[0].name)
        read = sum(each.nbytes if each.encoded_bytes is None else each.encoded_bytes for each in inputs)
        return replace(tensor, dtype=dtype, chunks=(chunk,), encoded_bytes=read)

    def _choose_dtype(self, tensor: Tensor) -> DType:
        if self.cast is None or tensor.dtype.name not in CASTABLE:
            return tensor.dtype
        kept = tensor.dtype.name == "F32" and self.keep is not None and self.keep.search(tensor.name)
        return tensor.dtype if kept else self.cast

    def _write_config(self) -> Mapping[str, Any] | None:
        """Return the first one's config, with the element type that the sums have."""
        config = self.first.config
        if config is None or self.cast is None:
            return config
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        return {**config, **dict.fromkeys(keys, self.cast.torch)}

    def _list_warnings(self) -> Iterator[str]:
        """Yield what is odd about the others, with their names."""
        for other in self.others:
            yield from (f"in {other.source.name}: {said}" for said in other.manifest.warnings)

    def _list_dropped_states(self) -> list[str]:
        found = []
        for each in (self.first, *self.others):
            training = each.manifest.training
            if training is not None and training.states:
                found.append(
                    f"{each.source.name}: {len(training.states):,} optimizer states are dropped, as sums have none: "
                    f"{format_first_few(training.states)}"
                )
        return found


def _prefix(number: int) -> str:
    return f"other {number + 1}"


def _relocate_path(path: str, number: int) -> str:
    return f"{_prefix(number)}/{path}"


def _relocate(tensor: Tensor, number: int) -> Tensor:
    """Return a tensor of another checkpoint by the paths that its files have among those of all."""
    chunks = tuple(
        replace(chunk, where=replace(chunk.where, file=_relocate_path(chunk.where.file, number)))
        if isinstance(chunk.where, Region)
        else chunk
        for chunk in tensor.chunks
    )
    return replace(tensor, chunks=chunks)
