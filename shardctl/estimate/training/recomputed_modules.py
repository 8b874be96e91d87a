"""Lists what Megatron-LM's `--recompute-modules` do not keep of a layer, and what they keep instead.

After megatron-core 0.14, to which 0.16 and 0.18 are alike: `transformer_layer.py`, `mlp.py`,
`multi_latent_attention.py`, `moe/moe_layer.py` and `moe/experts.py` of `core/transformer`, and
`core/models/gpt/gpt_layer_specs.py` for the norms that Transformer Engine has. `core_attn`, `mlp`, `moe` and
`shared_experts` keep their input. `moe_act`, `layernorm` and `mla_up_proj` keep theirs, too, and free their output
(`CheckpointWithoutOutput`), which is there twice once it is computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class
from shardctl.estimate.training.saved_activations import SavedActivation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.estimate.model.layer_graph import LayerAttention, ModelLayer
    from shardctl.estimate.training.saved_activations import Group
    from shardctl.estimate.workload import RecomputedModule, TrainingWorkload
    from shardctl.tensors.mesh import Mesh

MODULES_HINT: Final = "leave the module out of --recompute-modules, or give --recompute full or none"
_NORMS_PER_LAYER: Final = 2
"""Before attention and before the MLP."""
_CORE_ATTENTION_MODULES: Final[tuple[RecomputedModule, ...]] = ("core_attn",)
"""Its tensors are marked in the profiles (`SavedActivation.core`)."""


@value_class
class ModuleCheckpoint:
    """What one module does not keep of a layer."""

    dropped: Mapping[Group, frozenset[str]]
    """Names of tensors that the profile keeps, by their group; all of the group if there are none."""
    partly: Mapping[Group, tuple[SavedActivation, ...]]
    """Parts of other tensors, which are counted for several modules together."""
    instead: tuple[SavedActivation, ...] = ()
    """What it keeps that would not be kept otherwise."""
    frees_output: bool = False
    """Whether its output is freed: computed again, it is there twice."""


_ALL_ACTIVATIONS: Final[frozenset[str]] = frozenset()
_EXPERT_ACTIVATION_CHECKPOINT: Final = ModuleCheckpoint(
    {"experts": frozenset({"input of the experts' projection down"})}, {}, frees_output=True
)
_DENSE_MLP_CHECKPOINT: Final = ModuleCheckpoint(
    # Transformer Engine's kernel of the projection up computes the norm, which is so within the module.
    {"mlp": _ALL_ACTIVATIONS},
    {"norms": (SavedActivation("input of the MLP, normed", "hidden", sequence=True),)},
)
_SHARED_EXPERTS_CHECKPOINT: Final = ModuleCheckpoint({"mlp": _ALL_ACTIVATIONS}, {})
_MOE_LAYER_CHECKPOINT: Final = ModuleCheckpoint({"mlp": _ALL_ACTIVATIONS, "experts": _ALL_ACTIVATIONS}, {})
_MLA_PROJECTION_CHECKPOINT: Final = ModuleCheckpoint(
    {"attention": frozenset({"queries", "keys", "values"})},
    {"attention": (SavedActivation("compressed queries and keys, normed", "latent_norms", sequence=True),)},
    (SavedActivation("rotary part of the keys", "rotary_keys"),),
    frees_output=True,
)
_LAYERNORM_CHECKPOINT: Final = ModuleCheckpoint(
    {}, {"norms": (SavedActivation("output of a norm", "hidden", sequence=True),)}, (), True
)


def list_checkpoints(layer: ModelLayer, modules: Sequence[RecomputedModule]) -> Iterator[ModuleCheckpoint]:
    """List what `modules` change of a layer; of those that it does not have, nothing, and so of `core_attn`."""
    experts, latent = layer.experts is not None, _is_latent(layer)
    if "moe_act" in modules and experts:
        yield _EXPERT_ACTIVATION_CHECKPOINT
    if "mlp" in modules and layer.mlp and not experts:
        yield _DENSE_MLP_CHECKPOINT
    if "moe" in modules and experts:
        yield _MOE_LAYER_CHECKPOINT
    if "shared_experts" in modules and layer.experts is not None and layer.experts.shared:
        yield _SHARED_EXPERTS_CHECKPOINT
    if "mla_up_proj" in modules and latent:
        yield _MLA_PROJECTION_CHECKPOINT
    if "layernorm" in modules:
        # Other norms are computed by the kernel of the projection behind them, and are not modules of their own.
        yield from [_LAYERNORM_CHECKPOINT] * (experts + latent)


def find_unknown_module(layer: ModelLayer, work: TrainingWorkload, mesh: Mesh) -> str:
    """Return why nobody knows what `work.recompute_modules` leave of a layer; an empty string if it is known."""
    modules = set(work.recompute_modules).difference(_CORE_ATTENTION_MODULES)
    attention = layer.attention
    crossed = attention is not None and (attention.cross or attention.kind == "cross")
    if modules and (layer.encoder or layer.halves > 1 or layer.streams > 1 or crossed):
        return "it is no layer of megatron-core's GPT"
    if modules and layer.experts is not None and layer.mlp:
        return "it has a dense MLP beside its experts"
    if modules & {"layernorm", "mlp"} and layer.mixes and layer.feeds and layer.norms != _NORMS_PER_LAYER:
        return f"it has {layer.norms} norms, not {_NORMS_PER_LAYER}"
    if attention is not None and attention.kind == "latent" and "mla_up_proj" in modules:
        return _find_unknown_projection(attention, work, mesh)
    return ""


def _find_unknown_projection(attention: LayerAttention, work: TrainingWorkload, mesh: Mesh) -> str:
    if attention.indexer is not None or attention.chosen is not None or attention.compressed:
        return "its attention chooses tokens"
    if not work.flash:
        return "attention that is not fused may keep copies of what mla_up_proj frees"
    return "cp ranks may keep copies of what mla_up_proj frees" if mesh.degree("cp") > 1 else ""


def list_idle_modules(
    layers: Sequence[ModelLayer], modules: Sequence[RecomputedModule]
) -> tuple[RecomputedModule, ...]:
    """List those of `modules` that no layer has, so that they change nothing."""
    return tuple(
        name
        for name in modules
        if name not in _CORE_ATTENTION_MODULES and not any(any(list_checkpoints(each, (name,))) for each in layers)
    )


def count_module_operations(
    layers: Sequence[ModelLayer], mesh: Mesh, tokens: float, modules: Sequence[RecomputedModule]
) -> float:
    """Count operations of one forward pass of `tokens` tokens through the matrices of `modules`, on one rank."""
    return sum(2 * tokens * _count_weights(layer, set(modules)) / mesh.degree("tp") for layer in layers)


def _count_weights(layer: ModelLayer, modules: set[RecomputedModule]) -> float:
    """Count weights of `modules` that a token of a layer is multiplied with."""
    matrices, found = 2 + layer.gated, 0
    if layer.experts is None:
        found += layer.mlp * layer.hidden * matrices if "mlp" in modules else 0
    elif modules & {"moe", "shared_experts"}:
        found += layer.experts.shared * layer.hidden * matrices
    if layer.experts is not None and "moe" in modules:
        found += layer.experts.chosen * layer.experts.size * (layer.experts.width or layer.hidden) * matrices
    if layer.attention is not None and _is_latent(layer) and "mla_up_proj" in modules:
        one = layer.attention
        plain = one.head_dim - (one.latent - one.key_rank)
        found += one.heads * one.head_dim * (one.query_rank or layer.hidden)
        found += one.heads * (plain + one.value_dim) * one.key_rank
    return found


def _is_latent(layer: ModelLayer) -> bool:
    return layer.attention is not None and layer.attention.kind == "latent"
