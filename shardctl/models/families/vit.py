"""Describes ViT, the vision transformer.

Names and shapes follow transformers 5 (`models/vit/modeling_vit.py`); files have BERT's names for the layers, which
`conversion_mapping.py` lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_LAYER_PREFIX: Final = ".layers.{layer}"
_VIT_ROWS: Final = (
    Row(".embeddings.cls_token", "1 1 hidden", on="first"),
    Row(".embeddings.mask_token", "1 1 hidden", "masked", on="first"),
    Row(".embeddings.position_embeddings", "1 patches hidden", on="first"),
    Row(".embeddings.patch_embeddings.projection.weight", "hidden channels patch patch", on="first"),
    Row(".embeddings.patch_embeddings.projection.bias", "hidden", on="first"),
    Row(f"{_LAYER_PREFIX}.attention.q_proj.weight", "q hidden"),
    Row(f"{_LAYER_PREFIX}.attention.q_proj.bias", "q", "qkv_bias"),
    Row(f"{_LAYER_PREFIX}.attention.k_proj.weight", "q hidden"),
    Row(f"{_LAYER_PREFIX}.attention.k_proj.bias", "q", "qkv_bias"),
    Row(f"{_LAYER_PREFIX}.attention.v_proj.weight", "q hidden"),
    Row(f"{_LAYER_PREFIX}.attention.v_proj.bias", "q", "qkv_bias"),
    Row(f"{_LAYER_PREFIX}.attention.o_proj.weight", "hidden q"),
    Row(f"{_LAYER_PREFIX}.attention.o_proj.bias", "hidden"),
    Row(f"{_LAYER_PREFIX}.layernorm_before.weight", "hidden"),
    Row(f"{_LAYER_PREFIX}.layernorm_before.bias", "hidden"),
    Row(f"{_LAYER_PREFIX}.layernorm_after.weight", "hidden"),
    Row(f"{_LAYER_PREFIX}.layernorm_after.bias", "hidden"),
    Row(f"{_LAYER_PREFIX}.mlp.fc1.weight", "ffn hidden"),
    Row(f"{_LAYER_PREFIX}.mlp.fc1.bias", "ffn"),
    Row(f"{_LAYER_PREFIX}.mlp.fc2.weight", "hidden ffn"),
    Row(f"{_LAYER_PREFIX}.mlp.fc2.bias", "hidden"),
    Row(".layernorm.weight", "hidden", on="last"),
    Row(".layernorm.bias", "hidden", on="last"),
    Row(".pooler.dense.weight", "pooled hidden", "pooler", on="last"),
    Row(".pooler.dense.bias", "pooled", "pooler", on="last"),
    Row("decoder.0.weight", "pixels hidden 1 1", "masked", on="last"),
    Row("decoder.0.bias", "pixels", "masked", on="last"),
    Row("classifier.weight", "labels hidden", "classifier", on="last"),
    Row("classifier.bias", "labels", "classifier", on="last"),
)


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden, patch = config.size("hidden_size"), config.size("patch_size", 16)
    channels = config.size("num_channels", 3)
    return ModelDims(
        dims={
            "hidden": LogicalDim(hidden),
            "channels": LogicalDim(channels),
            "patch": LogicalDim(patch),
            # One more for the class token.
            "patches": LogicalDim((config.size("image_size", 224) // patch) ** 2 + 1),
            "q": LogicalDim(hidden, config.divided("hidden_size", "num_attention_heads"), "tp", noun="attention heads"),
            "ffn": LogicalDim(config.size("intermediate_size"), axis="tp"),
            "pooled": LogicalDim(config.size("pooler_output_size", hidden)),
            "pixels": LogicalDim(config.size("encoder_stride", 16) ** 2 * channels),
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers")), layer=0)},
        flags={"qkv_bias": config.read_flag("qkv_bias", default=True)},
    )


VIT: Final = Family(
    name="vit",
    rows=_VIT_ROWS,
    facts=_build_facts,
    classes={
        "ViTForImageClassification": ModelClass("vit", "classifier"),
        "ViTModel": ModelClass("", "pooler?"),
        "ViTForMaskedImageModeling": ModelClass("vit", "masked"),
    },
    prefixes=("vit",),
    legacy={
        "encoder.layer": "layers",
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    },
    traits=LayerFeatures(
        activation=("hidden_act", "gelu"),
        dropout=("hidden_dropout_prob", 0.0),
        attention_dropout=("attention_probs_dropout_prob", 0.0),
    ),
    assumed={"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
)
