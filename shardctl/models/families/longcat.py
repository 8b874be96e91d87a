"""Describes LongCat-Flash: each layer has latent attention and an MLP twice, and experts once, across both.

Names and shapes follow transformers 5 (`models/longcat_flash/modeling_longcat_flash.py`). Beyond the routed experts
there are idle ones, which give a token back as it is: routers choose among all of them. transformers has gate and up
projections for idle ones, too, which nothing reads, and saves them; other files need not have them. The layer that
predicts, `mtp`, is on the Hub only (vLLM, `longcat_flash_mtp.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import EMBEDDING, GATED, HEADS, LAST_NORM, LAYER
from shardctl.models.tables.experts import add_expert_facts, build_expert_rows, build_predicting_rows, count_experts
from shardctl.models.tables.family import Family, FusedArray, LogicalDim, ModelClass, Row, RowIndex
from shardctl.models.tables.latent_attention import LATENT, build_latent_facts
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_EXPERTS_PREFIX: Final = f"{LAYER}.mlp.experts"
_MLP_ROWS: Final = tuple(row for row in GATED if not row.when)
_MTP_LAYER_PREFIX: Final = ".mtp.layers.{next}"


def _build_twice(rows: tuple[Row, ...], module: str, list_module: str, index: str) -> tuple[Row, ...]:
    """Build the rows of a list of two modules from those of the one `module`; `index` counts the two."""
    return tuple(
        replace(row, name=row.name.replace(f"{LAYER}.{module}", f"{LAYER}.{list_module}.{{{index}}}")) for row in rows
    )


_LATENT_ATTENTION_ROWS: Final = tuple(row for row in LATENT if row.when != "!q_lora")
_FIRST_NORM: Final = (Row(f"{LAYER}.input_layernorm.weight", "hidden"),)
_SECOND_NORM: Final = (Row(f"{LAYER}.post_attention_layernorm.weight", "hidden"),)
_MTP_LAYER_ROWS: Final = tuple(
    replace(row, name=row.name.replace(f"{_MTP_LAYER_PREFIX}.mlp", f"{_MTP_LAYER_PREFIX}.transformer_layer.mlp"))
    for row in build_predicting_rows(
        (*_LATENT_ATTENTION_ROWS, *_MLP_ROWS, *_FIRST_NORM, *_SECOND_NORM), _MTP_LAYER_PREFIX, ""
    )
)


def _build_facts(config: ModelConfig) -> ModelDims:
    routed = count_experts(config, "n_routed_experts")
    idle, ffn = config.count("zero_expert_num", 256), config.size("moe_intermediate_size")
    facts = build_latent_facts(config.alias_keys({"num_layers": "num_hidden_layers"}), mlp_bias=False)
    both = RowIndex(range(2))
    return add_expert_facts(facts, routed, ffn).extend_dims(
        dims={"experts": LogicalDim(routed + idle)},
        indices={
            **dict.fromkeys(("attention", "half", "before", "behind"), both),
            "idle": RowIndex(range(routed, routed + idle), axis="ep"),
            "any_expert": RowIndex(range(routed + idle)),
            "next": RowIndex(range(config.count("num_nextn_predict_layers", 1))),
        },
        flags={"router_bias": config.read_flag("router_bias", default=False)},
    )


_GATE, _UP, _DOWN = (row.name for row in build_expert_rows())
LONGCAT_FLASH: Final = Family(
    name="longcat_flash",
    rows=(
        *EMBEDDING,
        *build_expert_rows(when=""),
        Row(f"{_EXPERTS_PREFIX}.{{idle}}.gate_proj.weight", "effn hidden", when="idle"),
        Row(f"{_EXPERTS_PREFIX}.{{idle}}.up_proj.weight", "effn hidden", when="idle"),
        Row(f"{LAYER}.mlp.router.e_score_correction_bias", "experts"),
        Row(f"{LAYER}.mlp.router.classifier.weight", "experts hidden"),
        Row(f"{LAYER}.mlp.router.classifier.bias", "experts", when="router_bias"),
        *_build_twice(_LATENT_ATTENTION_ROWS, "self_attn", "self_attn", "attention"),
        *_build_twice(_MLP_ROWS, "mlp", "mlps", "half"),
        *_build_twice(_FIRST_NORM, "input_layernorm", "input_layernorm", "before"),
        *_build_twice(_SECOND_NORM, "post_attention_layernorm", "post_attention_layernorm", "behind"),
        *LAST_NORM,
        *(row for row in HEADS if row.when in ("", "lm")),
        Row(".mtp.embed_tokens.weight", "vocab hidden", on="last", optional=True),
        *_MTP_LAYER_ROWS,
        *(
            Row(f".mtp.{name}.weight", dims, on="last", optional=True)
            for name, dims in (
                ("layers.{next}.eh_proj", "hidden hidden+hidden"),
                ("layers.{next}.enorm.m", "hidden"),
                ("layers.{next}.hnorm.m", "hidden"),
                ("norm", "hidden"),
            )
        ),
    ),
    facts=_build_facts,
    classes={"LongcatFlashForCausalLM": ModelClass("model", "lm idle?"), "LongcatFlashModel": ModelClass("", "idle?")},
    prefixes=("model",),
    fused=(
        FusedArray(
            f"{_EXPERTS_PREFIX}.gate_up_proj",
            (_GATE.replace("expert}", "any_expert}"), _UP.replace("expert}", "any_expert}")),
        ),
        FusedArray(f"{_EXPERTS_PREFIX}.down_proj", (_DOWN,)),
    ),
    traits=LayerFeatures(
        activation=("hidden_act", "silu"),
        norm="rms",
        experts_per_token=12,
        wide_router=True,
        further=(
            FurtherTensor("results of the experts, weighted", "routed_hidden"),
            FurtherTensor("tokens of idle experts, also weighted", "idle_hidden", width=4),
        ),
    ),
    aliases={
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "moe_topk": "num_experts_per_tok",
        "ffn_hidden_size": "intermediate_size",
        "expert_ffn_hidden_size": "moe_intermediate_size",
    },
    assumed={
        "vocab_size": 131072,
        "hidden_size": 6144,
        "num_layers": 28,
        "num_attention_heads": 64,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 512,
    },
)
