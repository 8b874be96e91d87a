"""Describes a checkpoint from its headers: container, layout, model, mesh, types and ties; on request, its values."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_count, format_plural
from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import MissingTensorsError, SourceError, UnsupportedError, UsageError, format_first_few
from shardctl.base.result_view import ResultView
from shardctl.base.value import value_class
from shardctl.checkpoint.config_lint import lint_config
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.checkpoint.pipeline_parts import is_pipeline, list_pipeline_parts
from shardctl.models import build_rule_table
from shardctl.models.names.binding import list_ungathered_weights
from shardctl.models.names.wrapping import AmbiguousNamesError, list_whole_readings
from shardctl.models.quantization.settings import find_quantization_config
from shardctl.models.submodels.draft_models import name_draft_model
from shardctl.options import InspectOptions, SourceOptions
from shardctl.tensors.manifest import first_byte, name_block, sort_naturally
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.training import split_state_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from shardctl.base.workers import ExecutionOptions
    from shardctl.checkpoint.adapters.adapter_checkpoint import AdapterSummary
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.checkpoint.pipeline_parts import PipelinePart
    from shardctl.models import RuleRow
    from shardctl.models.derived import RuleDerivation
    from shardctl.models.names.extra_names import ExtraTensor
    from shardctl.models.names.wrapping import NameReading
    from shardctl.tensors.manifest import Tensor, TrainingState
    from shardctl.verify.value_statistics import ValueStatistics, ValueSums


@value_class
class DTypeShare:
    """How much of a checkpoint has one type."""

    dtype: str
    tensors: int
    parameters: int
    nbytes: int


@value_class
class TensorLine:
    """One global tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    ties: tuple[str, ...]
    stored: tuple[str, ...]
    """The names in the files, where they differ from the canonical one."""
    chunks: int
    """Stored boxes, replicas included."""
    files: tuple[str, ...]


@value_class
class StateShare:
    """One kind of optimizer state, such as `exp_avg`."""

    state: str
    tensors: int
    nbytes: int


@value_class
class TrainingLine:
    """What a training checkpoint has beside the weights."""

    writer: str
    ranks: int | None
    """How many processes wrote it."""
    step: int | None
    groups: int
    """Groups of parameters with settings of their own."""
    states: tuple[StateShare, ...]
    notes: tuple[str, ...]
    """How the files were understood."""


@value_class
class ModelSubtree:
    """One of the models in the files, by what stands before its names."""

    prefix: str
    """Modules, without the last dot; empty for nothing."""
    tensors: int
    nbytes: int


@value_class
class TensorStatistics:
    """What the values of one tensor are."""

    name: str
    dtype: str
    """The type that the values were counted in: of quantized weights that were decoded, F32."""
    values: ValueStatistics | None
    """None for packed types of 6 bits."""


@value_class
class LayerStatistics:
    """What the values of the tensors of one layer are, or of a module that is outside of layers."""

    name: str
    tensors: int
    values: ValueStatistics


@value_class
class CheckpointStatistics:
    """What the values of a checkpoint are; no digit depends on the CPU, the threads, the memory or the layout."""

    total: ValueStatistics
    layers: tuple[LayerStatistics, ...]
    tensors: tuple[TensorStatistics, ...]
    notes: tuple[str, ...]
    """How quantized weights were counted, and what was not."""


