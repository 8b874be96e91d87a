"""Converts between Megatron-LM's `args` and the config of transformers.

The names are those of `megatron/training/arguments.py` in Megatron-LM core 0.16, as `load_args_from_checkpoint` reads
them back. They describe an architecture and never name the model: the simplest one that has it is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.libraries.megatron.family_features import TRAITS
from shardctl.libraries.megatron.hybrid_config import convert_hybrid_arguments, is_hybrid_model
from shardctl.libraries.megatron.ranks import TITLE
from shardctl.libraries.megatron.turning_layers import LIMIT
from shardctl.models import name_usual_class
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.rope import LLAMA3
from shardctl.tensors.manifest import OwnConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.settings import Setting

LAST_ROW: Final = "vocabulary_padded_with_last_row"
"""An arg of shardctl's own, which nothing in Megatron-LM looks at: without it, what padding holds is not known."""
PART: Final = "rotary_percent"
SOME_WINDOWS: Final = "window_attn_skip_freq"
WITHOUT_ROTATION: Final = "no_rope_freq"
LINEAR: Final = "linear_attention_freq"
_ATTENTION_VARIANT_ARG: Final = "experimental_attention_variant"
LISTS: Final = frozenset({"moe_layer_freq", "spec", LINEAR, SOME_WINDOWS, WITHOUT_ROTATION})
"""Args that are lists: of a one or a zero for each layer, but for that which says where layers are specified."""
USUAL: Final[dict[str, Setting]] = {
    "rotary_interleaved": False,
    PART: 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "attention_output_gate": False,
    "squared_relu": False,
    "heterogeneous_layers_config_path": None,
    "hybrid_override_pattern": None,
}
"""What most models have; a field that is absent has it, too."""
_OPTIONAL_ARG_DEFAULTS: Final[dict[str, Setting]] = {
    SOME_WINDOWS: None,
    WITHOUT_ROTATION: None,
    "softmax_type": "vanilla",
    "qk_l2_norm": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    _ATTENTION_VARIANT_ARG: None,
}
"""The same of args that shardctl writes for those models only that have something else."""
_ZERO_CENTERED_NORM_ARGS: Final = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
TURNING: Final[dict[str, Setting]] = {
    "softmax_type": "learnable",
    "activation_func_clamp_value": LIMIT,
    "glu_linear_offset": 1.0,
}
"""What gpt-oss has in place of those."""
_FAMILY_SPECIFIC_ARGS: Final = {
    "arcee": {"squared_relu"},
    "dots1": {SOME_WINDOWS},
    "ernie4_5": {"rotary_interleaved"},
    "glm4_moe": {PART},
    "gpt_oss": {SOME_WINDOWS, *TURNING},
    "nemotron": {"squared_relu", PART},
    "phi3": {PART},
    "qwen2": {SOME_WINDOWS},
    "qwen3": {SOME_WINDOWS},
    "qwen3_5_text": {PART, "attention_output_gate", _ATTENTION_VARIANT_ARG},
    "qwen3_next": {PART, "attention_output_gate", _ATTENTION_VARIANT_ARG},
    "smollm3": {WITHOUT_ROTATION},
}
"""By family, which of these may have other values."""
DELTA: Final = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""The sizes of gated DeltaNet, and what core and the classes of transformers assume where they are not said."""
YARN: Final = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
"""What transformers and the args of latent attention call the numbers of YaRN."""
LATENT: Final = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}


_ASSUMED_CONFIG_KEYS: Final = frozenset({"architectures", "model_type"})
"""What args never say: they describe an architecture, and several classes may have it."""


def convert_arguments_to_config(arguments: Mapping[str, Setting], *, tied: bool) -> OwnConfig | None:
    """Return the config that `args` describe; `tied` if no head is stored beside the embedding, or a copy of it is.

    None if they say too little, or describe a model that no config here can. `vocab_size` is None where they only tell
    to how many rows the vocabulary was padded.
    """
    if not {"num_layers", "hidden_size", "num_attention_heads"} <= arguments.keys():
        return None
    if is_hybrid_model(arguments):
        found = convert_hybrid_arguments(ModelConfig(arguments), tied=tied)
        if found is None:
            return None
        return OwnConfig(found, (_warn_of_class(str(found["model_type"])),), _ASSUMED_CONFIG_KEYS)
    family = _find_model_type(arguments)
    own = _FAMILY_SPECIFIC_ARGS.get(family or "", set())
    if any(
        arguments.get(name, value) != value
        for name, value in (USUAL | _OPTIONAL_ARG_DEFAULTS).items()
        if name not in own
    ):
        return None
    window = arguments.get("window_size")
    left = window[0] if isinstance(window, tuple) and window else None
    if window is not None and arguments.get(SOME_WINDOWS) is None:  # the only ones of these whose every layer has one
        family = {"llama": "mistral", "mixtral": "mixtral", "phi3": "phi3"}.get(family or "")
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
    if TRAITS[family].window:
        values["sliding_window"] = left + 1 if isinstance(left, int) else None
    elif isinstance(left, int):
        values |= {"use_sliding_window": True, "sliding_window": left + 1, "layer_types": _list_layer_types(said)}
    return OwnConfig(values, (_warn_of_class(family),), _ASSUMED_CONFIG_KEYS)


def _warn_of_class(family: str) -> str:
    return (
        f"config.json is made from {TITLE}'s args, which do not name the model; {name_usual_class(family)} is "
        "assumed (--config gives another)"
    )


def has_zero_centred_norms(arguments: Mapping[str, Setting]) -> bool:
    """Return whether norms keep their weights less one."""
    return any(arguments.get(name) is True for name in _ZERO_CENTERED_NORM_ARGS)


def _find_model_type(arguments: Mapping[str, Setting]) -> str | None:
    """Find the model type of transformers that has all of this; None if there is none here."""
    said = ModelConfig(arguments)
    if said.read_flag("quick_geglu", default=False):
        return _find_turning_type(said)
    learned = said.text("position_embedding_type", "learned_absolute") == "learned_absolute"
    if said.read_flag("use_rotary_position_embeddings", default=False):
        learned = False
    rms, gated = said.text("normalization", "LayerNorm") == "RMSNorm", said.read_flag("swiglu", default=False)
    if learned or not rms or not gated:
        return _find_ungated_type(said, learned=learned, rms=rms, gated=gated)
    return _find_routed_type(said) if said.count("num_experts", 0) > 0 else _find_dense_type(said)


def _find_turning_type(said: ModelConfig) -> str | None:
    """Find gpt-oss, which has all of its arguments."""
    same = all(said.values.get(name) == value for name, value in TURNING.items())
    yarn = said.text("position_embedding_type", "") == "yarn" and said.text("normalization", "") == "RMSNorm"
    biased = said.read_flag("add_bias_linear", default=True) and not said.read_flag("qk_layernorm", default=False)
    routed = said.count("num_experts", 0) > 0 and _count_dense_layers(said) == 0
    windows = said.values.get(SOME_WINDOWS) is not None
    return "gpt_oss" if same and yarn and biased and routed and windows else None


def _find_ungated_type(said: ModelConfig, *, learned: bool, rms: bool, gated: bool) -> str | None:
    if gated or any(said.read_flag(name, default=False) for name in ("qk_layernorm", "multi_latent_attention")):
        return None
    if said.count("num_experts", 0) > 0:
        return None
    if learned:
        return "gpt2" if not rms and said.read_flag("add_bias_linear", default=True) else None
    if not said.read_flag("squared_relu", default=False):
        return None
    if rms:
        return "arcee"
    return "nemotron" if any(said.read_flag(name, default=False) for name in _ZERO_CENTERED_NORM_ARGS) else None


def _find_dense_type(said: ModelConfig) -> str | None:
    biased, normed = said.read_flag("add_bias_linear", default=True), said.read_flag("qk_layernorm", default=False)
    of_heads = said.read_flag("add_qkv_bias", default=biased)
    if said.read_flag("multi_latent_attention", default=False) or (biased and normed) or _count_dense_layers(said) != 0:
        return None
    if _has_delta_layers(said):
        return "qwen3_5_text" if normed and not of_heads else None
    if normed or of_heads != biased:
        return "qwen3" if normed and not of_heads else "qwen2"
    if said.read_flag("rotary_interleaved", default=False):
        return "ernie4_5"
    if said.values.get(WITHOUT_ROTATION):
        return "smollm3"
    return "phi3" if not biased and said.values.get(PART, 1.0) != 1.0 else "llama"


def _find_routed_type(said: ModelConfig) -> str | None:
    biased, normed = said.read_flag("add_bias_linear", default=True), said.read_flag("qk_layernorm", default=False)
    of_heads = said.read_flag("add_qkv_bias", default=biased)
    balanced = said.read_flag("moe_router_enable_expert_bias", default=False)
    sigmoid = said.text("moe_router_score_function", "softmax") == "sigmoid"
    shared = said.values.get("moe_shared_expert_intermediate_size") is not None
    if biased:
        return None
    latent = said.read_flag("multi_latent_attention", default=False)
    if latent or balanced:
        windows = normed and not of_heads and said.values.get(SOME_WINDOWS) is not None
        by_heads = None if not sigmoid else "dots1" if windows else "glm4_moe"
        return None if not balanced else "deepseek_v3" if latent else by_heads
    if _count_dense_layers(said) != 0:
        return None
    if _has_delta_layers(said):
        gated = shared and said.read_flag("moe_shared_expert_gate", default=False)
        return "qwen3_next" if gated and normed and not of_heads else None
    if shared and said.read_flag("moe_shared_expert_gate", default=False) and of_heads and not normed:
        return "qwen2_moe"
    return None if shared or of_heads else "qwen3_moe" if normed else "mixtral"


def _has_delta_layers(said: ModelConfig) -> bool:
    """Return whether there is gated DeltaNet, beside attention with gates and norms less one, as Qwen has it."""
    if said.text(_ATTENTION_VARIANT_ARG, "") != "gated_delta_net" or not said.read_flag(
        "attention_output_gate", default=False
    ):
        return False
    return any(said.read_flag(name, default=False) for name in _ZERO_CENTERED_NORM_ARGS)


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
    fused = said.read_flag("bias_gelu_fusion", default=False) or said.read_flag("openai_gelu", default=False)
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
    grouped = said.read_flag("group_query_attention", default=False)
    latent = family == "deepseek_v3"
    values: dict[str, object] = {
        "hidden_act": TRAITS[family].activation,
        "hidden_size": said.size("hidden_size"),
        "intermediate_size": ffn,
        "num_hidden_layers": said.size("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": said.size("num_query_groups", heads) if grouped and not latent else heads,
        "max_position_embeddings": said.size("max_position_embeddings", 4_096),
        "rms_norm_eps": said.values.get("norm_epsilon", 1e-5),
        "rope_theta": as_number(said.values.get("rotary_base")) or 10_000.0,
    }
    if not latent:
        values["head_dim"] = said.size("kv_channels", said.size("hidden_size") // heads)
    if not latent and said.text("position_embedding_type", "rope") == "yarn":
        values["rope_scaling"] = _build_yarn(said)
    if said.read_flag("use_rope_scaling", default=False):
        factor = said.values.get("rope_scaling_factor", 8.0)
        values["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **LLAMA3}
    values |= _build_own_values(said, family)
    if family == "nemotron":
        values["norm_eps"] = values.pop("rms_norm_eps")
    if said.count("num_experts", 0) > 0:
        values |= _build_expert_config(said, family, ffn)
    return values


def _build_own_values(said: ModelConfig, family: str) -> dict[str, object]:
    """Build what a family's config calls otherwise than most."""
    biased, part = said.read_flag("add_bias_linear", default=True), as_number(said.values.get(PART, 1.0))
    values: dict[str, object] = {}
    if family in {"arcee", "llama", "nemotron", "smollm3"}:
        values |= {"attention_bias": biased, "mlp_bias": biased}
    elif family.startswith("qwen3"):
        values["attention_bias"] = False
    elif family == "ernie4_5":
        values["use_bias"] = biased
    if TRAITS[family].part is not None:
        values["partial_rotary_factor"] = part
    if TRAITS[family].delta:
        kinds = ["linear_attention" if mark else "full_attention" for mark in _list_marks(said, LINEAR)]
        values |= {"layer_types": kinds, **{name: said.size(name, usual) for name, usual in DELTA.items()}}
    elif family == "smollm3":
        values |= {"use_sliding_window": False, "no_rope_layers": _list_rotated_layers(said)}
    elif family == "gpt_oss":
        values["attention_bias"] = True
    elif family == "dots1":
        values |= {"attention_bias": False, "norm_topk_prob": True}
    elif family == "glm4_moe":
        values["attention_bias"] = said.read_flag("add_qkv_bias", default=biased)
        values["use_qk_norm"] = said.read_flag("qk_layernorm", default=False)
    return values


