"""Makes those of Megatron-LM's `args` that say what a model is, from a config of transformers.

Names are those of `megatron/training/arguments.py` in Megatron-LM core 0.16; `arguments.py` goes the other way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.libraries.megatron.arguments import (
    DELTA,
    LATENT,
    LINEAR,
    PART,
    SOME_WINDOWS,
    TURNING,
    USUAL,
    WITHOUT_ROTATION,
    YARN,
    as_number,
)
from shardctl.libraries.megatron.family_features import TRAITS
from shardctl.libraries.megatron.layers import ROUTERS, count_experts, is_hybrid, is_tied
from shardctl.libraries.megatron.ranks import TITLE
from shardctl.libraries.megatron.turning_layers import LIMIT
from shardctl.models.families import load_family
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.rope import parse_rope
from shardctl.models.tables.windows import list_windows, mark_rotary_layers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.settings import Setting
    from shardctl.libraries.megatron.family_features import CoreFeatures
    from shardctl.models import Model
    from shardctl.models.tables.rope import RotaryEmbedding
    from shardctl.models.tables.windows import WindowRule

_EXPERTS_PER_GROUP_SCORE: Final = 2
"""Experts of a group by whose scores DeepSeek-V3's routers and their like choose it."""


def convert_config_to_arguments(config: Mapping[str, object], model: Model) -> dict[str, Setting]:
    """Return those of `args` that say what the model is, from which Megatron-LM builds it with `--use-checkpoint-args`.

    Raises UnsupportedError for rotary embeddings, biases, windows or activations that it does not have.
    """
    if model.family == "gpt2":
        return {**USUAL, "mtp_num_layers": None, **_build_gpt2_arguments(config, model)}
    if is_hybrid(model):
        from shardctl.libraries.megatron.hybrid_arguments import build_hybrid_arguments  # few models need it

        return {**USUAL, **build_hybrid_arguments(config, model)}
    own, traits = model.tensors, TRAITS[model.family]
    said = _complete_config(config, model).over(traits.assumed)
    first = _find_attention(model)
    latent, heads = f"{first}.kv_b_proj.weight" in own, said.size("num_attention_heads")
    biased = f"{first}.o_proj.bias" in own
    if biased != any(f"model.layers.0.mlp.{name}" in own for name in ("down_proj.bias", "experts.down_proj_bias")):
        raise UnsupportedError(f"{TITLE} has biases in all projections or in none, except in those of q, k and v")
    usual = {"silu", "swish"} if traits.activation == "silu" else {traits.activation}
    if said.text("hidden_act", traits.activation) not in usual:
        raise UnsupportedError(f"{TITLE}'s args have no activation {config['hidden_act']!r} for models like this")
    hidden = own["model.embed_tokens.weight"].shape[1]
    epsilon, default = ("norm_eps", 1e-5) if traits.layer_norm else ("rms_norm_eps", 1e-6)
    found: dict[str, Setting] = {
        **USUAL,
        "mtp_num_layers": None,
        "num_layers": model.layers,
        "hidden_size": hidden,
        "ffn_hidden_size": said.size("intermediate_size", None if not traits.delta else 4 * hidden),
        "num_attention_heads": heads,
        "max_position_embeddings": said.size("max_position_embeddings", 4_096),
        "position_embedding_type": "rope",
        "add_position_embedding": False,
        "use_rotary_position_embeddings": True,
        "normalization": "LayerNorm" if traits.layer_norm else "RMSNorm",
        "norm_epsilon": as_number(said.values.get(epsilon, default)),
        "swiglu": traits.gated and not traits.turning,
        "squared_relu": traits.activation == "relu2",
        "openai_gelu": False,
        "add_bias_linear": biased,
        "add_qkv_bias": f"{first}.q_proj.bias" in own,
        "qk_layernorm": latent or f"{first}.q_norm.weight" in own,
        "multi_latent_attention": latent,
        "untie_embeddings_and_output_weights": not is_tied(model),
        **_build_window_arguments(said, model),
        **_build_rope_arguments(said, traits, latent=latent),
    }
    found |= _build_special_arguments(said, model)
    if latent:
        if not said.read_flag("rope_interleave", default=True):
            raise UnsupportedError(f"{TITLE} turns neighbours in latent attention, which this config does not")
        found |= {name: _as_integer(said.values.get(other)) for name, other in LATENT.items()}
        found |= {"group_query_attention": False, "num_query_groups": heads, "kv_channels": hidden // heads}
    else:
        head = own[f"{first}.o_proj.weight"].shape[1] // heads
        groups = said.size("num_key_value_heads", _count_key_heads(model, first, head))
        found |= {"group_query_attention": groups != heads, "num_query_groups": groups, "kv_channels": head}
    return {**found, **_build_expert_arguments(said, model)}


def _complete_config(config: Mapping[str, object], model: Model) -> ModelConfig:
    """Return the config with what its class assumes where it is silent, as far as the family's table says."""
    family = load_family(model.family)
    return ModelConfig(config) if family is None else family.complete_config(ModelConfig(config))


def _build_special_arguments(said: ModelConfig, model: Model) -> dict[str, Setting]:
    """Build what only models of some families have."""
    traits = TRAITS[model.family]
    found = _build_turning_arguments(said) if traits.turning else {}
    if traits.delta:
        found |= _build_delta_arguments(said, model)
    if traits.centred:
        found["apply_layernorm_1p"] = True
    if traits.skips_rotation:
        found[WITHOUT_ROTATION] = _list_layers_without_rotation(said, model)
    return found


def _find_attention(model: Model) -> str:
    """Find the first layer's attention that is not linear."""
    names = (f"model.layers.{number}.self_attn" for number in range(model.layers))
    return next((name for name in names if f"{name}.o_proj.weight" in model.tensors), "model.layers.0.self_attn")


def _build_delta_arguments(said: ModelConfig, model: Model) -> dict[str, Setting]:
    """Build what core is told of gated DeltaNet; where a config is silent as its class assumes."""
    linear = (f"model.layers.{number}.linear_attn.A_log" in model.tensors for number in range(model.layers))
    return {
        "experimental_attention_variant": "gated_delta_net",
        "attention_output_gate": True,
        LINEAR: tuple(map(int, linear)),
        **{name: said.size(name, usual) for name, usual in DELTA.items()},
    }


def _build_turning_arguments(said: ModelConfig) -> dict[str, Setting]:
    """Build what core is told of gpt-oss; raises UnsupportedError for what nobody computes, or is not said."""
    if as_number(said.values.get("swiglu_limit", LIMIT)) != LIMIT:
        raise UnsupportedError(f"config.json has swiglu_limit = {said.values['swiglu_limit']!r}; only {LIMIT} is known")
    if not said.values.get("rope_parameters") and not said.values.get("rope_scaling"):
        raise UnsupportedError("config.json does not say how positions are scaled", hint="give one that does, --config")
    return {"quick_geglu": True, **TURNING}


def _count_key_heads(model: Model, attention: str, head: int) -> int | None:
    """Count heads of keys by the rows of their projection; None if it is in one array with others."""
    keys = model.tensors.get(f"{attention}.k_proj.weight")
    return keys.shape[0] // head if keys is not None else None


def _build_expert_arguments(said: ModelConfig, model: Model) -> dict[str, Setting]:
    count, own = count_experts(model), model.tensors
    if not count:
        return {"num_experts": None}
    layers = (f"model.layers.{number}" for number in range(model.layers))
    routed = [any(f"{layer}.{router}.weight" in own for router in ROUTERS) for layer in layers]
    delta, first = TRAITS[model.family].delta, (".experts.0.gate_proj.weight", ".experts.0.w1.weight")
    turning = TRAITS[model.family].turning
    inner = next((own[name].shape[0] for name in own if name.endswith(first)), 0)
    shared = next((own[n].shape[0] for n in own if ".mlp.shared_expert" in n and n.endswith(".gate_proj.weight")), None)
    found: dict[str, Setting] = {
        "num_experts": count,
        "moe_ffn_hidden_size": inner or said.size("intermediate_size"),
        "moe_router_topk": said.size("num_experts_per_tok", 2),
        "moe_layer_freq": 1 if all(routed) else tuple(map(int, routed)),
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": any(name.endswith(".mlp.shared_expert_gate.weight") for name in own),
        "moe_router_pre_softmax": not (
            model.family == "mixtral" or turning or said.read_flag("norm_topk_prob", default=delta)
        ),
        "moe_router_load_balancing_type": "none",
    }
    if not TRAITS[model.family].balanced:
        return found
    if not said.read_flag("norm_topk_prob", default=True):
        raise UnsupportedError(
            f"{TITLE} divides the sigmoids of chosen experts by their sum, which this config does not"
        )
    groups, chosen = said.size("n_group", 1), said.size("topk_group", 1)
    if groups > 1 and said.size("num_experts_per_tok") // chosen != _EXPERTS_PER_GROUP_SCORE:
        raise UnsupportedError(
            f"{TITLE} chooses groups by the {said.size('num_experts_per_tok') // chosen} best experts of each, which "
            f"is num_experts_per_tok / topk_group; this model does so by the best {_EXPERTS_PER_GROUP_SCORE}"
        )
    return {
        **found,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_router_topk_scaling_factor": as_number(said.values.get("routed_scaling_factor", 1.0)),
    }


def _build_gpt2_arguments(config: Mapping[str, object], model: Model) -> dict[str, Setting]:
    hidden = model.tensors["transformer.wte.weight"].shape[1]
    said = ModelConfig(config).alias_keys({"n_head": "num_attention_heads"})
    heads, activation = said.size("n_head"), said.text("activation_function", "gelu_new")
    if activation not in {"gelu_new", "gelu_pytorch_tanh", "gelu"}:
        raise UnsupportedError(f"{TITLE} has no activation {ascii(activation)[:40]} in models like GPT-2")
    return {
        "num_layers": model.layers,
        "hidden_size": hidden,
        "ffn_hidden_size": model.tensors["transformer.h.0.mlp.c_fc.weight"].shape[1],
        "num_attention_heads": heads,
        "group_query_attention": False,
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "max_position_embeddings": model.tensors["transformer.wpe.weight"].shape[0],
        "position_embedding_type": "learned_absolute",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "normalization": "LayerNorm",
        "norm_epsilon": as_number(config.get("layer_norm_epsilon", 1e-5)),
        "swiglu": False,
        "openai_gelu": False,
        "bias_gelu_fusion": activation != "gelu",
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "qk_layernorm": False,
        "multi_latent_attention": False,
        "untie_embeddings_and_output_weights": not is_tied(model),
        "num_experts": None,
    }


def _build_rope_arguments(said: ModelConfig, traits: CoreFeatures, *, latent: bool) -> dict[str, Setting]:
    """Build theta, scaling and the part of each head; raises UnsupportedError for what args cannot say.

    Of `--use-rope-scaling` the factor alone can be given (`rotary_pos_embedding.py`).
    """
    usual = {"rope_theta": traits.theta, "partial_rotary_factor": traits.part or 1.0}
    rope = parse_rope({**usual, **{key: value for key, value in said.values.items() if value is not None}})
    found: dict[str, Setting] = {"rotary_base": int(rope.theta), "use_rope_scaling": False}
    if traits.interleaved:
        found["rotary_interleaved"] = True
    if rope.theta == int(rope.theta) and (rope.part == 1.0 or (traits.part and rope.kind == "default")):
        if rope.kind == "default":
            if traits.part:
                found[PART] = rope.part
            return {**found, "rope_type": "rope", "rotary_scaling_factor": 1.0} if latent else found
        if rope.as_llama3 and not latent:
            factor = as_number(rope.settings.get("factor", 8.0))
            return {**found, "use_rope_scaling": True, "rope_scaling_factor": factor}
        if rope.kind == "yarn" and latent:
            numbers = {name: rope.settings.get(other) for other, name in YARN.items()}
            yarn = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
            return {**found, "rope_type": "yarn", **yarn}
        if rope.kind == "yarn" and not rope.settings.get("attention_factor"):
            return {**found, **_build_yarn_arguments(rope, said.size("max_position_embeddings", 4_096))}
    raise UnsupportedError(f"{TITLE} does not support this config's rotary embeddings of type {rope.kind!r}")


def _build_yarn_arguments(rope: RotaryEmbedding, positions: int) -> dict[str, Setting]:
    """Build YaRN of attention without latents, as transformers computes it (`modeling_rope_utils.py`)."""
    said = rope.settings
    both = bool(said.get("mscale") and said.get("mscale_all_dim"))
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": as_number(said.get("factor")),
        "yarn_original_max_position_embeddings": _as_integer(said.get("original_max_position_embeddings")) or positions,
        "yarn_beta_fast": as_number(said.get("beta_fast") or 32),
        "yarn_beta_slow": as_number(said.get("beta_slow") or 1),
        "yarn_correction_range_round_to_int": said.get("truncate", True) is not False,
        "mscale": as_number(said.get("mscale")) if both else 1.0,
        "mscale_all_dim": as_number(said.get("mscale_all_dim")) if both else 0.0,
    }


def _build_window_arguments(said: ModelConfig, model: Model) -> dict[str, Setting]:
    """Build how far back tokens look, as Megatron-LM counts it: without themselves; and which layers do so."""
    widths = list_windows(_find_window_rule(model), said, model.layers)
    width = next((each for each in widths if each is not None), None)
    if width is None:
        return {"window_size": None}
    found: dict[str, Setting] = {"window_size": (width - 1, 0)}
    return found if None not in widths else {**found, SOME_WINDOWS: tuple(int(each is not None) for each in widths)}


def _find_window_rule(model: Model) -> WindowRule | None:
    family = load_family(model.family)
    return family.traits.window if family is not None and family.traits is not None else None


def _list_layers_without_rotation(said: ModelConfig, model: Model) -> tuple[int, ...] | None:
    """List ones for layers without rotary embeddings; None if there are none."""
    rule = _find_window_rule(model)
    if rule is None:
        return None
    found = tuple(int(not marked) for marked in mark_rotary_layers(rule, said, model.layers))
    return found if any(found) else None


def _as_integer(value: object) -> int | None:
    return value if isinstance(value, int) else None
