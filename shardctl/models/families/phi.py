"""Describes Phi 1 and 2, and Phi-3 and Phi-4 with q, k and v fused, and gate and up projection too.

Names and shapes follow transformers 5 (`models/phi/modeling_phi.py`, `models/phi3/modeling_phi3.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import (
    EMBEDDING,
    FUSED_GATED,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    assume_sizes,
    build_decoder_classes,
    build_decoder_facts,
)
from shardctl.models.tables.family import Family, Row
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

BIASED_HEAD_NORMS: Final = tuple(
    Row(f"{LAYER}.self_attn.{norm}_layernorm.{part}", "head", when="qk_norm")
    for norm in ("q", "k")
    for part in ("weight", "bias")
)
FINAL_NORM: Final = tuple(Row(f".final_layernorm.{part}", "hidden", on="last") for part in ("weight", "bias"))
_PHI_ROWS: Final = (
    *EMBEDDING,
    Row(f"{LAYER}.self_attn.q_proj.weight", "q hidden"),
    Row(f"{LAYER}.self_attn.q_proj.bias", "q"),
    Row(f"{LAYER}.self_attn.k_proj.weight", "kv hidden"),
    Row(f"{LAYER}.self_attn.k_proj.bias", "kv"),
    Row(f"{LAYER}.self_attn.v_proj.weight", "kv hidden"),
    Row(f"{LAYER}.self_attn.v_proj.bias", "kv"),
    Row(f"{LAYER}.self_attn.dense.weight", "hidden q"),
    Row(f"{LAYER}.self_attn.dense.bias", "hidden"),
    *BIASED_HEAD_NORMS,
    Row(f"{LAYER}.mlp.fc1.weight", "ffn hidden"),
    Row(f"{LAYER}.mlp.fc1.bias", "ffn"),
    Row(f"{LAYER}.mlp.fc2.weight", "hidden ffn"),
    Row(f"{LAYER}.mlp.fc2.bias", "hidden"),
    Row(f"{LAYER}.input_layernorm.weight", "hidden"),
    Row(f"{LAYER}.input_layernorm.bias", "hidden"),
    *FINAL_NORM,
    Row("lm_head.weight", "vocab hidden", when="lm", on="last", tie=".embed_tokens.weight"),
    Row("lm_head.bias", "vocab", when="lm", on="last"),
    Row("score.weight", "labels hidden", when="score", on="last"),
    Row("score.bias", "labels", when="score_bias", on="last"),
)
_PHI3_ROWS: Final = (
    *EMBEDDING,
    Row(f"{LAYER}.self_attn.o_proj.weight", "hidden q"),
    Row(f"{LAYER}.self_attn.qkv_proj.weight", "q+kv+kv hidden"),
    *FUSED_GATED,
    *NORMS,
    *LAST_NORM,
    *HEADS,
)


def _build_phi_facts(config: ModelConfig) -> ModelDims:
    return build_decoder_facts(config, qk_norm=config.read_flag("qk_layernorm", default=False))


PHI: Final = Family(
    name="phi",
    rows=_PHI_ROWS,
    facts=_build_phi_facts,
    classes=build_decoder_classes("Phi", question=None),
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_act", "gelu_new"),
        dropout=("resid_pdrop", 0.0),
        side_by_side=("", True),
        joined_queries=True,
    ),
    assumed=assume_sizes(51200, 2048, 8192, 24, 32),
)
PHI3: Final = Family(
    name="phi3",
    rows=_PHI3_ROWS,
    facts=build_decoder_facts,
    classes=build_decoder_classes("Phi3", question=None),
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        dropout=("resid_pdrop", 0.0),
        window=WindowRule(None),
        rotated_product=True,
        joined_queries=True,
    ),
    assumed=assume_sizes(32064, 3072, 8192, 32, 32),
    outer_classes=("Phi4MMForCausalLM", "Phi4MultimodalForCausalLM"),
)