def _list_layer_types(said: ModelConfig) -> list[str]:
    """List which layers have a window."""
    marks = _list_marks(said, SOME_WINDOWS)
    return ["sliding_attention" if mark else "full_attention" for mark in marks]


def _list_marks(said: ModelConfig, name: str) -> list[int]:
    """List a one or a zero for each layer; a number stands for the other kind in every so manyth layer."""
    pattern = said.values[name]
    if isinstance(pattern, tuple):
        return [int(bool(each)) for each in pattern]
    period = said.size(name)
    return [int((number + 1) % period != 0) for number in range(said.size("num_layers"))]


def _build_yarn(said: ModelConfig) -> dict[str, object]:
    """Build YaRN of attention without latents."""
    given = {other: said.values.get(name) for other, name in YARN.items()}
    for name in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
        given[name] = said.values.get(f"yarn_{name}")
    rounded = said.read_flag("yarn_correction_range_round_to_int", default=True)
    return {"rope_type": "yarn", "truncate": rounded, **{k: value for k, value in given.items() if value is not None}}


def _list_rotated_layers(said: ModelConfig) -> list[int]:
    """List ones for layers with rotary embeddings; the arg has ones for the others, unless it is a number."""
    marks = _list_marks(said, WITHOUT_ROTATION)
    return [1 - mark for mark in marks] if isinstance(said.values[WITHOUT_ROTATION], tuple) else marks


