"""Describes Qwen3-VL: Qwen3 or Qwen3-MoE behind a vision model that hands over the results of some of its layers, too.

Names and shapes follow the Hub (`models/qwen3_vl/modeling_qwen3_vl.py` and its namesake with experts), whose stacks of
experts are `[expert, in, out]`; those of transformers' state dict are `[expert, out, in]`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.families.qwen import QWEN3
from shardctl.models.families.qwen_moe import QWEN3_MOE, add_qwen_experts
from shardctl.models.families.vision_towers import DEEPSTACK_EYES, build_qwen3_vision_facts
from shardctl.models.submodels.towers import ModelTower, build_tower_classes, build_tower_family
from shardctl.models.tables.decoder import (
    EMBEDDING,
    HEAD_NORMS,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    assume_sizes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import DENSE, ROUTER
from shardctl.models.tables.family import FusedArray, Row
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_GATE_UP, _DOWN = f"{LAYER}.mlp.experts.gate_up_proj", f"{LAYER}.mlp.experts.down_proj"
_EXPERT_ROWS: Final = (
    Row(_GATE_UP, "expert hidden effn+effn", when="moe"),
    Row(_DOWN, "expert effn hidden", when="moe"),
)


def _build_moe_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    facts = build_decoder_facts(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return add_qwen_experts(facts, config, shared=None)


_LAYER_FEATURES: Final = LayerFeatures(activation=("hidden_act", "silu"), norm="rms")
_TEXT_FAMILY: Final = replace(QWEN3, name="qwen3_vl_text", traits=_LAYER_FEATURES)
_MOE_TEXT: Final = replace(
    QWEN3_MOE,
    name="qwen3_vl_moe_text",
    rows=(*EMBEDDING, *QKVO, *HEAD_NORMS, *DENSE, *_EXPERT_ROWS, ROUTER, *NORMS, *LAST_NORM, *HEADS),
    facts=_build_moe_facts,
    fused=tuple(FusedArray(name, (name,), transposed=True) for name in (_GATE_UP, _DOWN)),
    traits=replace(_LAYER_FEATURES, experts_per_token=4, narrow_experts=True),
    aliases={"num_local_experts": "num_experts"},
    assumed={
        **assume_sizes(151936, 2048, 5632, 24, 16),
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
    },
)
_VISION_TOWERS: Final = (ModelTower("vision_config", "visual", DEEPSTACK_EYES, build_qwen3_vision_facts),)
QWEN3_VL: Final = build_tower_family("qwen3_vl", build_tower_classes("Qwen3VL"), _TEXT_FAMILY, _VISION_TOWERS)
QWEN3_VL_MOE: Final = build_tower_family("qwen3_vl_moe", build_tower_classes("Qwen3VLMoe"), _MOE_TEXT, _VISION_TOWERS)
