"""Splits a part off an opened checkpoint: its text model, its vision model, or the tensors of some names.

What follows, from the plan of a conversion to the comparison of its result, takes it for any other checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from shardctl import models
from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.checkpoint.adapters.adapter_splitting import ADAPTER, split_adapter
from shardctl.checkpoint.left_tensors import keep_tensors
from shardctl.models.names.binding import bind_names, find_canonical_name
from shardctl.models.submodels.part_models import find_text_half, find_vision_half
from shardctl.models.tables.name_pattern import PatternList
from shardctl.models.tables.predicting import list_predicting_names
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Region, Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.models import Model
    from shardctl.models.submodels.part_models import PartModel
    from shardctl.tensors.manifest import Manifest

ONLY: Final = "only"
"""The option of a record that says that its checkpoint is a part of another, and which."""
_SUBMODEL_NAMES: Final = ("text", "vision")
_EXPERT_TENSOR_PATTERN: Final = re.compile(r"(^|\.)experts(\.|$)")
_IMAGE_PROCESSOR_FILES: Final = frozenset(
    {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
)
"""Side files that say how pictures are prepared, which a text model has no use for."""


def split_checkpoint(checkpoint: OpenedCheckpoint, only: str | None) -> OpenedCheckpoint:
    """Return the part of `checkpoint` that `only` names, under the names and with the config that it has by itself.

    `text` and `vision` are models inside a model that sees or hears, `adapter` is what was trained beside one (LoRA).
    `mtp` (layers that predict further tokens), `experts` and a pattern of names leave names and config as they are. A
    warning says what is left out. Raises UsageError for a part that nothing belongs to, UnsupportedError for a half
    that is not known by itself.
    """
    if only is None or checkpoint.part == only:
        return checkpoint
    if _is_adapter(only):
        return split_adapter(checkpoint, only)
    if only in _SUBMODEL_NAMES:
        if checkpoint.config is None:
            raise UsageError(f"--only {only} needs a config", hint="name it with --config PATH, or give a pattern")
        config, manifest = checkpoint.config, checkpoint.manifest
        arrays = checkpoint.model.fusions if checkpoint.model is not None else ()
        half = find_text_half(config, manifest, arrays) if only == "text" else find_vision_half(config, manifest)
        if half.strange:
            raise UnsupportedError(
                f"{half.title} would not compute by itself what it does inside: {half.strange}",
                hint="--only takes a pattern of names, too, and leaves names and config as they are",
            )
        return _split_half(checkpoint, only, half)
    kept = _select_names(checkpoint, only)
    if not kept:
        raise UsageError(f"--only {only} matches no tensor", hint="shardctl inspect SRC --tensors lists the names")
    manifest = keep_tensors(checkpoint.manifest, kept)
    return replace(checkpoint, manifest=manifest, part=only)


def split_as(result: OpenedCheckpoint, source: OpenedCheckpoint) -> OpenedCheckpoint:
    """Return the part of `source` that `result` was made of, if its record says that it is a part of another."""
    only = result.record.options.get(ONLY) if result.record is not None else None
    if only is None or (source.record is not None and source.record.options.get(ONLY) == only):
        return source
    return split_checkpoint(source, only)


def is_whole_model(part: str) -> bool:
    """Return whether a part is a model of its own, and not some tensors of one."""
    return part in _SUBMODEL_NAMES or _is_adapter(part)


def _is_adapter(part: str) -> bool:
    return part.partition(":")[0] == ADAPTER


def _select_names(checkpoint: OpenedCheckpoint, only: str) -> list[str]:
    names = list(checkpoint.manifest.tensors)
    if only == "mtp":
        if checkpoint.config is None:
            raise UsageError("--only mtp needs a config", hint="name it with --config PATH, or give a pattern")
        return list_predicting_names(checkpoint.config, names)
    if only == "experts":
        return [name for name in names if _EXPERT_TENSOR_PATTERN.search(name)]
    if "." not in only and "*" not in only:
        raise UsageError(
            f"--only {only!r} names no part of a model",
            hint=(
                f"use {', '.join([*_SUBMODEL_NAMES, ADAPTER, 'mtp', 'experts'])}, or a pattern such as"
                " 'model.layers.0.**'"
            ),
        )
    pattern = PatternList([only])
    return [name for name in names if pattern.first(name) is not None]


def _split_half(checkpoint: OpenedCheckpoint, only: str, half: PartModel) -> OpenedCheckpoint:
    """Return a half under its own names, bound to the table of its own family where one knows it."""
    whole = keep_tensors(checkpoint.manifest, half.names)
    fusions = checkpoint.model.fusions if checkpoint.model is not None else {}
    tensors = {}
    for name, tensor in whole.tensors.items():
        fusion = fusions.get(name)
        turned = only == "text" and fusion is not None and fusion.tensors == (name,) and not fusion.renames
        held = _swap_last_dims(tensor) if turned else tensor
        tensors[half.names[name]] = replace(held, name=half.names[name], ties=(), spelling=())
    objects = tuple(
        replace(each, policy="drop") if only == "text" and each.name in _IMAGE_PROCESSOR_FILES else each
        for each in whole.objects
    )
    told = (f"{half.title}: {half.renamed}",) if half.renamed else ()
    manifest = replace(whole, tensors=tensors, objects=objects, warnings=(*whole.warnings, *told))
    config = _rename_quantized_modules(half.config, half.names)
    model, problem = _find_model(checkpoint, config, manifest)
    if model is not None:
        _check_encodings(checkpoint.model, model, half)
        manifest = _keep_stacks(checkpoint.model, whole, bind_names(model, manifest), half)
    return replace(
        checkpoint,
        manifest=manifest,
        model=model,
        model_error=problem,
        config=config,
        untabled=cache(partial(models.build_untabled_model, config, manifest)) if model is None else None,
        derived=None,
        part=only,
        remade_config=True,
    )


def _keep_stacks(model: Model | None, whole: Manifest, bound: Manifest, half: PartModel) -> Manifest:
    """Return the tensors of a half, of which those that the source has in one array stay in one."""
    if model is None:
        return bound
    tensors = dict(bound.tensors)
    for name, tensor in whole.tensors.items():
        arrays = [find_canonical_name(model, each) or "" for each in tensor.spelling]
        stacks = tuple(half.names[each] for each in arrays if each in model.fusions and each in half.names)
        if stacks and half.names[name] in tensors:
            tensors[half.names[name]] = replace(tensors[half.names[name]], spelling=stacks)
    return replace(bound, tensors=tensors)


def _find_model(
    checkpoint: OpenedCheckpoint, config: Mapping[str, object], manifest: Manifest
) -> tuple[Model | None, UnsupportedError | None]:
    """Find the model of a half; heads are shared among ranks as they were in the whole."""
    old = checkpoint.model.tensors.values() if checkpoint.model is not None else ()
    shared = any(part.shared for t in old for cuts in t.spec.cuts for cut in cuts for part in cut.sections)
    try:
        return models.choose_model(config, manifest, kv_heads="replicate" if shared else "error"), None
    except UnsupportedError as error:
        return None, error


def _swap_last_dims(tensor: Tensor) -> Tensor:
    """Return a stack of matrices, each transposed."""

    def swap(of: tuple[int, ...]) -> tuple[int, ...]:
        return (*of[:-2], of[-1], of[-2])

    chunks = []
    for chunk in tensor.chunks:
        where = chunk.where
        if isinstance(where, Region):
            where = replace(where, strides=swap(where.strides))
        chunks.append(replace(chunk, box=Box(swap(chunk.box.origin), swap(chunk.box.shape)), where=where))
    return replace(tensor, shape=swap(tensor.shape), chunks=tuple(chunks))


def _rename_quantized_modules(config: Mapping[str, object], names: Mapping[str, str]) -> Mapping[str, object]:
    """Return a config whose `quantization_config` calls modules as the half does, in its lists of names."""
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return config

    def rename(module: object) -> object:
        example = next((name for name in names if name.startswith(f"{module}.")), None)
        rest = example.removeprefix(str(module)) if example is not None else ""
        return names[example].removesuffix(rest) if example and names[example].endswith(rest) else module

    renamed = {
        key: [rename(each) for each in value] if isinstance(value, list) else value for key, value in settings.items()
    }
    return {**config, "quantization_config": renamed}


def _check_encodings(whole: Model | None, model: Model, half: PartModel) -> None:
    """Raise UnsupportedError if by its own config other weights of a half would be quantized than are."""
    if _count_encoded(whole, half.names.keys()) != _count_encoded(model, half.names.values()):
        raise UnsupportedError(
            f"a config of {half.title} alone would not say which of its weights are quantized",
            hint="take them back to numbers with --dtype bf16",
        )


def _count_encoded(model: Model | None, names: Collection[str]) -> int:
    """Count the quantized weights of a model of which arrays have the names."""
    encodings, known = (model.encodings.values() if model is not None else ()), set(names)
    return sum(any(each.name(array) in known for array in each.arrays) for each in encodings)
