"""Finds the family of a config, and describes the model."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Literal

from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.models.families import load_families, load_family
from shardctl.models.quantization import drop_quantization_config, find_quantization_config, quantize_model
from shardctl.models.rules.transformers_rules import build_transformers_model
from shardctl.models.submodels.multimodal import build_multimodal_model, describe_text_half
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.stacked_experts import split_family, stores_split_experts
from shardctl.models.tables.table import build_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.models.rules.rule_file import RuleFile
    from shardctl.models.tables.family import Family
    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Manifest

KvHeads = Literal["replicate", "error"]
"""What to do where there are fewer key/value heads than tp ranks."""


def find_family(config: Mapping[str, object]) -> tuple[Family, str] | None:
    """Find the family and the class that a config names, or None if no family has it.

    The class is the first of `architectures`; a config without any gets the most usual class of its `model_type`.
    """
    named = ModelConfig(config)
    architecture, kind = named.architecture(), named.text("model_type", "")
    usual = load_family(kind)
    if not architecture:
        return None if usual is None else (usual, next(iter(usual.classes)))
    for family in chain(() if usual is None else (usual,), _list_families()):
        current = family.renamed.get(architecture, architecture)
        if current in family.classes:
            return family, current
    return None


def _list_families() -> Iterator[Family]:
    """Yield every family; they are loaded only if the first is asked for."""
    yield from load_families()


def name_usual_class(kind: str) -> str:
    """Name the class that most models of a `model_type` have, such as `Qwen3ForCausalLM` for those of `qwen3`."""
    family = load_family(kind)
    if family is None:
        raise ValueError(f"no family is called {kind}")
    return next(iter(family.classes))


def list_assumed_values(config: Mapping[str, object]) -> Mapping[str, object]:
    """List what a config's family assumes of keys that are absent, by key; nothing if no family knows it."""
    found = find_family(config)
    if found is None:
        return {}
    said = ModelConfig(config).alias_keys(found[0].aliases).values
    return {key: value for key, value in found[0].assumed.items() if key not in said}


def describe_model(
    config: Mapping[str, object],
    *,
    kv_heads: KvHeads = "error",
    stored: Manifest | None = None,
    cut_towers: bool = False,
) -> Model:
    """Return the model that a decoded `config.json` describes.

    What is `stored` decides which weights are quantized where the config leaves it open; see `quantize_model`.
    `cut_towers` cuts models that see or hear over tp, too, where a table says how.
    Raises UnsupportedError if no family knows its architecture or nobody how its weights are quantized, and SourceError
    if a number it needs is absent or is none.
    """
    found = find_family(config)
    if found is None:
        share = kv_heads == "replicate"
        if stored is None:
            inside = describe_text_half(config, share_kv=share)
        else:
            inside = build_multimodal_model(config, stored, share_kv=share)
        if inside is not None:
            return inside
        named = ModelConfig(config)
        what = named.architecture() or named.text("model_type", "")
        raise UnsupportedError(
            f"the architecture {what} is not known" if what else "config.json names no architecture",
            hint="say how its tensors are cut with --rules FILE, or borrow rules with --rules-from transformers; "
            "on one device none are needed",
        )
    family, architecture = found
    share = kv_heads == "replicate"
    if stores_split_experts(config, stored):
        family = split_family(family) or family
    model = build_model(family, architecture, ModelConfig(config), share_kv=share, cut_towers=cut_towers)
    if stored is not None and find_quantization_config(config) is not None:
        from shardctl.models.names.wrapping import read_quantized_names

        stored = read_quantized_names(model, stored)
    quantised = quantize_model(model, config, stored)
    plain = drop_quantization_config(config)
    if quantised is model and plain != config:  # the family's own table has the arrays of quantized weights
        return replace(model, plain=build_model(family, architecture, ModelConfig(plain), share_kv=share))
    return quantised


def choose_model(
    config: Mapping[str, object] | None,
    stored: Manifest,
    rules: RuleFile | None = None,
    *,
    kv_heads: KvHeads = "error",
    borrow: bool = False,
) -> Model | None:
    """Choose the model of a checkpoint: its family's, with what a rule file says instead, or a rule file's alone.

    None if there is neither a config nor a rule file: then names stay as stored, and only one device can hold it.
    `borrow` takes the rules of an unknown architecture from an installed transformers, and says so in a warning.
    Raises UnsupportedError for an unknown architecture without a rule file, UsageError for a tensor that no rule
    matches, or where there is nothing to borrow for.
    """
    if borrow:
        if config is None or find_family(config) is not None:
            raise UsageError(
                "--rules-from transformers is for a config whose architecture is not known, and "
                + ("there is no config" if config is None else f"{ModelConfig(config).architecture()} is"),
                hint="leave it out" if config is not None else "name a config with --config PATH",
            )
        borrowed = build_transformers_model(config, stored)
        return rules.over(borrowed, stored) if rules is not None else borrowed
    if rules is None:
        return None if config is None else describe_model(config, kv_heads=kv_heads, stored=stored)
    if config is not None and find_family(config) is not None:
        try:
            described = describe_model(config, kv_heads=kv_heads, stored=stored)
            from shardctl.models.names.wrapping import read_class_names

            named = read_class_names(described, stored)
            others = {name: each for name, each in named.extra.items() if name not in stored.extra}
            # What the class does not have may be what the rules are for.
            return rules.over(described, replace(named, tensors={**named.tensors, **others}))
        except UnsupportedError:  # quantized in a way that is not known: then the rule file alone speaks
            return rules.model(stored, ModelConfig(config).architecture())
    return rules.model(stored, ModelConfig(config).architecture() if config is not None else "")
