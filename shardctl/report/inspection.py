"""What `inspect` says, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group

from shardctl.amounts import count, file_size, memory_size, plural
from shardctl.errors import some
from shardctl.report.grid import line, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from shardctl.models import RuleRow
    from shardctl.verbs.inspect import Inspected, TensorLine, TrainingLine

_FILES_SHOWN = 8


def inspection(found: Inspected, *, tensors: bool = False, rules: bool = False) -> RenderableType:
    """A checkpoint in a dozen lines; on request each tensor, and each rule in force."""
    parts: list[RenderableType] = [line(found.path, "bold"), table(_facts(found), indent=2)]
    if tensors:
        parts += ["", _tensors(found.tensors)]
    if rules:
        parts += ["", _rules(found.rules)]
    return Group(*parts)


def _files(found: Inspected) -> Iterator[tuple[str, str]]:
    """Where the files are, and how they divide the model."""
    if found.address:
        yield "address", found.address
    yield "format", f"{found.format}, {plural(len(found.files), 'file')}, {file_size(found.file_bytes)}"
    if found.layout:
        yield "layout", f"{found.layout}, written by shardctl" + (f" for {found.mesh}" if found.mesh else "")
    elif found.mesh and found.mesh.world > 1:
        yield "mesh", f"{found.mesh} = {plural(found.mesh.world, 'rank')}"
    if len(found.stages) > 1:
        yield "stages", f"{', '.join(map(str, found.stages))} layers"


def _facts(found: Inspected) -> Iterator[tuple[str, str]]:
    yield from _files(found)
    yield "model", _model(found)
    amount = f"{count(found.parameters)} parameters in {plural(len(found.tensors), 'tensor')}"
    yield "weights", f"{amount}, {file_size(found.nbytes)} ({memory_size(found.nbytes)})"
    for number, share in enumerate(found.dtypes):
        label = "" if number else "dtypes"
        amount = f"{count(share.parameters)} parameters, {file_size(share.nbytes)}"
        yield label, f"{share.dtype}: {plural(share.tensors, 'tensor')}, {amount}"
    ties = [f"{name} = {tensor.name}" for tensor in found.tensors for name in tensor.ties]
    if ties:
        yield "ties", some(ties)
    if found.training is not None:
        yield from _training(found.training)
    replicas = sum(tensor.chunks > 1 for tensor in found.tensors)
    if replicas:
        yield "pieces", f"{plural(replicas, 'tensor')} stored in several boxes"
    if found.digest:
        yield "digest", f"{found.digest} (as recorded, not computed)"
    if found.carried:
        yield "carried", some(found.carried, _FILES_SHOWN)
    if found.dropped:
        yield "dropped", some(found.dropped, _FILES_SHOWN)


def _training(training: TrainingLine) -> Iterator[tuple[str, str]]:
    if training.writer:
        yield "writer", training.writer + (f", {plural(training.ranks, 'rank')}" if training.ranks else "")
    for note in training.notes:
        yield "read as", note
    if training.step is not None:
        yield "step", f"{training.step:,}"
    for number, share in enumerate(training.states):
        amount = f"{plural(share.tensors, 'tensor')}, {file_size(share.nbytes)}"
        yield "" if number else "optimizer", f"{share.state}: {amount}"
    if training.groups:
        yield "settings", f"{plural(training.groups, 'group')} of parameters"


def _model(found: Inspected) -> str:
    if found.why_no_model:
        return f"unknown: {found.why_no_model}"
    if not found.architecture:
        return found.family or "known from the rule file only"
    return f"{found.architecture} ({found.family})" if found.family else found.architecture


def _tensors(lines: Iterable[TensorLine]) -> RenderableType:
    rows = [("dtype", "shape", "size", "name")]
    for tensor in lines:
        ties = "".join(f" = {tie}" for tie in tensor.ties)
        stored = f" (stored as {', '.join(tensor.stored)})" if tensor.stored else ""
        rows.append((tensor.dtype, str(list(tensor.shape)), file_size(tensor.nbytes), f"{tensor.name}{ties}{stored}"))
    return table(rows, right=frozenset({2}))


def _rules(rules: Iterable[RuleRow]) -> RenderableType:
    rows = [(str(rule.tensors), " ".join(rule.stages), rule.pattern, _dims(rule)) for rule in rules]
    if not rows:
        return line("no rules are in force: the model is not known")
    return table([("tensors", "stage", "name", "dims"), *rows], right=frozenset({0}))


def _dims(rule: RuleRow) -> str:
    """Each dim with the axes that cut it, such as ``out/tp in/fsdp``, and the axis that divides the tensors whole."""
    words = rule.dims.split() or [f"dim{number}" for number in range(len(rule.axes))]
    cut = ["/".join((word, *axes)) for word, axes in zip(words, rule.axes, strict=False)]
    return " ".join([*cut, f"whole/{rule.divides}"] if rule.divides else cut)
