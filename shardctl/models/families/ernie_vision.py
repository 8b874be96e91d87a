"""Describes ERNIE 4.5 VL: experts for texts and narrower ones for pictures in each layer, behind a model that sees.

Names and shapes follow transformers 5 (`models/ernie4_5_vl_moe`). On the Hub the experts for pictures are numbered
behind those for texts, routers are transposed, and the biases of both are one array: `conversion_mapping.py` says so.
Its config there has the keys of the text model beside `vision_config`, as the Hub's own code reads them.
ep divides each kind among all its ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.families.deepseek import BIASED_SHARED
from shardctl.models.families.ernie_moe import ERNIE4_5_MOE
from shardctl.models.submodels.towers import ModelTower, build_tower_family
from shardctl.models.tables.decoder import EMBEDDING, GATED, HEADS, LAST_NORM, LAYER, NORMS, QKVO, build_decoder_facts
from shardctl.models.tables.experts import (
    add_condition,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    list_sparse_layers,
)
from shardctl.models.tables.family import Family, FusedArray, LogicalDim, ModelClass, ModelDims, Row, RowIndex

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.layer_features import LayerFeatures

_MLP_PREFIX: Final = f"{LAYER}.mlp"
_CORRECTION_BIAS_NAME: Final = "moe_statics.e_score_correction_bias"
_ROUTER_ROWS: Final = tuple(
    row
    for kind in ("text_moe", "vision_moe")
    for row in (
        Row(f"{_MLP_PREFIX}.{kind}.gate.weight", "experts hidden", when="moe", dtype="F32"),
        Row(f"{_MLP_PREFIX}.{kind}.gate.{_CORRECTION_BIAS_NAME}", "1 experts", when="moe", dtype="F32"),
    )
)
_TEXT_EXPERT_ROWS: Final = build_expert_rows()
_SEEING_EXPERTS: Final = tuple(
    replace(row, name=row.name.replace("{expert}", "{seeing}"), dims=row.dims.replace("effn", "seeing_effn"))
    for row in _TEXT_EXPERT_ROWS
)
_SEEING_ARRAYS: Final = tuple(
    replace(one, parts=tuple(part.replace("{expert}", "{seeing}") for part in one.parts))
    for one in build_fused_experts(within="mlp.vision_moe")
)
_STORED_ROUTER_ARRAYS: Final = (
    FusedArray(f"{_MLP_PREFIX}.gate.weight", (f"{_MLP_PREFIX}.text_moe.gate.weight",), transposed=True, stored=True),
    FusedArray(
        f"{_MLP_PREFIX}.gate.weight_1", (f"{_MLP_PREFIX}.vision_moe.gate.weight",), transposed=True, stored=True
    ),
    FusedArray(
        f"{_MLP_PREFIX}.{_CORRECTION_BIAS_NAME}",
        tuple(f"{_MLP_PREFIX}.{kind}.gate.{_CORRECTION_BIAS_NAME}" for kind in ("text_moe", "vision_moe")),
        stored=True,
    ),
)


def _read_pair(config: ModelConfig, key: str, usual: tuple[int, int]) -> tuple[int, int]:
    """Read a number for texts and one for pictures; raises SourceError for anything but one number or two."""
    said = config.values.get(key)
    if said is None:
        return usual
    numbers = said if isinstance(said, list | tuple) else [said, said]
    if len(numbers) != len(usual):
        raise SourceError(
            f"{config.file} has {key} = {said!r} where a number for texts and one for pictures are expected"
        )
    first, second = (replace(config, values={key: number}).size(key) for number in numbers)
    return first, second


def _build_text_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("use_bias", default=False)
    ffn, seeing = _read_pair(config, "moe_intermediate_size", (1536, 512))
    count, others = _read_pair(config, "moe_num_experts", (64, 64))
    if count != others:
        raise SourceError(f"{config.file} has {count} experts for texts and {others} for pictures; no class has both")
    facts = build_decoder_facts(config, tied=True, kv_heads=4, qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    shared = ffn * config.count("moe_num_shared_experts", 2) or None
    return add_expert_facts(facts, count, ffn, moe=list_sparse_layers(config, 1), shared=shared).extend_dims(
        dims={"seeing_effn": LogicalDim(seeing, axis="etp", noun="columns of each expert")},
        indices={"seeing": RowIndex(range(count, 2 * count), axis="ep")},
    )


_TEXT_FAMILY: Final = Family(
    name="ernie4_5_vl_moe_text",
    rows=(
        *EMBEDDING,
        *(row for row in QKVO if not row.buffer),
        *add_condition(GATED, "!moe"),
        *_ROUTER_ROWS,
        *_TEXT_EXPERT_ROWS,
        *_SEEING_EXPERTS,
        *BIASED_SHARED,
        *NORMS,
        *LAST_NORM,
        *(row for row in HEADS if row.when == "lm"),
    ),
    facts=_build_text_facts,
    classes={},
    prefixes=(),
    fused=(*_STORED_ROUTER_ARRAYS, *build_fused_experts(within="mlp.text_moe"), *_SEEING_ARRAYS),
    traits=ERNIE4_5_MOE.traits,
    aliases=ERNIE4_5_MOE.aliases,
    assumed={key: value for key, value in ERNIE4_5_MOE.assumed.items() if not key.startswith("moe_")},
)


def _build_pair(name: str, dims: str, on: str = "") -> Iterator[Row]:
    yield Row(f"{name}.weight", dims, on=on)
    yield Row(f"{name}.bias", dims.split(maxsplit=1)[0], on=on)


_BLOCK_PREFIX: Final = ".blocks.{layer}"
_VISION_ENCODER_ROWS: Final = (
    Row(".patch_embed.proj.weight", "hidden pixels"),
    *_build_pair(f"{_BLOCK_PREFIX}.norm1", "hidden"),
    *_build_pair(f"{_BLOCK_PREFIX}.norm2", "hidden"),
    *_build_pair(f"{_BLOCK_PREFIX}.attn.qkv", "hidden+hidden+hidden hidden"),
    *_build_pair(f"{_BLOCK_PREFIX}.attn.proj", "hidden hidden"),
    *_build_pair(f"{_BLOCK_PREFIX}.mlp.fc1", "ffn hidden"),
    *_build_pair(f"{_BLOCK_PREFIX}.mlp.fc2", "hidden ffn"),
    *_build_pair(".ln", "hidden"),
)


def _build_eye_facts(config: ModelConfig) -> ModelDims:
    config = config.alias_keys({"num_heads": "num_attention_heads", "num_hidden_layers": "depth"})
    hidden, ratio = config.size("hidden_size", 1280), config.count("mlp_ratio", 0)
    return ModelDims(
        dims={
            "hidden": LogicalDim(hidden),
            "ffn": LogicalDim(config.size("intermediate_size", ratio * hidden if ratio else 4 * 1280)),
            "pixels": LogicalDim(config.size("in_channels", 3) * config.size("patch_size", 14) ** 2),
            "merged": LogicalDim(hidden * config.size("spatial_merge_size", 2) ** 2),
            "moments": LogicalDim(
                hidden * config.size("spatial_merge_size", 2) ** 2 * config.size("temporal_merge_size", 2)
            ),
        },
        indices={"layer": RowIndex(range(config.size("depth", 32)))},
    )


_RESAMPLER_PREFIX: Final = ".resampler_model"
_MULTIMODAL_FAMILY: Final = build_tower_family(
    "ernie4_5_vl_moe",
    {"Ernie4_5_VLMoeForConditionalGeneration": ModelClass("model", "lm"), "Ernie4_5_VLMoeModel": ModelClass()},
    _TEXT_FAMILY,
    (),
    after=(
        ModelTower("vision_config", "vision_tower", _VISION_ENCODER_ROWS, _build_eye_facts),
        *_build_pair(f"{_RESAMPLER_PREFIX}.spatial_linear.fc1", "vision_merged vision_merged", "first"),
        *_build_pair(f"{_RESAMPLER_PREFIX}.spatial_linear.fc2", "vision_merged vision_merged", "first"),
        *_build_pair(f"{_RESAMPLER_PREFIX}.spatial_linear.ln", "vision_merged", "first"),
        *_build_pair(f"{_RESAMPLER_PREFIX}.temporal_linear.fc1", "vision_merged vision_moments", "first"),
        *_build_pair(f"{_RESAMPLER_PREFIX}.temporal_linear.fc2", "vision_merged vision_merged", "first"),
        *_build_pair(f"{_RESAMPLER_PREFIX}.temporal_linear.ln", "vision_merged", "first"),
        *_build_pair(f"{_RESAMPLER_PREFIX}.mlp", "hidden vision_merged", "first"),
        Row(f"{_RESAMPLER_PREFIX}.after_norm.weight", "hidden", on="first"),
    ),
    legacy={
        "^embed_tokens": "language_model.embed_tokens",
        "^layers": "language_model.layers",
        "^norm": "language_model.norm",
        "^vision_model": "vision_tower",
        **{
            f"{kind}_linear.{number}": f"{kind}_linear.{name}"
            for kind in ("spatial", "temporal")
            for number, name in ((0, "fc1"), (2, "fc2"), (3, "ln"))
        },
    },
)


def _nest_flat_keys(config: ModelConfig) -> ModelConfig:
    """Return a config with the keys of the text model in one of their own; the Hub's has them beside the others."""
    if config.values.get("text_config") or "hidden_size" not in config.values:
        return config
    return replace(config, values={**config.values, "text_config": config.values})


def _build_facts(config: ModelConfig) -> ModelDims:
    return _MULTIMODAL_FAMILY.facts(_nest_flat_keys(config))


def _read_text(config: ModelConfig) -> tuple[LayerFeatures | None, ModelConfig]:
    config = _nest_flat_keys(config)
    return _TEXT_FAMILY.traits, _TEXT_FAMILY.complete_config(config.part("text_config"))


ERNIE4_5_VL_MOE: Final = replace(
    _MULTIMODAL_FAMILY,
    facts=_build_facts,
    text=_read_text,
    renamed={
        "Ernie4_5_VL_MoeForConditionalGeneration": "Ernie4_5_VLMoeForConditionalGeneration",
        "Ernie4_5_VL_MoeModel": "Ernie4_5_VLMoeModel",
    },
)
