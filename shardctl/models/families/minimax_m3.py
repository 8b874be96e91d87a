"""Describes MiniMax-M3: MiniMax-M2's experts with a shared one, and attention to blocks that an indexer chooses.

Experts have the names of the Hub; transformers 5 joins gate and up projections and calls the model inside the one that
sees otherwise (`models/minimax_m3_vl/modeling_minimax_m3_vl.py`, and `minimax_m3_vl` in `conversion_mapping.py`). The
indexer's heads go where the key/value heads go, and its one key is whole on every tp rank, as in vLLM
(`models/minimax_m3/nvidia/model.py`). The layers that predict, `mtp.layers`, are on the Hub only (`mtp.py` there).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.submodels.towers import ModelTower, build_tower_family
from shardctl.models.tables.decoder import (
    EMBEDDING,
    HEAD_NORMS,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    assume_sizes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import (
    DENSE,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    build_predicting_rows,
    build_shared_expert_rows,
    count_experts,
)
from shardctl.models.tables.family import Family, FusedArray, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardctl.models.tables.config import ModelConfig

_EXPERT_WEIGHT_NAMES: Final = ("w1", "w3", "w2")
_MOE_MODULE_NAME: Final = "block_sparse_moe"
_ATTENTION_PREFIX: Final = f"{LAYER}.self_attn"
_INDEXER_ROWS: Final = (
    Row(f"{_ATTENTION_PREFIX}.index_q_proj.weight", "index_q hidden", when="sparse"),
    Row(f"{_ATTENTION_PREFIX}.index_k_proj.weight", "index hidden", when="sparse"),
    Row(f"{_ATTENTION_PREFIX}.index_q_norm.weight", "index", when="sparse"),
    Row(f"{_ATTENTION_PREFIX}.index_k_norm.weight", "index", when="sparse"),
)
"""What scores blocks of earlier tokens, with as many heads as there are of keys and values."""
_MOE_ROWS: Final = (
    Row(f"{LAYER}.{_MOE_MODULE_NAME}.gate.weight", "experts hidden", when="moe"),
    Row(f"{LAYER}.{_MOE_MODULE_NAME}.e_score_correction_bias", "experts", when="moe"),
    *build_expert_rows(_MOE_MODULE_NAME, _EXPERT_WEIGHT_NAMES),
    *build_shared_expert_rows(f"{_MOE_MODULE_NAME}.shared_experts"),
)
_LAYER_ROWS: Final = (*(row for row in QKVO if not row.when), *HEAD_NORMS, *_INDEXER_ROWS, *DENSE, *_MOE_ROWS, *NORMS)
_MTP_LAYER_PREFIX: Final = ".mtp.layers.{next}"


def _join_gated(module: str, within: str) -> tuple[FusedArray, FusedArray]:
    """Return what transformers has in the module `within` of the MLP `module`."""
    gate, up, down = (f"{LAYER}.{module}.{name}_proj.weight" for name in ("gate", "up", "down"))
    return FusedArray(f"{LAYER}.{within}.gate_up_proj.weight", (gate, up)), FusedArray(
        f"{LAYER}.{within}.down_proj.weight", (down,)
    )


def _build_facts(config: ModelConfig) -> ModelDims:
    sparse = _read_sparse_config(config)
    ffn, heads, width = (
        config.size("intermediate_size"),
        sparse.size("sparse_num_index_heads", config.size("index_n_heads", 4)),
        sparse.size("sparse_index_dim", config.size("index_head_dim", 128)),
    )
    dense = config.over({"intermediate_size": None}).size("dense_intermediate_size", 12288)
    facts = build_decoder_facts(config, head_dim=128, kv_heads=4, qk_norm=True)
    blocks = sparse.size("sparse_topk_blocks", config.size("index_topk_blocks", 16))
    return add_expert_facts(
        facts,
        count_experts(config, "num_local_experts"),
        ffn,
        moe=_list_marked_layers(config, "mlp_layer_types", "sparse", config.values.get("moe_layer_freq"), usual=True),
        shared=config.size("shared_intermediate_size", 3072),
    ).extend_dims(
        dims={
            "ffn": LogicalDim(dense, axis="tp"),
            "index": LogicalDim(width),
            "index_q": LogicalDim(heads * width, width, "tp", shared=True, noun="heads of the indexer"),
            "index_heads": LogicalDim(heads),
            "chosen": LogicalDim(blocks * sparse.size("sparse_block_size", config.size("index_block_size", 128))),
        },
        indices={"next": RowIndex(range(config.count("num_mtp_modules", 0)))},
        flags={
            "sparse": _list_marked_layers(
                config, "layer_types", "minimax_m3_sparse", sparse.values.get("sparse_attention_freq"), usual=False
            )
        },
    )


def _read_sparse_config(config: ModelConfig) -> ModelConfig:
    found = config.values.get("sparse_attention_config")
    return config.part("sparse_attention_config") if found else replace(config, values={})


def _list_marked_layers(config: ModelConfig, key: str, kind: str, marks: object, *, usual: bool) -> Collection[int]:
    """List the layers that `key` says are of the `kind`, else those that the Hub's `marks` mark; else all or none."""
    layers, kinds = config.size("num_hidden_layers"), config.values.get(key)
    said = kinds if kinds is not None else marks
    if said is None:
        return range(layers if usual else 0)
    if not isinstance(said, list) or len(said) != layers:
        raise SourceError(f"config.json has {said!r} where a list of {layers} layers is expected ({key})")
    return frozenset(n for n, one in enumerate(said) if (one == kind if kinds is not None else one))