@value_class
class InspectResult(ResultView):
    """What `inspect` says."""

    path: str
    format: str
    layout: str
    """What shardctl wrote, or empty."""
    family: str
    architecture: str
    why_no_model: str
    """Why the model is not known, if it is not."""
    mesh: Mesh | None
    stages: tuple[int, ...]
    parameters: int
    """Elements of every tensor, ties and replicas counted once."""
    nbytes: int
    """Bytes of every tensor, ties and replicas counted once."""
    file_bytes: int
    """Bytes of the weight files."""
    files: tuple[str, ...]
    dtypes: tuple[DTypeShare, ...]
    tensors: tuple[TensorLine, ...]
    carried: tuple[str, ...]
    """Other files that would travel along."""
    dropped: tuple[str, ...]
    """Other files that would be left behind."""
    digest: str
    """As recorded when shardctl wrote it; not computed."""
    rules: tuple[RuleRow, ...]
    """The effective rule table."""
    warnings: tuple[str, ...]
    training: TrainingLine | None = None
    """None if no trainer wrote it."""
    address: str = ""
    """Of a source that is elsewhere: where just these files are, with their commit if there is one."""
    hypothetical: bool = False
    """Whether there are no weights: all this is what the config describes."""
    drafter: str = ""
    """Which kind of draft model it is, such as `EAGLE-3`; empty for a model that stands alone."""
    adapter: AdapterSummary | None = None
    """What the adapter is, if it is one and no model."""
    parts: tuple[PipelinePart, ...] = ()
    """The models of a pipeline of diffusers."""
    derivation: RuleDerivation | None = None
    """How the rules were derived, where no table has them and that was asked for."""
    extra: tuple[ExtraTensor, ...] = ()
    """The tensors that the class does not have."""
    subtrees: tuple[ModelSubtree, ...] = ()
    """The whole models in the files, if there are more than one; `--subtree` chooses."""
    show_tensors: bool = False
    """Whether the text and the JSON list every tensor."""
    show_rules: bool = False
    """Whether they list the rules in force."""
    complete: bool | None = None
    """Whether every tensor of the class is there with all its elements; None if the class is not known."""
    file_sizes: tuple[int, ...] = ()
    """Bytes of each of `files`."""
    quantization: tuple[tuple[str, str], ...] = ()
    """How the weights are quantized, as the config or the stored names say it: what, and its value."""
    statistics: CheckpointStatistics | None = None
    """What the values are; None if only headers were read."""

    @property
    def verdict(self) -> str:
        """The answer in one line: which model it is, its size, types and files, and whether it is complete."""
        if self.adapter is not None:
            model = f"{self.adapter.kind} adapter"
        elif self.parts:
            model = f"pipeline of {format_plural(len(self.parts), 'model')}"
        else:
            model = re.sub(r"(For[A-Z]\w*|Model|LMHeadModel)$", "", self.architecture) or self.family or "unknown model"
        large = [share for share in self.dtypes if share.nbytes * 100 >= self.nbytes]
        types = " + ".join(re.sub(r"^f(?=\d)", "fp", share.dtype.lower()) for share in large)
        states = ", with optimizer states" if self.training is not None and self.training.states else ""
        sharded = f", sharded for {self.mesh}" if self.mesh is not None and self.mesh.world > 1 else ""
        stored = f"{self.format} in {format_plural(len(self.files), 'file')}{sharded}{states}"
        whole = {True: "complete", False: "NOT COMPLETE", None: "not known whether complete"}[self.complete]
        if self.hypothetical:
            stored, whole = "a config without weights", ""
        return ", ".join(filter(None, [model, f"{format_count(self.parameters)} parameters", types, stored, whole]))


def inspect(
    path: str | Path,
    inspect_options: InspectOptions | None = None,
    *,
    source_options: SourceOptions | None = None,
    effort: ExecutionOptions | None = None,
) -> InspectResult:
    """Describe the checkpoint at `path` from its headers; where there are no weights, from its config.

    With `stats`, `effort` says how many threads read the values, and who watches. Raises CoverageError for elements
    that are missing, SourceError for copies of an element that differ, and MemoryBudgetError if the tensors' list alone
    needs more memory than is allowed.
    """
    options = inspect_options or InspectOptions()
    source_options = replace(source_options or SourceOptions(), described=not options.stats, unbound=True)
    with open_checkpoint(path, source_options, count=_limit_chunks(options)) as checkpoint:
        found = _build_result(str(path), checkpoint)
        if options.stats:
            found = replace(found, statistics=_measure_statistics(checkpoint, options, effort))
        unknown = options.show_rules and checkpoint.model is None
        derived = checkpoint.find_placement(Mesh.of(tp=2)) if unknown else None
    if derived is None:
        return found
    return replace(found, rules=build_rule_table(derived), derivation=derived.derivation)


