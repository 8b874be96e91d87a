"""Describes Hunyuan 4 (Hy4): latent attention with sinks and a gate, to tokens that an indexer chooses, and streams.

Names and shapes follow transformers 5 (`models/hy_v4/modeling_hy_v4.py`); the names of the Hub, which stand in
`conversion_mapping.py`, are spellings of them. tp cuts attention, its sinks and its gate by heads; indexers and what
mixes the streams are whole on every rank. The layer that predicts, which transformers leaves out, has no streams, and
its names are those that engines read (`model.mtp_layers.0`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.families.deepseek import BALANCED_EXPERTS, add_balanced_facts
from shardctl.models.families.deepseek_sparse import INDEXER, build_indexer_facts
from shardctl.models.tables.decoder import EMBEDDING, HEADS, LAST_NORM, LAYER, NORMS, assume_sizes
from shardctl.models.tables.experts import (
    build_fused_experts,
    build_predicting_ends,
    build_predicting_rows,
    list_sparse_layers,
)
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row, RowIndex
from shardctl.models.tables.hyper_connections import list_added_streams
from shardctl.models.tables.latent_attention import LATENT
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_ATTENTION_ROWS: Final = (
    Row(f"{LAYER}.self_attn.sinks", "heads", dtype="F32"),
    *LATENT,
    *(replace(row, dtype="F32") if "k_norm" in row.name or "weights" in row.name else row for row in INDEXER),
    Row(f"{LAYER}.self_attn.gate_proj.weight", "vs hidden"),
)
_RESIDUAL_STREAM_ROWS: Final = tuple(
    Row(f"{LAYER}.{half}_hc.{name}", dims, dtype="F32")
    for half in ("attn", "ffn")
    for name, dims in (("fn", "mixes streams"), ("base", "mixes"), ("scale", "2"))
)
"""What reads the sum of the streams before attention and experts, and adds their result to each."""
_MTP_LAYER_PREFIX: Final = ".mtp_layers.{next}"
_MTP_EXTRA_TENSORS: Final = {
    "enorm": "hidden",
    "hnorm": "hidden",
    "eh_proj": "hidden hidden+hidden",
    "final_layernorm": "hidden",
}
_BLOCK_ROWS: Final = (*(row for row in _ATTENTION_ROWS if "!q_lora" not in row.when), *BALANCED_EXPERTS, *NORMS)
_LEGACY_NAME_PATTERNS: Final = {
    # transformers 5.23 saves `hc_pre` in front of what it follows on the Hub.
    "hc_pre.hc_attn_layer": "hc_attn_layer",
    "hc_pre.hc_mlp_layer": "hc_mlp_layer",
    "hc_pre.hc_head": "hc_head",
    **{f"hc_pre.hc_{name}": f"hc_{name}" for name in ("fn", "base", "scale")},
    **{f"hc_attn_layer.hc_{name}": f"attn_hc.{name}" for name in ("fn", "base", "scale")},
    **{f"hc_mlp_layer.hc_{name}": f"ffn_hc.{name}" for name in ("fn", "base", "scale")},
    **{f"hc_head_{name}": f"hc_{name}" for name in ("fn", "base", "scale")},
    "learnable_sink_param": "sinks",
    "linear_gate": "gate_proj",  # of attention; transformers 5.23 saves those of MLPs under this name, too
}


def _build_facts(config: ModelConfig) -> ModelDims:
    sizes = config.over({"qk_nope_head_dim": 192, "v_head_dim": 256})
    facts = build_indexer_facts(sizes, heads=16, indexer=_list_choosing_layers(config))
    facts = add_balanced_facts(facts, config, moe=list_sparse_layers(config, 1), following=1)
    streams = config.size("hc_mult", 4)
    return facts.extend_dims(
        dims={
            "heads": LogicalDim(config.size("num_attention_heads"), axis="tp", noun="attention heads"),
            "count": LogicalDim(streams),
            "mixes": LogicalDim(2 * streams),
            "streams": LogicalDim(streams * facts.size("hidden")),
        },
        indices={"next": RowIndex(range(config.count("num_nextn_predict_layers", 1)))},
    )


def _list_choosing_layers(config: ModelConfig) -> frozenset[int]:
    """List the layers that choose tokens themselves; the others take over the choice of the last that did."""
    layers, kinds = config.size("num_hidden_layers"), config.entries("indexer_types")
    if kinds is None:
        return frozenset(n for n in range(layers) if n == 0 or (n - 1) % 4 == 0)
    if len(kinds) != layers or not {"full", "shared"}.issuperset(kinds):
        raise SourceError(
            f"config.json has indexer_types = {kinds!r} where {layers} entries, full or shared, are expected"
        )
    return frozenset(n for n, kind in enumerate(kinds) if kind == "full")


HY_V4: Final = Family(
    name="hy_v4",
    rows=(
        *EMBEDDING,
        *_BLOCK_ROWS,
        *_RESIDUAL_STREAM_ROWS,
        *LAST_NORM,
        Row(".hc_head.hc_fn", "count streams", on="last", dtype="F32"),
        Row(".hc_head.hc_base", "count", on="last", dtype="F32"),
        Row(".hc_head.hc_scale", "1", on="last", dtype="F32"),
        *(replace(row, dtype="F32") if row.name == "lm_head.weight" else row for row in HEADS),
        *build_predicting_rows(_BLOCK_ROWS, _MTP_LAYER_PREFIX, "moe shared indexer"),
        *build_predicting_ends(_MTP_LAYER_PREFIX, _MTP_EXTRA_TENSORS),
    ),
    facts=_build_facts,
    classes={"HYV4ForCausalLM": ModelClass("model", "lm"), "HYV4Model": ModelClass()},
    prefixes=("model",),
    legacy=_LEGACY_NAME_PATTERNS,
    fused=(*build_fused_experts(), *build_fused_experts(layer=_MTP_LAYER_PREFIX)),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        experts_per_token=8,
        wide_router=True,
        shifted_scores=True,
        expert_steps=2,
        unfused=True,
        further=(
            *list_added_streams(),
            FurtherTensor("what fp32 scores of sinks have more", "rows", width=2),
            FurtherTensor("gate of attention, activated, and the result with it", dims="vs", width=4),
        ),
    ),
    aliases={"num_local_experts": "n_routed_experts"},
    assumed={
        **assume_sizes(120832, 2816, 6912, 34, 32),
        "moe_intermediate_size": 768,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
    },
)
