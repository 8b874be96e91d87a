"""Compares the configs of two checkpoints value by value: they may spell or leave out the same thing differently.

Spellings are made one first: `torch_dtype` and `dtype`; `rope_theta`, `rope_scaling` and `rope_parameters`; null and
absent; 1 and 1.0. A setting that only one of the two gives may be the default of the other. The config class of
transformers decides that, where there is one and it is installed; otherwise such a setting is a warning.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.base.value import value_class
from shardctl.models import list_assumed_values

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

ABSENT: Final = "absent"
_OF_THE_FILE: Final = frozenset(
    {
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "auto_map", "_from_model_config"),
        *("_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset"),
        *("_experts_implementation", "_experts_implementation_internal", "_output_attentions", "architectures"),
    }
)
"""Keys that say who wrote the file, or how to run it; `architectures` is compared by itself."""
_OF_THE_RUN: Final = frozenset(
    {
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict", "torchscript", "use_bfloat16"),
        *("gradient_checkpointing", "tf_legacy_loss"),
    }
)
"""Keys that change what a run returns or keeps, and no number that the model computes."""
_ROTARY_CONFIG_KEYS: Final = ("rope_theta", "partial_rotary_factor")
_DTYPE_KEY: Final = "dtype"
_MODEL_TYPE: Final = "model_type"
_QUANTIZATION_CONFIG_KEY: Final = "quantization_config"
_MAX_VALUE_CHARACTERS: Final = 100
"""Characters of a value in a message."""


@value_class
class ConfigChange:
    """One setting that is not the same in two configs."""

    key: str
    """The path of the setting, such as ``text_config.rope_parameters.rope_theta``."""
    a: str
    """The value in the first config as JSON, or `absent`."""
    b: str
    harmless: bool = False
    """Whether the model computes the same with either value: it concerns the run, or transformers reads both alike."""
    certain: bool = True
    """Whether both configs give a value; otherwise the absent one may have a default that is equal."""
    file: str = "config.json"
    """What holds the setting: the config, or what another library keeps instead."""


@value_class
class ConfigComparison:
    """How two configs differ."""

    changes: tuple[ConfigChange, ...]
    compared: int
    """Settings that both have."""


def compare_configs(
    a: Mapping[str, object],
    b: Mapping[str, object],
    *,
    common_only: bool = False,
    assumed: Collection[str] = (),
    cast: bool = False,
) -> ConfigComparison:
    """Compare two decoded configs of transformers.

    `common_only` looks only at what both say, where one is derived from what another library keeps, and `assumed` are
    settings, by path, that are a guess in one of them.
    `cast` lets the element types differ.

    >>> (change,) = compare_configs({"rope_theta": 1e4, "vocab_size": 9}, {"rope_theta": 5e3, "vocab_size": 9}).changes
    >>> change.key, change.a, change.b
    ('rope_parameters.rope_theta', '10000.0', '5000.0')
    """
    ours, theirs = _list_settings(a), _list_settings(b)
    ours, theirs = ({key: value for key, value in each.items() if key not in assumed} for each in (ours, theirs))
    both = ours.keys() & theirs.keys()
    unequal = sorted(key for key in both if not is_same_value(ours[key], theirs[key]) and not (cast and _is_dtype(key)))
    single = [] if common_only else sorted(key for key in ours.keys() ^ theirs.keys() if not _is_dtype(key))
    read = [_read_with_class(config) for config in (a, b)] if unequal or single else []
    filled = [_list_settings(config) for config in read if config is not None]
    alike = {key: _read_alike(key, filled) and (common_only or key != _MODEL_TYPE) for key in unequal}
    changes = [_build_change(key, ours, theirs, alike=alike[key]) for key in unequal]
    named = [_name_classes(config) for config in (a, b)]
    if named[0] != named[1] and (all(named) or not common_only) and "architectures" not in assumed:
        ours_named, theirs_named = (json.dumps(classes) if classes else ABSENT for classes in named)
        changes.insert(0, ConfigChange("architectures", ours_named, theirs_named, harmless=not named[1]))
    # No class knows a default of these: AutoConfig chooses the class by the type of the model.
    sure = [key for key in single if key == _MODEL_TYPE or _QUANTIZATION_CONFIG_KEY in key.split(".")]
    for key in sure:
        change = _build_change(key, ours, theirs, alike=key == _MODEL_TYPE and key not in theirs)
        changes.append(replace(change, certain=True))
    single = [key for key in single if key not in sure]
    if single and len(filled) == len(read):
        ours, theirs = filled
        named_anew = {_last_part(key) for key in unequal if key not in ours}
        known = {key for key in ours.keys() | theirs.keys() if key in unequal or _last_part(key) in named_anew}
        single = [
            key
            for key in sorted((ours.keys() | theirs.keys()) - known)
            if not _is_dtype(key) and not is_same_value(ours.get(key), theirs.get(key))
        ]
        changes += [replace(_build_change(key, ours, theirs), certain=True) for key in single]
    else:
        changes += [_build_change(key, ours, theirs) for key in single]
    return ConfigComparison(tuple(changes), len(both))


def _read_alike(key: str, filled: Sequence[Mapping[str, object]]) -> bool:
    """Return whether the config class gives one meaning to both values of a setting; types it was told."""
    if _is_dtype(key):
        return False
    return len(filled) == 2 and all(key in each for each in filled) and is_same_value(filled[0][key], filled[1][key])  # noqa: PLR2004


def _build_change(
    key: str, ours: Mapping[str, object], theirs: Mapping[str, object], *, alike: bool = False
) -> ConfigChange:
    return ConfigChange(
        key,
        _format_value(ours, key),
        _format_value(theirs, key),
        harmless=alike or _last_part(key) in _OF_THE_RUN,
        certain=key in ours and key in theirs,
    )


def _format_value(settings: Mapping[str, object], key: str) -> str:
    if key not in settings:
        return ABSENT
    text = json.dumps(settings[key], ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}..."


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _is_dtype(key: str) -> bool:
    return _last_part(key) == _DTYPE_KEY


def _name_classes(config: Mapping[str, object]) -> list[str]:
    named = config.get("architectures")
    return [str(each) for each in named] if isinstance(named, list) else []


def is_same_value(a: object, b: object) -> bool:
    """Return whether two values mean the same; a number is no switch, but it may be written with a point."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(is_same_value, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same_value(a[key], b[key]) for key in a)
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _list_settings(config: Mapping[str, object]) -> dict[str, object]:
    """List the settings of a config by path, under one spelling, with what its family assumes of absent keys."""
    assumed = {key: value for key, value in list_assumed_values(config).items() if config.get(key) is None}
    return dict(_walk_settings({**config, **assumed}, ""))


