"""Describes DeepSeek-V4: one key and value vector for all heads, compressed and chosen, and four streams of states.

Names and shapes follow transformers 5 (`models/deepseek_v4/modeling_deepseek_v4.py`); the Hub's names, which
`conversion_mapping.py` lists, are spellings of them. tp cuts queries, sinks and the grouped projection of the output by
groups of heads, as vLLM does (`models/deepseek_v4/attention.py`); keys and values, compressors, indexers and what mixes
the streams are whole on every rank. The first layers find a token's experts in a table. The layers that predict further
tokens, which the Hub has and transformers leaves out, see a window of tokens only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.tables.decoder import EMBEDDING, HEADS, LAYER, build_decoder_facts
from shardctl.models.tables.experts import (
    add_condition,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    build_predicting_rows,
    build_shared_expert_rows,
    count_experts,
)
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row, RowIndex
from shardctl.models.tables.hyper_connections import list_mixed_streams
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_SPARSE, _DENSE = "compressed_sparse_attention", "heavily_compressed_attention"
_LAYER_TYPES_BY_COMPRESSION: Final = {0: "sliding_attention", 4: _SPARSE, 128: _DENSE}
"""What older configs say of each layer by how many tokens it compresses to one (`DeepseekV4Config`)."""
_DEFAULT_HASH_LAYER_COUNT: Final = 3
"""Layers whose experts a table names, where a config is silent."""
_ATTENTION_ROWS: Final = (
    Row(f"{LAYER}.self_attn.sinks", "heads", dtype="F32"),
    Row(f"{LAYER}.self_attn.q_a_proj.weight", "q_rank hidden"),
    Row(f"{LAYER}.self_attn.q_a_norm.weight", "q_rank", dtype="F32"),
    Row(f"{LAYER}.self_attn.q_b_proj.weight", "q q_rank"),
    Row(f"{LAYER}.self_attn.kv_proj.weight", "shared_kv hidden"),
    Row(f"{LAYER}.self_attn.kv_norm.weight", "shared_kv", dtype="F32"),
    Row(f"{LAYER}.self_attn.o_a_proj.weight", "o_rank group"),
    Row(f"{LAYER}.self_attn.o_b_proj.weight", "hidden o_rank"),
)


def _build_compressor_rows(module: str, width: str, rate: str, when: str) -> tuple[Row, ...]:
    """What makes one vector of `rate` tokens; `width` are the dims of the sums that it is made of."""
    base = f"{LAYER}.self_attn.compressor{module}"
    return (
        Row(f"{base}.position_bias", f"{rate} {width}", when, dtype="F32"),
        Row(f"{base}.kv_proj.weight", f"{width} hidden", when),
        Row(f"{base}.gate_proj.weight", f"{width} hidden", when),
        Row(f"{base}.kv_norm.weight", width.split("+", maxsplit=1)[0], when, dtype="F32"),
    )


_COMPRESSOR_ROWS: Final = (
    *_build_compressor_rows("", "shared_kv+shared_kv", "rate", "choosing"),
    *_build_compressor_rows("", "shared_kv", "dense_rate", "compressing"),
    *_build_compressor_rows(".indexer", "index+index", "rate", "choosing"),
    Row(f"{LAYER}.self_attn.compressor.indexer.q_b_proj.weight", "index_q q_rank", "choosing"),
    Row(f"{LAYER}.self_attn.compressor.indexer.scorer.weights_proj.weight", "index_heads hidden", "choosing"),
)
_ROUTER_ROW: Final = Row(f"{LAYER}.mlp.gate.weight", "experts hidden")
_CORRECTION_BIAS_ROW: Final = Row(f"{LAYER}.mlp.gate.e_score_correction_bias", "experts", dtype="F32")
_EXPERT_ROWS: Final = (
    *build_expert_rows("mlp", ("w1", "w3", "w2"), when=""),
    *build_shared_expert_rows("mlp.shared_experts"),
)
_NORM_AND_STREAM_ROWS: Final = (
    Row(f"{LAYER}.input_layernorm.weight", "hidden", dtype="F32"),
    Row(f"{LAYER}.post_attention_layernorm.weight", "hidden", dtype="F32"),
    *(
        Row(f"{LAYER}.{half}_hc.{name}", dims, dtype="F32")
        for half in ("attn", "ffn")
        for name, dims in (("fn", "mixes streams"), ("base", "mixes"), ("scale", "3"))
    ),
)
"""Norms, and what mixes the streams around attention and experts (manifold-constrained hyper-connections)."""
_MTP_LAYER_PREFIX: Final = "mtp.{next}"
_MTP_LAYER_ROWS: Final = (
    *build_predicting_rows(
        (*_ATTENTION_ROWS, _ROUTER_ROW, _CORRECTION_BIAS_ROW, *_EXPERT_ROWS, *_NORM_AND_STREAM_ROWS),
        _MTP_LAYER_PREFIX,
        "moe shared",
    ),
    *(
        Row(f"{_MTP_LAYER_PREFIX}.{name}", dims, on="last", optional=True, dtype=dtype)
        for name, dims, dtype in (
            ("emb.tok_emb.weight", "vocab hidden", ""),
            ("enorm.weight", "hidden", "F32"),
            ("hnorm.weight", "hidden", "F32"),
            ("e_proj.weight", "hidden hidden", ""),
            ("h_proj.weight", "hidden hidden", ""),
            ("norm.weight", "hidden", "F32"),
            ("head.weight", "vocab hidden", ""),
            ("hc_head_fn", "count streams", "F32"),
            ("hc_head_base", "count", "F32"),
            ("hc_head_scale", "1", "F32"),
        )
    ),
)
_LEGACY_NAME_PATTERNS: Final = {
    "^embed": "embed_tokens",
    "^head": "lm_head",
    "^hc_head_fn": "hc_head.hc_fn",
    "^hc_head_base": "hc_head.hc_base",
    "^hc_head_scale": "hc_head.hc_scale",
    "attn.attn_sink": "self_attn.sinks",
    "attn.indexer.compressor": "self_attn.compressor.indexer",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn": "self_attn",
    "ffn": "mlp",
    "compressor.norm": "compressor.kv_norm",
    "compressor.indexer.norm": "compressor.indexer.kv_norm",
    "self_attn.norm": "self_attn.kv_norm",  # as transformers 5.23 saves it; the Hub has attn.kv_norm
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"hc_{half}_{name}": f"{half}_hc.{name}" for half in ("attn", "ffn") for name in ("fn", "base", "scale")},
    "ape": "position_bias",
    "wq_a": "q_a_proj",
    "wkv": "kv_proj",
    "wgate": "gate_proj",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
    "gate.bias": "gate.e_score_correction_bias",
    "shared_experts.w1": "shared_experts.gate_proj",
    "shared_experts.w2": "shared_experts.down_proj",
    "shared_experts.w3": "shared_experts.up_proj",
}


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden, head = config.size("hidden_size"), config.size("head_dim", 512)
    heads, groups = config.size("num_attention_heads"), config.size("o_groups", 8)
    if heads % groups:
        raise SourceError(f"config.json has o_groups = {groups}, which does not divide its {heads} attention heads")
    ffn, streams = config.size("moe_intermediate_size"), config.size("hc_mult", 4)
    index, index_heads = config.size("index_head_dim", 128), config.size("index_n_heads", 64)
    layers, kinds = config.size("num_hidden_layers"), _list_kinds(config)
    rank = config.size("o_lora_rank", 1024)
    rates = config.part("compress_rates") if config.values.get("compress_rates") is not None else config
    decoder = config.over({"intermediate_size": ffn, "num_key_value_heads": 1})
    facts = build_decoder_facts(decoder, head_dim=head)
    shared = ffn * config.size("n_shared_experts", 1)
    return add_expert_facts(facts, count_experts(config, "n_routed_experts"), ffn, shared=shared).extend_dims(
        dims={
            "heads": LogicalDim(heads, heads // groups, "tp", noun="groups of attention heads"),
            "q": LogicalDim(heads * head, heads // groups * head, "tp", noun="groups of attention heads"),
            "o_rank": LogicalDim(groups * rank, rank, "tp", noun="groups of attention heads"),
            "group": LogicalDim(heads * head // groups),
            "q_rank": LogicalDim(config.size("q_lora_rank", 1024)),
            "shared_kv": LogicalDim(head),
            "rate": LogicalDim(rates.size(_SPARSE, config.size("compress_rate_csa", 4))),
            "dense_rate": LogicalDim(rates.size(_DENSE, config.size("compress_rate_hca", 128))),
            "index": LogicalDim(index),
            "index_q": LogicalDim(index_heads * index),
            "index_heads": LogicalDim(index_heads),
            "chosen": LogicalDim(config.size("index_topk", 512)),
            "count": LogicalDim(streams),
            "mixes": LogicalDim((2 + streams) * streams),
            "rounds": LogicalDim(config.size("hc_sinkhorn_iters", 20)),
            "rope": LogicalDim(config.size("qk_rope_head_dim", head // 8)),
            "streams": LogicalDim(streams * hidden),
            "tokens": LogicalDim(config.size("vocab_size")),
            "targets": LogicalDim(config.size("num_experts_per_tok", 6)),
        },
        indices={"next": RowIndex(range(config.count("num_nextn_predict_layers", 1)))},
        flags={
            "choosing": frozenset(n for n in range(layers) if kinds[n] == _SPARSE),
            "compressing": frozenset(n for n in range(layers) if kinds[n] == _DENSE),
            "hashed": _list_hashed_layers(config),
        },
    )


def _list_kinds(config: ModelConfig) -> list[object]:
    """What attention each layer has; older configs give the rates of its compressor, those that predict included."""
    layers = config.size("num_hidden_layers")
    kinds, rates = config.entries("layer_types"), config.entries("compress_ratios")
    if kinds is None and rates is None:
        return [_SPARSE if n > 1 and n % 2 else _DENSE for n in range(layers)]
    said = kinds if kinds is not None else [_LAYER_TYPES_BY_COMPRESSION.get(rate, rate) for rate in rates or ()]
    if len(said) < layers or not set(_LAYER_TYPES_BY_COMPRESSION.values()).issuperset(said):
        key, value = ("layer_types", kinds) if kinds is not None else ("compress_ratios", rates)
        raise SourceError(f"config.json has {key} = {value!r} where {layers} kinds of attention are expected")
    return said[:layers]


def _list_hashed_layers(config: ModelConfig) -> frozenset[int]:
    """The layers that look a token's experts up in a table."""
    layers, kinds = config.size("num_hidden_layers"), config.entries("mlp_layer_types")
    if kinds is None:
        return frozenset(range(min(layers, config.count("num_hash_layers", _DEFAULT_HASH_LAYER_COUNT))))
    if len(kinds) < layers or not {"hash_moe", "moe"}.issuperset(kinds):
        raise SourceError(f"config.json has mlp_layer_types = {kinds!r} where {layers} kinds of layers are expected")
    return frozenset(n for n in range(layers) if kinds[n] == "hash_moe")


