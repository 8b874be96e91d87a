"""Describes Mixtral and Phi-3.5-MoE: experts `block_sparse_moe.experts.N` with w1 (gate), w2 (down), w3 (up).

Names and shapes follow the Hub; transformers 5 says `mlp` (`models/mixtral/modeling_mixtral.py`,
`models/phimoe/modeling_phimoe.py`, and `mixtral` and `phimoe` in `conversion_mapping.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import (
    BIASED_LAST_NORM,
    BIASED_NORMS,
    EMBEDDING,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    assume_sizes,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import add_expert_facts, build_expert_rows, build_fused_experts, count_experts
from shardctl.models.tables.family import Family, FusedArray, ModelClass, Row
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_EXPERT_WEIGHT_NAMES: Final = ("w1", "w3", "w2")
MODULE: Final = "block_sparse_moe"
ROUTER: Final = f"{LAYER}.{MODULE}.gate.weight"
MOE: Final = (Row(ROUTER, "experts hidden"), *build_expert_rows(MODULE, _EXPERT_WEIGHT_NAMES))
FUSED: Final = build_fused_experts(MODULE, _EXPERT_WEIGHT_NAMES, within="mlp")


def _add_expert_facts(facts: ModelDims, config: ModelConfig) -> ModelDims:
    return add_expert_facts(facts, count_experts(config, "num_local_experts"), config.size("intermediate_size"))


def _build_mixtral_facts(config: ModelConfig) -> ModelDims:
    return _add_expert_facts(build_decoder_facts(config, kv_heads=8), config)


def _build_phimoe_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    facts = build_decoder_facts(config, kv_heads=8, qkv_bias=bias, o_bias=bias)
    head = config.read_flag("lm_head_bias", default=False)
    return _add_expert_facts(facts, config).extend_dims(flags={"sequential": True, "head_bias": head})


MIXTRAL: Final = Family(
    name="mixtral",
    rows=(*EMBEDDING, *QKVO, *MOE, *NORMS, *LAST_NORM, *HEADS),
    facts=_build_mixtral_facts,
    classes=build_decoder_classes("Mixtral"),
    prefixes=("model",),
    fused=(FusedArray(f"{LAYER}.mlp.gate.weight", (ROUTER,)), *FUSED),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", window=WindowRule(None), experts_per_token=2),
    aliases={"num_experts": "num_local_experts"},
    assumed={**assume_sizes(32000, 4096, 14336, 32, 32), "num_local_experts": 8},
)
PHIMOE: Final = Family(
    name="phimoe",
    rows=(
        *EMBEDDING,
        *QKVO,
        *MOE,
        *BIASED_NORMS,
        *BIASED_LAST_NORM,
        *HEADS,
        Row("lm_head.bias", "vocab", when="lm head_bias", on="last"),
    ),
    facts=_build_phimoe_facts,
    classes={
        "PhimoeForCausalLM": ModelClass("model", "lm"),
        "PhimoeModel": ModelClass(),
        "PhimoeForSequenceClassification": ModelClass("model", "score"),
    },
    prefixes=("model",),
    renamed={"PhiMoEForCausalLM": "PhimoeForCausalLM"},
    fused=(FusedArray(f"{LAYER}.mlp.router.weight", (ROUTER,)), *FUSED),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"), window=WindowRule(None), experts_per_token=2, narrow_experts=True
    ),
    assumed={**assume_sizes(32064, 4096, 6400, 32, 32), "num_local_experts": 16},
)
