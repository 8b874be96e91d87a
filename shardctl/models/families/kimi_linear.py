"""Describes Kimi-Linear: one layer in four has latent attention, the others Kimi delta attention (KDA).

Names and shapes follow the Hub; transformers 5 joins the three convolutions and says `mlp` for the experts
(`models/kimi_linear/modeling_kimi_linear.py`, and `kimi_linear` in `conversion_mapping.py`). KDA is cut by heads, and
the projections down to its gates' latents are whole on every tp rank, as in vLLM (`kimi_gdn_linear_attn.py`). Kimi-K3's
text model has this `model_type`, too, and parts that transformers lacks: they follow vLLM (`models/kimi_k3`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.families.deepseek import add_balanced_facts, build_balanced_rows
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.decoder import LAYER, NORMS, assume_sizes
from shardctl.models.tables.experts import (
    DENSE,
    add_condition,
    build_expert_rows,
    build_fused_experts,
    build_shared_expert_rows,
    list_sparse_layers,
)
from shardctl.models.tables.family import Family, FusedArray, LogicalDim, ModelClass, Row
from shardctl.models.tables.latent_attention import LATENT, build_latent_facts
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.tables.family import ModelDims

_MIXER_PREFIX: Final = f"{LAYER}.self_attn"
_MOE_MODULE_NAME: Final = "block_sparse_moe"
_EXPERT_WEIGHT_NAMES: Final = ("w1", "w3", "w2")
KDA: Final = (
    Row(f"{_MIXER_PREFIX}.q_proj.weight", "keys hidden"),
    Row(f"{_MIXER_PREFIX}.k_proj.weight", "keys hidden"),
    Row(f"{_MIXER_PREFIX}.v_proj.weight", "values hidden"),
    Row(f"{_MIXER_PREFIX}.q_conv1d.weight", "keys 1 window"),
    Row(f"{_MIXER_PREFIX}.k_conv1d.weight", "keys 1 window"),
    Row(f"{_MIXER_PREFIX}.v_conv1d.weight", "values 1 window"),
    Row(f"{_MIXER_PREFIX}.dt_bias", "values", dtype="F32"),
    Row(f"{_MIXER_PREFIX}.A_log", "1 1 value_heads 1", when="!full_gate"),
    Row(f"{_MIXER_PREFIX}.f_a_proj.weight", "decay_rank hidden"),
    Row(f"{_MIXER_PREFIX}.f_b_proj.weight", "values decay_rank"),
    Row(f"{_MIXER_PREFIX}.b_proj.weight", "value_heads hidden"),
    Row(f"{_MIXER_PREFIX}.g_a_proj.weight", "decay_rank hidden", when="!full_gate"),
    Row(f"{_MIXER_PREFIX}.g_b_proj.weight", "values decay_rank", when="!full_gate"),
    Row(f"{_MIXER_PREFIX}.o_norm.weight", "value_head"),
    Row(f"{_MIXER_PREFIX}.o_proj.weight", "hidden values"),
)
"""Attention whose state decays by a rate of each channel, with a convolution for each of q, k and v."""
KDA_ARRAYS: Final = (
    FusedArray(f"{_MIXER_PREFIX}.conv1d.weight", tuple(f"{_MIXER_PREFIX}.{one}_conv1d.weight" for one in "qkv")),
    FusedArray(f"{_MIXER_PREFIX}.forget_gate.dt_bias", (f"{_MIXER_PREFIX}.dt_bias",)),
    FusedArray(f"{_MIXER_PREFIX}.forget_gate.A_log", (f"{_MIXER_PREFIX}.A_log",)),
    FusedArray(f"{_MIXER_PREFIX}.forget_gate.f_a_proj.weight", (f"{_MIXER_PREFIX}.f_a_proj.weight",)),
    FusedArray(f"{_MIXER_PREFIX}.forget_gate.f_b_proj.weight", (f"{_MIXER_PREFIX}.f_b_proj.weight",)),
)
"""What transformers makes of those."""
FORGET_GATE: Final = (
    FurtherTensor("decays in their latent", dims="decay_rank", when="!attention"),
    FurtherTensor("the gate in its latent", dims="decay_rank", when="!attention"),
    FurtherTensor(
        "exponentials, logarithms' arguments, softplus and decays", dims="values", width=16, when="!attention"
    ),
    FurtherTensor("which decays are beyond softplus", dims="values", width=1, when="!attention"),
)
"""What transformers keeps of the decays of KDA, which it computes in fp32 outside the kernel."""
_K3_KDA: Final = (
    Row(f"{_MIXER_PREFIX}.A_log", "*", when="full_gate"),
    Row(f"{_MIXER_PREFIX}.g_proj.weight", "values hidden", when="full_gate"),
)
"""A gate without a latent; K3's files have more decays than heads, of which engines read the first."""
_OUTPUT_GATE_ROW: Final = Row(f"{_MIXER_PREFIX}.g_proj.weight", "vs hidden", when="output_gate")
_MOE_ROWS: Final = (
    *(
        replace(row, dims=row.dims.replace("hidden", "routed"))
        for row in build_expert_rows(_MOE_MODULE_NAME, _EXPERT_WEIGHT_NAMES)
    ),
    Row(f"{LAYER}.{_MOE_MODULE_NAME}.gate.weight", "experts hidden", when="moe"),
    Row(f"{LAYER}.{_MOE_MODULE_NAME}.gate.e_score_correction_bias", "experts", when="moe", dtype="F32"),
    *build_shared_expert_rows(f"{_MOE_MODULE_NAME}.shared_experts"),
    Row(f"{LAYER}.{_MOE_MODULE_NAME}.routed_expert_down_proj.weight", "routed hidden", when="moe latent"),
    Row(f"{LAYER}.{_MOE_MODULE_NAME}.routed_expert_norm.weight", "routed", when="moe latent latent_norm"),
    Row(f"{LAYER}.{_MOE_MODULE_NAME}.routed_expert_up_proj.weight", "hidden routed", when="moe latent"),
)
"""Experts, of Kimi-K3 in a latent, which one projection makes and another unfolds, both whole on every tp rank."""
_ATTENTION_RESIDUAL_ROWS: Final = (
    Row(f"{LAYER}.self_attention_res_norm.weight", "hidden", when="residuals"),
    Row(f"{LAYER}.mlp_res_norm.weight", "hidden", when="residuals"),
    Row(f"{LAYER}.self_attention_res_proj.weight", "1 hidden", when="residuals"),
    Row(f"{LAYER}.mlp_res_proj.weight", "1 hidden", when="residuals"),
)
"""Attention residuals: each half of a layer weighs the sums of the blocks of layers before."""
_ATTENTION_ROWS: Final = add_condition((*LATENT, _OUTPUT_GATE_ROW), "attention")
_LAYER_ROWS: Final = (
    *add_condition((*KDA, *_K3_KDA), "!attention"),
    *_ATTENTION_ROWS,
    *DENSE,
    *_MOE_ROWS,
    *NORMS,
    *_ATTENTION_RESIDUAL_ROWS,
)
_ROUTER_TENSOR_NAMES: Final = ("gate.weight", "gate.e_score_correction_bias")
_SHARED_EXPERT_NAMES: Final = tuple(f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down"))


def build_kda_dims(heads: int, width: int, window: int) -> Mapping[str, LogicalDim]:
    """Build the dims of KDA with so many heads of that width, and a convolution over `window` tokens."""
    noun = "heads of linear attention"
    whole = LogicalDim(heads * width, width, "tp", noun=noun)
    return {
        "keys": whole,
        "values": whole,
        "value_heads": LogicalDim(heads, axis="tp", noun=noun),
        "value_head": LogicalDim(width),
        "decay_rank": LogicalDim(width),
        "window": LogicalDim(window),
    }


def _build_facts(config: ModelConfig) -> ModelDims:
    linear = ModelConfig(_get_linear_config(config))
    facts = build_latent_facts(config.over({"q_lora_rank": None}), mlp_bias=False)
    facts = add_balanced_facts(facts, config, moe=list_sparse_layers(config, 1), following=0)
    return facts.extend_dims(
        dims={
            **build_kda_dims(
                linear.size("num_heads", config.size("linear_num_heads", 32)),
                linear.size("head_dim", config.size("linear_head_dim", 128)),
                linear.size("short_conv_kernel_size", config.size("linear_conv_kernel_dim", 4)),
            ),
            "routed": LogicalDim(config.size("routed_expert_hidden_size", facts.size("hidden"))),
        },
        flags={
            "attention": _list_attention_layers(config, linear),
            "full_gate": linear.read_flag("use_full_rank_gate", default=False),
            "output_gate": config.read_flag("mla_use_output_gate", default=False),
            "latent": config.values.get("routed_expert_hidden_size") is not None,
            "latent_norm": config.read_flag("latent_moe_use_norm", default=False),
            "residuals": config.values.get("attn_res_block_size") is not None,
        },
    )


def _get_linear_config(config: ModelConfig) -> Mapping[str, object]:
    """Return what the config says of KDA in a config of its own, which transformers' own files lack."""
    found = config.values.get("linear_attn_config") or {}
    if not isinstance(found, dict):
        raise SourceError(f"config.json has linear_attn_config = {found!r} where a config is expected")
    return found


def _list_attention_layers(config: ModelConfig, linear: ModelConfig) -> frozenset[int]:
    """List the layers with latent attention; `full_attn_layers` and `kda_layers` count them from one.

    Raises SourceError where those two do not share all layers between them.
    """
    layers, kinds = config.size("num_hidden_layers"), config.values.get("layer_types")
    if isinstance(kinds, list):
        return frozenset(n for n, kind in enumerate(kinds) if kind == "full_attention")
    full, recurrent = linear.entries("full_attn_layers"), linear.entries("kda_layers")
    if full is None or recurrent is None:
        return frozenset(range(4, layers, 4))
    if {*full, *recurrent} != {*range(1, layers + 1)} or len(full) + len(recurrent) != layers:
        raise SourceError(f"config.json has full_attn_layers and kda_layers that do not share {layers} layers")
    return frozenset(n - 1 for n in full)


KIMI_LINEAR: Final = Family(
    name="kimi_linear",
    rows=(
        *build_balanced_rows(_LAYER_ROWS, "moe shared attention"),
        Row(".output_attn_res_norm.weight", "hidden", when="residuals", on="last"),
        Row(".output_attn_res_proj.weight", "1 hidden", when="residuals", on="last"),
    ),
    facts=_build_facts,
    classes={"KimiLinearForCausalLM": ModelClass("model", "lm"), "KimiLinearModel": ModelClass()},
    prefixes=("model",),
    # as which transformers saves the MLPs of layers without experts
    legacy={f"{_MOE_MODULE_NAME}.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    fused=(
        *KDA_ARRAYS,
        *build_fused_experts(_MOE_MODULE_NAME, _EXPERT_WEIGHT_NAMES, within="mlp"),
        *(
            FusedArray(f"{LAYER}.mlp.{one}", (f"{LAYER}.{_MOE_MODULE_NAME}.{one}",))
            for one in (*_ROUTER_TENSOR_NAMES, *_SHARED_EXPERT_NAMES)
        ),
    ),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        experts_per_token=8,
        wide_router=True,
        further=FORGET_GATE,
        unmodelled="parts of Kimi-K3 that transformers has no class for",
        unmodelled_when=("full_gate", "output_gate", "latent", "residuals"),
    ),
    aliases={
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "model_max_length": "max_position_embeddings",
    },
    assumed={
        **assume_sizes(163840, 2304, 9216, 27, 32),
        "moe_intermediate_size": 1024,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
    },
)
