"""Compares the config and the auxiliary files of a checkpoint with those of another."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.value import value_class
from shardctl.checkpoint.config_files import CONFIG, read_config
from shardctl.checkpoint.pipeline_parts import is_pipeline
from shardctl.checkpoint.settings_comparison import compare_library_settings
from shardctl.libraries.reader import find_given_file
from shardctl.libraries.registry import is_plain_safetensors, is_served
from shardctl.models.quantization.settings import QUANTIZATION_FILES
from shardctl.models.tables.config import ModelConfig
from shardctl.tensors.record import RECORD, SUMS
from shardctl.tensors.training import SETTINGS
from shardctl.verify.auxiliary_files import (
    AUTO_MAP,
    describe_loading,
    has_same_content,
    is_code,
    is_document,
    is_needed,
    list_code_references,
    names_code,
)
from shardctl.verify.config_comparison import ABSENT, ConfigChange, ConfigComparison, compare_configs
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.tensors.manifest import OpaqueObject

_MADE_ANEW: Final = frozenset({CONFIG, RECORD, SUMS, SETTINGS, *QUANTIZATION_FILES})


_TYPE_KEYS: Final = ("dtype", "torch_dtype")
"""What the configs of a pipeline's parts say of element types."""


@value_class
class FileChange:
    """An auxiliary file that is not the same beside two checkpoints."""

    file: str
    kind: Literal["content", "only_in_a", "only_in_b"]
    names_code: bool = False
    """Whether only the first has it, and it names classes in files of code (`auto_map`)."""


@value_class
class CompanionComparison:
    """How the configs and side files of two checkpoints differ."""

    config: ConfigComparison | None
    """None where one of the two has no config."""
    files: tuple[FileChange, ...]
    notes: tuple[str, ...] = ()
    """What was not compared, and why."""
    lacks_config: bool = False
    """Whether the first lacks a config that transformers needs to load its files, and the second has one."""
    served: tuple[bool, bool] = (False, False)
    """Of each, whether `from_pretrained` or an engine loads it with what lies beside the weights."""
    alone: bool = False
    """Whether the second is one file, so that it has no auxiliary files to compare with."""


def compare_companions(a: OpenedCheckpoint, b: OpenedCheckpoint, *, cast: bool = False) -> CompanionComparison:
    """Compare the config of `a` as its own files have it with that of `b`, and the side files of both.

    `cast` lets configs declare different element types. Raises SourceError for a file that cannot be read.
    """
    found, notes = compare_model_configs(a, b, cast=cast)
    settings, uncompared = compare_library_settings(a, b)
    changes = (*_compare_code_references(a, b), *settings)
    if changes:
        compared = found or ConfigComparison((), 0)
        found = replace(compared, changes=(*compared.changes, *changes))
    loaded = is_plain_safetensors(a.stored) and find_given_file(a.source) is None
    lacks = loaded and a.config is None and b.config is not None
    served, alone = (_is_served(a), _is_served(b)), find_given_file(b.source) is not None
    files = tuple(_compare_files(a, b, cast=cast))
    return CompanionComparison(found, files, (*notes, *uncompared), lacks, served, alone)


def compare_model_configs(
    a: OpenedCheckpoint, b: OpenedCheckpoint, *, cast: bool = False
) -> tuple[ConfigComparison | None, tuple[str, ...]]:
    """Compare the configs alone; gives None where one of the two has none, and what was not compared, and why."""
    ours, theirs = _read_stored_config(a), b.config
    if is_pipeline(a.stored) and is_pipeline(b.stored):  # those of the parts are compared as files
        return None, ()
    if ours is None or theirs is None:
        which = [each.source.name for each, config in ((a, ours), (b, theirs)) if config is None]
        return None, tuple(f"configs were not compared: {name} has none" for name in which)
    derived = [each for each, config in ((a, ours), (b, theirs)) if _is_derived(each, config)]
    assumed = {key for each in derived for key in _list_assumed(each)}
    # The type that a library's settings name is the one that it computes in, whatever it stores.
    cast = cast or bool(derived) or _declares_other_type(b)
    found = compare_configs(ours, theirs, common_only=bool(derived), assumed=assumed, cast=cast)
    return found, tuple(_describe_derived(each, found.compared) for each in derived)


def _declares_other_type(checkpoint: OpenedCheckpoint) -> bool:
    """Return whether a config that was given with `--config` declares a type that no tensor is stored in."""
    if _read_stored_config(checkpoint) == checkpoint.config:
        return False
    declared = ModelConfig(checkpoint.config or {}).declared()
    stored = {tensor.dtype for tensor in checkpoint.manifest.tensors.values()}
    return declared is not None and bool(stored) and declared not in stored


