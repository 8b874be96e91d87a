"""Describes the parts of a pipeline of diffusers, and refuses what is for one model alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.base.value import value_class
from shardctl.checkpoint.config_files import CONFIG
from shardctl.libraries.files.file_names import PIPELINE, PIPELINE_FORMAT
from shardctl.models import find_quantization_config
from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.options import ReshardOptions, SourceOptions
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest


@value_class
class PipelinePart:
    """One model of a pipeline."""

    name: str
    """Its folder."""
    class_name: str
    """What `model_index.json` says that it is."""
    tensors: int
    parameters: int
    nbytes: int
    dtypes: tuple[str, ...]
    quantised: bool
    """Whether its config says that its weights are quantized."""


def is_pipeline(stored: Manifest) -> bool:
    """Return whether what was scanned is a whole pipeline."""
    return stored.format == PIPELINE_FORMAT


def list_pipeline_parts(source: Source, stored: Manifest) -> tuple[PipelinePart, ...]:
    """List the models of a pipeline in the order of its files; none of anything else."""
    if not is_pipeline(stored):
        return ()
    index = parse_json(read_text(source, PIPELINE, CONFIG_TEXT), PIPELINE, CONFIG_TEXT)
    parts = []
    for name in dict.fromkeys(tensor.partition("/")[0] for tensor in stored.tensors):
        own = [tensor for tensor in stored.tensors.values() if tensor.name.startswith(f"{name}/")]
        parts.append(
            PipelinePart(
                name=name,
                class_name=str(index[name][-1]),
                tensors=len(own),
                parameters=sum(tensor.size for tensor in own),
                nbytes=sum(tensor.nbytes for tensor in own),
                dtypes=tuple(dict.fromkeys(tensor.dtype.name for tensor in own)),
                quantised=find_quantization_config(read_part_config(source, name)) is not None,
            )
        )
    return tuple(parts)


def read_part_config(source: Source, name: str) -> Mapping[str, Any]:
    """Read the config of a part; empty if there is none. Raises SourceError for a file that cannot be read."""
    path = f"{name}/{CONFIG}"
    values = parse_json(read_text(source, path, CONFIG_TEXT), path, CONFIG_TEXT) if path in source.files() else {}
    return values if isinstance(values, dict) else {}


def check_pipeline_source(stored: Manifest, source_options: SourceOptions) -> None:
    """Raise UsageError for options that say what one model is."""
    given = [
        flag
        for flag, value in (
            ("--config", source_options.config),
            ("--rules", source_options.rules),
            ("--complete-from", source_options.complete_from),
        )
        if value is not None
    ]
    if given and is_pipeline(stored):
        raise UsageError(
            f"{given[0]} is for one model, and a pipeline of diffusers has several",
            hint="give the folder of one part as the source",
        )


def check_pipeline_options(checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions, layout: str) -> None:
    """Raise UnsupportedError for a conversion that cannot be done to all parts of a pipeline at once."""
    if not is_pipeline(checkpoint.stored):
        return
    parts = list_pipeline_parts(checkpoint.source, checkpoint.stored)
    one = f"give the folder of one part, such as {checkpoint.source.name}/{parts[0].name}"
    for flag in ("quantize", "merge", "only"):
        if getattr(reshard_options, flag):
            raise UnsupportedError(f"--{flag} is for one model, and a pipeline of diffusers has several", hint=one)
    if layout != "hf":
        raise UnsupportedError(f"a whole pipeline of diffusers is written to hf, not to {layout}", hint=one)
    quantised = [part.name for part in parts if part.quantised]
    if quantised and reshard_options.dtype != "keep":
        raise UnsupportedError(
            f"--dtype {reshard_options.dtype} would cast the scales of {', '.join(quantised)}, which is quantized",
            hint=f"leave --dtype out, or give the folder {checkpoint.source.name}/{quantised[0]} by itself",
        )
