"""Finds the halves of a model that hears or sees, and names and configs by which each is a model of its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError, format_first_few
from shardctl.base.value import value_class
from shardctl.models.describe import find_family
from shardctl.models.submodels.inner_kinds import (
    ROPES,
    assume_inner_values,
    find_inner_family,
    list_flat_families,
    name_plain_kind,
)
from shardctl.models.submodels.multimodal import TextBackbone, list_text_models
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.name_pattern import list_name_patterns
from shardctl.models.tables.windows import list_windows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardctl.models.tables.family import Family
    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Manifest, Tensor

_PICTURE_AXES: Final = frozenset({"mrope_section", "mrope_interleaved"})
_TIED_EMBEDDINGS_KEY: Final = "tie_word_embeddings"
_INHERITED_CONFIG_KEYS: Final = (
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
)
"""Keys that a text model without them has from the config around it."""
_MULTIMODAL_KEY_PATTERN: Final = re.compile(r"(vision|audio|image|video)_")
"""How keys begin that are not the text model's, where its own stand beside them."""
_VISION_MODULE_PATTERN: Final = re.compile(r"(visual|img_processor|image_encoder|vision(_tower|_model|_encoder)?)")
"""How the module of a vision model is called, inside the base model or outside."""


@value_class
class PartModel:
    """A part of a model that is a model by itself."""

    title: str
    """What it is, for messages."""
    config: Mapping[str, Any]
    names: Mapping[str, str]
    """The names of its tensors, and those that they have in it by itself."""
    strange: str = ""
    """Why it does not compute by itself what it does inside; empty if nothing says so."""
    renamed: str = ""
    """What is known of other names that its class has for its tensors; empty for nothing."""


def find_text_half(config: Mapping[str, Any], stored: Manifest, arrays: Iterable[str]) -> PartModel:
    """Find the text model inside another, whose tensors have the names of `stored`, and the `arrays` that hold some.

    Raises UnsupportedError where there is none, or no table knows it.
    """
    found = _find_text_model(config, stored)
    if found is None:
        raise UnsupportedError(
            f"{_title(config)} has no text model inside that is known by itself",
            hint="--only takes a pattern of names, too, such as 'model.language_model.**'",
        )
    family, inner = found
    half = TextBackbone(family, inner, config, stored, share_kv=False)
    plain = half.build("", "")
    base = half.find_base(plain)
    if base is None:
        raise UnsupportedError(f"no tensors have the names of the {family.name} inside {half.title}")
    names = _strip_text_names([*stored.tensors, *arrays], base, half.member.prefix, plain)
    values = _build_text_config(config, inner, family)
    heads = [row.name for row in family.rows if row.tie and not row.name.startswith(".")]
    values[_TIED_EMBEDDINGS_KEY] = bool(heads) and not any(head in names.values() for head in heads)
    return PartModel(
        f"the {family.name} inside {half.title}", values, names, _find_strange_layers(family, inner, values)
    )


def find_vision_half(config: Mapping[str, Any], stored: Manifest) -> PartModel:
    """Find the vision model inside another; raises UnsupportedError where there is none, or more than one."""
    modules: dict[str, None] = {}
    for name in stored.tensors:
        words = name.split(".")
        depth = next((n for n, word in enumerate(words[:4], 1) if _VISION_MODULE_PATTERN.fullmatch(word)), None)
        if depth is not None:
            modules[".".join(words[:depth]) + "."] = None
    inner = config.get("vision_config")
    if len(modules) != 1 or not isinstance(inner, dict):
        several = f": there are {format_first_few(modules)}" if modules else ""
        raise UnsupportedError(
            f"{_title(config)} has no one vision model that is known by itself{several}",
            hint="--only takes a pattern of names, too, such as 'model.visual.**'",
        )
    (module,) = modules
    values = {**{key: config[key] for key in _INHERITED_CONFIG_KEYS[:2] if key in config}, **inner}
    names = {name: name.removeprefix(module) for name in stored.tensors if name.startswith(module)}
    title = f"the vision model {module}** of {_title(config)}"
    return PartModel(title, values, names, renamed=_describe_renamed_tensors(config, inner, names))


def group_left_tensors(tensors: Iterable[Tensor], kept: Iterable[str]) -> list[tuple[str, list[Tensor]]]:
    """Group tensors by the outermost module of which nothing is `kept`, as patterns.

    >>> from shardctl.tensors.manifest import Tensor
    >>> from shardctl.base.dtype import BY_NAME
    >>> left = [Tensor(n, BY_NAME["F32"], (2,), ()) for n in ("model.visual.0.up", "model.visual.1.up", "head")]
    >>> [pattern for pattern, _ in group_left_tensors(left, ["model.norm"])]
    ['model.visual.**', 'head']
    """
    modules = {name[: at.start()] for name in kept for at in re.finditer(r"\.", name)}
    found: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        words = tensor.name.split(".")
        count = next((n for n in range(1, len(words)) if ".".join(words[:n]) not in modules), len(words))
        pattern = ".".join([*words[:count], *(["**"] if count < len(words) else [])])
        found.setdefault(list_name_patterns([pattern])[0], []).append(tensor)
    return list(found.items())