def _walk_settings(config: Mapping[str, object], place: str) -> Iterator[tuple[str, object]]:
    merged = dict(config) if "rope_parameters." in place else _merge_rotary_keys(config)
    for key, value in merged.items():
        path = f"{place}{key}"
        if key in _OF_THE_FILE or value is None:
            continue
        if key in {_DTYPE_KEY, "torch_dtype"}:
            yield f"{place}{_DTYPE_KEY}", str(value).removeprefix("torch.")
        elif isinstance(value, dict) and all(isinstance(inner, str) for inner in value):
            yield from _walk_settings(value, f"{path}.")
        else:
            yield path, value


def _merge_rotary_keys(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config that says everything of its rotary embeddings in `rope_parameters`, if they are of one kind."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    said = dict(given) if isinstance(given, dict) else {}
    outer = {key: config[key] for key in _ROTARY_CONFIG_KEYS if config.get(key) is not None}
    if not (said or outer) or any(isinstance(value, dict) for value in said.values()):
        return dict(config)
    kind = said.pop("rope_type", None) or said.pop("type", None) or "default"
    said.pop("type", None)
    rest = {
        key: value
        for key, value in config.items()
        if key not in {*_ROTARY_CONFIG_KEYS, "rope_scaling", "rope_parameters"}
    }
    return {**rest, "rope_parameters": {**outer, **said, "rope_type": kind}}


def _read_with_class(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """Read a config with its class of transformers, which fills in defaults; None where that cannot be done."""
    from shardctl.verify.transformers_classes import build_config, get_model_class

    named = _name_classes(config)
    try:
        import torch

        kind = get_model_class(named[0] if named else "")
        filled = build_config(kind, config, torch.float32).to_dict()
    except (ImportError, UnsupportedError, UsageError):
        return None
    except Exception:  # noqa: BLE001 - any config class may refuse a value in its own way
        return None
    return dict(filled) if isinstance(filled, dict) else None
