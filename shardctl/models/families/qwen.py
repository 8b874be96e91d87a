"""Describes Qwen2, with biases on q, k and v, and Qwen3, with norms of q and k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import DECODER, assume_sizes, build_decoder_classes, build_decoder_facts
from shardctl.models.tables.family import Family
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_HEAD_DIM: Final = 128
"""What `Qwen3Config` assumes where a config is silent."""


def _build_qwen2_facts(config: ModelConfig) -> ModelDims:
    return build_decoder_facts(config, qkv_bias=True)


def _build_qwen3_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    return build_decoder_facts(config, head_dim=_HEAD_DIM, qkv_bias=bias, o_bias=bias, qk_norm=True)


_SLIDING_WINDOW_RULE: Final = WindowRule(4096, "last", start=28, switched=True)
_QWEN2_TRAITS: Final = LayerFeatures(activation=("hidden_act", "silu"), norm="rms", window=_SLIDING_WINDOW_RULE)
QWEN2: Final = Family(
    name="qwen2",
    rows=DECODER,
    facts=_build_qwen2_facts,
    classes=build_decoder_classes("Qwen2", question="transformer"),
    prefixes=("model", "transformer"),
    outer_classes=("DotsOCRForCausalLM", "GOTQwenForCausalLM", "LlavaQwenForCausalLM", "MiniCPMO", "MiniCPMV"),
    traits=_QWEN2_TRAITS,
    assumed={**assume_sizes(151936, 4096, 22016, 32, 32), "num_key_value_heads": 32},
    inner_kinds={
        kind: {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
        for kind in ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")
    }
    | {
        "qwen2_5_omni_text": {
            **assume_sizes(152064, 3584, 18944, 28, 28),
            "num_key_value_heads": 4,
            "rope_theta": 1e6,
        }
    },
)
QWEN3: Final = Family(
    name="qwen3",
    rows=DECODER,
    facts=_build_qwen3_facts,
    classes=build_decoder_classes("Qwen3", question="transformer"),
    prefixes=("model", "transformer"),
    outer_classes=("MiniCPMO", "MiniCPMV"),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", window=_SLIDING_WINDOW_RULE),
    assumed={**assume_sizes(151936, 4096, 22016, 32, 32), "num_key_value_heads": 32},
    inner_kinds={"qwen3_vl_text": {"rope_theta": 5e5, "max_position_embeddings": 128000}},
)
