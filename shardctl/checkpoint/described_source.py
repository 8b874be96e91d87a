"""Opens a source of which no tensor can be converted, a config or a GGUF file, as the checkpoint that it describes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from shardctl import models
from shardctl.base.errors import SourceError, UnsupportedError, UsageError
from shardctl.checkpoint.config_files import CONFIG, read_config
from shardctl.checkpoint.config_only import (
    build_manifest_from_class,
    build_model_from_config,
    find_config_file,
    is_model_config,
)
from shardctl.checkpoint.model_binding import ModelBinder
from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
from shardctl.libraries import registry as formats
from shardctl.libraries.catalogue import FORMATS
from shardctl.libraries.gguf.reading import describe_gguf, find_gguf_file
from shardctl.libraries.reader import find_given_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from shardctl.checkpoint.config_files import ConfigReading
    from shardctl.models import Model, UntabledModel
    from shardctl.options import SourceOptions
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest


def refuse_warnings(manifest: Manifest, source_options: SourceOptions) -> None:
    """Raise SourceError for the first warning if options say that every warning is an error."""
    if source_options.strict and manifest.warnings:
        raise SourceError(manifest.warnings[0], hint="--strict makes every warning an error")


def _find_only_config(source: Source, source_options: SourceOptions) -> ConfigReading | None:
    """Find the config of a source that has no weights; None if it has some, or is no model at all.

    Raises SourceError if that will not do, UsageError for options that only stored tensors give a meaning.
    """
    path = find_config_file(source) if source_options.container is None else None
    if path is None:
        return None
    try:
        found = read_config(source, given=path)
    except SourceError:
        if path == CONFIG or not _has_known_format(source):
            raise
        return None
    if not is_model_config(found.values or {}):
        if find_given_file(source) is None or _has_known_format(source):
            return None
        raise SourceError(
            f"{source.name} is not the config of a model: it names neither architectures nor model_type",
            hint="give the config.json of a transformers model, or a checkpoint",
        )
    formats.refuse_unread_weights(source)
    if not source_options.described:
        formats.refuse_nested_saves(source)
        raise SourceError(
            f"{source.name} has no weights, only a config",
            hint=f"shardctl plan {source.name} says what such a model would need",
        )
    if source_options.config is not None and find_given_file(source) is not None:
        raise UsageError(f"{source.name} is a config, and --config names another", hint="give one of them")
    if source_options.rules_from == "transformers":
        raise UsageError("--rules-from needs the names of stored tensors, but there are no weights")
    return read_config(source, source_options.config) if source_options.config is not None else found


def _has_known_format(source: Source) -> bool:
    """Return whether some format knows what it is."""
    return any(known.detect(source) for known in FORMATS)


def _build_described_checkpoint(source: Source, only: ConfigReading, source_options: SourceOptions) -> OpenedCheckpoint:
    """Build a checkpoint without bytes."""
    rules = models.load_rules(source_options.rules) if source_options.rules else None
    kv_heads = source_options.kv_heads or "error"
    config = only.values or {}
    if rules is None and models.find_family(config) is None:
        try:
            return _build_class_checkpoint(source, only, source_options)
        except UnsupportedError:
            if not models.has_text_half(config):  # which a table describes by itself
                raise
    model, manifest = build_model_from_config(source, config, rules, kv_heads=kv_heads)
    manifest = replace(manifest, warnings=(*manifest.warnings, *only.warnings))
    refuse_warnings(manifest, source_options)
    stored = replace(manifest, tensors={})
    return OpenedCheckpoint(source, stored, manifest, model, None, only.values, None, hypothetical=True)


def _build_class_checkpoint(source: Source, only: ConfigReading, source_options: SourceOptions) -> OpenedCheckpoint:
    """Build a checkpoint without bytes of a config that no table knows, as transformers' class describes it.

    If a table knows the text model inside, it says how that is cut and run. Raises UnsupportedError if there is no such
    class.
    """
    manifest = build_manifest_from_class(source, only.values or {})
    manifest = replace(manifest, warnings=(*manifest.warnings, *only.warnings))
    refuse_warnings(manifest, source_options)
    bound = ModelBinder(source, only.values, None, source_options, None).bind(manifest)
    if bound.model is not None:  # a table knows the text model inside
        manifest = bound.manifest
    untabled = cache(partial(models.build_untabled_model, only.values, manifest)) if bound.model is None else None
    return OpenedCheckpoint(
        source,
        replace(manifest, tensors={}),
        manifest,
        bound.model,
        bound.problem,
        only.values,
        None,
        untabled=untabled,
        derived=prepare_derivation(only.values, untabled, source_options),
        hypothetical=True,
    )


def prepare_derivation(
    config: Mapping[str, Any] | None, untabled: Callable[[], UntabledModel] | None, reading: SourceOptions
) -> Callable[[], Model] | None:
    """Return what derives how tensors are cut of a model that no table knows, when it is asked for."""
    if (
        config is None
        or untabled is None
        or reading.rules_from in {"none", "transformers"}
        or models.find_family(config) is not None
    ):
        return None
    library = reading.rules_from != "names"
    share = reading.kv_heads == "replicate"

    def derive() -> Model:
        from shardctl.models.derived import derive_model

        return derive_model(config, untabled().model, share_kv=share, library=library)

    return cache(derive)


def describe_source(source: Source, source_options: SourceOptions) -> OpenedCheckpoint | None:
    """Describe a source of which no tensor could be converted: a GGUF file, or a config; None if it is neither."""
    gguf = find_gguf_file(source) if source_options.described and source_options.container is None else None
    if gguf is not None:
        return _build_gguf_checkpoint(source, gguf)
    only = _find_only_config(source, source_options)
    return _build_described_checkpoint(source, only, source_options) if only is not None else None


def _build_gguf_checkpoint(source: Source, path: str) -> OpenedCheckpoint:
    """Build a checkpoint that is only described: no tensor of it is converted."""
    manifest, config = describe_gguf(source, path)
    model = models.build_untabled_model(config, manifest).model
    if config is not None:
        model = replace(model, text=config)
    return OpenedCheckpoint(source, manifest, manifest, model, None, config, None, hypothetical=True)
