"""Describes Granite-MoE, whose experts the Hub already has in one array, and its variant with shared experts.

Names and shapes follow the Hub; transformers 5 renames the arrays (`models/granitemoe/modeling_granitemoe.py`,
`models/granitemoeshared/`, and `granitemoe` in `conversion_mapping.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import (
    EMBEDDING,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    assume_sizes,
    build_decoder_facts,
)
from shardctl.models.tables.experts import add_expert_facts, count_experts
from shardctl.models.tables.family import Family, FusedArray, ModelClass, Row
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_MOE_PREFIX: Final = f"{LAYER}.block_sparse_moe"
MOE: Final = (
    Row(f"{_MOE_PREFIX}.router.layer.weight", "experts hidden"),
    Row(f"{_MOE_PREFIX}.input_linear.weight", "expert effn+effn hidden"),
    Row(f"{_MOE_PREFIX}.output_linear.weight", "expert hidden effn"),
)
SHARED: Final = (
    Row(f"{LAYER}.shared_mlp.input_linear.weight", "sffn+sffn hidden", when="shared"),
    Row(f"{LAYER}.shared_mlp.output_linear.weight", "hidden sffn", when="shared"),
)
FUSED: Final = (
    FusedArray(f"{_MOE_PREFIX}.router.weight", (f"{_MOE_PREFIX}.router.layer.weight",)),
    FusedArray(f"{_MOE_PREFIX}.experts.gate_up_proj", (f"{_MOE_PREFIX}.input_linear.weight",)),
    FusedArray(f"{_MOE_PREFIX}.experts.down_proj", (f"{_MOE_PREFIX}.output_linear.weight",)),
)


def _build_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    return add_expert_facts(
        build_decoder_facts(config, qkv_bias=bias, o_bias=bias),
        count_experts(config, "num_local_experts"),
        config.size("intermediate_size"),
        shared=config.count("shared_intermediate_size", 0) or None,
    )


_LAYER_FEATURES: Final = LayerFeatures(
    activation=("hidden_act", "silu"), norm="rms", experts_per_token=2, narrow_experts=True
)
GRANITE_MOE: Final = Family(
    name="granitemoe",
    rows=(*EMBEDDING, *QKVO, *NORMS, *MOE, *LAST_NORM, *HEADS),
    facts=_build_facts,
    classes={"GraniteMoeForCausalLM": ModelClass("model", "lm"), "GraniteMoeModel": ModelClass()},
    prefixes=("model",),
    fused=FUSED,
    traits=_LAYER_FEATURES,
    assumed={**assume_sizes(32000, 4096, 11008, 32, 32), "num_local_experts": 8},
)
GRANITE_MOE_SHARED: Final = Family(
    name="granitemoeshared",
    rows=(*EMBEDDING, *QKVO, *NORMS, *MOE, *SHARED, *LAST_NORM, *HEADS),
    facts=_build_facts,
    classes={"GraniteMoeSharedForCausalLM": ModelClass("model", "lm"), "GraniteMoeSharedModel": ModelClass()},
    prefixes=("model",),
    fused=FUSED,
    traits=_LAYER_FEATURES,
    assumed={**assume_sizes(32000, 4096, 11008, 32, 32), "num_local_experts": 8},
)
