"""Describes what Gemma 4 sees and hears with: a vision transformer and a conformer, or, unified, a projection of each.

Names and shapes follow transformers 5 (`models/gemma4/modeling_gemma4.py`). Linear layers may keep the bounds that
their inputs and outputs are clipped to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.submodels.towers import ModelTower
from shardctl.models.tables.family import LogicalDim, ModelDims, Row, RowIndex

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_CLIPPING_BOUND_NAMES: Final = ("input_min", "input_max", "output_min", "output_max")


def _build_clipped_rows(name: str, dims: str) -> tuple[Row, ...]:
    return (
        *(Row(f"{name}.{bound}", "", "clipped") for bound in _CLIPPING_BOUND_NAMES),
        Row(f"{name}.linear.weight", dims),
    )


_VISION_LAYER_PREFIX: Final = ".encoder.layers.{layer}"
_VISION_ENCODER_ROWS: Final = (
    Row(".std_bias", "hidden", "standardized"),
    Row(".std_scale", "hidden", "standardized"),
    Row(".patch_embedder.position_embedding_table", "2 positions hidden"),
    Row(".patch_embedder.input_proj.weight", "hidden pixels"),
    *_build_clipped_rows(f"{_VISION_LAYER_PREFIX}.self_attn.q_proj", "q hidden"),
    *_build_clipped_rows(f"{_VISION_LAYER_PREFIX}.self_attn.k_proj", "kv hidden"),
    *_build_clipped_rows(f"{_VISION_LAYER_PREFIX}.self_attn.v_proj", "kv hidden"),
    *_build_clipped_rows(f"{_VISION_LAYER_PREFIX}.self_attn.o_proj", "hidden q"),
    Row(f"{_VISION_LAYER_PREFIX}.self_attn.q_norm.weight", "head"),
    Row(f"{_VISION_LAYER_PREFIX}.self_attn.k_norm.weight", "head"),
    *_build_clipped_rows(f"{_VISION_LAYER_PREFIX}.mlp.gate_proj", "ffn hidden"),
    *_build_clipped_rows(f"{_VISION_LAYER_PREFIX}.mlp.up_proj", "ffn hidden"),
    *_build_clipped_rows(f"{_VISION_LAYER_PREFIX}.mlp.down_proj", "hidden ffn"),
    Row(f"{_VISION_LAYER_PREFIX}.input_layernorm.weight", "hidden"),
    Row(f"{_VISION_LAYER_PREFIX}.post_attention_layernorm.weight", "hidden"),
    Row(f"{_VISION_LAYER_PREFIX}.pre_feedforward_layernorm.weight", "hidden"),
    Row(f"{_VISION_LAYER_PREFIX}.post_feedforward_layernorm.weight", "hidden"),
)
_AUDIO_LAYER_PREFIX: Final = ".layers.{layer}"


def _build_ffw_rows(name: str) -> tuple[Row, ...]:
    return (
        *_build_clipped_rows(f"{name}.ffw_layer_1", "ffn hidden"),
        *_build_clipped_rows(f"{name}.ffw_layer_2", "hidden ffn"),
        Row(f"{name}.pre_layer_norm.weight", "hidden"),
        Row(f"{name}.post_layer_norm.weight", "hidden"),
    )


_AUDIO_ENCODER_ROWS: Final = (
    Row(".subsample_conv_projection.layer0.conv.weight", "conv0 1 3 3"),
    Row(".subsample_conv_projection.layer0.norm.weight", "conv0"),
    Row(".subsample_conv_projection.layer1.conv.weight", "conv1 conv0 3 3"),
    Row(".subsample_conv_projection.layer1.norm.weight", "conv1"),
    Row(".subsample_conv_projection.input_proj_linear.weight", "hidden subsampled"),
    *_build_ffw_rows(f"{_AUDIO_LAYER_PREFIX}.feed_forward1"),
    *_build_ffw_rows(f"{_AUDIO_LAYER_PREFIX}.feed_forward2"),
    Row(f"{_AUDIO_LAYER_PREFIX}.self_attn.per_dim_scale", "head"),
    *_build_clipped_rows(f"{_AUDIO_LAYER_PREFIX}.self_attn.q_proj", "hidden hidden"),
    *_build_clipped_rows(f"{_AUDIO_LAYER_PREFIX}.self_attn.k_proj", "hidden hidden"),
    *_build_clipped_rows(f"{_AUDIO_LAYER_PREFIX}.self_attn.v_proj", "hidden hidden"),
    *_build_clipped_rows(f"{_AUDIO_LAYER_PREFIX}.self_attn.post", "hidden hidden"),
    Row(f"{_AUDIO_LAYER_PREFIX}.self_attn.relative_k_proj.weight", "hidden hidden"),
    *_build_clipped_rows(f"{_AUDIO_LAYER_PREFIX}.lconv1d.linear_start", "hidden+hidden hidden"),
    *_build_clipped_rows(f"{_AUDIO_LAYER_PREFIX}.lconv1d.linear_end", "hidden hidden"),
    Row(f"{_AUDIO_LAYER_PREFIX}.lconv1d.depthwise_conv1d.weight", "hidden 1 window"),
    Row(f"{_AUDIO_LAYER_PREFIX}.lconv1d.pre_layer_norm.weight", "hidden"),
    Row(f"{_AUDIO_LAYER_PREFIX}.lconv1d.conv_norm.weight", "hidden"),
    Row(f"{_AUDIO_LAYER_PREFIX}.norm_pre_attn.weight", "hidden"),
    Row(f"{_AUDIO_LAYER_PREFIX}.norm_post_attn.weight", "hidden"),
    Row(f"{_AUDIO_LAYER_PREFIX}.norm_out.weight", "hidden"),
    Row(".output_proj.weight", "output hidden"),
    Row(".output_proj.bias", "output"),
)


def _build_vision_facts(config: ModelConfig) -> ModelDims:
    hidden, head = config.size("hidden_size", 768), config.size("head_dim", 64)
    return ModelDims(
        dims={
            "hidden": LogicalDim(hidden),
            "output": LogicalDim(hidden),
            "positions": LogicalDim(config.size("position_embedding_size", 10 * 1024)),
            "pixels": LogicalDim(3 * config.size("patch_size", 16) ** 2),
            "q": LogicalDim(config.size("num_attention_heads", 12) * head),
            "kv": LogicalDim(config.size("num_key_value_heads", 12) * head),
            "head": LogicalDim(head),
            "ffn": LogicalDim(config.size("intermediate_size", 3072)),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers", 16)))},
        flags={
            "clipped": config.read_flag("use_clipped_linears", default=False),
            "standardized": config.read_flag("standardize", default=False),
        },
    )


def _build_audio_facts(config: ModelConfig) -> ModelDims:
    hidden, channels = config.size("hidden_size", 1024), config.values.get("subsampling_conv_channels", [128, 32])
    if not isinstance(channels, list) or len(channels) != 2 or not all(isinstance(n, int) for n in channels):  # noqa: PLR2004
        raise SourceError(f"config.json has subsampling_conv_channels = {channels!r} where two numbers are expected")
    return ModelDims(
        dims={
            "hidden": LogicalDim(hidden),
            "head": LogicalDim(hidden // config.size("num_attention_heads", 8)),
            "ffn": LogicalDim(4 * hidden),
            "conv0": LogicalDim(channels[0]),
            "conv1": LogicalDim(channels[1]),
            "subsampled": LogicalDim(channels[0] // 4 * channels[1]),
            "window": LogicalDim(config.size("conv_kernel_size", 5)),
            "output": LogicalDim(config.size("output_proj_dims", 1536)),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers", 12)))},
        flags={"clipped": config.read_flag("use_clipped_linears", default=True)},
    )


_PATCH_EMBEDDING_ROWS: Final = (
    Row(".pos_embedding", "positions 2 hidden"),
    *(Row(f".patch_ln1.{part}", "pixels") for part in ("weight", "bias")),
    Row(".patch_dense.weight", "hidden pixels"),
    Row(".patch_dense.bias", "hidden"),
    *(Row(f".{norm}.{part}", "hidden") for norm in ("patch_ln2", "pos_norm") for part in ("weight", "bias")),
)


def _build_patch_facts(config: ModelConfig) -> ModelDims:
    side = config.size("patch_size", 16) * config.size("pooling_kernel_size", 3)
    return ModelDims(
        dims={
            "hidden": LogicalDim(config.size("mm_embed_dim", 3840)),
            "output": LogicalDim(config.size("output_proj_dims", 3840)),
            "positions": LogicalDim(config.size("mm_posemb_size", 1120)),
            "pixels": LogicalDim(3 * side**2),
        },
        indices={},
    )


def _build_sound_facts(config: ModelConfig) -> ModelDims:
    return ModelDims(dims={"output": LogicalDim(config.size("audio_embed_dim", 640))}, indices={})


GEMMA4_PATCHES: Final = ModelTower(
    "vision_config", "embed_vision", _PATCH_EMBEDDING_ROWS, _build_patch_facts, optional=True
)
GEMMA4_SOUNDS: Final = ModelTower("audio_config", "embed_audio", (), _build_sound_facts, optional=True)
GEMMA4_VISION: Final = ModelTower(
    "vision_config", "vision_tower", _VISION_ENCODER_ROWS, _build_vision_facts, optional=True
)
GEMMA4_AUDIO: Final = ModelTower("audio_config", "audio_tower", _AUDIO_ENCODER_ROWS, _build_audio_facts, optional=True)
