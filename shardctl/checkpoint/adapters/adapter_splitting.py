"""Splits an adapter off a checkpoint: from the tensors of its base, or out of a file or folder beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UsageError
from shardctl.checkpoint.adapters.adapter_checkpoint import describe_adapter
from shardctl.checkpoint.config_files import CONFIG
from shardctl.checkpoint.left_tensors import keep_tensors
from shardctl.libraries import registry as formats
from shardctl.libraries.files.impostors import ADAPTER_CONFIG, ADAPTERS
from shardctl.libraries.peft.adapter import scan_adapter_file
from shardctl.libraries.peft.settings import parse_settings
from shardctl.libraries.peft.trainer_metadata import TRAINER_METADATA, build_adapter_config
from shardctl.libraries.peft.whole_model import list_live_adapters, map_saved_names
from shardctl.storage.addresses import open_source
from shardctl.storage.bounded_text import CONFIG_TEXT, read_json
from shardctl.tensors.manifest import Chunk, Manifest, OpaqueObject, Region

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.libraries.peft.settings import AdapterSettings
    from shardctl.storage import Source

ADAPTER: Final = "adapter"
"""What `--only` calls it; `adapter:NAME` is one of several."""
_OF_BASE: Final = frozenset({CONFIG, "generation_config.json"})
"""Side files that describe the base."""


def split_adapter(checkpoint: OpenedCheckpoint, only: str) -> OpenedCheckpoint:
    """Return the adapter that `only` names, under the names and with the config that PEFT saves it with.

    It is looked for among the tensors, then in files that PEFT wrote beside them or in folders. What was read of the
    checkpoint says how its base is cut. Raises UsageError where there is none, or several and none is named,
    SourceError where nothing says its scaling.
    """
    asked = only.partition(":")[2]
    if checkpoint.adapter and not asked:
        return replace(checkpoint, part=only)
    live = list_live_adapters(checkpoint.stored.tensors)
    if live:
        return replace(_split_live_adapter(checkpoint, _choose_adapter(live, asked)), part=only)
    folder = _choose_adapter(_list_adapter_folders(checkpoint.source), asked)
    return replace(_open_beside(checkpoint, "" if folder == "." else f"{folder}/"), part=only)


def _split_live_adapter(checkpoint: OpenedCheckpoint, adapter: str) -> OpenedCheckpoint:
    """Return an adapter whose matrices are among the tensors of a model in training."""
    stored, source = checkpoint.stored, checkpoint.source
    file = _find_config(source, adapter)
    config = read_json(source, file, CONFIG_TEXT)
    own = OpaqueObject(ADAPTER_CONFIG, "carry", file=file, size=source.files()[file].size)
    notes: tuple[str, ...] = ()
    if file == TRAINER_METADATA:
        config = build_adapter_config(config, stored.tensors, adapter)
        content = (json.dumps(config, indent=2) + "\n").encode()
        own = OpaqueObject(ADAPTER_CONFIG, "synthesise", size=len(content), content=content)
        notes = (f"{ADAPTER_CONFIG} is made of {file}, which does not say whether rsLoRA was used: LoRA is assumed",)
    if not isinstance(config, dict):
        raise SourceError(f"{file} is not a JSON object")
    names = map_saved_names(stored.tensors, adapter, config)
    kept = keep_tensors(replace(stored, training=checkpoint.manifest.training), names)
    tensors = {
        names[name]: replace(tensor, name=names[name], ties=(), spelling=()) for name, tensor in kept.tensors.items()
    }
    objects = [
        *(replace(each, policy="drop") if each.name in {*_OF_BASE, file} else each for each in stored.objects),
        own,
    ]
    manifest = replace(kept, tensors=tensors, objects=_drop_repeats(objects, file.removesuffix(ADAPTER_CONFIG)))
    manifest = replace(manifest, warnings=(*manifest.warnings, *notes))
    return _describe_part(checkpoint, manifest, file, parse_settings(config, merged=False))


def _drop_repeats(objects: Iterable[OpaqueObject], folder: str) -> tuple[OpaqueObject, ...]:
    """Leave behind the adapter's own files beside its base, of which it is written anew."""
    own = {f"{folder}{name}" for name in ADAPTERS}
    return tuple(replace(each, policy="drop") if each.name in own else each for each in objects)


