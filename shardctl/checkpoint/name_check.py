"""Compares the names in a checkpoint with the tensors of the class in its config, from headers alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl import models
from shardctl.base.amounts import format_plural
from shardctl.base.errors import ShardctlError, UnsupportedError, format_first_few
from shardctl.checkpoint.config_files import CONFIG
from shardctl.libraries.peft.whole_model import list_live_adapters
from shardctl.models.names.binding import is_maxtext
from shardctl.models.names.wrapping import AmbiguousNamesError, ClassReader
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.models.names.wrapping import NameReading

CHECK: Final = "names"
"""What findings call this check."""
_LOADED_FILE: Final = re.compile(r"(model|pytorch_model)(-[0-9]+-of-[0-9]+)?\.(safetensors|bin)")
"""The weight files that `from_pretrained` looks for."""


def check_names(checkpoint: OpenedCheckpoint) -> Iterator[CheckFinding]:
    """Yield tensors of the class that no stored name is, and those that some consumers reject.

    Arrays of ranks and of other libraries are compared after they were mapped to the class's names.
    """
    if checkpoint.model is not None:
        reading = _find_wrapped_reading(checkpoint)
        if reading is not None:
            yield CheckFinding("error", CHECK, _describe_prefix(checkpoint, reading))
        yield from _check_extra(checkpoint)
        return
    reader = _build_reader(checkpoint)
    if reader is None or isinstance(checkpoint.model_error, AmbiguousNamesError):
        return
    plain = reader.read_below("", list(checkpoint.stored.tensors))
    if plain.lacking == reader.required:
        yield CheckFinding("error", CHECK, _describe_absence(checkpoint, reader))
    elif plain.lacking and checkpoint.record is None and not reader.any_array:
        yield CheckFinding(
            "error",
            CHECK,
            f"{len(plain.lacking)} of {format_plural(len(reader.required), 'tensor')} of {reader.model.architecture} "
            f"are missing: {format_first_few(sorted(plain.lacking))}",
        )


def note_names(checkpoint: OpenedCheckpoint) -> Iterator[str]:
    """Say why names were not compared with a class."""
    if checkpoint.model is not None or checkpoint.adapter or checkpoint.hypothetical:
        return
    if checkpoint.config is None:
        yield f"names: not checked, because there is no {CONFIG}"
    elif models.find_family(checkpoint.config) is None:
        named = models.ModelConfig(checkpoint.config)
        title = named.architecture() or named.text("model_type", "") or "the model"
        yield f"names: not checked, because no table knows the tensors of {title}"
    elif isinstance(checkpoint.model_error, AmbiguousNamesError):
        yield f"names: not checked: {checkpoint.model_error.message}"


def refuse_foreign_names(checkpoint: OpenedCheckpoint) -> None:
    """Raise UnsupportedError if nothing stored is a tensor of the class in the config, or two parts are all of it.

    The hint names a prefix that would help.
    """
    if isinstance(checkpoint.model_error, AmbiguousNamesError):
        raise checkpoint.model_error
    reader = _build_reader(checkpoint) if checkpoint.model is None else None
    if reader is None or reader.read_below("", list(checkpoint.stored.tensors)).lacking != reader.required:
        return
    best = _find_likeliest(reader)
    hint = f"--config may name another model's config; without {CONFIG}, names stay as they are"
    if best is not None:
        hint = f"--subtree {best.prefix.removesuffix('.')} reads the tensors below that prefix"
    raise UnsupportedError(_describe_absence(checkpoint, reader), hint=hint)


def _build_reader(checkpoint: OpenedCheckpoint) -> ClassReader | None:
    """Build what reads the stored names as the class's; None if no table knows it, or the names are other arrays'."""
    config, stored = checkpoint.config, checkpoint.stored
    if config is None or checkpoint.adapter or checkpoint.hypothetical or stored.dialect is not None:
        return None
    if checkpoint.stored_quantization is not None or list_live_adapters(stored.tensors):
        return None  # --only adapter takes an adapter and its base apart
    partial = checkpoint.record is not None and checkpoint.record.partial
    if partial or checkpoint.ruled or checkpoint.part or is_maxtext(stored.tensors) or not stored.tensors:
        return None
    try:
        if models.find_family(config) is None:
            return None
        model = models.describe_model(models.drop_quantization_config(config))
    except ShardctlError:  # the config cannot be understood, of which other checks speak
        return None
    quantized = models.find_quantization_config(config) is not None
    return ClassReader(model, stored.tensors, any_array=quantized)


def _describe_absence(checkpoint: OpenedCheckpoint, reader: ClassReader) -> str:
    best, count = _find_likeliest(reader), len(reader.required)
    message = (
        f"none of {format_plural(count, 'tensor')} of {reader.model.architecture} is there; the names are such as "
        f"{format_first_few(checkpoint.stored.tensors, 2)}"
    )
    if best is not None:
        message += f", of which {count - len(best.lacking)} would be its tensors without the prefix {best.prefix!r}"
    return message


def _find_likeliest(reader: ClassReader) -> NameReading | None:
    """Find the reading that gives the class the most tensors; None if no prefix helps."""
    best = min(reader.list_readings(least=1), key=lambda each: (len(each.lacking), len(each.prefix)))
    return best if best.prefix and best.lacking != reader.required else None


def _find_wrapped_reading(checkpoint: OpenedCheckpoint) -> NameReading | None:
    """Find the reading of a directory that `from_pretrained` would load by other names than it holds."""
    model, stored = checkpoint.model, checkpoint.stored
    own_config = CONFIG in checkpoint.source.files() and checkpoint.record is None and not checkpoint.ruled
    if model is None or not own_config or not model.family or stored.dialect is not None or checkpoint.subtree:
        return None
    if not all(_LOADED_FILE.fullmatch(path) for path in stored.files):
        return None
    reader = ClassReader(model, stored.tensors, unwrapped=False)
    plain = reader.read_below("", list(stored.tensors))
    if plain.complete or not plain.lacking:
        return None
    best = min(reader.list_readings(least=1), key=lambda each: (len(each.lacking), len(each.prefix)))
    return best if best.prefix and len(best.lacking) < len(plain.lacking) else None


def _describe_prefix(checkpoint: OpenedCheckpoint, reading: NameReading) -> str:
    count = len(reading.names)
    assert checkpoint.model is not None  # noqa: S101 - asked before
    return (
        f"the names of {format_plural(count, 'tensor')} begin with {reading.prefix!r}, under which a loader of "
        f"{checkpoint.model.architecture} finds none of them; shardctl reshard removes it"
    )


def _check_extra(checkpoint: OpenedCheckpoint) -> Iterator[CheckFinding]:
    """Say which consumers reject a checkpoint because of tensors that its class does not have."""
    extra = [each for each in checkpoint.list_extra_tensors() if not each.kept]
    if not extra:
        return
    from shardctl.libraries.consumers.profile import list_rejecting_consumers

    rejecting = ", ".join(list_rejecting_consumers())
    some = f"{format_plural(len(extra), 'tensor')} that the class does not have"
    named = format_first_few([each.name for each in extra])
    yield CheckFinding("warning", CHECK, f"{rejecting} reject {some}: {named}; reshard stores them apart")
