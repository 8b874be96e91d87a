"""Describes the vision models of Qwen2-VL to Qwen3.5, and Pixtral's, which only occur inside other models.

Names and shapes follow transformers 5 (`models/pixtral`, and `models/qwen2_vl` and its successors).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.tables.family import LogicalDim, ModelDims, Row, RowIndex

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_BLOCK_PREFIX: Final = ".blocks.{layer}"
_LAYER_PREFIX: Final = ".transformer.layers.{layer}"


def _build_linear_rows(name: str, dims: str, when: str = "") -> tuple[Row, ...]:
    return (Row(f"{name}.weight", dims, when), Row(f"{name}.bias", dims.split(maxsplit=1)[0], when))


QWEN_EYES: Final = (
    Row(".patch_embed.proj.weight", "hidden channels frames patch patch"),
    Row(f"{_BLOCK_PREFIX}.norm1.weight", "hidden"),
    Row(f"{_BLOCK_PREFIX}.norm1.bias", "hidden", "!gated"),
    Row(f"{_BLOCK_PREFIX}.norm2.weight", "hidden"),
    Row(f"{_BLOCK_PREFIX}.norm2.bias", "hidden", "!gated"),
    *_build_linear_rows(f"{_BLOCK_PREFIX}.attn.qkv", "q+q+q hidden"),
    *_build_linear_rows(f"{_BLOCK_PREFIX}.attn.proj", "hidden q"),
    *_build_linear_rows(f"{_BLOCK_PREFIX}.mlp.fc1", "ffn hidden", "!gated"),
    *_build_linear_rows(f"{_BLOCK_PREFIX}.mlp.fc2", "hidden ffn", "!gated"),
    *_build_linear_rows(f"{_BLOCK_PREFIX}.mlp.gate_proj", "ffn hidden", "gated"),
    *_build_linear_rows(f"{_BLOCK_PREFIX}.mlp.up_proj", "ffn hidden", "gated"),
    *_build_linear_rows(f"{_BLOCK_PREFIX}.mlp.down_proj", "hidden ffn", "gated"),
    Row(".merger.ln_q.weight", "hidden"),
    Row(".merger.ln_q.bias", "hidden", "!gated"),
    *_build_linear_rows(".merger.mlp.0", "inner merged"),
    *_build_linear_rows(".merger.mlp.2", "output inner"),
)
"""Qwen2-VL's has biased norms and a plain MLP, that of Qwen2.5-VL norms without bias and a gated MLP."""


def _build_merger_rows(name: str, normed: str) -> tuple[Row, ...]:
    return (
        *_build_linear_rows(f"{name}.norm", normed),
        *_build_linear_rows(f"{name}.linear_fc1", "inner merged"),
        *_build_linear_rows(f"{name}.linear_fc2", "output inner"),
    )


QWEN3_EYES: Final = (
    *_build_linear_rows(".patch_embed.proj", "hidden channels frames patch patch"),
    Row(".pos_embed.weight", "positions hidden"),
    *_build_linear_rows(f"{_BLOCK_PREFIX}.norm1", "hidden"),
    *_build_linear_rows(f"{_BLOCK_PREFIX}.norm2", "hidden"),
    *_build_linear_rows(f"{_BLOCK_PREFIX}.attn.qkv", "q+q+q hidden"),
    *_build_linear_rows(f"{_BLOCK_PREFIX}.attn.proj", "hidden q"),
    *_build_linear_rows(f"{_BLOCK_PREFIX}.mlp.linear_fc1", "ffn hidden"),
    *_build_linear_rows(f"{_BLOCK_PREFIX}.mlp.linear_fc2", "hidden ffn"),
    *_build_merger_rows(".merger", "hidden"),
)
"""That of Qwen3.5; that of Qwen3-VL hands the text model the results of some layers, too."""
DEEPSTACK_EYES: Final = (*QWEN3_EYES, *_build_merger_rows(".deepstack_merger_list.{deep}", "merged"))
PIXTRAL_EYES: Final = (
    Row(".patch_conv.weight", "hidden channels patch patch"),
    Row(".ln_pre.weight", "hidden"),
    Row(f"{_LAYER_PREFIX}.attention_norm.weight", "hidden"),
    Row(f"{_LAYER_PREFIX}.feed_forward.gate_proj.weight", "ffn hidden"),
    Row(f"{_LAYER_PREFIX}.feed_forward.up_proj.weight", "ffn hidden"),
    Row(f"{_LAYER_PREFIX}.feed_forward.down_proj.weight", "hidden ffn"),
    Row(f"{_LAYER_PREFIX}.attention.k_proj.weight", "q hidden"),
    Row(f"{_LAYER_PREFIX}.attention.v_proj.weight", "q hidden"),
    Row(f"{_LAYER_PREFIX}.attention.q_proj.weight", "q hidden"),
    Row(f"{_LAYER_PREFIX}.attention.o_proj.weight", "hidden q"),
    Row(f"{_LAYER_PREFIX}.ffn_norm.weight", "hidden"),
)


