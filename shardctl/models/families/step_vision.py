"""Describes Step-3.7 with its vision model, before the text model that `step` describes.

Names and shapes follow transformers 5 (`models/step3p7/modeling_step3p7.py`); the Hub's names, which
`conversion_mapping.py` lists, are spellings of them. Of the vision model they are those of the Hub, because there
queries, keys and values are one array, and their rows lie in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.families.step import STEP3P5
from shardctl.models.submodels.towers import ModelTower, build_tower_classes, build_tower_family
from shardctl.models.tables.family import LogicalDim, ModelDims, Row, RowIndex

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.models.tables.config import ModelConfig

_VISION_MODEL_PREFIX: Final = "vision_model"
_RESIDUAL_BLOCK_PREFIX: Final = f"{_VISION_MODEL_PREFIX}.transformer.resblocks.{{layer}}"
_DEFAULT_MLP_RATIO: Final = 8960 / 1536
"""Of the widths of an MLP and of the states, where a config is silent."""


def _build_pair(name: str, dims: str) -> Iterator[Row]:
    yield Row(f"{name}.weight", dims)
    yield Row(f"{name}.bias", dims.split(maxsplit=1)[0])


_VISION_ENCODER_ROWS: Final = (
    Row(f"{_VISION_MODEL_PREFIX}.conv1.weight", "hidden channels patch patch"),
    Row(f"{_VISION_MODEL_PREFIX}.positional_embedding", "positions hidden"),
    *_build_pair(f"{_VISION_MODEL_PREFIX}.ln_pre", "hidden"),
    Row(f"{_RESIDUAL_BLOCK_PREFIX}.ls_1.gamma", "hidden"),
    Row(f"{_RESIDUAL_BLOCK_PREFIX}.ls_2.gamma", "hidden"),
    Row(f"{_RESIDUAL_BLOCK_PREFIX}.attn.in_proj_weight", "hidden+hidden+hidden hidden"),
    Row(f"{_RESIDUAL_BLOCK_PREFIX}.attn.in_proj_bias", "hidden+hidden+hidden"),
    *_build_pair(f"{_RESIDUAL_BLOCK_PREFIX}.attn.out_proj", "hidden hidden"),
    *_build_pair(f"{_RESIDUAL_BLOCK_PREFIX}.mlp.c_fc", "ffn hidden"),
    *_build_pair(f"{_RESIDUAL_BLOCK_PREFIX}.mlp.c_proj", "hidden ffn"),
    *_build_pair(f"{_RESIDUAL_BLOCK_PREFIX}.ln_1", "hidden"),
    *_build_pair(f"{_RESIDUAL_BLOCK_PREFIX}.ln_2", "hidden"),
    *_build_pair(f"{_VISION_MODEL_PREFIX}.vit_downsampler1", "twice hidden 3 3"),
    *_build_pair(f"{_VISION_MODEL_PREFIX}.vit_downsampler2", "output twice 3 3"),
)


def _build_eye_facts(config: ModelConfig) -> ModelDims:
    config = config.alias_keys({"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"})
    hidden, patch = config.size("hidden_size", 1536), config.size("patch_size", 14)
    ratio = config.values.get("mlp_ratio", _DEFAULT_MLP_RATIO)
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 < ratio < hidden:
        raise SourceError(f"{config.file} has mlp_ratio = {ratio!r} where a positive number is expected")
    return ModelDims(
        dims={
            "hidden": LogicalDim(hidden),
            "ffn": LogicalDim(int(hidden * ratio)),
            "twice": LogicalDim(2 * hidden),
            "output": LogicalDim(4 * hidden),
            "channels": LogicalDim(config.size("num_channels", 3)),
            "patch": LogicalDim(patch),
            "positions": LogicalDim((config.size("image_size", 728) // patch) ** 2),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers", 47)))},
    )


def _add_projector_facts(config: ModelConfig, facts: ModelDims) -> ModelDims:
    return facts.extend_dims(flags={"projector_bias": config.read_flag("projector_bias", default=False)})


STEP3P7: Final = build_tower_family(
    "step3p7",
    build_tower_classes("Step3p7"),
    STEP3P5,
    (ModelTower("vision_config", _VISION_MODEL_PREFIX, _VISION_ENCODER_ROWS, _build_eye_facts),),
    after=(
        Row(".multi_modal_projector.weight", "hidden vision_output", on="first"),
        Row(".multi_modal_projector.bias", "hidden", "projector_bias", on="first"),
    ),
    facts=_add_projector_facts,
    legacy={
        "^embed_tokens": "language_model.embed_tokens",
        "^layers": "language_model.layers",
        "^norm": "language_model.norm",
        "^vit_large_projector": "multi_modal_projector",
        **STEP3P5.legacy,
    },
    hub_modules=("vision_model.",),
)
