"""Makes those of Megatron-LM's `args` that say what a hybrid model (Nemotron-H) is.

`hybrid_config.py` goes the other way. The numbers that no arg says are those of core's modules: the epsilon of the norm
behind Mamba, the tokens that its convolution sees (`ssm/mamba_mixer.py` of Megatron-LM core 0.16 to 0.19).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.libraries.megatron.hybrid_config import MAMBA
from shardctl.libraries.megatron.hybrid_layers import format_patterns
from shardctl.libraries.megatron.layers import count_experts, is_tied
from shardctl.libraries.megatron.ranks import TITLE
from shardctl.models.tables.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.settings import Setting
    from shardctl.models import Model

_MAMBA_LAYER_SPEC: Final = ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec")
"""Where core says what the layers are made of, which newer versions have under this name, too."""
_MAMBA_NORM_EPSILON: Final = 1e-5
"""That of the norm behind Mamba."""


def build_hybrid_arguments(config: Mapping[str, object], model: Model) -> dict[str, Setting]:
    """Build what core is told; where a config is silent as its class assumes.

    Raises UnsupportedError for activations, epsilons or routers that core does not have.
    """
    said, own = ModelConfig(config), model.tensors
    _check_config(said, model)
    patterns = format_patterns(model, (), 0)
    heads, hidden = said.size("num_attention_heads"), own["model.norm_f.weight"].shape[0]
    groups = said.size("num_key_value_heads", 8)
    return {
        "mtp_num_layers": None,
        "num_layers": model.layers,
        "hidden_size": hidden,
        "ffn_hidden_size": said.size("intermediate_size", 21_504),
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": said.size("head_dim", 128),
        "max_position_embeddings": said.size("max_position_embeddings", 4_096),
        "position_embedding_type": "none",
        "add_position_embedding": False,
        "use_rotary_position_embeddings": False,
        "normalization": "RMSNorm",
        "norm_epsilon": _read_number(said, "layer_norm_epsilon", _MAMBA_NORM_EPSILON),
        "swiglu": False,
        "squared_relu": True,
        "openai_gelu": False,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "multi_latent_attention": False,
        "window_size": None,
        "fp32_residual_connection": said.read_flag("residual_in_fp32", default=False),
        "untie_embeddings_and_output_weights": not is_tied(model),
        "is_hybrid_model": True,
        "spec": _MAMBA_LAYER_SPEC,
        **patterns,
        **{arg: said.size(name, usual) for arg, (name, usual) in MAMBA.items()},
        "mamba_num_heads": said.size("mamba_num_heads", 128),
        **_build_expert_arguments(said, model),
    }


def _check_config(said: ModelConfig, model: Model) -> None:
    for key, usual in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if said.text(key, usual) != usual and not (usual == "silu" and said.text(key, usual) == "swish"):
            raise UnsupportedError(f"{TITLE}'s args have no {key} {said.values[key]!r} for models like this")
    epsilon = _read_number(said, "layer_norm_epsilon", _MAMBA_NORM_EPSILON)
    if epsilon != _MAMBA_NORM_EPSILON and any(name.endswith(".mixer.A_log") for name in model.tensors):
        raise UnsupportedError(
            f"{TITLE}'s core has an epsilon of {_MAMBA_NORM_EPSILON:g} in the norm behind Mamba, but this config has"
            f" {epsilon:g}"
        )
    if not count_experts(model):
        return
    several = said.size("num_experts_per_tok", 2) > 1
    if said.read_flag("norm_topk_prob", default=True) != several:
        raise UnsupportedError(
            f"{TITLE} divides the sigmoids of chosen experts by their sum, "
            + ("which this config does not" if several else "but not that of one alone, which this config does")
        )


def _build_expert_arguments(said: ModelConfig, model: Model) -> dict[str, Setting]:
    count, own = count_experts(model), model.tensors
    if not count:
        return {"num_experts": None}
    shared = next((own[n].shape[0] for n in own if n.endswith(".mixer.shared_experts.up_proj.weight")), None)
    latent = next((own[n].shape[0] for n in own if n.endswith(".mixer.fc1_latent_proj.weight")), None)
    return {
        "num_experts": count,
        "moe_ffn_hidden_size": said.size("moe_intermediate_size", 7_688),
        "moe_latent_size": latent,
        "moe_router_topk": said.size("num_experts_per_tok", 2),
        "moe_layer_freq": 1,
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": False,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": said.size("n_group", 1),
        "moe_router_group_topk": said.size("topk_group", 1),
        "moe_router_topk_scaling_factor": _read_number(said, "routed_scaling_factor", 1.0),
    }


def _read_number(said: ModelConfig, key: str, usual: float) -> float:
    value = said.values.get(key, usual)
    return float(value) if isinstance(value, int | float) else usual