MINIMAX_M3_TEXT: Final = Family(
    name="minimax_m3_vl_text",
    rows=(
        *EMBEDDING,
        *_LAYER_ROWS,
        *LAST_NORM,
        *HEADS,
        *build_predicting_rows(_LAYER_ROWS, f"{_MTP_LAYER_PREFIX}.transformer_layer", "moe shared sparse"),
        Row(f"{_MTP_LAYER_PREFIX}.enorm.weight", "hidden", on="last", optional=True),
        Row(f"{_MTP_LAYER_PREFIX}.hnorm.weight", "hidden", on="last", optional=True),
        Row(f"{_MTP_LAYER_PREFIX}.eh_proj.weight", "hidden hidden+hidden", on="last", optional=True),
        Row(f"{_MTP_LAYER_PREFIX}.final_layernorm.weight", "hidden", on="last", optional=True),
    ),
    facts=_build_facts,
    classes={"MiniMaxM3VLForCausalLM": ModelClass("model", "lm"), "MiniMaxM3VLTextModel": ModelClass()},
    prefixes=("model", "model.language_model"),
    renamed={
        "MiniMaxM3ForCausalLM": "MiniMaxM3VLForCausalLM",
        "MiniMaxM3SparseForCausalLM": "MiniMaxM3VLForCausalLM",
    },
    fused=(
        FusedArray(f"{LAYER}.mlp.gate.weight", (f"{LAYER}.{_MOE_MODULE_NAME}.gate.weight",)),
        FusedArray(
            f"{LAYER}.mlp.gate.e_score_correction_bias", (f"{LAYER}.{_MOE_MODULE_NAME}.e_score_correction_bias",)
        ),
        *build_fused_experts(_MOE_MODULE_NAME, _EXPERT_WEIGHT_NAMES, within="mlp"),
        *_join_gated(f"{_MOE_MODULE_NAME}.shared_experts", "mlp.shared_experts"),
        _join_gated("mlp", "mlp")[0],
        *(
            FusedArray(f"{_ATTENTION_PREFIX}.indexer.{name}.weight", (f"{_ATTENTION_PREFIX}.index_{name}.weight",))
            for name in ("q_proj", "k_proj", "q_norm", "k_norm")
        ),
    ),
    traits=LayerFeatures(
        activation=("", "silu"),
        norm="rms32",
        experts_per_token=4,
        expert_steps=3,
        joined_queries=True,
        further=(
            FurtherTensor("gate and up within their bounds, and what scales the gate", "intermediate", width=6),
            FurtherTensor("mask of the blocks that an indexer chose", "scores", when="sparse", given=("fused",)),
            FurtherTensor("what is wider of that mask", "scores", "", 2, "sparse", ("fused", "autocast")),
        ),
    ),
    class_names_only=True,
    aliases={"num_experts": "num_local_experts"},
    assumed={
        **assume_sizes(200064, 6144, 3072, 60, 64),
        "num_key_value_heads": 4,
        "num_local_experts": 128,
    },
)
_VISION_LAYER_PREFIX: Final = ".layers.{layer}"
_VISION_ENCODER_ROWS: Final = (
    Row(".embeddings.proj.weight", "hidden channels frames patch patch"),
    Row(".pre_layrnorm.weight", "hidden"),
    Row(".pre_layrnorm.bias", "hidden"),
    *(
        row
        for name, dims in {
            "self_attn.k_proj": "hidden hidden",
            "self_attn.v_proj": "hidden hidden",
            "self_attn.q_proj": "hidden hidden",
            "self_attn.out_proj": "hidden hidden",
            "layer_norm1": "hidden",
            "mlp.fc1": "ffn hidden",
            "mlp.fc2": "hidden ffn",
            "layer_norm2": "hidden",
        }.items()
        for row in (
            Row(f"{_VISION_LAYER_PREFIX}.{name}.weight", dims),
            Row(f"{_VISION_LAYER_PREFIX}.{name}.bias", dims.split(maxsplit=1)[0]),
        )
    ),
)


