"""Knows in which order arrays that hold more than one projection have them.

The order in a stored array is what transformers' conversions make of it when they load it (`conversions.json`). Arrays
that are not converted have the order of their class, which this module knows from the sources of transformers 5.24
(`models/*/modeling_*.py`). For classes and types that transformers does not have, the order is not known.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.value import state_class
from shardctl.models.names.hub.conversion_table import NameRenamer, find_conversions, knows_class
from shardctl.models.tables.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.derived.head_counts import HeadLayout
    from shardctl.models.names.hub.conversion_table import NameConversions

FusedOrder = Literal["joined", "grouped", "interleaved"]
"""`joined`: all rows of the first, then all of the next; `grouped`: group by group of heads; `interleaved`: a row of
each in turn."""
_SPLIT_IN_THREE: Final = ("qkv_proj", "qkv", "Wqkv", "c_attn", "att_proj", "in_proj_weight", "in_proj")
"""Always split into three in the sources that use these names."""
_GROUPED_TYPES: Final = ("persimmon", "fuyu", "gpt_neox_japanese", "gpt_neox", "bloom")
"""`query_key_value` viewed as heads of three parts each."""
_OTHER_TYPES: Final = ("gpt_bigcode", "codegen", "minimax")
"""Those that call an array so and have an order of their own."""


@state_class
class FusedOrders:
    """The orders in the stored arrays of one model."""

    config: Mapping[str, object]
    _model_type: str = field(init=False)
    _known: bool = field(init=False)
    """Whether transformers has the class."""
    _conversions: NameConversions = field(init=False)

    def __post_init__(self) -> None:
        named = ModelConfig(self.config)
        architecture = named.architecture()
        self._model_type = named.text("model_type", "")
        self._known = knows_class(architecture, self.config)
        self._conversions = find_conversions(architecture, self.config)

    def find_attention_order(self, name: str, layout: HeadLayout) -> FusedOrder | None:
        """Return the order of queries, keys and values in a stored array; None if it is not known."""
        converted = self._find_conversion(name)
        if converted is not None:
            return converted or None
        last = name.removesuffix(".weight").rpartition(".")[2]
        if last == "query_key_value":
            grouped = self._model_type in _GROUPED_TYPES and layout.heads == layout.key_heads
            return "grouped" if grouped else None
        if last in _SPLIT_IN_THREE and self._known and self._model_type not in _OTHER_TYPES:
            return "joined"
        return None

    def is_converted(self, name: str) -> bool:
        """Return whether the class has something else in place of a stored array, so that nothing about it tells."""
        return self._find_conversion(name) is not None

    def find_gated_order(self, name: str) -> FusedOrder | None:
        """Return the order of gate and up in a stored array; None if it is not known."""
        converted = self._find_conversion(name)
        if converted is not None:
            return converted or None
        return "joined" if self._known else None

    def _find_conversion(self, name: str) -> FusedOrder | Literal[""] | None:
        """Find the order that loading a stored array undoes; empty if it is not known, None if none is undone."""
        inside = NameRenamer(self._conversions.loading_renames).rename(name)
        for loading, saving in zip(self._conversions.loading, reversed(self._conversions.saving), strict=True):
            if loading.kind != "arrays" or loading.match(inside) is None:
                continue
            made = [operation for operation, _ in saving.operations]
            if "Interleave" in made:
                return "interleaved"
            if "Concatenate" in made and len(saving.sources) > 1:
                return "joined"
            return "" if len(saving.sources) > len(saving.to) else None
        return None
