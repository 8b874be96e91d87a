"""Describes dots.llm1: attention with norms of each head, and DeepSeek-V3's experts after dense layers.

Names and shapes follow the Hub (`models/dots1/modeling_dots1.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.families.deepseek import BALANCED_EXPERTS, add_balanced_facts
from shardctl.models.tables.decoder import (
    EMBEDDING,
    HEAD_NORMS,
    HEADS,
    LAST_NORM,
    NORMS,
    QKVO,
    assume_sizes,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import build_fused_experts, list_later_layers
from shardctl.models.tables.family import Family
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_EXPERT_SIZE_DEFAULTS: Final = {"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2}
"""Those of the published model where a config says null, as transformers' class assumes, which then has no layers."""


def _build_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    null = {key: usual for key, usual in _EXPERT_SIZE_DEFAULTS.items() if config.values.get(key) is None}
    config = replace(config, values={**config.values, **null})
    facts = build_decoder_facts(config, kv_heads=32, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return add_balanced_facts(facts, config, moe=list_later_layers(config, 0), following=0)


DOTS1: Final = Family(
    name="dots1",
    rows=(*EMBEDDING, *QKVO, *HEAD_NORMS, *BALANCED_EXPERTS, *NORMS, *LAST_NORM, *HEADS),
    facts=_build_facts,
    classes=build_decoder_classes("Dots1", question=None, sentences=False, tokens=None),
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        window=WindowRule(4096, "last", start=62),
        wide_router=True,
    ),
    aliases={"num_local_experts": "n_routed_experts"},
    assumed=assume_sizes(152064, 4608, 10944, 62, 32),
)
