"""Describes Ling 3.0 (Bailing): the last layer of each group has latent attention with a gate, the others Kimi's (KDA).

Names and shapes follow transformers 5 (`models/bailing_hybrid/modeling_bailing_hybrid.py`) as far as it keeps those of
the Hub apart, as Kimi-Linear's do; the Hub's `attention` and `word_embeddings` are spellings of them. KDA's decay and
its gate have no latents here. Ling-3.0-Tiny compresses queries, which transformers 5.23 lacks; that, and the layer that
predicts, follow Megatron-Bridge (`models/bailing`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.families.deepseek import BALANCED_EXPERTS, add_balanced_facts
from shardctl.models.families.kimi_linear import KDA, KDA_ARRAYS, build_kda_dims
from shardctl.models.tables.decoder import EMBEDDING, HEADS, LAST_NORM, LAYER, NORMS, assume_sizes
from shardctl.models.tables.experts import (
    add_condition,
    build_fused_experts,
    build_predicting_ends,
    build_predicting_rows,
    list_sparse_layers,
)
from shardctl.models.tables.family import Family, FusedArray, LogicalDim, ModelClass, Row
from shardctl.models.tables.latent_attention import LATENT, build_latent_facts
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_MIXER_PREFIX: Final = f"{LAYER}.self_attn"
_QKV_WEIGHT_SUFFIXES: Final = tuple(f"{one}_{kind}.weight" for kind in ("proj", "conv1d") for one in "qkv")
_KDA_ROWS: Final = (
    *(row for row in KDA if row.name.endswith(_QKV_WEIGHT_SUFFIXES)),
    Row(f"{_MIXER_PREFIX}.A_log", "value_heads", dtype="F32"),
    Row(f"{_MIXER_PREFIX}.dt_bias", "values", dtype="F32"),
    Row(f"{_MIXER_PREFIX}.f_proj.weight", "decays hidden"),
    *(
        row
        for row in KDA
        if row.name.endswith(("b_proj.weight", "o_norm.weight", "o_proj.weight")) and "_b_" not in row.name
    ),
    Row(f"{_MIXER_PREFIX}.g_proj.weight", "values hidden"),
)
_LATENT_ATTENTION_ROWS: Final = (*LATENT, Row(f"{_MIXER_PREFIX}.g_proj.weight", "heads hidden"))
_LAYER_ROWS: Final = (
    *add_condition(_KDA_ROWS, "!attention"),
    *add_condition(_LATENT_ATTENTION_ROWS, "attention"),
    *BALANCED_EXPERTS,
    *NORMS,
)
_MTP_LAYER_PREFIX: Final = ".layers.{next}"
_MTP_EXTRA_TENSORS: Final = {
    "enorm": "hidden",
    "hnorm": "hidden",
    "eh_proj": "hidden hidden+hidden",
    "final_layernorm": "hidden",
}


def _build_facts(config: ModelConfig) -> ModelDims:
    facts = build_latent_facts(config.over({"q_lora_rank": None}), mlp_bias=False)
    facts = add_balanced_facts(facts, config, moe=list_sparse_layers(config, 2), following=1)
    heads = config.size("num_attention_heads")
    dims = build_kda_dims(
        config.size("linear_num_heads", heads),
        config.size("linear_head_dim", config.size("head_dim", 128)),
        config.size("linear_conv_kernel_dim", config.size("short_conv_kernel_size", 4)),
    )
    return facts.extend_dims(
        dims={**dims, "decays": dims["values"], "heads": LogicalDim(heads, axis="tp", noun="attention heads")},
        flags={"attention": _list_attention_layers(config)},
    )


def _list_attention_layers(config: ModelConfig) -> frozenset[int]:
    """List the layers with latent attention: by `layer_types`, else the last of each group."""
    layers, kinds = config.size("num_hidden_layers"), config.entries("layer_types")
    if kinds is not None:
        return frozenset(n for n, kind in enumerate(kinds) if kind == "full_attention")
    group = config.size("layer_group_size", 6)
    return frozenset(range(group - 1, layers, group))


_EXTRA_SAVED_ACTIVATIONS: Final = (
    FurtherTensor("fp32 decays, before and behind their bound", dims="decays", width=8, when="!attention"),
    FurtherTensor("decays", dims="decays", when="!attention"),
    FurtherTensor("fp32 gates of attention's heads", dims="heads", width=4, when="attention"),
    FurtherTensor("gates of attention's heads", dims="heads", when="attention"),
    FurtherTensor("attention's result, gated", dims="vs", when="attention", given=("own values",)),
)
BAILING_HYBRID: Final = Family(
    name="bailing_hybrid",
    rows=(
        *EMBEDDING,
        *_LAYER_ROWS,
        *LAST_NORM,
        *HEADS,
        *build_predicting_rows(_LAYER_ROWS, _MTP_LAYER_PREFIX, "moe shared attention"),
        *build_predicting_ends(_MTP_LAYER_PREFIX, _MTP_EXTRA_TENSORS),
    ),
    facts=_build_facts,
    classes={"BailingHybridForCausalLM": ModelClass("model", "lm"), "BailingHybridModel": ModelClass()},
    prefixes=("model",),
    renamed={"BailingMoeV3ForCausalLM": "BailingHybridForCausalLM"},
    legacy={
        "^word_embeddings": "embed_tokens",
        "attention": "self_attn",
        "self_attn.dense": "self_attn.o_proj",
        "gate.expert_bias": "gate.e_score_correction_bias",
    },
    fused=(
        *(array for array in KDA_ARRAYS if not array.name.endswith("proj.weight")),
        FusedArray(f"{_MIXER_PREFIX}.forget_gate.f_proj.weight", (f"{_MIXER_PREFIX}.f_proj.weight",)),
        *build_fused_experts(),
    ),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        experts_per_token=8,
        wide_router=True,
        further=_EXTRA_SAVED_ACTIVATIONS,
    ),
    aliases={
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_mtp_layers": "num_nextn_predict_layers",
        "model_max_length": "max_position_embeddings",
    },
    assumed={
        **assume_sizes(157184, 2560, 6144, 42, 32),
        "moe_intermediate_size": 768,
        "n_routed_experts": 512,
        "n_shared_experts": 1,
    },
)
