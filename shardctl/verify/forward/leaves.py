"""Provides modules that compute with ranks' parts, or with a weight too large to hold, stretch by stretch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardctl.box import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardctl.verify.forward.lens import LazyTensor
    from shardctl.verify.forward.skeleton import TensorSlot
    from shardctl.verify.forward.team import RankTeam
    from shardctl.verify.forward.weights import ModelWeights

Torch = Any


@dataclass(slots=True)
class ComputePrecision:
    """Where and in which type is computed, and how much of one weight is held at once."""

    device: str
    dtype: Torch
    limit: int
    """Bytes; a weight of more is read in stretches of so many."""

    def rows(self, width: int) -> int:
        """Return how many rows of `width` elements are read at once."""
        return max(self.limit // max(width * int(self.dtype.itemsize), 1), 1)


@dataclass(slots=True)
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
        read = self.weights.typed(self.slot, self.lazy.read(box), self.precision.dtype)
        return read.to(self.precision.device)

    def whole(self) -> Torch:
        """Return all of it."""
        return self.weights.typed(self.slot, self.lazy[...], self.precision.dtype).to(self.precision.device)

    def bands(self) -> list[tuple[int, int]]:
        """Return the stretches of rows in which it is read."""
        rows = self.lazy.shape[0]
        step = self.precision.rows(self.lazy.shape[1] if self.lazy.ndim > 1 else 1)
        return [(at, min(at + step, rows)) for at in range(0, rows, step)]


@dataclass(slots=True)
class LeafModule:
    """A module whose weight stays in the files until its forward is called."""

    module: Torch
    usual: Callable[..., Torch]
    """The forward of its class."""
    weight: list[WeightPart]
    """By index on the tp axis; one, if tp does not cut it."""
    bias: list[WeightPart]
    """Of the same number, or one that is added once, or none."""
    cut: int | None
    """The dim of the weight that tp cuts."""
    team: RankTeam
    transposed: bool = False
    """Whether inputs are rows, as in Conv1D."""
    calls: int = 0
    disagreement: float = 0.0
    """The largest relative difference between ranks that compute the same outputs."""

    def linear(self, inputs: Torch) -> Torch:
        """Return what Linear and Conv1D compute: gathered where outputs are cut, summed where inputs are."""
        import torch

        self.calls += 1
        inner = self.transposed != (self.cut == 1)  # whether the cut dim is that of the inputs
        extent = self._extent(1 if self.transposed else 0)
        result = torch.zeros(*inputs.shape[:-1], extent, dtype=inputs.dtype, device=inputs.device)
        if self.cut is not None and inner:

            def partial(index: int) -> Torch:
                part = self.weight[index]
                return self._local(part, _select_columns(inputs, part.runs[0 if self.transposed else 1]), None)

            for local in self.team.each(len(self.weight), partial):
                result += local
            return result + self.bias[0].whole() if self.bias else result
        apart = len(self.bias) == len(self.weight)

        def columns(index: int) -> Torch:
            return self._local(self.weight[index], inputs, self.bias[index] if apart else None)

        filled = torch.zeros(extent, dtype=torch.bool)
        for part, local in zip(self.weight, self.team.each(len(self.weight), columns), strict=True):
            self._place(result, filled, local, part.runs[1 if self.transposed else 0])
        return result + self.bias[0].whole() if self.bias and not apart else result

    def _extent(self, dim: int) -> int:
        return max(stop for part in self.weight for run in part.runs[dim] for stop in run)

    def _place(self, result: Torch, filled: Torch, local: Torch, runs: Sequence[tuple[int, int]]) -> None:
        """Put a rank's outputs where they belong; what another rank has put there must be the same."""
        at = 0
        for start, stop in runs:
            mine, there = local[..., at : at + stop - start], result[..., start:stop]
            if filled[start:stop].all():
                norm = float(there.norm())
                self.disagreement = max(self.disagreement, float((mine - there).norm()) / (norm or 1.0))
            there.copy_(mine)
            filled[start:stop] = True
            at += stop - start

    def _local(self, part: WeightPart, inputs: Torch, bias: WeightPart | None) -> Torch:
        """Return one rank's outputs."""
        import torch
        from torch.nn import functional

        added = bias.whole() if bias is not None else None
        bands = part.bands()
        if self.transposed:
            flat = inputs.reshape(-1, inputs.shape[-1])
            total = added if added is not None else torch.zeros((), dtype=inputs.dtype, device=inputs.device)
            for start, stop in bands:
                total = torch.addmm(total, flat[:, start:stop], part.rows(start, stop))
            return total.expand(len(flat), part.lazy.shape[1]).view(*inputs.shape[:-1], part.lazy.shape[1])
        if len(bands) == 1:
            return functional.linear(inputs, part.rows(*bands[0]), added)
        pieces = [
            functional.linear(inputs, part.rows(a, b), added[a:b] if added is not None else None) for a, b in bands
        ]
        return torch.cat(pieces, -1) if pieces else inputs[..., :0]

    def embedding(self, ids: Torch) -> Torch:
        """Return what an embedding computes, from the rows that are asked for; ranks that lack a row give zeros."""
        import torch
        from torch import nn

        self.calls += 1
        wanted, places = torch.unique(ids, return_inverse=True)
        width = self._extent(1)

        def rows(index: int) -> Torch:
            part = self.weight[index]
            table = torch.zeros(len(wanted), width, dtype=part.precision.dtype)
            for number, row in enumerate(wanted.tolist()):
                local = _find_row_position(part.runs[0], row)
                if local is not None:
                    table[number] = _spread_row(part.rows(local, local + 1)[0].cpu(), part.runs[1], width)
            return table

        table: Torch = sum(self.team.each(len(self.weight), rows))
        parameters = self.module._parameters  # noqa: SLF001
        padding, kept = self.module.padding_idx, parameters["weight"]
        self.module.padding_idx = None  # which would be outside of a table of some rows
        parameters["weight"] = nn.Parameter(table.to(ids.device), requires_grad=False)
        try:
            return self.usual(places)
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


