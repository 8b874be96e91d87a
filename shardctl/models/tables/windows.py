"""Finds which layers of a model attend to a window of tokens only, and how wide it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_WINDOWED_LAYER_TYPES: Final = (
    "sliding_attention",
    "chunked_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
"""What `layer_types` calls layers with a window; those of the last two see compressed tokens besides (DeepSeek-V4)."""
_NON_WINDOWED_LAYER_TYPES: Final = (
    "full_attention",
    "attention",
    "indexed_attention",
    "deepseek_sparse_attention",
    "qwen_sparse_attention",
    "minimax_m3_sparse",
    "linear_attention",
    "mamba",
    "conv",
)
"""What `layer_types` calls layers without a window: they see every token, or choose of all, or have no attention."""


@value_class
class WindowRule:
    """Which layers of a family have a window, and what its config class assumes where a config is silent.

    >>> WindowRule(4096, "all but every nth", period=6).size
    4096
    """

    size: int | None
    """Tokens; None for no window."""
    layers: Literal[
        "all",
        "none",
        "all but every nth",
        "all but first and every nth",
        "all but first of every n",
        "even",
        "first even",
        "last",
        "rotary",
        "not rotary",
    ] = "all"
    """Which layers have it, if `layer_types` does not say so."""
    period: int = 0
    """The n of rules that have one; of "rotary" and "not rotary" that of the layers without rotary positions."""
    start: int = 0
    """The layer at which "last" begins, and "first even" ends, if `max_window_layers` does not say so."""
    switched: bool = False
    """Whether there is a window only where `use_sliding_window` is true."""
    key: str = "sliding_window"
    """What the config calls it."""
    period_key: str = ""
    """What the config calls the period, if it can say so."""
    sides: int = 1
    """The sides of a query that the number in the config counts together: of two, a decoder sees one (ModernBERT)."""


def list_windows(rule: WindowRule | None, config: ModelConfig, layers: int) -> tuple[int | None, ...]:
    """List the tokens that a query of each layer sees, None for all, by the rule of the model's family.

    Raises UnsupportedError for a kind of attention that is not known, SourceError if `layer_types` does not speak of
    all layers.
    """
    kinds = config.values.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers + config.count("num_nextn_predict_layers", 0):
        kinds = kinds[:layers]  # the last are of layers that predict (Step-3.5)
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise SourceError(f"config.json has layer_types = {kinds!r} where a list of {layers} kinds is expected")
    if isinstance(kinds, list):
        odd = [
            one
            for one in kinds
            if one not in _NON_WINDOWED_LAYER_TYPES and (rule is None or one not in _WINDOWED_LAYER_TYPES)
        ]
        if odd:
            raise UnsupportedError(f"config.json has layers of type {odd[0]!r}, which is not known of its family")
    size = _get_window_size(rule, config) if rule is not None else None
    if rule is None or size is None:
        return (None,) * layers
    chosen = (
        [one in _WINDOWED_LAYER_TYPES for one in kinds]
        if isinstance(kinds, list)
        else _choose_windowed_layers(rule, config, layers)
    )
    return tuple(size if one else None for one in chosen)


def _get_window_size(rule: WindowRule, config: ModelConfig) -> int | None:
    """Return the window; a config that says null has none."""
    if rule.switched and not config.read_flag("use_sliding_window", default=False):
        return None
    silent = rule.size is None or rule.key in config.values
    if silent and config.values.get(rule.key) is None:
        return None
    return config.size(rule.key, rule.size) // rule.sides


def _choose_windowed_layers(rule: WindowRule, config: ModelConfig, layers: int) -> list[bool]:
    """Return whether each layer has the window."""
    match rule.layers:
        case "all" | "none":
            return [rule.layers == "all"] * layers
        case "even":
            return [n % 2 == 0 for n in range(layers)]
        case "all but every nth" | "all but first and every nth" | "all but first of every n":
            return _choose_periodic_layers(rule, config, layers)
        case "last":
            start = config.count("max_window_layers", rule.start)
            return [n >= start for n in range(layers)]
        case "first even":
            end = config.count("max_window_layers", rule.start)
            return [n % 2 == 0 and n < end for n in range(layers)]
        case "rotary" | "not rotary":
            return [marked == (rule.layers == "rotary") for marked in mark_rotary_layers(rule, config, layers)]


def _choose_periodic_layers(rule: WindowRule, config: ModelConfig, layers: int) -> list[bool]:
    """Choose all but the last of each period, or the first of each, and perhaps not the first layer of all."""
    period = config.size(rule.period_key, rule.period) if rule.period_key else rule.period
    first = 1 if rule.layers == "all but first and every nth" else 0
    place = 0 if rule.layers == "all but first of every n" else period - 1
    return [n >= first and n % period != place for n in range(layers)]


def mark_rotary_layers(rule: WindowRule, config: ModelConfig, layers: int) -> list[bool]:
    """Say of each layer whether it has rotary positions: `no_rope_layers` marks those with a one (Llama 4).

    Raises SourceError for marks that are none, or not of all layers.
    """
    marks = config.values.get("no_rope_layers") or []
    if not isinstance(marks, list) or (marks and len(marks) != layers):
        raise SourceError(f"config.json has no_rope_layers = {marks!r} where a list of {layers} marks is expected")
    return [bool(mark) for mark in marks] or _choose_periodic_layers(rule, config, layers)
