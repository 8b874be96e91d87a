"""Completes an opened checkpoint with what it lacks and another has: layers that predict, towers, a head, side files.

What follows, from the plan of a conversion to the comparison of its result, takes it for any other checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

from shardctl import models
from shardctl.base.errors import SourceError, UnsupportedError, UsageError, format_first_few
from shardctl.checkpoint.config_files import CONFIG
from shardctl.checkpoint.joined_source import BASE, JoinedSource
from shardctl.checkpoint.left_tensors import format_modules
from shardctl.libraries.files.file_names import DCP_METADATA, WEIGHT_SUFFIXES
from shardctl.libraries.files.side_files import list_side_files
from shardctl.models.names.binding import list_missing_warnings
from shardctl.models.submodels.part_models import find_text_half
from shardctl.models.tables.predicting import PREDICTING_KEYS, list_predicting_names
from shardctl.tensors.manifest import CheckpointFile, Region
from shardctl.tensors.record import LEFT_OUT
from shardctl.verify.config_comparison import compare_configs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Tensor

COMPLETED: Final = "complete_from"
"""The option of a record that says from which checkpoint its own was completed, and with what."""
_IGNORED_CONFIG_KEYS: Final = frozenset(
    {*("model_type", "architectures", "bos_token_id", "eos_token_id", "pad_token_id"), *PREDICTING_KEYS}
)
"""Keys of configs that may differ here: tokens that only a tokenizer gives, and how many layers predict."""
_QUANTIZATION_CONFIG_KEY: Final = "quantization_config"


def complete_checkpoint(checkpoint: OpenedCheckpoint, base: OpenedCheckpoint) -> OpenedCheckpoint:
    """Return `checkpoint` with the tensors, keys of the config and side files that it lacks and `base` has.

    If `checkpoint` is the text half of what `base` is, it takes that half's place. Where nothing is lacking it is
    returned as it is, and `base` is closed. Raises SourceError for what contradicts: shapes, types, or configs.
    """
    names = _match_names(checkpoint, base)
    mine = dict(_rename_tensors(checkpoint, base, names))
    _check_tensors(checkpoint, base, mine)
    taken = {name: tensor for name, tensor in base.manifest.tensors.items() if name not in mine}
    held = {each.name for each in checkpoint.manifest.objects}
    sides = [each for each in base.manifest.objects if each.policy == "carry" and each.name not in held]
    if not taken and not sides:
        _require_tensors(checkpoint)
        base.source.close()
        return checkpoint
    config = _merge_configs(checkpoint, base, taken, halved=bool(names))
    tensors = {name: _relocate(other) if name in taken else mine[name] for name, other in base.manifest.tensors.items()}
    tensors |= {name: tensor for name, tensor in mine.items() if name not in tensors}
    files = {f"{BASE}{path}": _relocate_file(file) for path, file in base.manifest.files.items()}
    used = {path for tensor in tensors.values() for path in tensor.files}
    said = format_modules(list(taken.values()), mine) if taken else f"files {format_first_few(e.name for e in sides)}"
    manifest = replace(
        checkpoint.manifest,
        tensors=tensors,
        files={path: file for path, file in {**checkpoint.manifest.files, **files}.items() if path in used},
        objects=(*checkpoint.manifest.objects, *(replace(each, file=f"{BASE}{each.file}") for each in sides)),
        warnings=(*checkpoint.manifest.warnings, f"taken from {base.source.name}: {said}"),
    )
    model = models.choose_model(config, manifest) if checkpoint.model is not None and config is not None else None
    record = checkpoint.record
    done = replace(
        checkpoint,
        source=JoinedSource(checkpoint.source, base.source),
        stored=replace(
            checkpoint.stored,
            tensors={**checkpoint.stored.tensors, **{f"{BASE}{name}": _relocate(t) for name, t in taken.items()}},
        ),
        manifest=manifest,
        model=model,
        config=config,
        record=record and replace(record, options={k: v for k, v in record.options.items() if k not in LEFT_OUT}),
        untabled=cache(partial(models.build_untabled_model, config, manifest)) if model is None else None,
        derived=None,
        remade_config=True,
        completed=f"{describe_location(base.source)}: {said}",
    )
    _require_tensors(done)
    return done


def holds_files_only(base: Source) -> bool:
    """Return whether a source has no weights at all, such as a folder with a tokenizer."""
    return not any(path.endswith((*WEIGHT_SUFFIXES, ".ckpt", DCP_METADATA)) for path in base.files())


def add_auxiliary_files(checkpoint: OpenedCheckpoint, base: Source) -> OpenedCheckpoint:
    """Return `checkpoint` with the configs and tokenizer files that it lacks and a source without weights has.

    Raises SourceError if the source has none that the checkpoint lacks.
    """
    held = {each.name for each in checkpoint.manifest.objects} | ({CONFIG} if checkpoint.config is not None else set())
    found, _ = list_side_files(base, set())
    taken = [each for each in found if each.policy == "carry" and each.name not in held and "/" not in each.name]
    if not taken:
        raise SourceError(f"{base.name} has no file that {checkpoint.source.name} lacks", hint="leave it out")
    text = f"files {format_first_few(each.name for each in taken)}"
    manifest = replace(
        checkpoint.manifest,
        objects=(*checkpoint.manifest.objects, *(replace(each, file=f"{BASE}{each.file}") for each in taken)),
        warnings=(*checkpoint.manifest.warnings, f"taken from {base.name}: {text}"),
    )
    return replace(
        checkpoint,
        source=JoinedSource(checkpoint.source, base),
        manifest=manifest,
        completed=f"{describe_location(base)}: {text}",
    )


def _match_names(checkpoint: OpenedCheckpoint, base: OpenedCheckpoint) -> Mapping[str, str]:
    """Map names of a checkpoint to those of `base`; empty if they are models of one class."""
    mine, theirs = checkpoint.model, base.model
    if (mine is None) != (theirs is None):
        whose = checkpoint if mine is None else base
        raise UsageError(
            f"only a model that shardctl knows can be completed from another, and it does not know {whose.source.name}"
        )
    if mine is None or theirs is None or mine.architecture == theirs.architecture or base.config is None:
        return {}
    try:
        half = find_text_half(base.config, base.manifest, theirs.fusions)
    except UnsupportedError:
        half = None
    if half is None or mine.architecture not in half.config["architectures"]:
        raise SourceError(
            f"{checkpoint.source.name} is {mine.architecture}, and {base.source.name} is {theirs.architecture}",
            hint="a checkpoint is completed from one of the same class, or one that has it inside",
        )
    names = {inner: outer for outer, inner in half.names.items()}
    unknown = [name for name in checkpoint.manifest.tensors if name not in names]
    if unknown:
        raise SourceError(
            f"{base.source.name} has no place for {format_first_few(unknown)} of {checkpoint.source.name}"
        )
    return names


def _check_tensors(checkpoint: OpenedCheckpoint, base: OpenedCheckpoint, mine: Mapping[str, Tensor]) -> None:
    """Raise SourceError for a tensor that both have, in other shapes or types."""
    for name, other in base.manifest.tensors.items():
        tensor = mine.get(name)
        if tensor is None or (tensor.shape, tensor.dtype) == (other.shape, other.dtype):
            continue
        raise SourceError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} in {checkpoint.source.name}, and {other.dtype} "
            f"{list(other.shape)} in {base.source.name}",
            hint="the two are not the same model"
            if tensor.shape != other.shape
            else "cast one of the two first, with --dtype",
        )


def _merge_configs(
    checkpoint: OpenedCheckpoint, base: OpenedCheckpoint, taken: Mapping[str, Tensor], *, halved: bool
) -> Mapping[str, Any] | None:
    """Return the config of the whole, which says of layers that predict what `base` says if they were taken.

    Raises SourceError, naming the keys, if the two contradict.
    """
    if checkpoint.config is None or base.config is None:
        return checkpoint.config or base.config
    mine, theirs = checkpoint.config, base.config
    inner = find_text_half(theirs, base.manifest, ()).config if halved else theirs
    unlike = list(_list_contradictions(mine, inner))
    if unlike:
        raise SourceError(
            f"the configs of {checkpoint.source.name} and {base.source.name} contradict each other: "
            f"{format_first_few(unlike)}",
            hint="if the source's is wrong, give the right one with --config PATH",
        )
    if halved:
        return {**theirs, **{key: mine[key] for key in ("dtype", "torch_dtype") if key in mine and key in theirs}}
    predicts = bool(list_predicting_names(theirs, taken))
    return {**theirs, **{key: value for key, value in mine.items() if not (predicts and key in PREDICTING_KEYS)}}


def _list_contradictions(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """Yield what two configs of one class say differently, and a quantization that only one of them names."""
    quantised = ["absent" if config.get(_QUANTIZATION_CONFIG_KEY) is None else "given" for config in (mine, theirs)]
    if quantised[0] != quantised[1]:
        yield f"{_QUANTIZATION_CONFIG_KEY} is {quantised[0]} and {quantised[1]}"
    named = {"architectures": theirs.get("architectures")}
    compared = [{**_drop_free_keys(config), **named} for config in (mine, theirs)]
    for change in compare_configs(*compared, common_only=True, cast=True).changes:
        if not change.harmless:
            yield f"{change.key} is {change.a:.40} and {change.b:.40}"


def _drop_free_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, and those inside it, without the keys that may differ."""
    return {
        key: _drop_free_keys(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _IGNORED_CONFIG_KEYS
    }


def _require_tensors(checkpoint: OpenedCheckpoint) -> None:
    """Raise SourceError for a tensor that is still lacking."""
    if checkpoint.model is not None and not (checkpoint.record is not None and checkpoint.record.filtered):
        list_missing_warnings(checkpoint.model, checkpoint.manifest.tensors)


def _rename_tensors(
    checkpoint: OpenedCheckpoint, base: OpenedCheckpoint, names: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under the names that `base` has for them, and spelled as there if they have others."""
    for name, tensor in checkpoint.manifest.tensors.items():
        other = base.manifest.tensors.get(names.get(name, ""))
        if other is not None:
            tensor = replace(tensor, name=other.name, ties=other.ties, spelling=other.spelling)  # noqa: PLW2901
        yield tensor.name, tensor


def _relocate(tensor: Tensor) -> Tensor:
    """Return a tensor of the second source, by the paths that its files have in the joined one."""
    chunks = tuple(
        replace(chunk, where=replace(chunk.where, file=f"{BASE}{chunk.where.file}"))
        if isinstance(chunk.where, Region)
        else chunk
        for chunk in tensor.chunks
    )
    return replace(tensor, chunks=chunks)


def _relocate_file(file: CheckpointFile) -> CheckpointFile:
    return replace(file, path=f"{BASE}{file.path}")


def describe_location(base: Source) -> str:
    """Return what a record calls a checkpoint: its address, or the name of its directory."""
    location = base.location
    return location if "://" in location else location.rstrip("/").rpartition("/")[2]
