"""Describes GLM-5.3-Flash: Kimi delta attention, latent attention to pools of chosen tokens, experts, and streams.

Names are those of the Hub; transformers 5 joins the three convolutions of delta attention, and calls its gate and what
mixes the streams otherwise (`models/glm5_next/modeling_glm5_next.py`, and `glm5_next` in `conversion_mapping.py`). The
layer that predicts, which transformers leaves out, has latent attention, experts and no streams.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from shardctl.base.errors import SourceError
from shardctl.models.families.deepseek import BALANCED_EXPERTS, add_balanced_facts
from shardctl.models.families.deepseek_sparse import INDEXER, build_indexer_facts, list_indexer_layers
from shardctl.models.families.kimi_linear import FORGET_GATE, KDA, KDA_ARRAYS, build_kda_dims
from shardctl.models.submodels.towers import ModelTower, build_tower_classes, build_tower_family
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.decoder import EMBEDDING, HEADS, LAST_NORM, LAYER, NORMS, assume_sizes
from shardctl.models.tables.experts import (
    add_condition,
    build_fused_experts,
    build_predicting_ends,
    build_predicting_rows,
    list_sparse_layers,
)
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.hyper_connections import list_mixed_streams
from shardctl.models.tables.latent_attention import LATENT
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

_FP32_TENSOR_SUFFIXES: Final = (".dt_bias", ".A_log")
_KDA_ROWS: Final = tuple(
    replace(
        row,
        dims="value_heads" if row.name.endswith(".A_log") else row.dims,
        when="",
        dtype="F32" if row.name.endswith(_FP32_TENSOR_SUFFIXES) else "",
    )
    for row in KDA
)
_KEY_POOLING_ROWS: Final = (
    Row(f"{LAYER}.self_attn.indexer.index_kpool_compress_ape", "pool index", needed="indexer"),
    Row(f"{LAYER}.self_attn.indexer.index_kpool_compress_gate", "index hidden", needed="indexer"),
)
"""What makes one key of the keys of several tokens."""
_ATTENTION_ROWS: Final = (*(row for row in LATENT if row.when != "!q_lora"), *_KEY_POOLING_ROWS, *INDEXER)
_RESIDUAL_STREAM_ROWS: Final = tuple(
    Row(f"{LAYER}.{half}_hc.{name}", dims, dtype="" if name == "fn" else "F32")
    for half in ("attn", "ffn")
    for name, dims in (("fn", "mixes streams"), ("base", "mixes"), ("scale", "3"))
)
"""What reads the sum of the streams before attention and experts, and adds their result to each."""
_MTP_LAYER_PREFIX: Final = ".layers.{next}"
_LATENT_ATTENTION_DEFAULTS: Final = {
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "q_lora_rank": 1536,
}


def _build_facts(config: ModelConfig) -> ModelDims:
    # The class takes `head_dim` for that of rotary positions, which it has none of.
    sizes = replace(
        config.over(_LATENT_ATTENTION_DEFAULTS),
        values={**config.over(_LATENT_ATTENTION_DEFAULTS).values, "head_dim": None},
    )
    facts = build_indexer_facts(sizes, heads=32, indexer=list_indexer_layers(config))
    facts = add_balanced_facts(facts, config, moe=list_sparse_layers(config, 3), following=1)
    linear = config.part("linear_attn_config") if config.values.get("linear_attn_config") else ModelConfig({})
    streams = config.size("hc_mult", 4)
    return facts.extend_dims(
        dims={
            **build_kda_dims(
                linear.size("num_heads", config.size("linear_num_heads", 64)),
                linear.size("head_dim", config.size("linear_head_dim", 128)),
                linear.size("short_conv_kernel_size", config.size("linear_conv_kernel_dim", 4)),
            ),
            "pool": LogicalDim(config.size("index_kpool", 16)),
            "count": LogicalDim(streams),
            "mixes": LogicalDim((2 + streams) * streams),
            "rounds": LogicalDim(config.size("hc_sinkhorn_iters", 20)),
            "streams": LogicalDim(streams * facts.size("hidden")),
        },
        flags={"attention": _list_attention_layers(config), "bounded": _has_bounded_decays(config, linear)},
    )


def _has_bounded_decays(config: ModelConfig, linear: ModelConfig) -> bool:
    """Return whether decays have a lower bound, as `Glm5NextTextConfig` finds it."""
    bound = linear.values.get("gate_lower_bound", config.values.get("linear_lower_bound", -5.0))
    return bound is not None or (bool(linear.values) and linear.read_flag("safe_gate", default=True))


_LINEAR_ATTENTION_TYPE: Final = "linear_attention"
_SPARSE_ATTENTION_TYPES: Final = ("indexed_attention", "full_attention", "deepseek_sparse_attention")


def _list_attention_layers(config: ModelConfig) -> frozenset[int]:
    """List the layers with latent attention; raises SourceError for a kind of layer that is not known."""
    layers, kinds = config.size("num_hidden_layers"), config.entries("layer_types")
    if kinds is None:
        return frozenset(range(3, layers, 4))
    if len(kinds) != layers or not {_LINEAR_ATTENTION_TYPE, *_SPARSE_ATTENTION_TYPES}.issuperset(kinds):
        raise SourceError(
            f"config.json has layer_types = {kinds!r} where {layers} are expected, each of {_LINEAR_ATTENTION_TYPE} or"
            f" {_SPARSE_ATTENTION_TYPES[0]}"
        )
    return frozenset(n for n, kind in enumerate(kinds) if kind != _LINEAR_ATTENTION_TYPE)


_TEXT_FAMILY: Final = Family(
    name="glm5_next_text",
    rows=(
        *EMBEDDING,
        *add_condition(_KDA_ROWS, "!attention"),
        *add_condition(_ATTENTION_ROWS, "attention"),
        *BALANCED_EXPERTS,
        *NORMS,
        *_RESIDUAL_STREAM_ROWS,
        *LAST_NORM,
        *(row for row in HEADS if row.when in ("", "lm")),
        *build_predicting_rows((*_ATTENTION_ROWS, *BALANCED_EXPERTS, *NORMS), _MTP_LAYER_PREFIX, "moe shared indexer"),
        *build_predicting_ends(
            _MTP_LAYER_PREFIX,
            {"enorm": "hidden", "hnorm": "hidden", "eh_proj": "hidden hidden+hidden", "shared_head.norm": "hidden"},
        ),
    ),
    facts=_build_facts,
    classes={"Glm5NextTextModel": ModelClass("model", "lm")},
    prefixes=("model",),
    fused=(*KDA_ARRAYS, *build_fused_experts()),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        experts_per_token=8,
        wide_router=True,
        expert_steps=2,
        further=(
            *list_mixed_streams(experts="moe"),
            *(one if one.dims == "decay_rank" else replace(one, when=f"{one.when} !bounded") for one in FORGET_GATE),
            FurtherTensor(
                "fp32 decays, before and behind their bound", dims="values", width=12, when="!attention bounded"
            ),
            FurtherTensor("gate and up of dense MLPs and shared experts within their bounds", "intermediate", width=4),
            FurtherTensor("mask of the tokens that an indexer chose", "pairs", "", 1, "attention", ("fused",)),
        ),
    ),
    aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
    assumed={
        **assume_sizes(154880, 4096, 12288, 45, 64),
        "moe_intermediate_size": 2048,
        "n_routed_experts": 288,
        "n_shared_experts": 1,
    },
)
_BLOCK_PREFIX: Final = ".blocks.{layer}"
_VISION_ENCODER_ROWS: Final = (
    Row(".patch_embed.proj.weight", "hidden channels frames patch patch"),
    Row(".patch_embed.proj.bias", "hidden"),
    Row(f"{_BLOCK_PREFIX}.norm1.weight", "hidden"),
    Row(f"{_BLOCK_PREFIX}.norm2.weight", "hidden"),
    Row(f"{_BLOCK_PREFIX}.attn.qkv.weight", "hidden+hidden+hidden hidden"),
    Row(f"{_BLOCK_PREFIX}.attn.qkv.bias", "hidden+hidden+hidden", "biased"),
    Row(f"{_BLOCK_PREFIX}.attn.proj.weight", "hidden hidden"),
    Row(f"{_BLOCK_PREFIX}.attn.proj.bias", "hidden", "biased"),
    Row(f"{_BLOCK_PREFIX}.attn.q_norm.weight", "head"),
    Row(f"{_BLOCK_PREFIX}.attn.k_norm.weight", "head"),
    Row(f"{_BLOCK_PREFIX}.mlp.gate_proj.weight", "ffn hidden"),
    Row(f"{_BLOCK_PREFIX}.mlp.gate_proj.bias", "ffn", "biased"),
    Row(f"{_BLOCK_PREFIX}.mlp.up_proj.weight", "ffn hidden"),
    Row(f"{_BLOCK_PREFIX}.mlp.up_proj.bias", "ffn", "biased"),
    Row(f"{_BLOCK_PREFIX}.mlp.down_proj.weight", "hidden ffn"),
    Row(f"{_BLOCK_PREFIX}.mlp.down_proj.bias", "hidden", "biased"),
    Row(".merger.proj.weight", "output output"),
    Row(".merger.post_projection_norm.weight", "output"),
    Row(".merger.post_projection_norm.bias", "output"),
    Row(".merger.gate_proj.weight", "projected output"),
    Row(".merger.up_proj.weight", "projected output"),
    Row(".merger.down_proj.weight", "output projected"),
    Row(".downsample.weight", "output hidden merged merged"),
    Row(".downsample.bias", "output"),
    Row(".post_layernorm.weight", "hidden"),
)


def _build_vision_facts(config: ModelConfig) -> ModelDims:
    config = config.alias_keys({"num_attention_heads": "num_heads", "num_hidden_layers": "depth"})
    sizes = config.over({"hidden_size": 1024, "num_heads": 16})
    return ModelDims(
        dims={
            "hidden": LogicalDim(sizes.size("hidden_size")),
            "head": LogicalDim(sizes.divided("hidden_size", "num_heads")),
            "ffn": LogicalDim(config.size("intermediate_size", 4096)),
            "output": LogicalDim(config.size("out_hidden_size", 1536)),
            "projected": LogicalDim(config.size("projection_intermediate_size", 10240)),
            "channels": LogicalDim(config.size("in_channels", 3)),
            "frames": LogicalDim(config.size("temporal_patch_size", 2)),
            "patch": LogicalDim(config.size("patch_size", 14)),
            "merged": LogicalDim(config.size("spatial_merge_size", 2)),
        },
        indices={"layer": RowIndex(range(config.size("depth", 24)))},
        flags={"biased": config.read_flag("attention_bias", default=True)},
    )


GLM5_NEXT: Final = build_tower_family(
    "glm5_next",
    build_tower_classes("Glm5Next"),
    _TEXT_FAMILY,
    (ModelTower("vision_config", "visual", _VISION_ENCODER_ROWS, _build_vision_facts),),
    legacy={f"hc_{half}_{name}": f"{half}_hc.{name}" for half in ("attn", "ffn") for name in ("fn", "base", "scale")},
)
