"""Describes Mistral Small 4: latent attention and experts, one of them shared, all stacked on the Hub.

Names and shapes follow transformers 5 (`models/mistral4/modeling_mistral4.py`), but for the experts, which the table
counts one by one, as in DeepSeek-V3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import EMBEDDING, HEADS, LAST_NORM, NORMS, assume_sizes
from shardctl.models.tables.experts import (
    DENSE,
    ROUTER,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    build_shared_expert_rows,
    count_experts,
    list_later_layers,
)
from shardctl.models.tables.family import Family, ModelClass
from shardctl.models.tables.latent_attention import LATENT, build_latent_facts
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims


def _build_facts(config: ModelConfig) -> ModelDims:
    ranks = {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64}
    ffn = config.size("moe_intermediate_size")
    return add_expert_facts(
        build_latent_facts(config.over(ranks), mlp_bias=False),
        count_experts(config, "n_routed_experts"),
        ffn,
        moe=list_later_layers(config, 0),
        shared=ffn * config.size("n_shared_experts", 1),
    )


MISTRAL4: Final = Family(
    name="mistral4",
    rows=(
        *EMBEDDING,
        *LATENT,
        *DENSE,
        *build_expert_rows(),
        ROUTER,
        *build_shared_expert_rows("mlp.shared_experts"),
        *NORMS,
        *LAST_NORM,
        *HEADS,
    ),
    facts=_build_facts,
    classes={
        "Mistral4ForCausalLM": ModelClass("model", "lm"),
        "Mistral4Model": ModelClass(),
        "Mistral4ForSequenceClassification": ModelClass("model", "score"),
        "Mistral4ForTokenClassification": ModelClass("model", "score score_bias"),
    },
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerFeatures(activation=("hidden_act", "silu"), norm="rms", experts_per_token=4, narrow_experts=True),
    aliases={"num_local_experts": "n_routed_experts"},
    assumed={
        **assume_sizes(131072, 4096, 12288, 36, 32),
        "moe_intermediate_size": 2048,
        "n_routed_experts": 128,
    },
)