_STATISTICS: Final = "reading of values"
"""What errors call the work of `--stats`."""
_PER_STATISTICS_BYTES: Final = 3_000
"""Bytes of a tensor's exact sums, of what is said of it, and of its lines in the report, besides its own."""


def _limit_chunks(options: InspectOptions) -> Callable[[int], None] | None:
    """Return what counts the tensors of a source whose values will be read; headers alone have no limit."""
    if not options.stats:
        return None
    from shardctl.conversion.engine.budget import require_reading

    return partial(require_reading, limit=options.host_memory, verb=_STATISTICS)


def _measure_statistics(
    checkpoint: OpenedCheckpoint, options: InspectOptions, effort: ExecutionOptions | None
) -> CheckpointStatistics:
    """Read every value of a checkpoint within the memory that the options allow."""
    from shardctl.base.workers import ExecutionOptions
    from shardctl.checkpoint.record_crcs import checked_reader
    from shardctl.conversion.engine.budget import divide_reading_memory
    from shardctl.conversion.engine.interrupt import stop_on_signals
    from shardctl.libraries.files.extra_tensors import add_extra_tensors
    from shardctl.verify.agreement import require_agreement
    from shardctl.verify.content import measure_statistics

    if effort is None:
        effort = ExecutionOptions() if options.threads is None else ExecutionOptions(threads=options.threads)
    with stop_on_signals(effort.stop):
        checkpoint.source.set_stop_request(effort.stop)
        checkpoint, notes = _decode_weights(checkpoint, effort.threads)
        tensors = sorted(add_extra_tensors(checkpoint.manifest).tensors.values(), key=first_byte)
        chunks = sum([len(tensor.chunks) for tensor in tensors])
        held = checkpoint.source.held_bytes + _PER_STATISTICS_BYTES * len(tensors)
        budget = divide_reading_memory(
            len(tensors), chunks, options.host_memory, effort.threads, held, verb=_STATISTICS
        )
        effort = replace(effort, threads=budget.threads, block=min(effort.block, budget.block))
        require_agreement(tensors, checkpoint.source, effort, checkpoint.find_spec)
        sums = measure_statistics(tensors, checked_reader(checkpoint), effort)
        checkpoint.prove()
    uncounted = [tensor.name for tensor, each in zip(tensors, sums, strict=True) if each is None]
    if uncounted:
        notes = (*notes, f"not counted, because 6-bit types are packed: {format_first_few(uncounted)}")
    if checkpoint.manifest.training is not None and checkpoint.manifest.training.states:
        notes = (*notes, "optimizer states were not counted")
    return _summarise_statistics(dict(zip([tensor.name for tensor in tensors], sums, strict=True)), tensors, notes)


def _decode_weights(checkpoint: OpenedCheckpoint, threads: int) -> tuple[OpenedCheckpoint, tuple[str, ...]]:
    """Return a checkpoint with its quantized weights as numbers, if they can be decoded, and a note on that."""
    model = checkpoint.model
    if checkpoint.stored_quantization is None and (model is None or model.plain is None):
        return checkpoint, ()
    from shardctl.checkpoint.quantization.dequantizing import dequantize_checkpoint

    try:
        decoded = dequantize_checkpoint(checkpoint, BY_NAME["F32"], threads)
    except (SourceError, UnsupportedError, UsageError) as error:
        return checkpoint, (f"quantized weights are counted as the integers that are stored: {error.message}",)
    return decoded, (decoded.source.notes()[-1],)


def _summarise_statistics(
    sums: Mapping[str, ValueSums | None], tensors: Iterable[Tensor], notes: tuple[str, ...]
) -> CheckpointStatistics:
    from shardctl.verify.value_statistics import ValueSums

    layers: dict[str, tuple[int, ValueSums]] = {}
    whole = ValueSums()
    for name, each in sums.items():
        if each is not None:
            number, before = layers.get(name_block(name), (0, ValueSums()))
            layers[name_block(name)] = number + 1, before.plus(each)
            whole = whole.plus(each)
    found = {
        tensor.name: TensorStatistics(tensor.name, tensor.dtype.name, each.describe() if each is not None else None)
        for tensor in tensors
        for each in (sums[tensor.name],)
    }
    return CheckpointStatistics(
        whole.describe(),
        tuple(
            LayerStatistics(name, number, each.describe())
            for name, (number, each) in sorted(layers.items(), key=lambda item: sort_naturally(item[0]))
        ),
        tuple(found[name] for name in sorted(found, key=sort_naturally)),
        notes,
    )


