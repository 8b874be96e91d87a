"""Describes MiMo, which is Qwen2 and predicts further tokens, and MiMo-V2, whose layers have two kinds of attention.

transformers lacks MiMo; its layers are Qwen2's, and those that predict are as in vLLM's `mimo_mtp.py`. Names and shapes
of MiMo-V2 follow transformers 5 (`models/mimo_v2_flash/modeling_mimo_v2_flash.py`): where a layer sees a window, it has
twice the key/value heads, and a sink for each head; values are narrower than keys. Its files have layers besides that
predict (vLLM, `mimo_v2_mtp.py`), which transformers leaves out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.models.tables.decoder import (
    EMBEDDING,
    GATED,
    HEADS,
    LAST_NORM,
    LAYER,
    NORMS,
    QKVO,
    assume_sizes,
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
    count_experts,
    list_sparse_layers,
)
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims


_LAYER_ROWS: Final = tuple(row for row in (*QKVO, *GATED, *NORMS) if row.when in ("", "qkv_bias"))
_MTP_LAYER_PREFIX: Final = ".mtp_layers.{next}"
_MTP_EXTRA_TENSORS: Final = {"token_layernorm": "hidden", "hidden_layernorm": "hidden", "final_layernorm": "hidden"}


def _build_facts(config: ModelConfig) -> ModelDims:
    following = config.count("num_nextn_predict_layers", 1)
    facts = build_decoder_facts(config, qkv_bias=config.read_flag("attention_bias", default=True))
    return facts.extend_dims(indices={"next": RowIndex(range(following))})


MIMO: Final = Family(
    name="mimo",
    rows=(
        *EMBEDDING,
        *_LAYER_ROWS,
        *LAST_NORM,
        *HEADS,
        *build_predicting_rows(_LAYER_ROWS, _MTP_LAYER_PREFIX, ""),
        *build_predicting_ends(_MTP_LAYER_PREFIX, {**_MTP_EXTRA_TENSORS, "input_proj": "hidden hidden+hidden"}),
    ),
    facts=_build_facts,
    classes={"MiMoForCausalLM": ModelClass("model", "lm")},
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"), norm="rms", window=WindowRule(4096, "last", start=28, switched=True)
    ),
)


def _build_attention(keys: str, values: str) -> tuple[Row, ...]:
    """Return the projections to keys and values of those dims."""
    return tuple(
        row
        for name, dims in (("k_proj", keys), ("v_proj", values))
        for row in (
            Row(f"{LAYER}.self_attn.{name}.weight", f"{dims} hidden"),
            Row(f"{LAYER}.self_attn.{name}.bias", dims, when="qkv_bias"),
        )
    )


_SLIDING_WINDOW_ROWS: Final = _build_attention("window_kv", "window_values")
_ATTENTION_SINKS_ROW: Final = Row(f"{LAYER}.self_attn.sinks", "heads")
_QUERY_ROWS: Final = (
    Row(f"{LAYER}.self_attn.q_proj.weight", "q hidden"),
    Row(f"{LAYER}.self_attn.q_proj.bias", "q", when="qkv_bias"),
)
_OUTPUT_PROJECTION_ROW: Final = Row(f"{LAYER}.self_attn.o_proj.weight", "hidden vs")
_V2_NEXT: Final = ".mtp.layers.{next}"
_MTP_LAYER_ROWS: Final = (
    *_QUERY_ROWS,
    *_SLIDING_WINDOW_ROWS,
    _OUTPUT_PROJECTION_ROW,
    _ATTENTION_SINKS_ROW,
    *(row for row in GATED if not row.when),
    NORMS[0],
)


def _build_v2_facts(config: ModelConfig) -> ModelDims:
    heads, groups = config.size("num_attention_heads"), config.size("num_key_value_heads")
    head, value = config.size("head_dim", 192), config.size("v_head_dim", 128)
    more = config.size("swa_num_key_value_heads", 2 * groups)
    noun = "key/value heads"
    facts = build_decoder_facts(config, head_dim=head, qkv_bias=config.read_flag("attention_bias", default=False))
    ffn = config.size("moe_intermediate_size")
    return add_expert_facts(
        facts, count_experts(config, "n_routed_experts"), ffn, moe=list_sparse_layers(config, 1)
    ).extend_dims(
        dims={
            "heads": LogicalDim(heads, axis="tp", noun="attention heads"),
            "vs": LogicalDim(heads * value, value, "tp", noun="attention heads"),
            "values": LogicalDim(groups * value, value, "tp", shared=True, noun=noun),
            "window_kv": LogicalDim(more * head, head, "tp", shared=True, noun=noun),
            "window_values": LogicalDim(more * value, value, "tp", shared=True, noun=noun),
        },
        indices={"next": RowIndex(range(config.count("num_nextn_predict_layers", 3)))},
        flags={"windowed": _list_windowed_layers(config)},
    )


def _list_windowed_layers(config: ModelConfig) -> frozenset[int]:
    """List the layers that see a window; raises UnsupportedError where the Hub's key and transformers' rule differ."""
    layers, kinds = config.size("num_hidden_layers"), config.values.get("layer_types")
    if isinstance(kinds, list):
        return frozenset(n for n, kind in enumerate(kinds) if kind == "sliding_attention")
    found = frozenset(n for n in range(1, layers) if (n + 1) % _FULL_ATTENTION_PERIOD)
    marks = config.values.get("hybrid_layer_pattern")
    if isinstance(marks, list) and frozenset(n for n, mark in enumerate(marks) if mark) != found:
        raise UnsupportedError(
            f"config.json has hybrid_layer_pattern = {marks!r}, where all layers but the first and every "
            f"{_FULL_ATTENTION_PERIOD}th are expected to have a window",
            hint="say in layer_types which layers do",
        )
    return found


_FULL_ATTENTION_PERIOD: Final = 6
MIMO_V2_FLASH: Final = Family(
    name="mimo_v2_flash",
    rows=(
        *EMBEDDING,
        *add_condition((_ATTENTION_SINKS_ROW,), "windowed"),
        *_QUERY_ROWS,
        *(
            row
            for whole, part in zip(_build_attention("kv", "values"), _SLIDING_WINDOW_ROWS, strict=True)
            for row in (*add_condition((whole,), "!windowed"), *add_condition((part,), "windowed"))
        ),
        _OUTPUT_PROJECTION_ROW,
        *DENSE,
        *build_expert_rows(),
        ROUTER,
        BALANCE,
        *NORMS,
        *LAST_NORM,
        *HEADS,
        *build_predicting_rows(_MTP_LAYER_ROWS, _V2_NEXT, ""),
        *build_predicting_ends(
            _V2_NEXT,
            {
                "enorm": "hidden",
                "hnorm": "hidden",
                "eh_proj": "hidden hidden+hidden",
                "pre_mlp_layernorm": "hidden",
                "final_layernorm": "hidden",
            },
        ),
    ),
    facts=_build_v2_facts,
    classes={"MiMoV2FlashForCausalLM": ModelClass("model", "lm"), "MiMoV2FlashModel": ModelClass()},
    prefixes=("model",),
    legacy={"attention_sink_bias": "sinks"},
    fused=build_fused_experts(),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        window=WindowRule(129, "all but first and every nth", period=_FULL_ATTENTION_PERIOD),
        experts_per_token=8,
        narrow_softmax=True,
        shifted_scores=True,
        wide_router=True,
    ),
    aliases={"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"},
    assumed={
        **assume_sizes(152576, 4096, 16384, 48, 64),
        "num_key_value_heads": 4,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
    },
)