_EXTRA_SAVED_ACTIVATIONS: Final = (
    *list_mixed_streams(experts=""),
    FurtherTensor(
        "fp32 copies of compressed queries, those normed, and the input of what they go through",
        dims="q_rank",
        width=10,
    ),
    FurtherTensor("queries that are normed, also in fp32", dims="q", width=6),
    FurtherTensor("statistics of their norms, also cast", "rows", width=6),
    FurtherTensor("fp32 copies of keys and values, also normed", dims="shared_kv", width=8),
    FurtherTensor("statistics of the norms of compressed queries, and of keys and values", width=8),
    FurtherTensor("what fp32 scores of sinks have more", "rows", width=2),
    FurtherTensor("input of the last matrix of attention", dims="o_rank"),
    FurtherTensor("gate and up of shared experts within their bounds", "intermediate", width=4),
    *(
        FurtherTensor("shares of tokens in their vector, in fp32 and cast", "compressed", dims, width, when)
        for dims, width, when in (("rate shared_kv", 16, "choosing"), ("dense_rate shared_kv", 6, "compressing"))
    ),
    FurtherTensor("tokens of all vectors", dims="shared_kv", when="compressing"),
    FurtherTensor("fp32 copies of vectors of several tokens, also normed", "compressed", dims="shared_kv", width=8),
    FurtherTensor("statistics of their norm", "compressed", width=4),
    FurtherTensor("sines and cosines of their positions", "compressed", dims="rope", width=4),
)
DEEPSEEK_V4: Final = Family(
    name="deepseek_v4",
    rows=(
        *EMBEDDING,
        *_ATTENTION_ROWS,
        *_COMPRESSOR_ROWS,
        _ROUTER_ROW,
        *add_condition((_CORRECTION_BIAS_ROW,), "!hashed"),
        Row(f"{LAYER}.mlp.gate.tid2eid", "tokens targets", when="hashed", dtype="I64"),
        *_EXPERT_ROWS,
        *_NORM_AND_STREAM_ROWS,
        Row(".norm.weight", "hidden", on="last", dtype="F32"),
        Row(".hc_head.hc_fn", "count streams", on="last", dtype="F32"),
        Row(".hc_head.hc_base", "count", on="last", dtype="F32"),
        Row(".hc_head.hc_scale", "1", on="last", dtype="F32"),
        *HEADS,
        *_MTP_LAYER_ROWS,
    ),
    facts=_build_facts,
    classes={"DeepseekV4ForCausalLM": ModelClass("model", "lm"), "DeepseekV4Model": ModelClass()},
    prefixes=("model",),
    legacy=_LEGACY_NAME_PATTERNS,
    fused=build_fused_experts("mlp", ("w1", "w3", "w2")),
    aliases={
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "intermediate_size": "moe_intermediate_size",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    assumed={
        "vocab_size": 129280,
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
    },
    traits=LayerFeatures(
        unfused=True,
        shifted_scores=True,
        expert_steps=2,
        further=_EXTRA_SAVED_ACTIVATIONS,
        activation=("hidden_act", "silu"),
        norm="rms32",
        window=WindowRule(128),
        experts_per_token=6,
        narrow_experts=True,
    ),
)