def _build_result(path: str, checkpoint: OpenedCheckpoint) -> InspectResult:
    manifest, model, record = checkpoint.manifest, checkpoint.model, checkpoint.record
    found = record or checkpoint.stored.dialect
    return InspectResult(
        path=path,
        format=manifest.format,
        layout=record.layout if record else "",
        family=model.family if model else "",
        architecture=model.architecture if model else "",
        why_no_model=_explain_no_model(checkpoint),
        mesh=found.mesh if found else None,
        stages=found.stages if found else (),
        parameters=sum(t.size for t in manifest.tensors.values()),
        nbytes=manifest.nbytes,
        file_bytes=sum(file.size for file in manifest.files.values()),
        files=tuple(manifest.files),
        dtypes=_count_dtypes(checkpoint),
        tensors=tuple(_list_tensors(checkpoint)),
        carried=tuple(o.name for o in manifest.objects if o.policy == "carry"),
        dropped=manifest.dropped,
        digest=record.digest if record else "",
        rules=_list_rules(checkpoint),
        warnings=(*manifest.warnings, *lint_config(checkpoint), *_note_holes(checkpoint), *_note_empty(checkpoint)),
        training=_summarise_training(manifest.training) if manifest.training is not None else None,
        address=checkpoint.source.location if "://" in checkpoint.source.location else "",
        hypothetical=checkpoint.hypothetical,
        drafter=name_draft_model(
            checkpoint.config, {name: tensor.shape for name, tensor in checkpoint.stored.tensors.items()}
        ),
        adapter=_summarise_adapter(checkpoint) if checkpoint.adapter else None,
        parts=list_pipeline_parts(checkpoint.source, checkpoint.stored),
        extra=checkpoint.list_extra_tensors(),
        subtrees=tuple(_list_subtrees(checkpoint)),
        complete=_is_complete(checkpoint),
        file_sizes=tuple(file.size for file in manifest.files.values()),
        quantization=tuple(_list_quantization(checkpoint)),
    )


def _list_quantization(checkpoint: OpenedCheckpoint) -> Iterator[tuple[str, str]]:
    """List how weights are quantized: what stored names show, what the config says, and how many weights it means."""
    if checkpoint.stored_quantization is not None:
        yield "arrays", checkpoint.stored_quantization.title
    try:
        settings = find_quantization_config(checkpoint.config or {})
    except SourceError:  # `model_error` says it
        settings = None
    values = settings.values if settings is not None else {}
    for key, value in values.items():
        if value is None:
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield key, text if len(text) <= _MAX_SETTING_CHARACTERS else f"{text[:_MAX_SETTING_CHARACTERS]}..."
    encodings = checkpoint.model.encodings.values() if checkpoint.model is not None else ()
    stored = sum(each.name(each.arrays[0]) in checkpoint.manifest.tensors for each in encodings if each.arrays)
    if stored:
        yield "quantized weights", f"{stored:,}"


_MAX_SETTING_CHARACTERS: Final = 200
"""Characters of one setting, such as a list of modules; the config has the rest."""


def _is_complete(checkpoint: OpenedCheckpoint) -> bool | None:
    """Return whether headers have every tensor of the class with all elements; None where no class says which."""
    if _note_holes(checkpoint) or _note_empty(checkpoint) or isinstance(checkpoint.model_error, MissingTensorsError):
        return False
    model, stored = checkpoint.model, checkpoint.manifest.tensors
    if model is None or checkpoint.hypothetical:
        return None
    return all(tensor.spare or tensor.name in stored for tensor in model.own())


