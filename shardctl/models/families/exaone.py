"""Describes EXAONE 4: norms of queries and keys, and norms behind attention and MLP instead of before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.decoder import (
    EMBEDDING,
    GATED,
    HEAD_NORMS,
    HEADS,
    LAST_NORM,
    LAYER,
    QKVO,
    assume_sizes,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.family import Family, Row
from shardctl.models.layer_traits import LayerTraits
from shardctl.models.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.config import ModelConfig
    from shardctl.models.family import FamilyFacts


def _build_facts(config: ModelConfig) -> FamilyFacts:
    return build_decoder_facts(config, kv_heads=32, qk_norm=True)


EXAONE4: Final = Family(
    name="exaone4",
    rows=(
        *EMBEDDING,
        *QKVO,
        *HEAD_NORMS,
        *GATED,
        Row(f"{LAYER}.post_attention_layernorm.weight", "hidden"),
        Row(f"{LAYER}.post_feedforward_layernorm.weight", "hidden"),
        *LAST_NORM,
        *HEADS,
    ),
    facts=_build_facts,
    classes=build_decoder_classes("Exaone4", question="transformer"),
    prefixes=("model", "transformer"),
    traits=LayerTraits(
        activation=("hidden_act", "silu"),
        norm="rms",
        window=WindowRule(4096, "all but every nth", period=4, period_key="sliding_window_pattern"),
    ),
    assumed={**assume_sizes(102400, 4096, 16384, 32, 32), "num_key_value_heads": 32},
)
