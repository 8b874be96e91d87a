"""Finds the config of the text model that the config of a model has inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_UNAMBIGUOUS_KEY_WORDS: Final = ("text", "llm", "language", "lm")
_TEXT_CONFIG_KEY_WORDS: Final = (*_UNAMBIGUOUS_KEY_WORDS, "thinker", "decoder", "model")
"""Words of the keys under which configs have that of the text model, the surest first."""
_MAX_CONFIG_DEPTH: Final = 3
"""How deep configs lie in each other; Qwen-Omni's is in `thinker_config.text_config`."""


def list_text_configs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the configs inside that may be of the text model, at any depth, the likeliest first."""
    inner = (
        (_rank_key(key, _TEXT_CONFIG_KEY_WORDS), values)
        for key, values in _list_inner_configs(config, _MAX_CONFIG_DEPTH)
    )
    return [values for rank, values in sorted(inner, key=lambda each: each[0]) if rank < len(_TEXT_CONFIG_KEY_WORDS)]


def list_outer_configs(config: Mapping[str, Any], inner: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the configs around `inner`, which is a part of `config`, the outermost first; `config` alone if it is none.

    >>> text = {"vocab_size": 8}
    >>> list_outer_configs({"tied": 1, "thinker_config": {"tied": 0, "text_config": text}}, text)
    [{'tied': 1, 'thinker_config': {...}}, {'tied': 0, 'text_config': {'vocab_size': 8}}]
    """
    return _find_path(config, inner, _MAX_CONFIG_DEPTH) or [config]


def _find_path(config: Mapping[str, Any], inner: Mapping[str, Any], depth: int) -> list[Mapping[str, Any]]:
    for value in config.values() if depth else ():
        if value is inner:
            return [config]
        below = _find_path(value, inner, depth - 1) if isinstance(value, dict) else []
        if below:
            return [config, *below]
    return []


def merge_text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the keys of its text model, if it surely has one, among its own.

    >>> merge_text_config({"model_type": "glimpse", "llm_config": {"vocab_size": 8}, "decoder": {"vocab_size": 9}})
    {'model_type': 'glimpse', 'llm_config': {'vocab_size': 8}, 'decoder': {'vocab_size': 9}, 'vocab_size': 8}
    """
    inner = [
        (key, values)
        for key, values in _list_inner_configs(config, 1)
        if _rank_key(key, _UNAMBIGUOUS_KEY_WORDS) < len(_UNAMBIGUOUS_KEY_WORDS)
    ]
    return {**config, **min(inner, key=lambda each: _rank_key(each[0], _UNAMBIGUOUS_KEY_WORDS), default=("", {}))[1]}


def _list_inner_configs(config: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, value in config.items():
        if isinstance(value, dict) and depth:
            yield key, value
            yield from _list_inner_configs(value, depth - 1)


def _rank_key(key: str, words: tuple[str, ...]) -> int:
    """Rank a key by the first of `words` that is one of its own; the number of words if none is."""
    own = key.removesuffix("_config").split("_")
    return next((rank for rank, word in enumerate(words) if word in own), len(words))
