"""StableLM: Llama with biased norms, and perhaps a norm for each single head of q and k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.decoder import (
    BIASED_LAST_NORM,
    BIASED_NORMS,
    EMBEDDING,
    GATED,
    HEADS,
    LAYER,
    QKVO,
    decoder_classes,
    decoder_facts,
)
from shardctl.models.family import Family, Index, Row
from shardctl.models.layer_traits import LayerTraits

if TYPE_CHECKING:
    from shardctl.models.config import Config
    from shardctl.models.family import Facts

_KV_HEADS: Final = 32
"""What `StableLmConfig` assumes where a config is silent."""
_STABLELM: Final = (
    *EMBEDDING,
    *QKVO,
    Row(f"{LAYER}.self_attn.q_layernorm.norms.{{q_head}}.weight", "head", when="qk_norm"),
    Row(f"{LAYER}.self_attn.k_layernorm.norms.{{kv_head}}.weight", "head", when="qk_norm"),
    *GATED,
    *BIASED_NORMS,
    *BIASED_LAST_NORM,
    *HEADS,
)
"""A head's norm is a tensor of its own: every tp rank holds those of all heads, a few kilobytes, and uses its own."""


def _facts(config: Config) -> Facts:
    facts = decoder_facts(
        config,
        kv_heads=_KV_HEADS,
        qkv_bias=config.switch("use_qkv_bias", default=False),
        qk_norm=config.switch("qk_layernorm", default=False),
    )
    head = facts.size("head")
    return facts.also(
        indices={"q_head": Index(range(facts.size("q") // head)), "kv_head": Index(range(facts.size("kv") // head))},
        flags={"sequential": not config.switch("use_parallel_residual", default=False)},
    )


STABLELM: Final = Family(
    name="stablelm",
    rows=_STABLELM,
    facts=_facts,
    classes=decoder_classes("StableLm", question=None),
    prefixes=("model",),
    traits=LayerTraits(activation=("hidden_act", "silu"), norm="layer", dropout=("hidden_dropout", 0.0)),
)
