"""Describes Mistral Large 4: latent attention to tokens that an indexer chooses, experts, and Pixtral's vision model.

Names and shapes follow transformers 5 (`models/mistral_large4/modeling_mistral_large4.py`); the Hub's names, which
`conversion_mapping.py` lists, are spellings of them. Of the vision model they are those of the Hub, because there the
rows of queries and keys lie in another order, which transformers turns when it reads and writes files. Queries are not
compressed; some layers have no rotary part, and some read the latents that an earlier layer caches.
The layers that predict (`mtp_dspark`) have no public code, and are not known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.families.deepseek_sparse import build_indexer_facts, list_indexer_layers
from shardctl.models.families.vision_towers import PIXTRAL_EYES, build_pixtral_vision_facts
from shardctl.models.submodels.towers import ModelTower, build_tower_classes, build_tower_family
from shardctl.models.tables.decoder import EMBEDDING, HEADS, LAST_NORM, LAYER, NORMS, assume_sizes
from shardctl.models.tables.experts import (
    DENSE,
    ROUTER,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    build_shared_expert_rows,
    count_experts,
    list_sparse_layers,
)
from shardctl.models.tables.family import Family, LogicalDim, Row
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_ATTENTION_PREFIX: Final = f"{LAYER}.self_attn"
_INDEXER_PREFIX: Final = f"{_ATTENTION_PREFIX}.indexer"
_LATENT_ATTENTION_ROWS: Final = (
    Row(f"{_ATTENTION_PREFIX}.kv_a_proj_with_mqa.weight", "kv_rank+rope hidden", "own_kv rotated"),
    Row(f"{_ATTENTION_PREFIX}.kv_a_proj_with_mqa.weight", "kv_rank hidden", "own_kv !rotated"),
    Row(f"{_ATTENTION_PREFIX}.kv_a_proj_with_mqa.bias", "kv_rank+rope", "own_kv rotated o_bias"),
    Row(f"{_ATTENTION_PREFIX}.kv_a_proj_with_mqa.bias", "kv_rank", "own_kv !rotated o_bias"),
    Row(f"{_ATTENTION_PREFIX}.kv_a_layernorm.weight", "kv_rank", "own_kv"),
    Row(f"{_ATTENTION_PREFIX}.kv_b_proj.weight", "kvs kv_rank", "rotated"),
    Row(f"{_ATTENTION_PREFIX}.kv_b_proj.weight", "wide_kvs kv_rank", "!rotated"),
    Row(f"{_ATTENTION_PREFIX}.o_proj.weight", "hidden vs"),
    Row(f"{_ATTENTION_PREFIX}.o_proj.bias", "hidden", "o_bias"),
    Row(f"{_INDEXER_PREFIX}.wq_b.weight", "index_q hidden", "indexer"),
    Row(f"{_INDEXER_PREFIX}.wk.weight", "index hidden", "indexer"),
    Row(f"{_INDEXER_PREFIX}.k_norm.weight", "index", "indexer"),
    Row(f"{_INDEXER_PREFIX}.k_norm.bias", "index", "indexer"),
    Row(f"{_INDEXER_PREFIX}.weights_proj.weight", "index_heads hidden", "indexer"),
    Row(f"{_INDEXER_PREFIX}.q_input_norm.weight", "index_input", "indexer"),
    Row(f"{_INDEXER_PREFIX}.q_input_norm.bias", "index_input", "indexer"),
    Row(f"{_INDEXER_PREFIX}.softmax_scaling.scale", "index_heads", "indexer"),
    Row(f"{_INDEXER_PREFIX}.softmax_scaling.bias", "index_heads", "indexer"),
    Row(f"{_ATTENTION_PREFIX}.q_proj.weight", "qs hidden"),
    Row(f"{_ATTENTION_PREFIX}.softmax_scaling.scale", "heads"),
    Row(f"{_ATTENTION_PREFIX}.softmax_scaling.bias", "heads"),
)
_EXPERT_WEIGHT_NAMES: Final = ("w1", "w3", "w2")


def _build_facts(config: ModelConfig) -> ModelDims:
    layers, heads = config.size("num_hidden_layers"), config.size("num_attention_heads")
    facts = build_indexer_facts(config.over({"qk_nope_head_dim": 64}), heads=32, indexer=list_indexer_layers(config))
    rotated, ffn = _list_rotated_layers(config, layers), config.size("moe_intermediate_size")
    sources = config.entries("kv_source_layers") or range(layers)
    head = facts.dims["kvs"]
    assert isinstance(head, LogicalDim)  # noqa: S101 - for the type checker: one dim
    wide = head.unit + facts.size("rope")
    return add_expert_facts(
        facts,
        count_experts(config, "n_routed_experts"),
        ffn,
        moe=list_sparse_layers(config, 1),
        shared=ffn * config.size("n_shared_experts", 1),
    ).extend_dims(
        dims={
            "heads": LogicalDim(heads, axis="tp", noun=head.noun),
            "wide_kvs": LogicalDim(heads * wide, wide, "tp", noun=head.noun),
            "index_input": LogicalDim(config.size("hidden_size")),
            "frequencies": LogicalDim(facts.size("rope") // 2),
        },
        flags={"rotated": rotated, "own_kv": frozenset(n for n, source in enumerate(sources) if n == source)},
    )


def _list_rotated_layers(config: ModelConfig, layers: int) -> frozenset[int]:
    """List the layers whose queries and keys have a rotary part; raises SourceError for a list that is too short."""
    said = config.entries("no_rope_layers")
    if said is None:
        period = config.size("no_rope_layer_interval", 4)
        return frozenset(n for n in range(layers) if (n + 1) % period)
    if len(said) < layers:
        raise SourceError(f"config.json has no_rope_layers = {said!r} where {layers} entries are expected")
    return frozenset(n for n in range(layers) if said[n])


_TEXT_FAMILY: Final = Family(
    name="mistral_large4_text",
    rows=(
        *EMBEDDING,
        *_LATENT_ATTENTION_ROWS,
        *DENSE,
        *build_expert_rows(names=_EXPERT_WEIGHT_NAMES),
        replace(ROUTER, dtype="F32"),
        *build_shared_expert_rows("mlp.shared_experts"),
        *NORMS,
        *LAST_NORM,
        Row(".rotary_emb.alpha", "frequencies", on="all", dtype="F32"),
        *(row for row in HEADS if row.when == "lm"),
    ),
    facts=_build_facts,
    classes={},
    prefixes=(),
    fused=build_fused_experts(names=_EXPERT_WEIGHT_NAMES),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        experts_per_token=4,
        logit_cap=("final_logit_softcapping", 30.0),
    ),
    aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
    assumed={
        **assume_sizes(204800, 6144, 24576, 72, 64),
        "moe_intermediate_size": 6144,
        "n_routed_experts": 128,
    },
)
_EYES_ON_THE_HUB: Final = {
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
}


def _rename_eyes(row: Row) -> Row:
    """Return a row of Pixtral's under the name that it has on the Hub."""
    words = [_EYES_ON_THE_HUB.get(word, word) for word in row.name.split(".")]
    return replace(row, name="vision_encoder" + ".".join(words))