def _build_vision_facts(config: ModelConfig) -> ModelDims:
    return ModelDims(
        dims={
            "hidden": LogicalDim(config.size("hidden_size", 1280)),
            "ffn": LogicalDim(config.size("intermediate_size", 5120)),
            "channels": LogicalDim(config.size("num_channels", 3)),
            "frames": LogicalDim(config.size("temporal_patch_size", 2)),
            "patch": LogicalDim(config.size("patch_size", 14)),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers", 32)))},
    )


def _add_projector_facts(config: ModelConfig, facts: ModelDims) -> ModelDims:
    merged = facts.size("hidden") * config.part("vision_config").size("spatial_merge_size", 2) ** 2
    return facts.extend_dims(
        dims={"merged": LogicalDim(merged), "projected": LogicalDim(config.size("projector_hidden_size", 6144))}
    )


_PROJECTOR_ROWS: Final = tuple(
    row
    for name, dims in {
        "linear_1": "projected vision_hidden",
        "linear_2": "hidden projected",
        "merge_linear_1": "projected merged",
        "merge_linear_2": "hidden projected",
    }.items()
    for row in (
        Row(f".multi_modal_projector.{name}.weight", dims, on="first"),
        Row(f".multi_modal_projector.{name}.bias", dims.split(maxsplit=1)[0], on="first"),
    )
)
MINIMAX_M3: Final = build_tower_family(
    "minimax_m3_vl",
    {"MiniMaxM3SparseForConditionalGeneration": ModelClass("model", "lm"), "MiniMaxM3VLModel": ModelClass()},
    MINIMAX_M3_TEXT,
    (ModelTower("vision_config", "vision_tower", _VISION_ENCODER_ROWS, _build_vision_facts), *_PROJECTOR_ROWS),
    facts=_add_projector_facts,
    legacy={
        "^language_model.lm_head": "lm_head",
        "^language_model.model": "language_model",
        "^vision_tower.vision_model.embeddings.patch_embedding": "vision_tower.embeddings.proj",
        "^vision_tower.vision_model.encoder": "vision_tower",
        "^vision_tower.vision_model": "vision_tower",
        "^patch_merge_mlp.linear_1": "multi_modal_projector.merge_linear_1",
        "^patch_merge_mlp.linear_2": "multi_modal_projector.merge_linear_2",
    },
)
