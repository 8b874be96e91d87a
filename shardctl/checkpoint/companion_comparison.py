"""Compares the config and the side files of a checkpoint with those of another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from shardctl.checkpoint.config_files import CONFIG, read_config
from shardctl.checkpoint.pipeline_parts import is_pipeline
from shardctl.checkpoint.settings_comparison import compare_library_settings
from shardctl.libraries.reader import find_given_file
from shardctl.libraries.registry import is_plain_safetensors
from shardctl.models.quantisation.settings import QUANTISATION_FILES
from shardctl.record import RECORD, SUMS
from shardctl.training import SETTINGS
from shardctl.value import value_class
from shardctl.verify.config_comparison import ConfigComparison, compare_configs
from shardctl.verify.finding import CheckFinding
from shardctl.verify.side_files import has_same_content, is_document

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.checkpoint.opening import OpenedCheckpoint

_MADE_ANEW: Final = frozenset({CONFIG, RECORD, SUMS, SETTINGS, *QUANTISATION_FILES})


_TYPE_KEYS: Final = ("dtype", "torch_dtype")
"""What the configs of a pipeline's parts say of element types."""


@value_class
class FileChange:
    """A side file that is not the same beside two checkpoints."""

    file: str
    kind: Literal["content", "only_in_a", "only_in_b"]


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


def compare_companions(a: OpenedCheckpoint, b: OpenedCheckpoint, *, cast: bool = False) -> CompanionComparison:
    """Compare the config of `a` as its own files have it with that of `b`, and the side files of both.

    `cast` lets configs declare different element types. Raises SourceError for a file that cannot be read.
    """
    found, notes = compare_model_configs(a, b, cast=cast)
    settings, uncompared = compare_library_settings(a, b)
    if settings:
        compared = found or ConfigComparison((), 0)
        found = replace(compared, changes=(*compared.changes, *settings))
    loaded = is_plain_safetensors(a.stored) and find_given_file(a.source) is None
    lacks = loaded and a.config is None and b.config is not None
    notes = (*notes, *uncompared)
    return CompanionComparison(found, tuple(_compare_files(a, b, cast=cast)), notes, lacks_config=lacks)


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
    cast = cast or bool(derived)
    found = compare_configs(ours, theirs, common_only=bool(derived), assumed=assumed, cast=cast)
    return found, tuple(_describe_derived(each, found.compared) for each in derived)


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
    left_out = checkpoint.record is not None and checkpoint.record.filtered
    for each in compared.files:
        if each.kind == "content":
            severity: Literal["error", "warning"] = "warning" if is_document(each.file) else "error"
            yield CheckFinding(severity, "files", f"{each.file} differs from that of the source", file=each.file)
        elif each.kind == "only_in_b" and not left_out and not is_document(each.file):
            yield CheckFinding("warning", "files", f"{each.file} is missing; the source has it", file=each.file)


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
    but = _TYPE_KEYS if cast and is_pipeline(a.stored) else ()
    ours, theirs = (
        {
            side.name
            for side in each.manifest.objects
            if side.policy == "carry" and side.name in each.source.files() and side.name not in _MADE_ANEW
        }
        for each in (a, b)
    )
    for name in sorted(ours | theirs):
        if name not in theirs:
            yield FileChange(name, "only_in_a")
        elif name not in ours:
            yield FileChange(name, "only_in_b")
        elif not has_same_content(name, a.source, b.source, but=but):
            yield FileChange(name, "content")
