"""Describes Command-R (Cohere and Cohere 2): attention and MLP in parallel after one norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import (
    EMBEDDING,
    GATED,
    HEADS,
    LAST_NORM,
    LAYER,
    QKVO,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.tables.family import Family, LogicalDim, Row
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_COHERE_ROWS: Final = (
    *EMBEDDING,
    *QKVO,
    Row(f"{LAYER}.self_attn.q_norm.weight", "heads head", when="qk_norm"),
    Row(f"{LAYER}.self_attn.k_norm.weight", "kv_heads head", when="qk_norm"),
    *GATED,
    Row(f"{LAYER}.input_layernorm.weight", "hidden"),
    *LAST_NORM,
    *HEADS,
)
"""Each head of q and k has a norm of its own, which is cut with the heads."""


def _build_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    qk_norm = config.read_flag("use_qk_norm", default=False)
    facts = build_decoder_facts(config, tied=True, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)
    head = facts.size("head")
    return facts.extend_dims(
        dims={
            "heads": LogicalDim(facts.size("q") // head, axis="tp", noun="attention heads"),
            "kv_heads": LogicalDim(facts.size("kv") // head, axis="tp", shared=True, noun="key/value heads"),
        }
    )


_SLIDING_WINDOW_RULE: Final = WindowRule(4096, "all but every nth", period=4, period_key="sliding_window_pattern")
COHERE: Final = Family(
    name="cohere",
    rows=_COHERE_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Cohere", question=None, sentences=False, tokens=None),
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="layer32", side_by_side=("", True)),
    assumed={
        "num_attention_heads": 64,
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
    },
)
COHERE2: Final = Family(
    name="cohere2",
    rows=_COHERE_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Cohere2", question=None, sentences=False, tokens=None),
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"), norm="layer32", window=_SLIDING_WINDOW_RULE, side_by_side=("", True)
    ),
    assumed={
        "num_attention_heads": 64,
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
    },
)