def _note_holes(checkpoint: OpenedCheckpoint) -> list[str]:
    """Say that files hold too few elements of some tensors, as where that of a rank is missing; counts alone."""
    if checkpoint.hypothetical:
        return []
    lacking = [
        tensor.name
        for tensor in checkpoint.manifest.tensors.values()
        if tensor.turns == 1
        and not (len(tensor.chunks) == 1 and tensor.chunks[0].box.shape == tensor.shape)
        and sum(box.size for box in {chunk.box for chunk in tensor.chunks}) < tensor.size
    ]
    if not lacking:
        return []
    return [f"elements of {format_first_few(lacking)} are stored in no file; shardctl verify says which"]


def _note_empty(checkpoint: OpenedCheckpoint) -> list[str]:
    """Say which weights were saved without their elements."""
    empty = list_ungathered_weights(checkpoint.manifest.tensors)
    return [f"{format_plural(len(empty), 'tensor')} without elements: {format_first_few(empty)}"] if empty else []


def _list_subtrees(checkpoint: OpenedCheckpoint) -> Iterator[ModelSubtree]:
    """List the models of the config's class in the files, if there are more than one."""
    model, problem = checkpoint.model, checkpoint.model_error
    readings: tuple[NameReading, ...] = ()
    if isinstance(problem, AmbiguousNamesError):
        readings = problem.readings
    elif model is not None and checkpoint.manifest.extra.keys() - checkpoint.stored.extra.keys():
        readings = list_whole_readings(model, checkpoint.stored)
    for reading in readings if len(readings) > 1 else ():
        tensors = [checkpoint.stored.tensors[name] for name in reading.names]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        yield ModelSubtree(reading.prefix.removesuffix("."), len(tensors), nbytes)


def _summarise_adapter(checkpoint: OpenedCheckpoint) -> AdapterSummary:
    from shardctl.checkpoint.adapters.adapter_checkpoint import summarise_adapter

    return summarise_adapter(checkpoint)


def _list_rules(checkpoint: OpenedCheckpoint) -> tuple[RuleRow, ...]:
    """List the rules in force; where no table knows the model, those of the axes that need none."""
    if checkpoint.model is not None:
        return build_rule_table(checkpoint.model)
    return build_rule_table(checkpoint.untabled().model) if checkpoint.untabled is not None else ()


def _explain_no_model(checkpoint: OpenedCheckpoint) -> str:
    if checkpoint.model:
        return ""
    if checkpoint.model_error:
        return checkpoint.model_error.message
    if checkpoint.adapter:
        return "it is an adapter, which tp and ep can cut if --config PATH gives the config of its base"
    if checkpoint.stored.own_config is not None:
        return "no file says how many tokens the vocabulary has (--true-vocab N, or --config PATH)"
    if checkpoint.stored.dialect is not None:
        return "there is no config.json (--config PATH); counted are the arrays of every rank"
    return "it is a pipeline of several" if is_pipeline(checkpoint.stored) else "there is no config.json"


def _count_dtypes(checkpoint: OpenedCheckpoint) -> tuple[DTypeShare, ...]:
    shares: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for tensor in checkpoint.manifest.tensors.values():
        share = shares[tensor.dtype.name]
        share[0] += 1
        share[1] += tensor.size
        share[2] += tensor.nbytes
    rows = (DTypeShare(name, *share) for name, share in shares.items())
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _summarise_training(training: TrainingState) -> TrainingLine:
    shares: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, tensor in training.states.items():
        state, _ = split_state_name(name) or (name, "")
        share = shares[state]
        share[0] += 1
        share[1] += tensor.nbytes
    return TrainingLine(
        writer=training.writer,
        ranks=training.ranks,
        step=training.step,
        groups=len(training.groups),
        states=tuple(StateShare(state, *share) for state, share in sorted(shares.items())),
        notes=training.notes,
    )


def _list_tensors(checkpoint: OpenedCheckpoint) -> list[TensorLine]:
    lines = []
    for tensor in checkpoint.manifest.tensors.values():
        names = dict.fromkeys(chunk.name for chunk in tensor.chunks)
        lines.append(
            TensorLine(
                tensor.name,
                tensor.dtype.name,
                tensor.shape,
                tensor.nbytes,
                tensor.ties,
                tuple(n for n in names if n != tensor.name),
                len(tensor.chunks),
                tensor.files,
            )
        )
    return lines
