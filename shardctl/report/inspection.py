"""Renders the result of `inspect` as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group

from shardctl.base.amounts import format_count, format_file_size, format_memory_size, format_plural, format_stages
from shardctl.base.errors import format_first_few
from shardctl.libraries.files.extra_tensors import EXTRA_FILE
from shardctl.libraries.files.impostors import ADAPTER_CONFIG
from shardctl.report.grid import render_line, render_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from shardctl.checkpoint.adapters.adapter_checkpoint import AdapterSummary
    from shardctl.checkpoint.pipeline_parts import PipelinePart
    from shardctl.models import RuleRow
    from shardctl.models.names.extra_names import ExtraTensor
    from shardctl.verbs.inspect import CheckpointStatistics, InspectResult, ModelSubtree, TensorLine, TrainingLine
    from shardctl.verify.value_statistics import ValueStatistics

_FILES_SHOWN = 8
_EXTRA_SHOWN = 50
"""Extra tensors in full; --json has them all."""


def render_inspection(found: InspectResult, *, tensors: bool = False, rules: bool = False) -> RenderableType:
    """Render a checkpoint in a dozen lines; on request each tensor, and each rule in force."""
    parts: list[RenderableType] = [
        render_line(found.verdict, "bold red" if found.complete is False else "bold"),
        render_line(found.path),
        render_table(list_inspection_facts(found), indent=2),
    ]
    if found.statistics is not None:
        parts += ["", *_render_statistics(found.statistics, tensors=tensors)]
    if tensors:
        parts += ["", _render_tensors(found.tensors)]
    if rules:
        parts += ["", _render_rules(found.rules)]
    return Group(*parts)


def _list_file_facts(found: InspectResult) -> Iterator[tuple[str, str]]:
    """List where the files are, and how they divide the model."""
    if found.address:
        yield "address", found.address
    yield "format", f"{found.format}, {format_plural(len(found.files), 'file')}, {format_file_size(found.file_bytes)}"
    if found.layout:
        yield "layout", f"{found.layout}, written by shardctl" + (f" for {found.mesh}" if found.mesh else "")
    elif found.mesh and found.mesh.world > 1:
        yield "mesh", f"{found.mesh} = {format_plural(found.mesh.world, 'rank')}"
    if len(found.stages) > 1:
        yield "stages", format_stages(found.stages)


def list_inspection_facts(found: InspectResult) -> Iterator[tuple[str, str]]:
    """List what is said of a checkpoint, each with its name."""
    yield from _list_file_facts(found)
    yield "model", _describe_model(found)
    yield from _list_subtree_facts(found.subtrees)
    if found.drafter:
        yield "drafter", f"{found.drafter}: it guesses tokens for a larger model, and is none by itself"
    if found.adapter is not None:
        yield from _list_adapter_facts(found.adapter)
    amount = f"{format_count(found.parameters)} parameters in {format_plural(len(found.tensors), 'tensor')}"
    yield "weights", f"{amount}, {format_file_size(found.nbytes)} ({format_memory_size(found.nbytes)})"
    for number, share in enumerate(found.dtypes):
        label = "" if number else "dtypes"
        amount = f"{format_count(share.parameters)} parameters, {format_file_size(share.nbytes)}"
        yield label, f"{share.dtype}: {format_plural(share.tensors, 'tensor')}, {amount}"
    yield from _list_part_facts(found.parts)
    ties = [f"{name} = {tensor.name}" for tensor in found.tensors for name in tensor.ties]
    if ties:
        yield "ties", format_first_few(ties)
    if found.training is not None:
        yield from _list_training_facts(found.training)
    replicas = sum(tensor.chunks > 1 for tensor in found.tensors)
    if replicas:
        yield "pieces", f"{format_plural(replicas, 'tensor')} stored in several boxes"
    yield from list_extra_facts(found.extra, "with the weights")
    if found.digest:
        yield "digest", f"{found.digest} (as recorded, not computed)"
    if found.carried:
        yield "carried", format_first_few(found.carried, _FILES_SHOWN)
    if found.dropped:
        yield "dropped", format_first_few(found.dropped, _FILES_SHOWN)


def _list_subtree_facts(subtrees: Iterable[ModelSubtree]) -> Iterator[tuple[str, str]]:
    """List the models of one class in the files, by the option that chooses each."""
    for number, subtree in enumerate(subtrees):
        where = f"--subtree {subtree.prefix}" if subtree.prefix else "no prefix"
        amount = f"{format_plural(subtree.tensors, 'tensor')}, {format_file_size(subtree.nbytes)}"
        yield "" if number else "models", f"{where}: {amount}"


def list_extra_facts(extra: Iterable[ExtraTensor], apart: str) -> Iterator[tuple[str, str]]:
    """List the tensors that the model's class does not have, with sizes; `apart` says where those are not kept."""
    extra = list(extra)
    for kept, place in ((True, f"in {EXTRA_FILE}"), (False, apart)):
        some = [each for each in extra if each.kept is kept]
        if some:
            size = format_file_size(sum(each.nbytes for each in some))
            yield "extra", f"{format_plural(len(some), 'tensor')}, {size}, {place}"
        for each in some[:_EXTRA_SHOWN]:
            yield "", f"{each.name}: {format_file_size(each.nbytes)}"
        if len(some) > _EXTRA_SHOWN:
            yield "", f"and {len(some) - _EXTRA_SHOWN:,} more; --json lists them all"


