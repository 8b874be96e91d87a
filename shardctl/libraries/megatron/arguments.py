"""Converts between Megatron-LM's `args` and the config of transformers.

The names are those of `megatron/training/arguments.py` in Megatron-LM core 0.16, as `load_args_from_checkpoint` reads
them back. They describe an architecture and never name the model: the simplest one that has it is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.errors import UnsupportedError
from shardctl.libraries.megatron.layers import TITLE, count_experts, is_tied
from shardctl.manifest import OwnConfig
from shardctl.models import name_usual_class
from shardctl.models.config import ModelConfig
from shardctl.models.rope import LLAMA3, parse_rope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models import Model
    from shardctl.settings import Setting

LAST_ROW: Final = "vocabulary_padded_with_last_row"
"""An arg of shardctl's own, which nothing in Megatron-LM looks at: without it, what padding holds is not known."""
_PART: Final = "rotary_percent"
_USUAL_PART: Final = 0.5
"""The part of each head that GLM's MoE rotates if its config says nothing."""
_USUAL: Final[dict[str, Setting]] = {
    "rotary_interleaved": False,
    _PART: 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "attention_output_gate": False,
    "squared_relu": False,
    "heterogeneous_layers_config_path": None,
    "hybrid_override_pattern": None,
}
"""What all the models below have; a field that is absent has it, too."""
_YARN: Final = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
"""What transformers and the args of latent attention call the numbers of YaRN."""
_BALANCED: Final = frozenset({"deepseek_v3", "glm4_moe"})
"""Those whose routers have a bias, sigmoids and groups."""
_LATENT: Final = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}


def convert_arguments_to_config(arguments: Mapping[str, Setting], *, tied: bool) -> OwnConfig | None:
    """Return the config that `args` describe; `tied` if no head is stored beside the embedding, or a copy of it is.

    None if they say too little, or describe a model that no config here can. `vocab_size` is None where they only tell
    to how many rows the vocabulary was padded.
    """
    if not {"num_layers", "hidden_size", "num_attention_heads"} <= arguments.keys():
        return None
    family = _find_model_type(arguments)
    usual = {name: value for name, value in _USUAL.items() if name != _PART or family != "glm4_moe"}
    if any(arguments.get(name, value) != value for name, value in usual.items()):
        return None
    window = arguments.get("window_size")
    if window is not None:  # the only ones of these whose every layer has one
        family = {"llama": "mistral", "mixtral": "mixtral"}.get(family or "")
    if family is None:
        return None
    said = ModelConfig(arguments)
    dtype = str(arguments.get("params_dtype") or "").removeprefix("torch.")
    values: dict[str, object] = {
        "architectures": [name_usual_class(family)],
        "model_type": family,
        "vocab_size": arguments.get("vocab_size"),
        "tie_word_embeddings": tied,
        **({"dtype": dtype} if dtype else {}),
    }
    values |= _build_gpt2_config(said) if family == "gpt2" else _build_decoder_config(said, family)
    if family in {"mistral", "mixtral"}:
        left = window[0] if isinstance(window, tuple) and window else None
        values["sliding_window"] = left + 1 if isinstance(left, int) else None
    warning = (
        f"config.json is made from {TITLE}'s args, which do not name the model; {name_usual_class(family)} is "
        "assumed (--config gives another)"
    )
    return OwnConfig(values, (warning,))


