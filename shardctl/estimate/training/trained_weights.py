"""Tells which weights of a layer are trained, because autograd keeps some tensors for the gradient of a weight alone.

A product keeps its input for the gradient of its matrix, and its matrix for that of its input. So nothing is kept of
what a matrix reads that is not trained, unless an adapter reads it, too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class
from shardctl.estimate.model.layer_weights import ROLES, blank_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardctl.estimate.model.layer_graph import ModelLayer
    from shardctl.estimate.model.layer_weights import WeightRole
    from shardctl.estimate.model.rank_shards import HeldPart
    from shardctl.estimate.model.sizes import Size
    from shardctl.estimate.training.saved_activations import Flag

_FLAGS_BY_ROLE: Final[Mapping[WeightRole, tuple[Flag, ...]]] = {
    "norms": ("norms trained",),
    "head norms": ("head norms trained",),
    "latents": ("latents trained",),
    "attention out": ("output trained",),
    "mlp in": ("mlp trained",),
    "mlp out": ("down trained",),
    "experts in": ("experts trained",),
    "experts out": ("experts down trained",),
    "router": ("router trained", "mlp trained"),
}
_BEFORE_MLP: Final[frozenset[WeightRole]] = frozenset(("mlp in", "router"))
_FIRST_OF_PAIR: Final = ".lora_A.weight"


@value_class
class TrainedWeights:
    """What of a layer is trained."""

    roles: frozenset[WeightRole] = ROLES
    """What the weights multiply of which some are trained; all that nobody knows of."""
    readers: int | None = None
    """Matrices that read whole tokens, experts not, of those that are trained; None if all are."""
    sides: int = 2
    """Of attention and MLP, how many have one of those."""
    halves: int = 1
    """How often the layer has its attention and its MLP."""
    ranks: int = 0
    """Of the adapters of a layer, experts not, all together: what the narrow products of a token have."""
    widths: int = 0
    """Of what those adapters read of a token, each by itself."""

    def list_flags(self, flags: frozenset[Flag]) -> Iterator[Flag]:
        """List what holds of a layer besides `flags`, by which others than weights may need the same tensors."""
        for role in self.roles:
            yield from _FLAGS_BY_ROLE.get(role, ())
        if not flags.isdisjoint(("gated", "relu")) or not self.roles.isdisjoint(("mlp out", "experts out")):
            yield "activation needed"
        if not flags.isdisjoint(("fused", "gated attention")) or "attention out" in self.roles:
            yield "result needed"
        if "gated attention" in flags or "attention out" in self.roles:
            yield "result read"
        own = not flags.isdisjoint(("copied adapters", "autocast"))  # each adapter has its own copy of what it reads
        if self.ranks and own and "attention out" in self.roles:
            yield "copied result"

    def limit_sizes(self, sizes: Mapping[Size, float]) -> dict[Size, float]:
        """Return the sizes of a layer with those inputs of attention and MLP alone that are kept."""
        if self.readers is None:
            return dict(sizes)
        hidden = sizes.get("hidden", 0)
        inputs = min(sizes.get("inputs", 0), hidden * self.sides * self.halves)
        return {
            **sizes,
            "inputs": inputs,
            "readings": max(0, hidden * self.readers * self.halves - inputs) if sizes.get("readings") else 0,
            "narrow_products": sizes.get("tokens", 0) * self.ranks,
            "adapter_inputs": sizes.get("tokens", 0) * self.widths,
        }


ALL_TRAINED: Final = TrainedWeights()


def find_trained_weights(
    layers: Sequence[ModelLayer], numbers: range, parts: Sequence[HeldPart], *, wide_router: bool
) -> Mapping[int, TrainedWeights]:
    """Find what is trained of those layers of which not all is and whose weights' places are known, by their numbers.

    `parts` are what a rank holds; each kind of tensor that is trained is of one module. A `wide_router` reads an fp32
    copy of its own.
    """
    if all(part.kind.trainable for part in parts):
        return {}
    kinds: dict[int, list[HeldPart]] = {}
    for part in parts:
        for number in part.kind.layers:
            kinds.setdefault(number, []).append(part)
    found = {
        number: _find_trained(layers[number], kinds.get(number, ()), wide_router=wide_router) for number in numbers
    }
    return {number: one for number, one in found.items() if one is not None}


def _find_trained(layer: ModelLayer, parts: Sequence[HeldPart], *, wide_router: bool) -> TrainedWeights | None:
    """Find what is trained of a layer; None if that is not known, or all is."""
    if not any(find_weight_role(layer, part.kind.example) for part in parts if not part.kind.trainable):
        return None
    found: dict[str, WeightRole] = {}
    ranks = widths = 0
    for part in (part for part in parts if part.kind.trainable):
        kind = part.kind
        first = kind.example.endswith(_FIRST_OF_PAIR)
        name = re.sub(r"\.lora_[AB]\.weight$", ".weight", kind.example)
        if name.endswith(".bias"):
            continue
        role = find_weight_role(layer, name)
        if role is None:
            return None
        found[name] = role
        if first and not kind.spec.of_expert:
            ranks += kind.shape[0] * part.count
            widths += part.gathered // kind.shape[0] * part.count
    return count_trained_weights(layer, found.values(), (ranks, widths), wide_router=wide_router)


def find_weight_role(layer: ModelLayer, name: str) -> WeightRole | None:
    """Find what a layer's weight of that name multiplies; None for biases and buffers, and where it is not known."""
    plain = blank_numbers(name)
    found = [place for place in layer.weights if plain.endswith(f".{place.name}")]
    return max(found, key=lambda place: len(place.name)).role if found else None


def count_trained_weights(
    layer: ModelLayer, roles: Iterable[WeightRole], adapters: tuple[int, int] = (0, 0), *, wide_router: bool
) -> TrainedWeights:
    """Count what is trained of a layer, from what each of those matrices multiplies.

    `adapters` are the elements that all adapters of a layer make of a token between their matrices, and that they read.
    """
    every = tuple(roles)
    found = frozenset(every)
    before = _BEFORE_MLP - {"router"} if wide_router else _BEFORE_MLP
    readers = sum(role in before or role == "attention in" for role in every)
    sides = ("attention in" in found) + (not found.isdisjoint(before))
    return TrainedWeights(found, readers, sides, layer.halves, *adapters)