def _find_config(source: Source, adapter: str) -> str:
    """Find the `adapter_config.json` of an adapter; raises SourceError where nobody can say which is its."""
    files = [path for path in source.files() if path.rpartition("/")[2] == ADAPTER_CONFIG]
    for path in (f"{adapter}/{ADAPTER_CONFIG}", ADAPTER_CONFIG):
        if path in files:
            return path
    if len(files) == 1:
        return files[0]
    if not files and TRAINER_METADATA in source.files():
        return TRAINER_METADATA
    several = f"; there are {', '.join(files)}" if files else ""
    raise SourceError(
        f"{source.name} has no {ADAPTER_CONFIG} of its adapter {adapter}{several}",
        hint=f"put it into the directory: only {ADAPTER_CONFIG} says what the matrices are multiplied with",
    )


def _list_adapter_folders(source: Source) -> list[str]:
    """List the folders with a file of an adapter and its config; `.` is the source itself."""
    files = source.files()
    folders = (path.rpartition("/")[0] for path in files if path.rpartition("/")[2] in ADAPTERS)
    found = [folder for folder in dict.fromkeys(folders) if f"{folder}/{ADAPTER_CONFIG}".lstrip("/") in files]
    return [folder or "." for folder in found]


def _choose_adapter(found: Collection[str], asked: str) -> str:
    if asked and asked not in found:
        there = f"it has {', '.join(found)}" if found else "it has none"
        raise UsageError(f"the checkpoint has no adapter {asked}", hint=there)
    if not found:
        raise UsageError(
            "--only adapter finds no adapter: no tensor is called as those of LoRA are in training "
            f"(...lora_A.default.weight), and no folder has {' or '.join(ADAPTERS)} beside {ADAPTER_CONFIG}",
            hint="give the folder of the adapter itself, if it is elsewhere",
        )
    if len(found) > 1 and not asked:
        names = list(found)
        raise UsageError(
            f"the checkpoint has several adapters: {', '.join(names)}", hint=f"name one: --only adapter:{names[0]}"
        )
    return asked or next(iter(found))


def _open_beside(checkpoint: OpenedCheckpoint, folder: str) -> OpenedCheckpoint:
    """Return an adapter that PEFT saved in a `folder` of the checkpoint, or beside the weights of its base."""
    outer = checkpoint.source
    where = folder or next(name for name in ADAPTERS if name in outer.files())
    inner = open_source(outer.folder / where if outer.folder is not None else f"{outer.location}/{where}".rstrip("/"))
    try:
        found = formats.scan_checkpoint(inner) if folder else scan_adapter_file(inner)
    finally:
        inner.close()
    objects = found.objects if folder else checkpoint.stored.objects
    left = {*ADAPTERS, *_OF_BASE}
    objects = tuple(replace(each, policy="drop") if each.name in left else each for each in objects)
    manifest = _move_into(folder, replace(found, objects=objects)) if folder else replace(found, objects=objects)
    return _describe_part(checkpoint, manifest, f"{folder}{ADAPTER_CONFIG}")


def _move_into(folder: str, manifest: Manifest) -> Manifest:
    """Return the manifest of a folder's files with the paths that they have around it."""

    def place(chunk: Chunk) -> Chunk:
        where = chunk.where
        return (
            replace(chunk, where=replace(where, file=f"{folder}{where.file}")) if isinstance(where, Region) else chunk
        )

    tensors = {n: replace(t, chunks=tuple(map(place, t.chunks))) for n, t in manifest.tensors.items()}
    files = {f"{folder}{path}": replace(each, path=f"{folder}{path}") for path, each in manifest.files.items()}
    objects = tuple(replace(each, file=f"{folder}{each.file}") if each.file else each for each in manifest.objects)
    return replace(manifest, tensors=tensors, files=files, objects=objects)


def _describe_part(
    checkpoint: OpenedCheckpoint, manifest: Manifest, config_file: str, settings: AdapterSettings | None = None
) -> OpenedCheckpoint:
    """Return the adapter in a checkpoint, of whose base the checkpoint has the config."""
    found = describe_adapter(checkpoint.source, manifest, checkpoint.config, config_file=config_file, settings=settings)
    return replace(
        found,
        stored=checkpoint.stored,
        resources=checkpoint.resources,
        allow_unverified=checkpoint.allow_unverified,
    )
