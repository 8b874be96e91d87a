"""Adds to a config of transformers 5 the settings by which transformers 4 reads the same from it.

>>> config = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
>>> add_older_settings(config)["rope_theta"]
500000.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROPE_PARAMETERS: Final = "rope_parameters"
_ROPE_THETA: Final = "rope_theta"
_ROPE_SCALING: Final = "rope_scaling"
_PARTIAL_FACTOR: Final = "partial_rotary_factor"
_TEXT_CONFIG: Final = "text_config"
_TIED_HEAD: Final = "tie_word_embeddings"
"""Transformers 4 reads it in the config of the text model, and transformers 5 in that of the whole."""
_LOCAL_THETA: Final = {
    "gemma3": ("rope_theta", "rope_local_base_freq"),
    "gemma3_text": ("rope_theta", "rope_local_base_freq"),
    "gemma3n_text": ("rope_theta", "rope_local_base_freq"),
    "modernbert": ("global_rope_theta", "local_rope_theta"),
    "modernbert-decoder": ("global_rope_theta", "local_rope_theta"),
    "olmo3": ("rope_theta", "rope_theta"),
}
"""By model type: where transformers 4 has the base of layers with full attention, and of those with a window.

It scales those with full attention alone.
"""
_OTHER_NAMES: Final = {
    "gpt_neox": {_ROPE_THETA: "rotary_emb_base", _PARTIAL_FACTOR: "rotary_pct"},
    "gpt_neox_japanese": {_ROPE_THETA: "rotary_emb_base", _PARTIAL_FACTOR: "rotary_pct"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "qwen3_vl_moe_text": {"num_local_experts": "num_experts"},
}
"""By model type: what transformers 4 calls a setting. All others have one name in 4.57 and 5.24."""
_FULL_ATTENTION, _SLIDING_ATTENTION = "full_attention", "sliding_attention"


def add_older_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, and the configs inside it, with what transformers 4.57 reads in the place of `rope_parameters`.

    Other settings stay as they are. Raises UnsupportedError for bases by kind of layer that transformers 4
    does not have for this model type.
    """
    changed = {key: add_older_settings(value) if _is_config(value) else value for key, value in config.items()}
    parameters, kind = config.get(_ROPE_PARAMETERS), str(config.get("model_type") or "")
    if isinstance(parameters, dict):
        for key, value in _list_rope_settings(parameters, kind).items():
            changed.setdefault(key, value)
    text = changed.get(_TEXT_CONFIG)
    if isinstance(text, dict) and _ROPE_PARAMETERS in text and _TIED_HEAD in config:
        text[_TIED_HEAD] = config[_TIED_HEAD]
    for key, older in _OTHER_NAMES.get(kind, {}).items():
        if key in changed:
            changed.setdefault(older, changed[key])
    return changed


def lacks_older_settings(config: Mapping[str, Any]) -> bool:
    """Return whether transformers 4 would read another model from this config."""
    try:
        return add_older_settings(config) != config
    except UnsupportedError:
        return True


def _is_config(value: object) -> bool:
    return isinstance(value, dict) and (_ROPE_PARAMETERS in value or "model_type" in value)


def _list_rope_settings(parameters: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """List transformers 4's settings for rotary embeddings; those of each kind of layer have names of their own."""
    if not any(isinstance(value, dict) for value in parameters.values()):
        return _flatten_parameters(parameters)
    if kind not in _LOCAL_THETA or not {*parameters} <= {_FULL_ATTENTION, _SLIDING_ATTENTION}:
        raise _build_rope_error(kind)
    full, window = (parameters.get(key) or {} for key in (_FULL_ATTENTION, _SLIDING_ATTENTION))
    found: dict[str, Any] = {}
    for name, part in zip(_LOCAL_THETA[kind], (full, window), strict=True):
        if found.setdefault(name, part.get(_ROPE_THETA)) != part.get(_ROPE_THETA):
            raise _build_rope_error(kind)
    scaling = _flatten_parameters(full).get(_ROPE_SCALING)
    return {**found, _ROPE_SCALING: scaling}


def _build_rope_error(kind: str) -> UnsupportedError:
    return UnsupportedError(
        f"transformers 4 has no such rotary embeddings by kind of layer for {kind or 'this model'}",
        hint="use a version that reads rope_parameters, such as --for transformers",
    )


def _flatten_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: parameters[key] for key in (_ROPE_THETA, _PARTIAL_FACTOR) if key in parameters}
    scaling = {key: value for key, value in parameters.items() if key not in found}
    return {**found, _ROPE_SCALING: scaling if scaling.keys() - {"rope_type"} else None} if scaling else found
