"""Describes DBRX, which has the experts of a layer one below the other in matrices.

Names and shapes follow transformers 5 (`models/dbrx/modeling_dbrx.py`). tp divides each expert's rows of these
matrices; ep does not divide the experts, for one dim cannot be cut for both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_BLOCK_PREFIX: Final = ".blocks.{layer}"
_ATTENTION_PREFIX: Final = f"{_BLOCK_PREFIX}.norm_attn_norm"
_EXPERTS_PREFIX: Final = f"{_BLOCK_PREFIX}.ffn.experts"
_DBRX_ROWS: Final = (
    Row(".wte.weight", "vocab hidden", on="first"),
    Row(f"{_ATTENTION_PREFIX}.norm_1.weight", "hidden"),
    Row(f"{_ATTENTION_PREFIX}.attn.Wqkv.weight", "q+kv+kv hidden"),
    Row(f"{_ATTENTION_PREFIX}.attn.out_proj.weight", "hidden q"),
    Row(f"{_ATTENTION_PREFIX}.norm_2.weight", "hidden"),
    Row(f"{_BLOCK_PREFIX}.ffn.router.layer.weight", "experts hidden"),
    Row(f"{_EXPERTS_PREFIX}.mlp.w1", "columns hidden"),
    Row(f"{_EXPERTS_PREFIX}.mlp.v1", "columns hidden"),
    Row(f"{_EXPERTS_PREFIX}.mlp.w2", "columns hidden"),
    Row(".norm_f.weight", "hidden", on="last"),
    Row("lm_head.weight", "vocab hidden", "lm", on="last"),
)
_ONE_EXPERT: Final = tuple(Row(f"{_EXPERTS_PREFIX}.{name}", "effn hidden") for name in ("gate", "up", "down"))


def _build_facts(config: ModelConfig) -> ModelDims:
    heads, head = config.size("n_heads"), config.divided("d_model", "n_heads")
    groups = config.part("attn_config").shared_by(heads, "kv_n_heads", 1)
    ffn = config.part("ffn_config")
    count, width = ffn.size("moe_num_experts", 4), ffn.size("ffn_hidden_size", 3584)
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "hidden": LogicalDim(config.size("d_model")),
            "q": LogicalDim(heads * head, head, "tp", noun="attention heads"),
            "kv": LogicalDim(groups * head, head, "tp", shared=True, noun="key/value heads"),
            "experts": LogicalDim(count),
            "columns": (LogicalDim(width, axis="tp", noun="columns of each expert"),) * count,
            "effn": LogicalDim(width),
        },
        indices={"layer": RowIndex(range(config.size("n_layers")), layer=0)},
        flags={"clipped": config.part("attn_config").values.get("clip_qkv") is not None},
    )


_LAYER_FEATURES: Final = LayerFeatures(
    activation=("hidden_act", "silu"),
    norm="layer",
    dropout=("resid_pdrop", 0.0),
    narrow_experts=True,
    rotated_product=True,
    further=(
        FurtherTensor("queries, before their bounds", dims="q", when="clipped"),
        FurtherTensor("keys and values, before their bounds", dims="kv", width=4, when="clipped"),
        FurtherTensor("results of the experts, weighted", "routed_hidden"),
    ),
)


def _read_text(config: ModelConfig) -> tuple[LayerFeatures, ModelConfig]:
    """Return the traits, and the config with what stands in the configs within it under the usual keys."""
    attention, ffn = config.part("attn_config").values, config.part("ffn_config").values
    activation = ffn.get("ffn_act_fn")
    usual = {
        "num_experts_per_tok": ffn.get("moe_top_k", 1),
        "attention_dropout": attention.get("attn_pdrop", 0.0),
        "hidden_act": activation.get("name") if isinstance(activation, dict) else None,
        "max_position_embeddings": config.values.get("max_seq_len"),
    }
    return _LAYER_FEATURES, replace(config, values={**config.values, **usual})


DBRX: Final = Family(
    name="dbrx",
    rows=_DBRX_ROWS,
    facts=_build_facts,
    classes={"DbrxForCausalLM": ModelClass("transformer", "lm"), "DbrxModel": ModelClass()},
    prefixes=("transformer",),
    weightless=_ONE_EXPERT,
    text=_read_text,
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
    },
    assumed={
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 24,
        "vocab_size": 32000,
        "attn_config": {},
        "ffn_config": {},
    },
)
