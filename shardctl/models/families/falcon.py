"""Describes Falcon, which fuses q, k and v in three ways: by head, by group, or with one key/value head.

Names and shapes follow transformers 5 (`models/falcon/modeling_falcon.py`, `FalconAttention._split_heads`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import build_decoder_classes, build_head_rows
from shardctl.models.tables.family import Family, LogicalDim, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_FALCON_ROWS: Final = (
    Row(".word_embeddings.weight", "vocab hidden", on="first"),
    Row(".h.{layer}.self_attention.query_key_value.weight", "qkv hidden"),
    Row(".h.{layer}.self_attention.query_key_value.bias", "qkv", when="bias"),
    Row(".h.{layer}.self_attention.dense.weight", "hidden q"),
    Row(".h.{layer}.self_attention.dense.bias", "hidden", when="bias"),
    Row(".h.{layer}.mlp.dense_h_to_4h.weight", "ffn hidden"),
    Row(".h.{layer}.mlp.dense_h_to_4h.bias", "ffn", when="bias"),
    Row(".h.{layer}.mlp.dense_4h_to_h.weight", "hidden ffn"),
    Row(".h.{layer}.mlp.dense_4h_to_h.bias", "hidden", when="bias"),
    Row(".h.{layer}.post_attention_layernorm.weight", "hidden", when="sequential"),
    Row(".h.{layer}.post_attention_layernorm.bias", "hidden", when="sequential"),
    Row(".h.{layer}.input_layernorm.weight", "hidden", when="!two_norms"),
    Row(".h.{layer}.input_layernorm.bias", "hidden", when="!two_norms"),
    Row(".h.{layer}.ln_attn.weight", "hidden", when="two_norms"),
    Row(".h.{layer}.ln_attn.bias", "hidden", when="two_norms"),
    Row(".h.{layer}.ln_mlp.weight", "hidden", when="two_norms"),
    Row(".h.{layer}.ln_mlp.bias", "hidden", when="two_norms"),
    Row(".ln_f.weight", "hidden", on="last"),
    Row(".ln_f.bias", "hidden", on="last"),
    *build_head_rows(".word_embeddings.weight"),
)


def _read_switch(config: ModelConfig, key: str) -> bool:
    """Read a switch that is on where a config is silent, and off where it says null, as `if` reads it in the class."""
    return config.read_flag(key, default=key not in config.values)


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden, queries = config.size("hidden_size"), config.size("num_attention_heads")
    head = config.divided("hidden_size", "num_attention_heads")
    grouped = config.read_flag("new_decoder_architecture", default=False)
    parallel = _read_switch(config, "parallel_attn")
    norms = config.size("num_ln_in_parallel_attn", 2 if grouped else 1)
    q = LogicalDim(hidden, head, "tp", noun="attention heads")
    qkv: LogicalDim | tuple[LogicalDim, ...]
    if grouped:
        # The queries of a group lie with its key and value, so that ranks hold whole groups.
        groups = config.shared_by(queries, "num_kv_heads", queries)
        share = hidden // groups
        q = LogicalDim(hidden, share, "tp", noun="key/value groups")
        qkv = LogicalDim(groups * (share + 2 * head), share + 2 * head, "tp", noun="key/value groups")
    elif _read_switch(config, "multi_query"):
        kv = LogicalDim(head, head, "tp", shared=True, noun="key/value heads")
        qkv = (q, kv, kv)
    else:
        qkv = LogicalDim(3 * hidden, 3 * head, "tp", noun="attention heads")
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "hidden": LogicalDim(hidden),
            "q": q,
            "head": LogicalDim(head),
            "qkv": qkv,
            "ffn": LogicalDim(config.size("ffn_hidden_size", 4 * hidden), axis="tp"),
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers")), layer=0)},
        flags={
            "tied": config.read_flag("tie_word_embeddings", default=True),
            "bias": config.read_flag("bias", default=False),
            "sequential": not parallel,
            "two_norms": parallel and norms == 2,  # noqa: PLR2004 - one for attention, one for the MLP
        },
    )


FALCON: Final = Family(
    name="falcon",
    rows=_FALCON_ROWS,
    facts=_build_facts,
    classes=build_decoder_classes("Falcon", prefix="transformer", tokens="classifier"),
    prefixes=("transformer",),
    traits=LayerFeatures(
        activation=("activation", "gelu"),
        dropout=("hidden_dropout", 0.0),
        side_by_side=("parallel_attn", True),
        narrow_softmax=True,
        copied_keys=("new_decoder_architecture", False),
    ),
    aliases={"n_embed": "hidden_size"},
    assumed={"num_attention_heads": 71, "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32},
)