def has_zero_centred_norms(arguments: Mapping[str, Setting]) -> bool:
    """Return whether norms keep their weights less one."""
    return any(arguments.get(name) is True for name in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"))


def _find_model_type(arguments: Mapping[str, Setting]) -> str | None:  # noqa: PLR0911 - one for each
    """Find the model type of transformers that has all of this; None if there is none here."""
    said = ModelConfig(arguments)
    learned = said.text("position_embedding_type", "learned_absolute") == "learned_absolute"
    if said.switch("use_rotary_position_embeddings", default=False):
        learned = False
    rms, gated = said.text("normalization", "LayerNorm") == "RMSNorm", said.switch("swiglu", default=False)
    biased, normed = said.switch("add_bias_linear", default=True), said.switch("qk_layernorm", default=False)
    routed, latent = said.count("num_experts", 0) > 0, said.switch("multi_latent_attention", default=False)
    if learned and not rms and not gated and biased and not (routed or latent or normed):
        return "gpt2"
    if learned or not rms or not gated:
        return None
    of_heads = said.switch("add_qkv_bias", default=biased)
    if latent:
        balanced = said.switch("moe_router_enable_expert_bias", default=False)
        return "deepseek_v3" if routed and balanced and not biased else None
    if said.switch("moe_router_enable_expert_bias", default=False):
        sigmoid = said.text("moe_router_score_function", "softmax") == "sigmoid"
        return "glm4_moe" if routed and sigmoid and not biased else None
    if _count_dense_layers(said) != 0 or (biased and (routed or normed)):
        return None
    if not routed:
        return "qwen3" if normed and not of_heads else "llama" if biased else "qwen2" if of_heads else "llama"
    shared = arguments.get("moe_shared_expert_intermediate_size") is not None
    if shared and said.switch("moe_shared_expert_gate", default=False) and of_heads and not normed:
        return "qwen2_moe"
    if shared or of_heads:
        return None
    return "qwen3_moe" if normed else "mixtral"


def _count_dense_layers(said: ModelConfig) -> int | None:
    """Count how many of the first layers have no routed experts; None if others have none, too."""
    pattern = said.values.get("moe_layer_freq", 1)
    if pattern in (None, 1):
        return 0
    if not isinstance(pattern, tuple):
        return None
    first = next((n for n, routed in enumerate(pattern) if routed), len(pattern))
    return first if all(pattern[first:]) else None


def _build_gpt2_config(said: ModelConfig) -> dict[str, object]:
    hidden = said.size("hidden_size")
    fused = said.switch("bias_gelu_fusion", default=False) or said.switch("openai_gelu", default=False)
    return {
        "activation_function": "gelu_new" if fused else "gelu",
        "n_embd": hidden,
        "n_head": said.size("num_attention_heads"),
        "n_layer": said.size("num_layers"),
        "n_inner": said.size("ffn_hidden_size", 4 * hidden),
        "n_positions": said.size("max_position_embeddings", 1_024),
        "layer_norm_epsilon": said.values.get("norm_epsilon", 1e-5),
    }


def _build_decoder_config(said: ModelConfig, family: str) -> dict[str, object]:
    heads, ffn = said.size("num_attention_heads"), said.size("ffn_hidden_size", 4 * said.size("hidden_size"))
    grouped = said.switch("group_query_attention", default=False)
    latent, biased = family == "deepseek_v3", said.switch("add_bias_linear", default=True)
    values: dict[str, object] = {
        "hidden_act": "silu",
        "hidden_size": said.size("hidden_size"),
        "intermediate_size": ffn,
        "num_hidden_layers": said.size("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": said.size("num_query_groups", heads) if grouped and not latent else heads,
        "max_position_embeddings": said.size("max_position_embeddings", 4_096),
        "rms_norm_eps": said.values.get("norm_epsilon", 1e-5),
        "rope_theta": _as_number(said.values.get("rotary_base")) or 10_000.0,
    }
    if not latent:
        values["head_dim"] = said.size("kv_channels", said.size("hidden_size") // heads)
    if said.switch("use_rope_scaling", default=False):
        factor = said.values.get("rope_scaling_factor", 8.0)
        values["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **LLAMA3}
    if family == "llama":
        values |= {"attention_bias": biased, "mlp_bias": biased}
    elif family.startswith("qwen3"):
        values["attention_bias"] = False
    elif family == "glm4_moe":
        values |= {
            "attention_bias": said.switch("add_qkv_bias", default=biased),
            "use_qk_norm": said.switch("qk_layernorm", default=False),
            "partial_rotary_factor": _as_number(said.values.get(_PART, 1.0)),
        }
    if family in {"qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"}:
        values |= _build_expert_config(said, family, ffn)
    return values


def _build_expert_config(said: ModelConfig, family: str, ffn: int) -> dict[str, object]:
    inner, count = said.size("moe_ffn_hidden_size", ffn), said.size("num_experts")
    values: dict[str, object] = {"num_experts_per_tok": said.size("moe_router_topk", 2)}
    if family == "mixtral":
        return {**values, "num_local_experts": count, "intermediate_size": inner}
    values["moe_intermediate_size"] = inner
    if family == "deepseek_v3":
        yarn = {other: said.values[name] for other, name in _YARN.items() if said.values.get(name) is not None}
        if said.text("rope_type", "rope") == "yarn" and said.values.get("rotary_scaling_factor", 1.0) != 1.0:
            values["rope_scaling"] = {"rope_type": "yarn", **yarn}
        values |= {other: said.values.get(name) for name, other in _LATENT.items()}
    if family in _BALANCED:
        return {
            **values,
            "n_routed_experts": count,
            "n_shared_experts": said.count("moe_shared_expert_intermediate_size", 0) // inner,
            "n_group": said.values.get("moe_router_num_groups") or 1,
            "topk_group": said.values.get("moe_router_group_topk") or 1,
            "first_k_dense_replace": _count_dense_layers(said) or 0,
            "routed_scaling_factor": said.values.get("moe_router_topk_scaling_factor") or 1.0,
            "num_nextn_predict_layers": said.count("mtp_num_layers", 0),
        }
    if family == "qwen2_moe":
        values["shared_expert_intermediate_size"] = said.size("moe_shared_expert_intermediate_size")
    return {
        **values,
        "num_experts": count,
        "norm_topk_prob": not said.switch("moe_router_pre_softmax", default=False),
        "decoder_sparse_step": 1,
    }


def convert_config_to_arguments(config: Mapping[str, object], model: Model) -> dict[str, Setting]:
    """Return those of `args` that say what the model is, from which Megatron-LM builds it with `--use-checkpoint-args`.

    Raises UnsupportedError for rotary embeddings, biases, windows or activations that it does not have.
    """
    if model.family == "gpt2":
        return {**_USUAL, "mtp_num_layers": None, **_build_gpt2_arguments(config, model)}
    said, own = ModelConfig(config), model.tensors
    first = "model.layers.0.self_attn"
    latent, heads = f"{first}.kv_b_proj.weight" in own, said.size("num_attention_heads")
    biased = f"{first}.o_proj.bias" in own
    if biased != ("model.layers.0.mlp.gate_proj.bias" in own):
        raise UnsupportedError(f"{TITLE} has biases in all projections or in none, except in those of q, k and v")
    if said.text("hidden_act", "silu") not in {"silu", "swish"}:
        raise UnsupportedError(f"{TITLE}'s args have no activation {config['hidden_act']!r} for models like this")
    hidden = own["model.embed_tokens.weight"].shape[1]
    found: dict[str, Setting] = {
        **_USUAL,
        "mtp_num_layers": None,
        "num_layers": model.layers,
        "hidden_size": hidden,
        "ffn_hidden_size": said.size("intermediate_size"),
        "num_attention_heads": heads,
        "max_position_embeddings": said.size("max_position_embeddings", 4_096),
        "position_embedding_type": "rope",
        "add_position_embedding": False,
        "use_rotary_position_embeddings": True,
        "normalization": "RMSNorm",
        "norm_epsilon": _as_number(config.get("rms_norm_eps", 1e-6)),
        "swiglu": True,
        "openai_gelu": False,
        "add_bias_linear": biased,
        "add_qkv_bias": f"{first}.q_proj.bias" in own,
        "qk_layernorm": latent or f"{first}.q_norm.weight" in own,
        "multi_latent_attention": latent,
        "untie_embeddings_and_output_weights": not is_tied(model),
        "window_size": _find_window(config, model),
        **_build_rope_arguments(config, latent=latent, partial=model.family == "glm4_moe"),
    }
    if latent:
        found |= {name: _as_integer(config.get(other)) for name, other in _LATENT.items()}
        found |= {"group_query_attention": False, "num_query_groups": heads, "kv_channels": hidden // heads}
    else:
        rows, keys = (own[f"{first}.{part}_proj.weight"].shape[0] for part in "qk")
        head = rows // heads
        found |= {"group_query_attention": keys != rows, "num_query_groups": keys // head, "kv_channels": head}
    return {**found, **_build_expert_arguments(said, model)}


def _build_expert_arguments(said: ModelConfig, model: Model) -> dict[str, Setting]:
    count, own = count_experts(model), model.tensors
    if not count:
        return {"num_experts": None}
    routed = [
        any(f"model.layers.{number}.{module}.gate.weight" in own for module in ("mlp", "block_sparse_moe"))
        for number in range(model.layers)
    ]
    shared = next((own[n].shape[0] for n in own if ".mlp.shared_expert" in n and n.endswith(".gate_proj.weight")), None)
    found: dict[str, Setting] = {
        "num_experts": count,
        "moe_ffn_hidden_size": said.size("moe_intermediate_size", said.size("intermediate_size")),
        "moe_router_topk": said.size("num_experts_per_tok", 2),
        "moe_layer_freq": 1 if all(routed) else tuple(map(int, routed)),
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": any(name.endswith(".mlp.shared_expert_gate.weight") for name in own),
        "moe_router_pre_softmax": model.family != "mixtral" and not said.switch("norm_topk_prob", default=False),
        "moe_router_load_balancing_type": "none",
    }
    if model.family not in _BALANCED:
        return found
    if not said.switch("norm_topk_prob", default=True):
        raise UnsupportedError(
            f"{TITLE} divides the sigmoids of chosen experts by their sum, which this config does not"
        )
    return {
        **found,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": _as_integer(said.values.get("n_group")),
        "moe_router_group_topk": _as_integer(said.values.get("topk_group")),
        "moe_router_topk_scaling_factor": _as_number(said.values.get("routed_scaling_factor", 1.0)),
    }


def _build_gpt2_arguments(config: Mapping[str, object], model: Model) -> dict[str, Setting]:
    hidden = model.tensors["transformer.wte.weight"].shape[1]
    said = ModelConfig(config).called({"n_head": "num_attention_heads"})
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
        "norm_epsilon": _as_number(config.get("layer_norm_epsilon", 1e-5)),
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


def _build_rope_arguments(config: Mapping[str, object], *, latent: bool, partial: bool) -> dict[str, Setting]:
    """Build theta, scaling and, if it may be `partial`, the part of each head; raises UnsupportedError for the rest.

    Of `--use-rope-scaling` the factor alone can be given (`rotary_pos_embedding.py`).
    """
    if partial:
        config = {**config, "partial_rotary_factor": config.get("partial_rotary_factor") or _USUAL_PART}
    said = parse_rope(config)
    found: dict[str, Setting] = {"rotary_base": int(said.theta), "use_rope_scaling": False}
    if partial and said.kind == "default" and said.theta == int(said.theta):
        return {**found, _PART: said.part}
    if said.theta == int(said.theta) and said.part == 1.0:
        if said.kind == "default":
            return {**found, "rope_type": "rope", "rotary_scaling_factor": 1.0} if latent else found
        if said.as_llama3 and not latent:
            factor = _as_number(said.settings.get("factor", 8.0))
            return {**found, "use_rope_scaling": True, "rope_scaling_factor": factor}
        if said.kind == "yarn" and latent:
            numbers = {name: said.settings.get(other) for other, name in _YARN.items()}
            yarn = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
            return {**found, "rope_type": "yarn", **yarn}
    raise UnsupportedError(f"{TITLE} does not support this config's rotary embeddings of type {said.kind!r}")


def _find_window(config: Mapping[str, object], model: Model) -> tuple[int, int] | None:
    """Find how far back tokens look, as Megatron-LM counts it: without themselves; None if to the first.

    Raises UnsupportedError where only some layers have a window.
    """
    width = config.get("sliding_window")
    if not isinstance(width, int) or model.family not in {"mistral", "mixtral"}:
        if config.get("use_sliding_window") is True:
            raise UnsupportedError(f"{TITLE}'s args cannot say that only some layers have a window")
        return None
    return width - 1, 0


def _as_integer(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _as_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