def _add_projector_facts(config: ModelConfig, facts: ModelDims) -> ModelDims:
    seen = facts.size("vision_hidden")
    return facts.extend_dims(
        dims={"merged": LogicalDim(seen * config.size("spatial_merge_size", 2) ** 2)},
        flags={"projector_bias": config.read_flag("multimodal_projector_bias", default=False)},
    )


def _build_projector_row(name: str, dims: str, when: str = "") -> Row:
    return Row(f".multi_modal_projector.{name}", dims, when, on="first")


MISTRAL_LARGE4: Final = build_tower_family(
    "mistral_large4",
    build_tower_classes("MistralLarge4"),
    _TEXT_FAMILY,
    (
        ModelTower(
            "vision_config", "vision_encoder", tuple(map(_rename_eyes, PIXTRAL_EYES)), build_pixtral_vision_facts
        ),
        _build_projector_row("norm.weight", "vision_hidden"),
        _build_projector_row("patch_merger.merging_layer.weight", "vision_hidden merged"),
        _build_projector_row("linear_1.weight", "hidden vision_hidden"),
        _build_projector_row("linear_1.bias", "hidden", "projector_bias"),
        _build_projector_row("linear_2.weight", "hidden hidden"),
        _build_projector_row("linear_2.bias", "hidden", "projector_bias"),
    ),
    facts=_add_projector_facts,
    legacy={
        "^tok_embeddings": "language_model.embed_tokens",
        "^lerope": "language_model.rotary_emb",
        "^layers": "language_model.layers",
        "^norm": "language_model.norm",
        "^output": "lm_head",
        "^pre_mm_projector_norm": "multi_modal_projector.norm",
        "^patch_merger": "multi_modal_projector.patch_merger",
        "^vision_language_adapter.w_in": "multi_modal_projector.linear_1",
        "^vision_language_adapter.w_out": "multi_modal_projector.linear_2",
        "attention.wq": "self_attn.q_proj",
        "attention.wo": "self_attn.o_proj",
        "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_a_norm": "self_attn.kv_a_layernorm",
        "attention.wkv_b": "self_attn.kv_b_proj",
        "attention": "self_attn",
        "ssmax_scaling.s": "softmax_scaling.scale",
        "ssmax_scaling.b": "softmax_scaling.bias",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "shared_experts.w1": "mlp.shared_experts.gate_proj",
        "shared_experts.w2": "mlp.shared_experts.down_proj",
        "shared_experts.w3": "mlp.shared_experts.up_proj",
        "gate": "mlp.gate",
        "experts": "mlp.experts",
    },
    hub_modules=("vision_encoder.",),
    assumed={
        "vision_config": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 30, "patch_size": 14}
    },
)
