"""Provides modules that compute with a rank's part, or with a weight too large to hold, stretch by stretch."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.value import state_class
from shardctl.running.forward.placed_tensors import PlacedTensor, RankPart
from shardctl.tensors.box import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardctl.running.forward.lazy_state_dict import LazyTensor
    from shardctl.running.forward.skeleton import TensorSlot
    from shardctl.running.forward.weights import ModelWeights

Torch = Any


@state_class
class ComputePrecision:
    """Where and in which type is computed, and how much of one weight is held at once."""

    device: str
    dtype: Torch
    limit: int
    """Bytes; a weight of more is read in stretches of so many."""

    def rows(self, width: int) -> int:
        """Return how many rows of `width` elements are read at once."""
        return max(self.limit // max(width * int(self.dtype.itemsize), 1), 1)


@state_class
class WeightPart:
    """A weight, or a rank's part of it, that is read when it is needed."""

    lazy: LazyTensor
    slot: TensorSlot
    weights: ModelWeights
    precision: ComputePrecision
    runs: tuple[tuple[tuple[int, int], ...], ...]
    """For each dim the intervals of the whole weight that this is."""

    def rows(self, start: int, stop: int) -> Torch:
        """Return rows of the part, ready to compute with."""
        box = Box((start, *(0 for _ in self.lazy.shape[1:])), (stop - start, *self.lazy.shape[1:]))
        read = self.weights.cast_floats(self.slot, self.lazy.read(box), self.precision.dtype)
        return read.to(self.slot.device)

    def list_row_bands(self) -> list[tuple[int, int]]:
        """Return the stretches of rows in which it is read."""
        rows = self.lazy.shape[0]
        step = self.precision.rows(self.lazy.shape[1] if self.lazy.ndim > 1 else 1)
        return [(at, min(at + step, rows)) for at in range(0, rows, step)]


@state_class
class StreamedLinear:
    """A module whose weight stays in the files until its forward is called.

    Of a rank's part, what it computes is as long as that of the whole, and zero where others have the weight.
    """

    module: Torch
    weight: WeightPart
    kind: str
    """`linear`, `conv1d` with inputs as rows, or `embedding`."""
    calls: int = 0

    @property
    def forward(self) -> Callable[[Torch], Torch]:
        """What the module is to run."""
        return self.embedding if self.kind == "embedding" else self.linear

    def linear(self, inputs: Torch) -> Torch:
        """Return what Linear and Conv1D compute."""
        self.calls += 1
        transposed = self.kind == "conv1d"
        bias, extent = self.module.bias, self.weight.slot.shape[1 if transposed else 0]
        columns, rows = self.weight.runs if transposed else reversed(self.weight.runs)
        if columns != ((0, self.weight.slot.shape[0 if transposed else 1]),):
            inputs = _select_columns(inputs, columns)
        if rows == ((0, extent),):
            return self._local(inputs, bias)
        local = self._local(inputs, _select_columns(bias, rows) if bias is not None else None)
        shape = (*inputs.shape[:-1], extent)
        result = inputs.new_zeros(shape) if bias is None else bias.expand(shape).clone()
        at = 0
        for start, stop in rows:
            result[..., start:stop] = local[..., at : at + stop - start]
            at += stop - start
        return result

    def _local(self, inputs: Torch, bias: Torch) -> Torch:
        """Return the outputs that the part has."""
        import torch
        from torch.nn import functional

        part = self.weight
        bands = part.list_row_bands()
        if self.kind == "conv1d":
            flat = inputs.reshape(-1, inputs.shape[-1])
            total = bias if bias is not None else torch.zeros((), dtype=inputs.dtype, device=inputs.device)
            for start, stop in bands:
                total = torch.addmm(total, flat[:, start:stop], part.rows(start, stop))
            return total.expand(len(flat), part.lazy.shape[1]).view(*inputs.shape[:-1], part.lazy.shape[1])
        if len(bands) == 1:
            return functional.linear(inputs, part.rows(*bands[0]), bias)
        pieces = [functional.linear(inputs, part.rows(a, b), bias[a:b] if bias is not None else None) for a, b in bands]
        return torch.cat(pieces, -1) if pieces else inputs[..., :0]

    def embedding(self, ids: Torch) -> Torch:
        """Return what an embedding computes, from the rows that are asked for."""
        import torch
        from torch import nn

        self.calls += 1
        wanted, places = torch.unique(ids, return_inverse=True)
        part, width = self.weight, self.weight.slot.shape[1]
        table = torch.zeros(len(wanted), width, dtype=part.precision.dtype)
        for number, row in enumerate(wanted.tolist()):
            local = _find_row_position(part.runs[0], row)
            if local is not None:
                table[number] = _spread_row(part.rows(local, local + 1)[0].cpu(), part.runs[1], width)
        parameters = self.module._parameters  # noqa: SLF001
        padding, kept = self.module.padding_idx, parameters["weight"]
        self.module.padding_idx = None  # which would be outside of a table of some rows
        parameters["weight"] = nn.Parameter(table.to(ids.device), requires_grad=False)
        try:
            return type(self.module).forward(self.module, places)
        finally:
            self.module.padding_idx, parameters["weight"] = padding, kept


def _select_columns(inputs: Torch, runs: Sequence[tuple[int, int]]) -> Torch:
    import torch

    pieces = [inputs[..., start:stop] for start, stop in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1) if pieces else inputs[..., :0]


def _spread_row(local: Torch, runs: Sequence[tuple[int, int]], width: int) -> Torch:
    import torch

    row, at = torch.zeros(width, dtype=local.dtype), 0
    for start, stop in runs:
        row[start:stop] = local[at : at + stop - start]
        at += stop - start
    return row


def _find_row_position(runs: Sequence[tuple[int, int]], row: int) -> int | None:
    """Find where in a rank's rows a row of the whole is."""
    at = 0
    for start, stop in runs:
        if start <= row < stop:
            return at + row - start
        at += stop - start
    return None


def find_leaf(slot: TensorSlot, weights: ModelWeights, precision: ComputePrecision) -> StreamedLinear | None:
    """Find the leaf for a module whose weight is a rank's part or too large to hold.

    None if the module is to run as it is.
    """
    kind = find_leaf_kind(slot.module)
    lazy = weights.direct.get(slot)
    if kind is None or lazy is None or slot.attribute != "weight" or slot.is_buffer:
        return None
    whole = tuple(((0, extent),) for extent in slot.shape)
    if isinstance(lazy, PlacedTensor) and lazy.runs != whole:
        return StreamedLinear(slot.module, WeightPart(RankPart(lazy), slot, weights, precision, lazy.runs), kind)
    if prod(slot.shape) * precision.dtype.itemsize <= precision.limit:
        return None
    return StreamedLinear(slot.module, WeightPart(lazy, slot, weights, precision, whole), kind)


_LINEAR_CLASS_NAMES: Final = {"FalconLinear"}
"""Classes with a forward of their own that computes what Linear does."""


def find_leaf_kind(module: Torch) -> str | None:
    """Find what the module computes, if it is known to the letter."""
    import inspect

    from torch import nn
    from transformers.pytorch_utils import Conv1D

    forward = type(module).forward
    if forward is nn.Linear.forward or (isinstance(module, nn.Linear) and type(module).__name__ in _LINEAR_CLASS_NAMES):
        return "linear"
    if forward is Conv1D.forward:
        return "conv1d"
    if isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq:
        stock = forward is nn.Embedding.forward
        scaled = "Scaled" in type(module).__name__ and list(inspect.signature(forward).parameters) == [
            "self",
            "input_ids",
        ]
        return "embedding" if stock or scaled else None
    return None
