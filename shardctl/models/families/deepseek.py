"""Describes DeepSeek-V2 and V3 (latent attention) and GLM-4.5: shared and routed experts after dense layers.

Names and shapes follow the Hub (`models/deepseek_v3/modeling_deepseek_v3.py`, and its namesakes `deepseek_v2` and
`glm4_moe`). The projections down to the latents, which all heads share, are whole on every tp rank, and those from the
latents up to the heads are cut by heads, as in DeepSeek's `inference/model.py` and vLLM. V3 and GLM-4.5 have layers
after the last that predict further tokens; the Hub has them, and transformers leaves them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.decoder import (
    EMBEDDING,
    GATED,
    HEAD_NORMS,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    build_decoder_facts,
)
from shardctl.models.experts import (
    DENSE,
    add_condition,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    build_predicting_rows,
    build_shared_expert_rows,
    count_experts,
)
from shardctl.models.family import Family, LogicalDim, ModelClass, Row, RowIndex
from shardctl.models.layer_traits import LayerTraits

if TYPE_CHECKING:
    from shardctl.models.config import ModelConfig
    from shardctl.models.family import FamilyFacts

_MLA: Final = (
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
_ROUTER: Final = Row(f"{LAYER}.mlp.gate.weight", "experts hidden", when="moe")
_BALANCE: Final = Row(f"{LAYER}.mlp.gate.e_score_correction_bias", "experts", when="moe", dtype="F32")
"""In fp32 in the checkpoints and, whatever the model's type, in transformers (`_keep_in_fp32_modules_strict`)."""
_SHARED: Final = build_shared_expert_rows("mlp.shared_experts")
_SHARED_BIASES: Final = (
    Row(f"{LAYER}.mlp.shared_experts.gate_proj.bias", "sffn", when="moe mlp_bias"),
    Row(f"{LAYER}.mlp.shared_experts.up_proj.bias", "sffn", when="moe mlp_bias"),
    Row(f"{LAYER}.mlp.shared_experts.down_proj.bias", "hidden", when="moe mlp_bias"),
)
_MOE: Final = (*DENSE, *build_expert_rows(), _ROUTER, _BALANCE, *_SHARED)
_V3_LAYER: Final = (*_MLA, *_MOE, *NORMS)
_GLM_LAYER: Final = (*QKVO, *HEAD_NORMS, *_MOE, *NORMS)
_NEXT: Final = ".layers.{next}"
_NEXT_ENDS: Final = (
    Row(f"{_NEXT}.embed_tokens.weight", "vocab hidden", on="last", optional=True),
    Row(f"{_NEXT}.enorm.weight", "hidden", on="last", optional=True),
    Row(f"{_NEXT}.hnorm.weight", "hidden", on="last", optional=True),
    Row(f"{_NEXT}.eh_proj.weight", "hidden hidden+hidden", on="last", optional=True),
    Row(f"{_NEXT}.shared_head.norm.weight", "hidden", on="last", optional=True),
    Row(f"{_NEXT}.shared_head.head.weight", "vocab hidden", on="last", optional=True),
)
"""What a layer that predicts has besides: its own embedding and head, and what joins the two streams."""


def _build_model_rows(layer: tuple[Row, ...]) -> tuple[Row, ...]:
    return (*EMBEDDING, *layer, *LAST_NORM, *HEADS, *build_predicting_rows(layer, _NEXT, "moe shared"), *_NEXT_ENDS)


def _add_expert_facts(facts: FamilyFacts, config: ModelConfig, *, dense: int, following: int) -> FamilyFacts:
    """`facts`, and those of experts after the first `dense` layers and of `following` layers that predict."""
    layers, ffn = config.size("num_hidden_layers"), config.size("moe_intermediate_size")
    return add_expert_facts(
        facts,
        count_experts(config, "n_routed_experts", "num_local_experts"),
        ffn,
        moe=range(config.count("first_k_dense_replace", dense), layers),
        shared=ffn * config.size("n_shared_experts"),
    ).also(indices={"next": RowIndex(range(layers, layers + config.count("num_nextn_predict_layers", following)))})


def _build_latent_facts(config: ModelConfig, *, mlp_bias: bool) -> FamilyFacts:
    """The facts of a decoder with latent attention."""
    bias, heads = config.switch("attention_bias", default=False), config.size("num_attention_heads")
    rope, nope = config.size("qk_rope_head_dim", 64), config.size("qk_nope_head_dim", 128)
    value = config.size("v_head_dim", 128)
    no_lora = "q_lora_rank" in config.values and config.values["q_lora_rank"] is None
    noun = "attention heads"
    return build_decoder_facts(config, head_dim=nope + rope, o_bias=bias, mlp_bias=mlp_bias).also(
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


def _build_v2_facts(config: ModelConfig) -> FamilyFacts:
    facts = _build_latent_facts(config, mlp_bias=config.switch("mlp_bias", default=False))
    return _add_expert_facts(facts, config, dense=0, following=0)


def _build_v3_facts(config: ModelConfig) -> FamilyFacts:
    return _add_expert_facts(_build_latent_facts(config, mlp_bias=False), config, dense=3, following=1)


def _build_glm4_moe_facts(config: ModelConfig) -> FamilyFacts:
    facts = build_decoder_facts(
        config,
        kv_heads=8,
        qkv_bias=config.switch("attention_bias", default=False),
        qk_norm=config.switch("use_qk_norm", default=False),
    )
    return _add_expert_facts(facts, config, dense=1, following=1)


DEEPSEEK_V2: Final = Family(
    name="deepseek_v2",
    rows=(
        *EMBEDDING,
        *_MLA,
        *add_condition(GATED, "!moe"),
        *build_expert_rows(),
        _ROUTER,
        *(row for pair in zip(_SHARED, _SHARED_BIASES, strict=True) for row in pair),
        *NORMS,
        *LAST_NORM,
        *HEADS,
    ),
    facts=_build_v2_facts,
    classes={
        "DeepseekV2ForCausalLM": ModelClass("model", "lm"),
        "DeepseekV2Model": ModelClass(),
        "DeepseekV2ForSequenceClassification": ModelClass("model", "score"),
    },
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerTraits(activation=("hidden_act", "silu"), norm="rms"),
)
DEEPSEEK_V3: Final = Family(
    name="deepseek_v3",
    rows=_build_model_rows(_V3_LAYER),
    facts=_build_v3_facts,
    classes={
        "DeepseekV3ForCausalLM": ModelClass("model", "lm"),
        "DeepseekV3Model": ModelClass(),
        "DeepseekV3ForSequenceClassification": ModelClass("model", "score"),
        "DeepseekV3ForTokenClassification": ModelClass("model", "score score_bias"),
    },
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerTraits(activation=("hidden_act", "silu"), norm="rms", experts_per_token=8),
)
GLM4_MOE: Final = Family(
    name="glm4_moe",
    rows=_build_model_rows(_GLM_LAYER),
    facts=_build_glm4_moe_facts,
    classes={"Glm4MoeForCausalLM": ModelClass("model", "lm"), "Glm4MoeModel": ModelClass()},
    prefixes=("model",),
    fused=build_fused_experts(),
    traits=LayerTraits(activation=("hidden_act", "silu"), norm="rms", experts_per_token=8),
)
