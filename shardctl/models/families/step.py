"""Describes the text model of Step-3.5 and 3.7: a gate for each head, windows with other heads, and a router's bias.

Names and shapes follow transformers 5 (`models/step3p7/modeling_step3p7.py`); the Hub's names, which stand in
`conversion_mapping.py`, are spellings of them, and its experts are three stacks of a layer. The layers that predict are
on the Hub only (vLLM, `step3p5_mtp.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models.tables.decoder import (
    EMBEDDING,
    HEAD_NORMS,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    build_decoder_facts,
)
from shardctl.models.tables.experts import (
    BALANCE,
    DENSE,
    ROUTER,
    add_condition,
    add_expert_facts,
    build_expert_rows,
    build_fused_experts,
    build_predicting_ends,
    build_predicting_rows,
    build_shared_expert_rows,
    count_experts,
)
from shardctl.models.tables.family import Family, FusedArray, LogicalDim, ModelClass, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_WINDOWED_ATTENTION_ROWS: Final = (
    *(row for row in QKVO if not row.buffer),
    *HEAD_NORMS,
    Row(f"{LAYER}.self_attn.g_proj.weight", "heads hidden"),
)
_FULL_ATTENTION_DIMS: Final = ("q", "kv", "heads")
_ATTENTION_ROWS: Final = tuple(
    row
    for one in _WINDOWED_ATTENTION_ROWS
    for row in (
        *add_condition((one,), "windowed"),
        *add_condition(
            (replace(one, dims=" ".join(f"full_{d}" if d in _FULL_ATTENTION_DIMS else d for d in one.dims.split())),),
            "!windowed",
        ),
    )
)
_MOE_ROWS: Final = (ROUTER, BALANCE, *build_expert_rows(), *build_shared_expert_rows("mlp.shared_experts"))
_MTP_LAYER_PREFIX: Final = ".layers.{next}"
_EXPERT_PREFIX: Final = f"{LAYER}.mlp.experts.{{expert}}"
_STACKED_EXPERT_ARRAYS: Final = tuple(
    FusedArray(f"{LAYER}.moe.{name}.weight", (f"{_EXPERT_PREFIX}.{name}.weight",), stored=True)
    for name in ("gate_proj", "up_proj", "down_proj")
)
"""The experts of a layer on the Hub."""


def _build_facts(config: ModelConfig) -> ModelDims:
    bias, ffn = config.read_flag("attention_bias", default=False), config.size("moe_intermediate_size")
    whole = build_decoder_facts(config, head_dim=128, kv_heads=8, qkv_bias=bias, o_bias=bias, qk_norm=True)
    windowed = _read_windowed_heads(config)
    layers, noun, head = config.size("num_hidden_layers"), "attention heads", whole.size("head")
    return add_expert_facts(
        whole,
        count_experts(config, "n_routed_experts"),
        ffn,
        moe=_list_expert_layers(config),
        shared=config.size("share_expert_dim", 1280),
    ).extend_dims(
        dims={
            "q": LogicalDim(windowed * head, head, "tp", noun=noun),
            "heads": LogicalDim(windowed, axis="tp", noun=noun),
            "full_q": whole.dims["q"],
            "full_kv": whole.dims["kv"],
            "full_heads": LogicalDim(config.size("num_attention_heads"), axis="tp", noun=noun),
        },
        indices={"next": RowIndex(range(layers, layers + config.count("num_nextn_predict_layers", 0)))},
        flags={
            "windowed": frozenset(
                n for n, kind in enumerate(config.entries("layer_types") or ()) if kind == "sliding_attention"
            )
        },
    )


def _read_windowed_heads(config: ModelConfig) -> int:
    """Read the query heads of layers with a window; raises UnsupportedError where those differ in more than that."""
    usual = config.size("num_attention_heads")
    if not config.values.get("attention_other_setting"):
        return config.size("num_sliding_attention_heads", usual)
    other = config.part("attention_other_setting")
    for key, name, default in (("num_attention_groups", "num_key_value_heads", 8), ("head_dim", "head_dim", 128)):
        if other.values.get(key) is not None and other.size(key) != config.size(name, default):
            raise UnsupportedError(
                f"config.json has {key} = {other.size(key)} in attention_other_setting, which other layers do not have",
                hint="say how such tensors are cut with --rules FILE",
            )
    return config.size("num_sliding_attention_heads", other.size("num_attention_heads", usual))


def _list_expert_layers(config: ModelConfig) -> frozenset[int]:
    """List the layers that have experts, under its present name or that of the Hub; raises SourceError for others."""
    layers = config.size("num_hidden_layers")
    kinds, said = config.entries("mlp_layer_types"), config.values.get("moe_layers_enum")
    if kinds is not None:
        return frozenset(n for n, kind in enumerate(kinds) if kind == "sparse")
    if said is None:
        return frozenset(range(config.count("first_k_dense_replace", 3), layers))
    words = said.split(",") if isinstance(said, str) else said
    if not isinstance(words, list) or not all(isinstance(n, int) or str(n).strip().isdecimal() for n in words):
        raise SourceError(f"config.json has moe_layers_enum = {said!r} where numbers of layers are expected")
    return frozenset(map(int, words))


STEP3P5: Final = Family(
    name="step3p5",
    rows=(
        *EMBEDDING,
        *_ATTENTION_ROWS,
        *DENSE,
        *_MOE_ROWS,
        *NORMS,
        *LAST_NORM,
        *(row for row in HEADS if row.when in ("", "lm")),
        *build_predicting_rows((*_ATTENTION_ROWS, *DENSE, *NORMS), _MTP_LAYER_PREFIX, "!moe"),
        *build_predicting_ends(
            _MTP_LAYER_PREFIX,
            {
                "enorm": "hidden",
                "hnorm": "hidden",
                "eh_proj": "hidden hidden+hidden",
                "shared_head.norm": "hidden",
                "shared_head.head": "vocab hidden",
            },
        ),
    ),
    facts=_build_facts,
    classes={"Step3p5ForCausalLM": ModelClass("model", "lm"), "Step3p7TextModel": ModelClass()},
    prefixes=("model", "model.language_model"),
    renamed={"Step3p7FlashForCausalLM": "Step3p5ForCausalLM"},
    legacy={
        "moe.experts": "mlp.experts",
        "moe.gate": "mlp.gate",
        "moe.router_bias": "mlp.gate.e_score_correction_bias",
        "share_expert": "mlp.shared_experts",
        "transformer.shared_head.output": "shared_head.head",
        "transformer.shared_head": "shared_head",
    },
    fused=(*_STACKED_EXPERT_ARRAYS, *build_fused_experts()),
    traits=LayerFeatures(
        activation=("", "silu"), norm="rms32", window=WindowRule(None, "none"), experts_per_token=8, narrow_experts=True
    ),
    aliases={
        "num_local_experts": "n_routed_experts",
        "moe_num_experts": "n_routed_experts",
        "num_experts": "n_routed_experts",
        "num_attention_groups": "num_key_value_heads",
        "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "share_expert_dim",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    assumed={
        "vocab_size": 128815,
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "moe_intermediate_size": 1280,
        "n_routed_experts": 288,
    },
)
