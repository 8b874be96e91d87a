"""Knows in which order implementations put queries, keys and values into one array.

Only what their sources say stands here (transformers 5.23, `models/*/modeling_*.py`); for other names the order is not
known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from shardctl.models.derived.head_counts import HeadLayout

FusedOrder = Literal["joined", "grouped"]
"""`joined`: all queries, then all keys, then all values; `grouped`: group by group of heads."""
_JOINED: Final = ("qkv_proj", "qkv", "Wqkv", "c_attn", "att_proj", "in_proj_weight", "in_proj")
"""Always split into three in the sources that use these names."""
_GROUPED_TYPES: Final = ("persimmon", "fuyu", "gpt_neox_japanese", "gpt_neox", "bloom")
"""`query_key_value` viewed as heads of three parts each."""
_OTHER_TYPES: Final = ("gpt_bigcode", "codegen", "minimax")
"""Those that call an array so and have an order of their own."""


def find_fused_order(path: str, model_type: str, layout: HeadLayout) -> FusedOrder | None:
    """Return the order in the array at `path` of a model, or None if it is not known."""
    last = path.rpartition(".")[2]
    if last == "query_key_value":
        return "grouped" if model_type in _GROUPED_TYPES and layout.heads == layout.key_heads else None
    if last in _JOINED and model_type not in _OTHER_TYPES:
        return "joined"
    return None
