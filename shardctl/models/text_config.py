"""Finds the config of the text model that the config of a model has inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SURE: Final = ("text", "llm", "language", "lm")
_WORDS: Final = (*_SURE, "thinker", "decoder", "model")
"""Words of the keys under which configs have that of the text model, the surest first."""
_DEPTH: Final = 3
"""How deep configs lie in each other; Qwen-Omni's is in `thinker_config.text_config`."""


def list_text_configs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the configs inside that may be of the text model, at any depth, the likeliest first."""
    inner = ((_rank_key(key, _WORDS), values) for key, values in _list_inner_configs(config, _DEPTH))
    return [values for rank, values in sorted(inner, key=lambda each: each[0]) if rank < len(_WORDS)]


def merge_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the keys of its text model, if it surely has one, among its own.

    >>> merge_text_config({"model_type": "glimpse", "llm_config": {"vocab_size": 8}, "decoder": {"vocab_size": 9}})
    {'model_type': 'glimpse', 'llm_config': {'vocab_size': 8}, 'decoder': {'vocab_size': 9}, 'vocab_size': 8}
    """
    inner = [(key, values) for key, values in _list_inner_configs(config, 1) if _rank_key(key, _SURE) < len(_SURE)]
    return {**config, **min(inner, key=lambda each: _rank_key(each[0], _SURE), default=("", {}))[1]}


def _list_inner_configs(config: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, value in config.items():
        if isinstance(value, dict) and depth:
            yield key, value
            yield from _list_inner_configs(value, depth - 1)


def _rank_key(key: str, words: tuple[str, ...]) -> int:
    """Rank a key by the first of `words` that is one of its own; the number of words if none is."""
    own = key.removesuffix("_config").split("_")
    return next((rank for rank, word in enumerate(words) if word in own), len(words))