def _build_expert_config(said: ModelConfig, family: str, ffn: int) -> dict[str, object]:
    inner, count = said.size("moe_ffn_hidden_size", ffn), said.size("num_experts")
    values: dict[str, object] = {"num_experts_per_tok": said.size("moe_router_topk", 2)}
    if family in {"mixtral", "gpt_oss"}:
        return {**values, "num_local_experts": count, "intermediate_size": inner}
    values["moe_intermediate_size"] = inner
    if family == "deepseek_v3":
        yarn = {other: said.values[name] for other, name in YARN.items() if said.values.get(name) is not None}
        if said.text("rope_type", "rope") == "yarn" and said.values.get("rotary_scaling_factor", 1.0) != 1.0:
            values["rope_scaling"] = {"rope_type": "yarn", **yarn}
        values |= {other: said.values.get(name) for name, other in LATENT.items()}
    if TRAITS[family].balanced:
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
    if family in {"qwen2_moe", "qwen3_next"}:
        values["shared_expert_intermediate_size"] = said.size("moe_shared_expert_intermediate_size")
    return {
        **values,
        "num_experts": count,
        "norm_topk_prob": not said.read_flag("moe_router_pre_softmax", default=False),
        "decoder_sparse_step": 1,
    }


def as_number(value: object) -> float:
    """Return a number as a float; 0 for anything else."""
    return float(value) if isinstance(value, int | float) else 0.0