def _list_part_facts(parts: Iterable[PipelinePart]) -> Iterator[tuple[str, str]]:
    """List the models of a pipeline."""
    for number, part in enumerate(parts):
        amount = f"{format_count(part.parameters)} parameters, {format_file_size(part.nbytes)}"
        quantised = ", quantized" if part.quantised else ""
        yield "" if number else "parts", f"{part.name}: {part.class_name}, {amount}, {'+'.join(part.dtypes)}{quantised}"


def _list_adapter_facts(adapter: AdapterSummary) -> Iterator[tuple[str, str]]:
    """List what an adapter changes of which base."""
    if adapter.problem:
        yield "adapter", f"{adapter.kind}: {adapter.problem}"
    else:
        others = [rank for rank in adapter.ranks if rank != adapter.rank]
        ranks = f" ({', '.join(map(str, others))} in some modules)" if others else ""
        yield "adapter", f"{adapter.kind} of rank {adapter.rank}{ranks}, alpha {adapter.alpha:g}"
        whole = f", and {format_plural(adapter.replaced, 'tensor')} whole" if adapter.replaced else ""
        yield (
            "changes",
            f"{format_plural(adapter.modules, 'module')}{whole}: {format_first_few(adapter.targets, _FILES_SHOWN)}",
        )
    yield "base", adapter.base or f"not said in {ADAPTER_CONFIG}"


def _list_training_facts(training: TrainingLine) -> Iterator[tuple[str, str]]:
    if training.writer:
        yield "writer", training.writer + (f", {format_plural(training.ranks, 'rank')}" if training.ranks else "")
    for note in training.notes:
        yield "read as", note
    if training.step is not None:
        yield "step", f"{training.step:,}"
    for number, share in enumerate(training.states):
        amount = f"{format_plural(share.tensors, 'tensor')}, {format_file_size(share.nbytes)}"
        yield "" if number else "optimizer", f"{share.state}: {amount}"
    if training.groups:
        yield "settings", f"{format_plural(training.groups, 'group')} of parameters"


def _describe_model(found: InspectResult) -> str:
    if found.why_no_model:
        return f"unknown: {found.why_no_model}"
    if not found.architecture:
        return found.family or "known from the rule file only"
    return f"{found.architecture} ({found.family})" if found.family else found.architecture


def _render_tensors(lines: Iterable[TensorLine]) -> RenderableType:
    rows = [("dtype", "shape", "size", "name")]
    for tensor in lines:
        ties = "".join(f" = {tie}" for tie in tensor.ties)
        stored = f" (stored as {', '.join(tensor.stored)})" if tensor.stored else ""
        rows.append(
            (tensor.dtype, str(list(tensor.shape)), format_file_size(tensor.nbytes), f"{tensor.name}{ties}{stored}")
        )
    return render_table(rows, right=frozenset({2}))


def _render_statistics(found: CheckpointStatistics, *, tensors: bool) -> list[RenderableType]:
    """Render what the values are: a row for each layer and for the whole, on request one for each tensor."""
    heads = ("elements", "norm", "mean", "largest", "zeros", "NaN", "inf")
    rows = [
        (*heads, "layer"),
        *((*format_statistics(layer.values), layer.name) for layer in found.layers),
        (*format_statistics(found.total), "all"),
    ]
    right = frozenset(range(len(heads)))
    parts: list[RenderableType] = [*map(render_line, found.notes), render_table(rows, right=right)]
    if not tensors:
        return [*parts, render_line("--tensors prints them for each tensor")]
    rows = [
        (*heads, "dtype", "tensor"),
        *((*format_statistics(each.values), each.dtype, each.name) for each in found.tensors),
    ]
    # lines of text: a table of 40,000 rows would take 250 MiB, which --memory does not count
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)) for row in rows)
    return [*parts, "", *(render_line(f"{line}  {row[-1]}") for line, row in zip(lines, rows, strict=True))]


def format_statistics(values: ValueStatistics | None) -> tuple[str, ...]:
    """Format what values are, for the columns of a table."""
    if values is None:
        return ("",) * 7
    numbers = (f"{each:.6g}" for each in (values.norm, values.mean, values.largest))
    return (
        f"{values.elements:,}",
        *numbers,
        f"{values.zeros:,}",
        f"{values.nans:,}",
        f"{values.infinities:,}",
    )


def _render_rules(rules: Iterable[RuleRow]) -> RenderableType:
    rows = [(str(rule.tensors), " ".join(rule.stages), rule.pattern, _format_dims(rule)) for rule in rules]
    if not rows:
        return render_line("no rules are in force: the model is not known")
    return render_table([("tensors", "stage", "name", "dims"), *rows], right=frozenset({0}))


def _format_dims(rule: RuleRow) -> str:
    """Format each dim with the axes that cut it, such as ``out/tp in/fsdp``, and the axis that divides tensors."""
    words = rule.dims.split() or [f"dim{number}" for number in range(len(rule.axes))]
    cut = ["/".join((word, *axes)) for word, axes in zip(words, rule.axes, strict=False)]
    return " ".join([*cut, f"whole/{rule.divides}"] if rule.divides else cut)
