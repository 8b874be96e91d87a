"""Describes MiniMax-M2: experts named as Mixtral's, and norms over all heads of queries, and of keys, at once.

Names and shapes follow the Hub; transformers 5 says `mlp` (`models/minimax_m2/modeling_minimax_m2.py`, and `minimax_m2`
in `conversion_mapping.py`). The norms are cut where the heads are, as vLLM does, which adds up the squares of all ranks
(`minimax_m2.py`, `MiniMaxText01RMSNormTP`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.families.mixtral import FUSED, MODULE, MOE, ROUTER
from shardctl.models.tables.decoder import (
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
from shardctl.models.tables.experts import add_expert_facts, count_experts
from shardctl.models.tables.family import Family, FusedArray, Row
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_CORRECTION_BIAS_NAME: Final = f"{LAYER}.{MODULE}.e_score_correction_bias"


def _build_facts(config: ModelConfig) -> ModelDims:
    facts = build_decoder_facts(config, head_dim=128, kv_heads=8)
    return add_expert_facts(facts, count_experts(config, "num_local_experts"), facts.size("ffn"))


MINIMAX_M2: Final = Family(
    name="minimax_m2",
    rows=(
        *EMBEDDING,
        *QKVO,
        Row(f"{LAYER}.self_attn.q_norm.weight", "q"),
        Row(f"{LAYER}.self_attn.k_norm.weight", "kv"),
        Row(_CORRECTION_BIAS_NAME, "experts"),
        *MOE,
        *NORMS,
        *LAST_NORM,
        *HEADS,
    ),
    facts=_build_facts,
    classes=build_decoder_classes("MiniMaxM2", question=None, sentences=False, tokens=None),
    prefixes=("model",),
    fused=(
        FusedArray(f"{LAYER}.mlp.e_score_correction_bias", (_CORRECTION_BIAS_NAME,)),
        FusedArray(f"{LAYER}.mlp.gate.weight", (ROUTER,)),
        *FUSED,
    ),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", experts_per_token=8, joined_queries=True),
    aliases={"num_experts": "num_local_experts"},
    assumed={**assume_sizes(200064, 3072, 1536, 62, 48), "num_local_experts": 256},
)
