"""Describes Nemotron 3 and 4 and Minitron: an MLP without a gate, and norms to whose weights one is added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.families.arcee import UNGATED
from shardctl.models.tables.decoder import (
    BIASED_LAST_NORM,
    BIASED_NORMS,
    EMBEDDING,
    HEADS,
    QKVO,
    assume_sizes,
    build_biased_facts,
    build_decoder_classes,
)
from shardctl.models.tables.family import Family
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims


def _build_facts(config: ModelConfig) -> ModelDims:
    return build_biased_facts(config).extend_dims(flags={"sequential": True})


NEMOTRON: Final = Family(
    name="nemotron",
    rows=(*EMBEDDING, *QKVO, *UNGATED, *BIASED_NORMS, *BIASED_LAST_NORM, *HEADS),
    facts=_build_facts,
    classes=build_decoder_classes("Nemotron", question="transformer"),
    prefixes=("model", "transformer"),
    traits=LayerFeatures(activation=("hidden_act", "relu2"), joined_queries=True),
    assumed=assume_sizes(256000, 6144, 24576, 32, 48),
)
