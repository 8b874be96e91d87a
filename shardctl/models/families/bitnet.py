"""Describes BitNet: Llama's names, and norms of what attention and MLP hand to their last matrix.

Names and shapes follow transformers 5 (`models/bitnet/modeling_bitnet.py`), of weights that are not packed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, Row
from shardctl.models.tables.layer_features import FurtherTensor, LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_OF_HEADS: Final = Row(f"{LAYER}.self_attn.attn_sub_norm.weight", "all_heads")
_OF_MLP: Final = Row(f"{LAYER}.mlp.ffn_sub_norm.weight", "all_ffn")
"""Both norms are over what all tp ranks have together; no engine says how it cuts them, and so they are whole."""


def _build_facts(config: ModelConfig) -> ModelDims:
    bias = config.read_flag("attention_bias", default=False)
    facts = build_decoder_facts(config, qkv_bias=bias, o_bias=bias)
    return facts.extend_dims(
        dims={"all_heads": LogicalDim(facts.size("hidden")), "all_ffn": LogicalDim(facts.size("ffn"))}
    )


_EXTRA_SAVED_ACTIVATIONS: Final = tuple(
    one
    for what, dims in (("attention", "all_heads"), ("the MLP", "all_ffn"))
    for one in (
        FurtherTensor(f"fp32 copy of what {what} hands to its last matrix", dims=dims, width=4),
        FurtherTensor(f"the same normed, before the weight, of {what}", dims=dims, given=("head norms trained",)),
        FurtherTensor(f"statistics of that norm, of {what}", width=4),
    )
)
_OUTPUT_PROJECTION_INPUT: Final = FurtherTensor(
    "input of attention's last matrix, besides its result", dims="all_heads", given=("fused", "output trained")
)
BITNET: Final = Family(
    name="bitnet",
    rows=(*EMBEDDING, *QKVO, _OF_HEADS, *GATED, _OF_MLP, *NORMS, *LAST_NORM, *HEADS),
    facts=_build_facts,
    classes={"BitNetForCausalLM": ModelClass("model", "lm"), "BitNetModel": ModelClass()},
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("hidden_act", "relu2"), norm="rms", further=(*_EXTRA_SAVED_ACTIVATIONS, _OUTPUT_PROJECTION_INPUT)
    ),
    assumed={**assume_sizes(128256, 2560, 6912, 30, 20), "num_key_value_heads": 5},
)
