"""Describes JetMoE, whose queries and outputs of attention are experts too, and whose keys and values all share.

Names and shapes follow transformers 5 (`models/jetmoe/modeling_jetmoe.py`). tp cuts each expert of attention by heads;
ep divides the experts of the MLP only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import EMBEDDING, HEADS, LAST_NORM, LAYER, NORMS, build_decoder_facts
from shardctl.models.tables.experts import add_expert_facts
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_ATTENTION_PREFIX: Final = f"{LAYER}.self_attention"
_JETMOE_ROWS: Final = (
    *EMBEDDING,
    Row(f"{LAYER}.mlp.bias", "hidden"),
    Row(f"{LAYER}.mlp.input_linear.weight", "expert effn+effn hidden"),
    Row(f"{LAYER}.mlp.output_linear.weight", "expert hidden effn"),
    Row(f"{LAYER}.mlp.router.layer.weight", "experts hidden"),
    *NORMS,
    Row(f"{_ATTENTION_PREFIX}.experts.bias", "hidden"),
    Row(f"{_ATTENTION_PREFIX}.experts.input_linear.weight", "experts expert_q hidden"),
    Row(f"{_ATTENTION_PREFIX}.experts.output_linear.weight", "experts hidden expert_q"),
    Row(f"{_ATTENTION_PREFIX}.experts.router.layer.weight", "experts hidden"),
    Row(f"{_ATTENTION_PREFIX}.kv_proj.weight", "kv+kv hidden"),
    *LAST_NORM,
    *(row for row in HEADS if not row.buffer),
)


def _build_facts(config: ModelConfig) -> ModelDims:
    """Build the facts; an expert of attention has as many heads as there are of keys and values."""
    head, heads = config.size("kv_channels"), config.size("num_key_value_heads")
    one = {"num_attention_heads": heads, "head_dim": head}
    facts = build_decoder_facts(replace(config, values={**config.values, **one}), tied=True)
    return add_expert_facts(facts, config.size("num_local_experts"), config.size("intermediate_size")).extend_dims(
        dims={
            "expert_q": LogicalDim(heads * head, head, "tp", noun="attention heads"),
            "q": LogicalDim(heads * head * config.size("num_experts_per_tok", 2), head),
            "kv": LogicalDim(heads * head, head, "tp", noun="key/value heads"),
        }
    )


JETMOE: Final = Family(
    name="jetmoe",
    rows=_JETMOE_ROWS,
    facts=_build_facts,
    classes={
        "JetMoeForCausalLM": ModelClass("model", "lm"),
        "JetMoeModel": ModelClass(),
        "JetMoeForSequenceClassification": ModelClass("model", "score"),
    },
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("activation_function", "silu"),
        norm="rms",
        experts_per_token=2,
        narrow_experts=True,
        cast_experts=True,
        copied_keys=("", True),
        further=(
            FurtherTensor("tokens of attention's experts, and their results, also weighted", "routed_hidden", width=6),
            FurtherTensor("queries in the order of attention's experts", "queries"),
            FurtherTensor("attention's result in the same", "queries", given=("fused",)),
            FurtherTensor("results of the experts, weighted", "routed_hidden"),
        ),
    ),
    weightless=(Row(f"{_ATTENTION_PREFIX}.queries", "q hidden"),),
    aliases={"head_dim": "kv_channels"},
    assumed={
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 12,
        "num_key_value_heads": 16,
        "kv_channels": 128,
        "intermediate_size": 5632,
        "num_local_experts": 8,
    },
)