def build_seeing_heads(hidden: int, heads: int) -> LogicalDim:
    """Build the dim that the heads of a vision model share; in one where they do not divide, it is never cut."""
    if hidden % heads:
        return LogicalDim(hidden)
    return LogicalDim(hidden, hidden // heads, "tp", noun="heads of the vision model")


def _build_qwen_vision_facts(config: ModelConfig, *, hidden: int, ffn: int, output: int, gated: bool) -> ModelDims:
    config = config.alias_keys({"in_chans": "in_channels", "num_hidden_layers": "depth"})
    merged = hidden * config.size("spatial_merge_size", 2) ** 2
    return ModelDims(
        dims={
            "hidden": LogicalDim(hidden),
            "q": build_seeing_heads(hidden, config.size("num_heads", 16)),
            "ffn": LogicalDim(ffn, axis="tp"),
            "output": LogicalDim(output),
            "merged": LogicalDim(merged),
            "inner": LogicalDim(merged, axis="tp"),
            "channels": LogicalDim(config.size("in_channels", 3)),
            "frames": LogicalDim(config.size("temporal_patch_size", 2)),
            "patch": LogicalDim(config.size("patch_size", 14)),
        },
        indices={"layer": RowIndex(range(config.size("depth", 32)))},
        flags={"gated": gated},
    )


def build_qwen2_vision_facts(config: ModelConfig) -> ModelDims:
    """Build what the rows need to know of Qwen2-VL's; its `hidden_size` is that of the text model."""
    hidden = config.size("embed_dim", 1280)
    ffn, output = hidden * config.size("mlp_ratio", 4), config.size("hidden_size", 3584)
    return _build_qwen_vision_facts(config, hidden=hidden, ffn=ffn, output=output, gated=False)


def build_qwen25_vision_facts(config: ModelConfig) -> ModelDims:
    """Build what the rows need to know of that of Qwen2.5-VL."""
    hidden, ffn = config.size("hidden_size", 3584), config.size("intermediate_size", 3420)
    return _build_qwen_vision_facts(
        config, hidden=hidden, ffn=ffn, output=config.size("out_hidden_size", 3584), gated=True
    )


def build_qwen3_vision_facts(config: ModelConfig) -> ModelDims:
    """Build what the rows need to know of that of Qwen3.5 or Qwen3-VL."""
    deep = config.values.get("deepstack_visual_indexes", (8, 16, 24))
    if not isinstance(deep, list | tuple):
        raise SourceError(f"config.json has deepstack_visual_indexes = {deep!r} where a list of layers is expected")
    facts = _build_qwen_vision_facts(
        config.alias_keys({"num_hidden_layers": "depth"}).over({"depth": 27, "patch_size": 16}),
        hidden=config.size("hidden_size", 1152),
        ffn=config.size("intermediate_size", 4304),
        output=config.size("out_hidden_size", 3584),
        gated=False,
    )
    return facts.extend_dims(
        dims={"positions": LogicalDim(config.size("num_position_embeddings", 2304))},
        indices={"deep": RowIndex(range(len(deep)))},
    )


def build_pixtral_vision_facts(config: ModelConfig) -> ModelDims:
    """Build what the rows need to know of Pixtral's."""
    hidden = config.size("hidden_size", 1024)
    return ModelDims(
        dims={
            "hidden": LogicalDim(hidden),
            "q": build_seeing_heads(hidden, config.size("num_attention_heads", 16)),
            "ffn": LogicalDim(config.size("intermediate_size", 4096), axis="tp"),
            "channels": LogicalDim(config.size("num_channels", 3)),
            "patch": LogicalDim(config.size("patch_size", 16)),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers", 24)))},
    )
