"""Makes a config of transformers from the args of a hybrid model of Megatron-LM: Nemotron-H, as far as there is one.

Names are those of Megatron-LM core 0.16 to 0.19 (`megatron/training/arguments.py`); `hybrid_arguments.py` goes the
other way. Older checkpoints say only how many layers have attention: of these a config is to be given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.settings import Setting
    from shardctl.models.tables.config import ModelConfig

FAMILY: Final = "nemotron_h"
PATTERNS: Final = ("hybrid_layer_pattern", "hybrid_override_pattern")
_MTP_PATTERN_ARG: Final = "mtp_hybrid_override_pattern"
_STAGE, _NEXT = "|", "/"
"""What patterns have between stages, and before the kinds of layers that predict a further token."""
MAMBA: Final = {
    "mamba_state_dim": ("ssm_state_size", 128),
    "mamba_head_dim": ("mamba_head_dim", 64),
    "mamba_num_groups": ("n_groups", 8),
}
"""The sizes of Mamba, what transformers calls them, and what both assume where they are not said."""
_REQUIRED_ARG_VALUES: Final = {
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "apply_layernorm_1p": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "layernorm_zero_centered_gamma": False,
    "moe_shared_expert_gate": False,
    "mtp_use_repeated_layer": False,
    "multi_latent_attention": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "none",
    "qk_layernorm": False,
    "softmax_type": "vanilla",
    "squared_relu": True,
    "swiglu": False,
    "window_size": None,
}
"""What Nemotron-H has; a field that is absent has it, too."""
_OF_EXPERTS: Final = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_LAYER_TYPES_BY_LETTER: Final = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_MAMBA_EXPANSION_FACTOR: Final = 2
"""How many times as wide as the hidden state core's Mamba is, if its heads are not counted."""


def is_hybrid_model(arguments: Mapping[str, Setting]) -> bool:
    """Return whether each layer is one of several kinds, whatever they are."""
    ratios = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
    return any(arguments.get(name) for name in (*PATTERNS, *ratios, "is_hybrid_model"))


def convert_hybrid_arguments(said: ModelConfig, *, tied: bool) -> dict[str, object] | None:
    """Return the config of the model that args describe; None if no config here can."""
    pattern = next((said.text(name, "") for name in PATTERNS if said.values.get(name)), "")
    own, *further = pattern.split(_NEXT)
    further = [each for each in further if each] or [said.text(_MTP_PATTERN_ARG, "")] * said.count("mtp_num_layers", 0)
    letters = own.replace(_STAGE, "")
    routed = "E" in letters + "".join(further)
    needed = _REQUIRED_ARG_VALUES | (_OF_EXPERTS if routed else {})
    if len(further) == 1:  # a layer that is used again for each token is one all the same
        needed.pop("mtp_use_repeated_layer")
    strange = any(said.values.get(name, value) != value for name, value in needed.items())
    if (
        tied
        or strange
        or not letters
        or not {*letters, *"".join(further)} <= _LAYER_TYPES_BY_LETTER.keys()
        or len({*further}) > 1
    ):
        return None
    dtype = str(said.values.get("params_dtype") or "").removeprefix("torch.")
    heads, hidden = said.size("num_attention_heads"), said.size("hidden_size")
    grouped = said.read_flag("group_query_attention", default=False)
    values: dict[str, object] = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": FAMILY,
        "vocab_size": said.values.get("vocab_size"),
        "tie_word_embeddings": False,
        **({"dtype": dtype} if dtype else {}),
        "hidden_size": hidden,
        "intermediate_size": said.size("ffn_hidden_size", 4 * hidden),
        "layers_block_type": [_LAYER_TYPES_BY_LETTER[letter] for letter in letters],
        "num_attention_heads": heads,
        "num_key_value_heads": said.size("num_query_groups", heads) if grouped else heads,
        "head_dim": said.size("kv_channels", hidden // heads),
        "max_position_embeddings": said.size("max_position_embeddings", 4_096),
        "layer_norm_epsilon": said.values.get("norm_epsilon", 1e-5),
        "residual_in_fp32": said.read_flag("fp32_residual_connection", default=False),
        "mlp_hidden_act": "relu2",
        **{name: said.size(arg, usual) for arg, (name, usual) in MAMBA.items()},
    }
    head = said.size("mamba_head_dim", MAMBA["mamba_head_dim"][1])
    values["mamba_num_heads"] = said.size("mamba_num_heads", _MAMBA_EXPANSION_FACTOR * hidden // head)
    if further:
        values["num_nextn_predict_layers"] = len(further)
        values["mtp_layers_block_type"] = [_LAYER_TYPES_BY_LETTER[letter] for letter in further[0]]
    return {**values, **(_build_experts(said) if routed else {})}


def _build_experts(said: ModelConfig) -> dict[str, object]:
    inner, shared = said.size("moe_ffn_hidden_size"), said.values.get("moe_shared_expert_intermediate_size")
    return {
        "n_routed_experts": said.size("num_experts"),
        "num_experts_per_tok": said.size("moe_router_topk", 2),
        "moe_intermediate_size": inner,
        "moe_shared_expert_intermediate_size": shared,
        "moe_latent_size": said.values.get("moe_latent_size"),
        "n_group": said.values.get("moe_router_num_groups") or 1,
        "topk_group": said.values.get("moe_router_group_topk") or 1,
        "routed_scaling_factor": said.values.get("moe_router_topk_scaling_factor") or 1.0,
        "norm_topk_prob": said.size("moe_router_topk", 2) > 1,
    }
