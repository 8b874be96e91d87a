"""Provides the parts of tables that models with latent attention share (multi-head latent attention, DeepSeek-V2).

The projections down to the latents, which all heads share, are whole on every tp rank, and those from the latents up to
the heads are cut by heads, as in DeepSeek's `inference/model.py` and vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import LAYER, build_decoder_facts
from shardctl.models.tables.family import LogicalDim, Row

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

LATENT: Final = (
    Row(f"{LAYER}.self_attn.q_proj.weight", "qs hidden", when="!q_lora"),
    Row(f"{LAYER}.self_attn.q_a_proj.weight", "q_rank hidden", when="q_lora"),
    Row(f"{LAYER}.self_attn.q_a_proj.bias", "q_rank", when="q_lora o_bias"),
    Row(f"{LAYER}.self_attn.q_a_layernorm.weight", "q_rank", when="q_lora"),
    Row(f"{LAYER}.self_attn.q_b_proj.weight", "qs q_rank", when="q_lora"),
    Row(f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight", "kv_rank+rope hidden"),
    Row(f"{LAYER}.self_attn.kv_a_proj_with_mqa.bias", "kv_rank+rope", when="o_bias"),
    Row(f"{LAYER}.self_attn.kv_a_layernorm.weight", "kv_rank"),
    Row(f"{LAYER}.self_attn.kv_b_proj.weight", "kvs kv_rank"),
    Row(f"{LAYER}.self_attn.o_proj.weight", "hidden vs"),
    Row(f"{LAYER}.self_attn.o_proj.bias", "hidden", when="o_bias"),
)
"""Multi-head latent attention; one switch gives biases to all of its projections that have any."""


def build_latent_facts(config: ModelConfig, *, mlp_bias: bool) -> ModelDims:
    """Build the facts of a decoder with latent attention."""
    bias, heads = config.read_flag("attention_bias", default=False), config.size("num_attention_heads")
    rope, nope = config.count("qk_rope_head_dim", 64), config.size("qk_nope_head_dim", 128)
    value = config.size("v_head_dim", 128)
    no_lora = "q_lora_rank" in config.values and config.values["q_lora_rank"] is None
    noun = "attention heads"
    return build_decoder_facts(config, head_dim=nope + rope, o_bias=bias, mlp_bias=mlp_bias).extend_dims(
        dims={
            "qs": LogicalDim(heads * (nope + rope), nope + rope, "tp", noun=noun),
            "kvs": LogicalDim(heads * (nope + value), nope + value, "tp", noun=noun),
            "vs": LogicalDim(heads * value, value, "tp", noun=noun),
            "q_rank": LogicalDim(config.size("q_lora_rank", 1536)),
            "kv_rank": LogicalDim(config.size("kv_lora_rank", 512)),
            "rope": LogicalDim(rope),
        },
        flags={"q_lora": not no_lora},
    )
