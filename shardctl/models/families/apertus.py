"""Describes Apertus: norms of heads, and an MLP without a gate, whose activation function is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.families.arcee import UNGATED
from shardctl.models.tables.decoder import (
    EMBEDDING,
    HEAD_NORMS,
    HEADS,
    LAST_NORM,
    LAYER,
    QKVO,
    assume_sizes,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.tables.family import Family, Row
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_ACTIVATION_PREFIX: Final = f"{LAYER}.mlp.act_fn"
_APERTUS_ROWS: Final = (
    *EMBEDDING,
    *QKVO,
    *HEAD_NORMS,
    *UNGATED,
    Row(f"{_ACTIVATION_PREFIX}.alpha_p", "1", when="xielu"),
    Row(f"{_ACTIVATION_PREFIX}.alpha_n", "1", when="xielu"),
    Row(f"{_ACTIVATION_PREFIX}.beta", "", when="xielu"),
    Row(f"{_ACTIVATION_PREFIX}.eps", "", when="xielu"),
    Row(f"{LAYER}.attention_layernorm.weight", "hidden"),
    Row(f"{LAYER}.feedforward_layernorm.weight", "hidden"),
    *LAST_NORM,
    *HEADS,
)


def _build_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    facts = build_decoder_facts(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return facts.extend_dims(flags={"xielu": config.text("hidden_act", "xielu") == "xielu"})


APERTUS: Final = Family(
    name="apertus",
    rows=_APERTUS_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Apertus", question=None, sentences=False),
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "xielu"), norm="rms"),
    assumed=assume_sizes(131072, 4096, 14336, 32, 32),
)
