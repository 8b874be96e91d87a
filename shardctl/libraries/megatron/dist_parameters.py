"""Lists the parameters of each rank in the order of Megatron-LM's modules, from arrays in a `torch_dist` file.

What a rank has of an array is what it wrote: the boxes in the files. Which ranks divide an array, and into how many
pieces each, follows from their number. The order is that of `named_parameters()` in megatron-core 0.12 to 0.19:
`transformer_layer.py`, `attention.py`, `multi_latent_attention.py`, `mlp.py`, `moe_layer.py`, `shared_experts.py`,
`mamba_mixer.py`.
"""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, Final

from shardctl.base.value import state_class, value_class

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.tensors.box import Box
    from shardctl.tensors.manifest import Tensor
    from shardctl.tensors.mesh import Mesh

_OF_LAYER: Final = re.compile(r"decoder\.layers\.(?:(\d+)\.)?([^0-9].*)")
_OF_EXPERT: Final = re.compile(r"(mlp\.experts\.)experts\.(?:(\d+)\.)?(linear_fc[12]\..+)")
_PARAMETER_COMPONENT_PATTERN: Final = re.compile(r"(.+\.(?:weight|bias))(_w|_v|\.z|\.x|\.B|\.C|\.dt)")
_PARAMETER_COMPONENT_SUFFIXES: Final = ("", "_w", "_v", ".z", ".x", ".B", ".C", ".dt")
"""What the arrays of a parameter's parts end with, in the order in which they lie in it."""
BUFFERS: Final = (".expert_bias", ".local_tokens_per_expert")
"""How the names of arrays end that no optimizer trains."""
_EMBEDDING_NAMES: Final = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
_LAST_NORMS: Final = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "decoder.final_norm.weight")
_OUTPUT_LAYER_NAME: Final = "output_layer.weight"
_ORDERED_PARAMETER_NAMES: Final = (
    *("gate_weight", "layer_norm_weight", "layer_norm_bias", "weight", "bias"),
    *("conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D"),
)
_ORDERED_MODULE_NAMES: Final = (
    *("mixer", "mixer.in_proj", "mixer.conv1d", "mixer.norm", "mixer.out_proj", "norm"),
    "input_layernorm",
    "self_attention.linear_proj",
    *(f"self_attention.linear_{name}" for name in ("qkv", "q_proj", "q_down_proj", "q_up_proj")),
    *(f"self_attention.linear_{name}" for name in ("kv_down_proj", "kv_up_proj")),
    *(f"self_attention.{name}_layernorm" for name in ("q", "kv", "k")),
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.fc1_latent_proj",
    "mlp.fc2_latent_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "mlp.experts",
    "mlp.shared_experts",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
)
"""In the order in which a layer makes them."""
_FUSED_NORMS: Final = (
    ("mixer.in_proj.layer_norm_", "norm."),
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
"""Names that local layers write for norms of their own."""
_CONVOLUTION_PREFIXES: Final = ("mixer.conv1d.", "mixer.conv1d_")
"""Mamba's convolution as a module, and as parameters of Mamba's own, which it has been since megatron-core 0.19."""
_EXPERTS_MODULE: Final = "mlp.experts"


class UnknownOrderError(Exception):
    """Says why the parameters in an optimizer's buckets cannot be told from each other."""


@value_class
class ModuleOrder:
    """What differs between implementations of the layers."""

    fused: bool
    """Whether norms are parts of the projections behind them, as in Transformer Engine's layers."""
    grouped: bool
    """Whether the first projections of all experts come before the second ones."""
    convolved: bool = False
    """Whether Mamba's convolution is a module, as in megatron-core before 0.19."""

    @property
    def title(self) -> str:
        """What messages call it."""
        layers = "Transformer Engine's layers" if self.fused else "local layers"
        layers += " before megatron-core 0.19" if self.convolved else ""
        return f"of {layers}, with grouped experts" if self.grouped else f"of {layers}"


@value_class
class RankParameter:
    """A parameter of a rank: boxes of arrays, their elements one behind another."""

    parts: tuple[tuple[str, Box], ...]
    """Each an array's name and a box of it; none for a copy of what another stage has."""
    size: int
    """Elements."""
    dtype: str
    """As torch calls it."""


@state_class
class _Cell:
    """A layer's part of an array, or of two, for gate and up."""

    boxes: list[tuple[str, Box]]
    dtype: str

    def share(self, index: int, count: int) -> RankParameter:
        """Return what a rank of so many has."""
        boxes = self.boxes
        if len(boxes) > 1:
            if len(boxes) % count:
                raise UnknownOrderError(f"{len(boxes)} boxes of {boxes[0][0]!r} cannot be those of {count} ranks")
            boxes = boxes[index::count]
        return RankParameter(tuple(boxes), sum(box.size for _, box in boxes), self.dtype)


class StoredModules:
    """The modules that a checkpoint's arrays are from, and the ranks that have them."""

    def __init__(self, arrays: Mapping[str, Tensor], mesh: Mesh) -> None:
        self.mesh = mesh
        self.stages = mesh.degree("pp")
        self._ends: dict[str, _Cell] = {}
        self._layers: dict[int, dict[tuple[str, int], _Cell]] = {}
        for name in sorted(arrays, key=_find_part):
            self._add_array(name, arrays[name])
        self._tied = _OUTPUT_LAYER_NAME not in self._ends
        self._experts = any(expert >= 0 for layer in self._layers.values() for _, expert in layer)
        if sorted(self._layers) != list(range(len(self._layers))):
            raise UnknownOrderError("not all layers are here")

    def _add_array(self, name: str, tensor: Tensor) -> None:
        if name.endswith(BUFFERS):
            return
        found = _OF_LAYER.fullmatch(name)
        half = _PARAMETER_COMPONENT_PATTERN.fullmatch(name)
        if found is None and name not in {*_EMBEDDING_NAMES, *_LAST_NORMS, _OUTPUT_LAYER_NAME}:
            raise UnknownOrderError(f"where {name!r} stands among parameters is not known")
        for chunk in sorted(tensor.chunks, key=lambda each: each.box.origin):
            if found is None:
                cell = self._ends.setdefault(name, _Cell([], chunk.dtype.torch))
            else:
                origin = iter(chunk.box.origin)
                layer = int(found[1]) if found[1] is not None else next(origin)
                local, expert = _PARAMETER_COMPONENT_PATTERN.sub(r"\1", found[2]), -1
                inner = _OF_EXPERT.fullmatch(local)
                if inner is not None:
                    local, expert = inner[1] + inner[3], int(inner[2]) if inner[2] is not None else next(origin)
                before = len(chunk.box.origin) - len(list(origin))
                if any(extent != 1 for extent in chunk.box.shape[:before]):
                    raise UnknownOrderError(f"a box of {name!r} has several layers or experts")
                key = self._layers.setdefault(layer, {})
                cell = key.setdefault((local, expert), _Cell([], chunk.dtype.torch))
            cell.boxes.append((name, chunk.box))
        if half is not None and found is None:
            raise UnknownOrderError(f"where {name!r} stands among parameters is not known")

    def list_orders(self) -> list[ModuleOrder]:
        """List the orders that parameters may have."""
        grouped = (False, True) if self._experts else (False,)
        mamba = any(local.startswith(_CONVOLUTION_PREFIXES) for layer in self._layers.values() for local, _ in layer)
        convolved = (False, True) if mamba else (False,)
        return [ModuleOrder(*each) for each in product((False, True), grouped, convolved)]

    def list_kinds(self, order: ModuleOrder) -> list[tuple[ModuleOrder, bool]]:
        """List the optimizers, each with whether it has experts: those that ep divides have one of their own."""
        return [(order, False), (order, True)] if self._divided else [(order, False)]

    @property
    def _divided(self) -> bool:
        return self._experts and self.mesh.ep > 1

    def count_ranks(self, kind: tuple[ModuleOrder, bool]) -> int:
        """Count the ranks of which each has parameters of its own."""
        return self.stages * (self.mesh.ep * self.mesh.etp if kind[1] else self.mesh.degree("tp"))

    def find_stage(self, kind: tuple[ModuleOrder, bool], rank: int) -> int:
        """Find the stage of a rank; stages are outermost."""
        return rank * self.stages // self.count_ranks(kind)

    def count_chunks(self, buffers: int, dtypes: int) -> int:
        """Count the chunks of layers that a rank has, one buffer for each type of parameters."""
        if buffers % dtypes:
            raise UnknownOrderError(f"{buffers} buffers cannot be those of {dtypes} types of parameters")
        return buffers // dtypes

    def list_counts(self, first: int, turns: int, *, last: bool) -> list[int]:
        """List how many layers may be in a chunk that begins with layer `first`, the likeliest number first."""
        left = len(self._layers) - first
        if last:
            return [left]
        return sorted(range(left + 1), key=lambda count: abs(count * turns - len(self._layers)))

    def list_parameters(
        self, kind: tuple[ModuleOrder, bool], rank: int, layers: range, *, last: bool
    ) -> list[RankParameter]:
        """List the parameters that a rank has in a chunk of these layers, in the order of modules."""
        order, routed = kind
        index = rank % (self.count_ranks(kind) // self.stages)
        found: list[RankParameter] = []
        if routed:
            group, within = divmod(index, self.mesh.etp)
            for layer in layers:
                found += self._list_experts(order, layer, group, within)
            return found
        tp = self.mesh.degree("tp")
        if layers.start == 0:
            found += [self._ends[name].share(index, tp) for name in _EMBEDDING_NAMES if name in self._ends]
        for layer in layers:
            found += self._list_layer(order, layer, index, tp)
        if last:
            found += [
                self._ends[name].share(index, tp) for name in (*_LAST_NORMS, _OUTPUT_LAYER_NAME) if name in self._ends
            ]
            if self._tied and layers.start > 0:
                copy = self._ends[_EMBEDDING_NAMES[0]].share(index, tp)
                found.append(RankParameter((), copy.size, copy.dtype))
        return found

    def _list_layer(self, order: ModuleOrder, layer: int, index: int, tp: int) -> Iterator[RankParameter]:
        """List what a rank has of a layer, but for experts that have an optimizer of their own."""
        names = {local for local, expert in self._layers[layer] if expert < 0}
        if not self._divided and any(expert >= 0 for _, expert in self._layers[layer]):
            if self.mesh.etp != tp:
                raise UnknownOrderError("experts are divided in another way than the layers that they are in")
            names.add(f"{_EXPERTS_MODULE}.weight")
        for name in sorted(names, key=lambda local: find_position(local, order)):
            if name == f"{_EXPERTS_MODULE}.weight":
                yield from self._list_experts(order, layer, 0, index)
            else:
                yield self._layers[layer][name, -1].share(index, tp)

    def _list_experts(self, order: ModuleOrder, layer: int, group: int, index: int) -> Iterator[RankParameter]:
        cells = {key: cell for key, cell in self._layers[layer].items() if key[1] >= 0}
        count = len({expert for _, expert in cells})
        if count % self.mesh.ep:
            raise UnknownOrderError(f"{count} experts cannot be divided over ep={self.mesh.ep}")
        held = range(group * count // self.mesh.ep, (group + 1) * count // self.mesh.ep)
        mine = [key for key in cells if key[1] in held]
        for key in sorted(mine, key=lambda each: (each[0], each[1]) if order.grouped else (each[1], each[0])):
            yield cells[key].share(index, self.mesh.etp)


def _find_part(name: str) -> tuple[str, int]:
    """Find whose part an array is, and which."""
    part = _PARAMETER_COMPONENT_PATTERN.fullmatch(name)
    return (part[1], _PARAMETER_COMPONENT_SUFFIXES.index(part[2])) if part is not None else (name, 0)


def find_position(local: str, order: ModuleOrder) -> tuple[int, int]:
    """Find where a parameter stands in its layer; raises UnknownOrderError if that is not known."""
    for fused, alone in _FUSED_NORMS if not order.fused else ():
        local = local.replace(fused, alone) if local.startswith(fused) else local
    local = local if order.convolved else local.replace(*_CONVOLUTION_PREFIXES)
    module, _, kind = local.rpartition(".")
    if module not in _ORDERED_MODULE_NAMES or kind not in _ORDERED_PARAMETER_NAMES:
        raise UnknownOrderError(f"where {local!r} stands among parameters is not known")
    return _ORDERED_MODULE_NAMES.index(module), _ORDERED_PARAMETER_NAMES.index(kind)