def find_leaf(
    slot: TensorSlot, weights: ModelWeights, precision: ComputePrecision, bias: TensorSlot | None
) -> LeafModule | None:
    """Find the leaf for a module whose weight is cut by tp or too large to hold.

    None if the module is to run as it is.
    """
    kind = find_leaf_kind(slot.module)
    lazy = weights.direct.get(slot)
    if kind is None or lazy is None or slot.attribute != "weight" or slot.is_buffer:
        return None
    sharding = weights.sharding(slot)
    size = precision.dtype.itemsize
    for extent in slot.shape:
        size *= extent
    if sharding is None and size <= precision.limit:
        return None
    biases: list[WeightPart] = []
    if bias is not None:
        if bias not in weights.direct:
            return None
        cut_bias = weights.sharding(bias) if sharding is not None else None
        output = 1 if kind == "conv1d" else 0
        if cut_bias is not None and sharding is not None and sharding.dim == output:
            biases = [WeightPart(each, bias, weights, precision, each.runs) for each in cut_bias.parts]
        else:
            biases = [WeightPart(weights.direct[bias], bias, weights, precision, ())]
    if sharding is None:
        whole = tuple(((0, extent),) for extent in slot.shape)
        parts = [WeightPart(lazy, slot, weights, precision, whole)]
    else:
        parts = [WeightPart(each, slot, weights, precision, each.runs) for each in sharding.parts]
    usual = type(slot.module).forward.__get__(slot.module)
    dim = sharding.dim if sharding is not None else None
    return LeafModule(slot.module, usual, parts, biases, dim, weights.team, kind == "conv1d")


_LINEAR: Final = {"FalconLinear"}
"""Classes with a forward of their own that computes what Linear does."""


def find_leaf_kind(module: Torch) -> str | None:
    """Find what the module computes, if it is known to the letter."""
    import inspect

    from torch import nn
    from transformers.pytorch_utils import Conv1D

    forward = type(module).forward
    if forward is nn.Linear.forward or (isinstance(module, nn.Linear) and type(module).__name__ in _LINEAR):
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
