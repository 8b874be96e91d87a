"""Describes Arcee: Llama's names, and an MLP of two matrices."""

from __future__ import annotations

from typing import Final

from shardctl.models.tables.decoder import (
    EMBEDDING,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    assume_sizes,
    build_biased_facts,
    build_decoder_classes,
)
from shardctl.models.tables.family import Family, Row
from shardctl.models.tables.layer_features import LayerFeatures

UNGATED: Final = (
    Row(f"{LAYER}.mlp.up_proj.weight", "ffn hidden"),
    Row(f"{LAYER}.mlp.up_proj.bias", "ffn", when="mlp_bias"),
    Row(f"{LAYER}.mlp.down_proj.weight", "hidden ffn"),
    Row(f"{LAYER}.mlp.down_proj.bias", "hidden", when="mlp_bias"),
)
ARCEE: Final = Family(
    name="arcee",
    rows=(*EMBEDDING, *QKVO, *UNGATED, *NORMS, *LAST_NORM, *HEADS),
    facts=build_biased_facts,
    classes=build_decoder_classes("Arcee", question="transformer"),
    prefixes=("model", "transformer"),
    traits=LayerFeatures(activation=("hidden_act", "relu2"), norm="rms"),
    assumed=assume_sizes(32000, 2560, 18432, 32, 32),
)