def check_companions(checkpoint: OpenedCheckpoint, compared: CompanionComparison) -> Iterator[CheckFinding]:
    """Yield what of a comparison with its source speaks against a checkpoint."""
    if compared.lacks_config:
        yield CheckFinding("error", "config", f"{CONFIG} is missing; the source has one", file=CONFIG)
    for change in compared.config.changes if compared.config is not None else ():
        message = f"{change.file} has {change.key} {change.a}; the source has {change.b}"
        if not change.certain:
            message += "; without the model's class of transformers, shardctl cannot tell whether that is the default"
        severe = change.certain and not change.harmless
        yield CheckFinding("error" if severe else "warning", "config", message, file=change.file)
    record = checkpoint.record
    left_out = record is not None and record.filtered
    for each in compared.files:
        severity: Literal["error", "warning"] = "warning" if is_document(each.file) else "error"
        if each.kind == "content":
            yield CheckFinding(severity, "files", f"{each.file} differs from that of the source", file=each.file)
        elif is_document(each.file):
            continue
        elif each.kind == "only_in_b" and not left_out:
            severity = "error" if compared.served[0] and is_needed(each.file) else "warning"
            yield CheckFinding(severity, "files", f"{each.file} is missing; the source has it", file=each.file)
        elif each.kind == "only_in_a" and not compared.alone:
            yield from _check_added_file(each, compared, recorded=record is not None and each.file in record.files)


def _check_added_file(each: FileChange, compared: CompanionComparison, *, recorded: bool) -> Iterator[CheckFinding]:
    """Yield what speaks against a file that the source lacks: code always, and what a loader reads of both sides.

    Where the source is a trainer's, it holds no tokenizer that could be compared. A record that lists any other file
    says that shardctl wrote it.
    """
    read = describe_loading(each.file)
    if is_code(each.file) or each.names_code or (read and all(compared.served)):
        message = f"{each.file} is not in the source{read}"
        if each.names_code:
            message += f"; its {AUTO_MAP} names code"
        yield CheckFinding("error", "files", message, file=each.file)
    elif read or not recorded:
        yield CheckFinding("warning", "files", f"{each.file} is not in the source", file=each.file)


def _is_served(checkpoint: OpenedCheckpoint) -> bool:
    beside = is_pipeline(checkpoint.stored) or CONFIG in checkpoint.source.files()
    return is_served(checkpoint.stored) and beside and find_given_file(checkpoint.source) is None


def _compare_code_references(a: OpenedCheckpoint, b: OpenedCheckpoint) -> Iterator[ConfigChange]:
    """Yield each `auto_map` that is not the same in both configs: it decides which code a loader runs.

    One that the first lacks says nothing where a config follows from the settings of another library. If the second has
    no config, a record that lists the first's says that `--config` gave it.
    """
    given = b.config is None and a.record is not None and CONFIG in a.record.files
    if given or find_given_file(b.source) is not None:
        return
    configs = (_read_stored_config(a), b.config)
    ours, theirs = (dict(list_code_references(config or {})) for config in configs)
    derived = any(
        config is not None and _is_derived(each, config) for each, config in zip((a, b), configs, strict=True)
    )
    for key in sorted(ours | theirs):
        if ours.get(key) != theirs.get(key) and (key in ours or not derived):
            mine, other = (json.dumps(each[key]) if key in each else ABSENT for each in (ours, theirs))
            yield ConfigChange(key, mine, other)


def _read_stored_config(checkpoint: OpenedCheckpoint) -> Mapping[str, object] | None:
    """Read the config that a checkpoint itself has, whatever `--config` says of it."""
    own = checkpoint.stored.own_config
    if own is not None and own.replaces:
        return own.values
    found = read_config(checkpoint.source).values
    return found if found is not None else own.values if own is not None else None


def _is_derived(checkpoint: OpenedCheckpoint, config: Mapping[str, object]) -> bool:
    """Return whether a config is what follows from the settings of a library, whose vocabulary may be given."""
    own = checkpoint.stored.own_config
    if own is None or (CONFIG in checkpoint.source.files() and not own.replaces):
        return False
    return all(key in own.values and own.values[key] == value for key, value in config.items() if key != "vocab_size")


def _list_assumed(checkpoint: OpenedCheckpoint) -> frozenset[str]:
    own = checkpoint.stored.own_config
    return own.assumed if own is not None else frozenset()


def _describe_derived(checkpoint: OpenedCheckpoint, compared: int) -> str:
    """Say what was compared of a checkpoint without a config, and what was not because it is a guess."""
    name, assumed = checkpoint.source.name, sorted(_list_assumed(checkpoint))
    text = f"{name} has no config of transformers: the {compared} settings that its own library keeps were compared"
    return f"{text}, but not {', '.join(assumed)}, which it does not keep" if assumed else text


def _compare_files(a: OpenedCheckpoint, b: OpenedCheckpoint, *, cast: bool) -> Iterator[FileChange]:
    """Yield the files that differ; what the second takes from the base that completes it counts, of the first not."""
    but = _TYPE_KEYS if cast and is_pipeline(a.stored) else ()
    ours = {name: side for name, side in _list_files(a).items() if side.file == name}
    theirs = _list_files(b)
    for name in sorted(ours | theirs):
        if name not in theirs:
            yield FileChange(name, "only_in_a", names_code(name, a.source))
        elif name not in ours:
            yield FileChange(name, "only_in_b")
        elif not has_same_content(name, a.source, b.source, theirs[name].file, but=but):
            yield FileChange(name, "content")


def _list_files(checkpoint: OpenedCheckpoint) -> dict[str, OpaqueObject]:
    files = checkpoint.source.files()
    return {
        side.name: side
        for side in checkpoint.manifest.objects
        if side.policy == "carry" and side.file in files and side.name not in _MADE_ANEW
    }