def _describe_renamed_tensors(config: Mapping[str, Any], inner: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Say which names an installed transformers has for tensors of a half inside the whole, other than those alone."""
    from shardctl.models.derived.library_names import build_renamer  # only a half needs what derives

    kinds = (
        ModelConfig(config).architecture(),
        *(ModelConfig(each).text("model_type", "") for each in (config, inner)),
    )
    rename = build_renamer(kinds)
    changed = {own: new for name, own in names.items() if not (new := rename(name)).endswith(own)}
    if not changed:
        return ""
    old, new = next(iter(changed.items()))
    return (
        f"{len(changed)} of its {len(names)} tensors have names that transformers changes when it reads the whole "
        f"model, such as {old} to {new}; the class of this part by itself may not find them"
    )


def _title(config: Mapping[str, Any]) -> str:
    named = ModelConfig(config)
    return named.architecture() or named.text("model_type", "") or "the model"


def _find_text_model(config: Mapping[str, Any], stored: Manifest) -> tuple[Family, Mapping[str, Any]] | None:
    """Find the family of the text model inside, as a model of its own, and its config."""
    outer = find_family(config)
    inner: Mapping[str, Any] = config.get("text_config") or {}
    if outer is not None and outer[0].text is not None:
        inner = outer[0].text(outer[0].complete_config(ModelConfig(config)))[1].values
        inner = {key: value for key, value in inner.items() if not _MULTIMODAL_KEY_PATTERN.match(key)}
    family = find_inner_family(inner)
    if family is not None and (outer is None or family.name != outer[0].name):
        return family, inner
    flat = list_flat_families(config)
    if len(flat) < 2:  # noqa: PLR2004 - the config leaves no choice
        return next(list_text_models(config), None)
    return next((each for each in list_text_models(config) if _is_stored(*each, config, stored)), None)


def _is_stored(family: Family, inner: Mapping[str, Any], config: Mapping[str, Any], stored: Manifest) -> bool:
    """Return whether the files have a text model of the family, and nothing in it that its table lacks."""
    try:
        return TextBackbone(family, inner, config, stored, share_kv=False).model() is not None
    except (SourceError, UnsupportedError):
        return False


def _strip_text_names(stored: Iterable[str], base: str, prefix: str, plain: Model) -> dict[str, str]:
    """Map the names under the base model and around it to those of the text model by itself."""
    words = base.split(".")[:-1]
    outer = ["".join(f"{word}." for word in words[:count]) for count in range(len(words), -1, -1)]
    known = plain.tensors.keys() | plain.aliases.keys() | plain.fusions.keys()
    shared = base.removesuffix(".") in (prefix, "model", "transformer")  # then towers stand under it, too
    roots = {name.removeprefix(f"{prefix}.").split(".")[0] for name in known}
    names = {}
    for name in stored:
        if name.startswith(base) and base and (not shared or name.removeprefix(base).split(".")[0] in roots):
            names[name] = f"{prefix}.{name.removeprefix(base)}" if prefix else name.removeprefix(base)
            continue
        heads = (name.removeprefix(around) for around in outer if name.startswith(around))
        head = next((head for head in heads if head in known), None)
        if head is not None:
            names[name] = head
    return names


def _build_text_config(config: Mapping[str, Any], inner: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Build the config of the text model by itself."""
    values = {key: value for key, value in inner.items() if key != "architectures"}
    values |= {
        key: config[key] for key in _INHERITED_CONFIG_KEYS if config.get(key) is not None and values.get(key) is None
    }
    if name_plain_kind(inner) != inner.get("model_type"):  # where no picture is seen, its rotary embedding is plain
        values = dict(assume_inner_values(values))
        for rope in ROPES:
            if isinstance(values.get(rope), dict):
                values[rope] = _drop_picture_axes(values[rope])
    return {"architectures": [next(iter(family.classes))], **values, "model_type": family.name}


def _find_strange_layers(family: Family, inner: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """Say which kind of layer a text model has inside only, where its class by itself is another one."""
    if name_plain_kind(inner) == inner.get("model_type") or family.traits is None:
        return ""
    config = family.complete_config(ModelConfig(values))
    try:
        list_windows(family.traits.window, config, config.size("num_hidden_layers"))
    except UnsupportedError as error:
        return error.message
    return ""


def _drop_picture_axes(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a rotary embedding without how it turns with the place in a picture."""
    kept = {key: value for key, value in rope.items() if key not in _PICTURE_AXES}
    types = {key: "default" for key in ("type", "rope_type") if kept.get(key) == "mrope"}
    return {**kept, **types}
