"""Mixtral and Phi-3.5-MoE, whose experts are `block_sparse_moe.experts.N` with w1 (gate), w2 (down) and w3 (up).

Names and shapes follow the Hub; transformers 5 says `mlp` (`models/mixtral/modeling_mixtral.py`,
`models/phimoe/modeling_phimoe.py`, and `mixtral` and `phimoe` in `conversion_mapping.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.decoder import (
    BIASED_LAST_NORM,
    BIASED_NORMS,
    EMBEDDING,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    decoder_classes,
    decoder_facts,
)
from shardctl.models.experts import expert_count, experts, fused_experts, with_experts
from shardctl.models.family import Family, Fused, ModelClass, Row
from shardctl.models.layer_traits import LayerTraits
from shardctl.models.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.config import Config
    from shardctl.models.family import Facts

_NAMES: Final = ("w1", "w3", "w2")
_MODULE: Final = "block_sparse_moe"
_ROUTER: Final = f"{LAYER}.{_MODULE}.gate.weight"
_MOE: Final = (Row(_ROUTER, "experts hidden"), *experts(_MODULE, _NAMES))
_FUSED: Final = fused_experts(_MODULE, _NAMES, within="mlp")


def _with_experts(facts: Facts, config: Config) -> Facts:
    return with_experts(facts, expert_count(config, "num_local_experts"), config.size("intermediate_size"))


def _mixtral(config: Config) -> Facts:
    return _with_experts(decoder_facts(config, kv_heads=8), config)


def _phimoe(config: Config) -> Facts:
    bias = config.switch("attention_bias", default=False)
    facts = decoder_facts(config, kv_heads=8, qkv_bias=bias, o_bias=bias)
    head = config.switch("lm_head_bias", default=False)
    return _with_experts(facts, config).also(flags={"sequential": True, "head_bias": head})


MIXTRAL: Final = Family(
    name="mixtral",
    rows=(*EMBEDDING, *QKVO, *_MOE, *NORMS, *LAST_NORM, *HEADS),
    facts=_mixtral,
    classes=decoder_classes("Mixtral"),
    prefixes=("model",),
    fused=(Fused(f"{LAYER}.mlp.gate.weight", (_ROUTER,)), *_FUSED),
    traits=LayerTraits(activation=("hidden_act", "silu"), norm="rms", window=WindowRule(None), experts_per_token=2),
)
PHIMOE: Final = Family(
    name="phimoe",
    rows=(
        *EMBEDDING,
        *QKVO,
        *_MOE,
        *BIASED_NORMS,
        *BIASED_LAST_NORM,
        *HEADS,
        Row("lm_head.bias", "vocab", when="lm head_bias", on="last"),
    ),
    facts=_phimoe,
    classes={
        "PhimoeForCausalLM": ModelClass("model", "lm"),
        "PhimoeModel": ModelClass(),
        "PhimoeForSequenceClassification": ModelClass("model", "score"),
    },
    prefixes=("model",),
    renamed={"PhiMoEForCausalLM": "PhimoeForCausalLM"},
    fused=(Fused(f"{LAYER}.mlp.router.weight", (_ROUTER,)), *_FUSED),
    traits=LayerTraits(
        activation=("hidden_act", "silu"), window=WindowRule(None), experts_per_token=2, narrow_experts=True
    ),
)
