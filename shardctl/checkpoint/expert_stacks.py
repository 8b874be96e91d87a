"""Takes the experts of a checkpoint out of their arrays: each matrix as a tensor of its own, where it lies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl import models
from shardctl.models.tables.stacked_experts import MATRICES, ExpertMatrix, split_family
from shardctl.tensors.box import Box
from shardctl.tensors.copyplan import cover_tensor
from shardctl.tensors.manifest import Chunk, Region, Tensor, narrow_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint

_EXPERT_STACK_NDIM: Final = 3


def unstack_experts(checkpoint: OpenedCheckpoint, quantization: Mapping[str, Any]) -> OpenedCheckpoint:
    """Return a checkpoint whose experts have the names and matrices that a `quantization` config is about.

    Itself, if they have them already, or if nobody reads them so.
    """
    config, model = checkpoint.config, checkpoint.model
    found = models.find_family(config) if config is not None else None
    if config is None or model is None or found is None or split_family(found[0]) is None:
        return checkpoint
    shared = any(part.shared for t in model.own() for cuts in t.spec.cuts for cut in cuts for part in cut.sections)
    described = models.describe_model(
        {**config, "quantization_config": quantization}, kv_heads="replicate" if shared else "error"
    )
    plain = described.plain or described
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint.manifest.tensors.items():
        if name in plain.tensors:
            tensors[name] = tensor
        else:
            tensors.update((each.name, each) for each in _list_matrices(tensor))
    if not tensors.keys() <= plain.tensors.keys():
        return checkpoint
    return replace(checkpoint, manifest=replace(checkpoint.manifest, tensors=tensors), model=plain)


def _list_matrices(tensor: Tensor) -> Iterator[Tensor]:
    """List the matrices `[out, in]` in an array `[expert, in, out]`; the array itself, if it is of another kind."""
    module, _, own = tensor.name.rpartition(".")
    if own not in MATRICES or len(tensor.shape) != _EXPERT_STACK_NDIM:
        yield tensor
        return
    experts, inputs, outputs = tensor.shape
    stored = cover_tensor(tensor)
    for expert in range(experts):
        for matrix in MATRICES[own]:
            high = outputs // matrix.parts
            box = Box((expert, 0, matrix.part * high), (1, inputs, high))
            yield Tensor(
                f"{module}.{expert}.{matrix.name}.weight",
                tensor.dtype,
                (high, inputs),
                tuple(_narrow_to_matrix(chunk, box) for chunk in stored if chunk.box.intersect(box) is not None),
                spelling=_spell_matrix(tensor, expert, matrix),
            )


def _narrow_to_matrix(chunk: Chunk, matrix: Box) -> Chunk:
    """Return what a chunk has of one matrix, transposed."""
    common = chunk.box.intersect(matrix)
    assert common is not None  # noqa: S101 - asked before
    part = narrow_chunk(chunk, common)
    (_, row, column), (_, rows, columns) = common.origin, common.shape
    where = part.where
    if isinstance(where, Region):
        where = replace(where, strides=(where.strides[2], where.strides[1]))
    return replace(part, box=Box((column - matrix.origin[2], row), (columns, rows)), where=where)


def _spell_matrix(tensor: Tensor, expert: int, matrix: ExpertMatrix) -> tuple[str, ...]:
    """Return what the source would call a matrix, if it has a name of its own for the array."""
    return tuple(f"{each.rpartition('.')[0]}.{expert}.{matrix.name}.weight" for each in tensor.spelling[:1])
