"""Describes Granite and HyperCLOVA X: Llama's names, with biases and further norms where the config wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import (
    DECODER,
    EMBEDDING,
    GATED,
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

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_HYPERCLOVAX_ROWS: Final = (
    *EMBEDDING,
    *QKVO,
    *GATED,
    *NORMS,
    Row(f"{LAYER}.post_norm1.weight", "hidden", when="post_norm"),
    Row(f"{LAYER}.post_norm2.weight", "hidden", when="post_norm"),
    *LAST_NORM,
    *HEADS,
)


def _build_clova_facts(config: ModelConfig) -> ModelDims:
    return build_biased_facts(config).extend_dims(flags={"post_norm": config.read_flag("use_post_norm", default=True)})


GRANITE: Final = Family(
    name="granite",
    rows=DECODER,
    facts=build_biased_facts,
    classes=build_decoder_classes("Granite", question=None, sentences=False, tokens=None),
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms"),
    assumed=assume_sizes(32000, 4096, 11008, 32, 32),
    inner_kinds={
        "granite4_vision_text": {},
        "granite_docling_text": {
            **assume_sizes(133800, 1024, 2048, 28, 16),
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32768,
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.263,
        },
    },
)
HYPERCLOVAX: Final = Family(
    name="hyperclovax",
    rows=_HYPERCLOVAX_ROWS,
    facts=_build_clova_facts,
    classes=build_decoder_classes("HyperCLOVAX", question=None, sentences=False, tokens=None),
    prefixes=("model",),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms"),
    assumed=assume_sizes(32000, 4096, 11008, 32, 32),
)
