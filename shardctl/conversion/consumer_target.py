"""Turns `--for CONSUMER` into the options of a conversion, and checks what will be written before it is written.

For example, `--for vllm --tp 2` writes plain Hugging Face files in the Hub's names, and the mesh enters the checks and
the command that is printed; with `--to vllm` the files are those of vLLM's ranks.
"""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import SourceError, UnsupportedError, UsageError
from shardctl.checkpoint.config_files import CONFIG
from shardctl.checkpoint.consumer_check import describe_model
from shardctl.checkpoint.run_directory import find_run_files
from shardctl.conversion.conversion_plan import plan_conversion
from shardctl.libraries.consumers.profile import find_profile, has_profile
from shardctl.libraries.files.file_names import SAFETENSORS
from shardctl.libraries.files.impostors import ADAPTER_CONFIG, find_lone_adapter
from shardctl.libraries.safetensors.header import METADATA
from shardctl.storage.addresses import open_source
from shardctl.storage.bounded_text import CONFIG_TEXT, read_json
from shardctl.tensors.mesh import Mesh
from shardctl.verify.consumer import TOKENIZER_FILES, check_consumer, require_axes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.conversion.conversion_plan import PlannedConversion
    from shardctl.libraries.consumers.profile import ConsumerProfile
    from shardctl.options import ReshardOptions, SourceOptions
    from shardctl.tensors.manifest import Manifest
    from shardctl.verify.consumer import ConsumerVerdict, StoredModel

_PER_RANK_LAYOUT: Final = "vllm"
"""The layout whose files are those of a server's ranks."""
_LENGTH_BYTES: Final = 8
"""Bytes of the length before the header of a safetensors file."""


def apply_consumer(options: ReshardOptions) -> ReshardOptions:
    """Return the options with what `--for` decides: the layout, the names, and the profile of files of ranks.

    Raises UsageError for options that say something else.
    """
    if options.consumer is None or options.consumer_mesh is not None:
        return options
    older = _find_older_profile(options)
    if older:
        return replace(options, consumer=None, vllm_profile=older)
    profile = find_profile(options.consumer)
    if options.vllm_profile is not None:
        raise UsageError(
            "--for and --vllm-profile are both given",
            hint=f"leave --vllm-profile out: --for {options.consumer} says it",
        )
    mesh = options.mesh or Mesh.of()
    require_axes(profile, mesh)
    if options.to == _PER_RANK_LAYOUT:
        if not profile.sharded:
            raise UsageError(f"{profile.label} does not load --to {options.to}", hint="leave --to out")
        return replace(options, vllm_profile=profile.rank_profile, consumer_mesh=mesh)
    if options.to not in {None, "hf"}:
        raise UsageError(f"{profile.label} does not load --to {options.to}", hint="leave --to out, which means hf")
    if options.stages is not None:
        raise UsageError(f"{profile.label} divides layers itself", hint="leave --stages out")
    return replace(options, to="hf", mesh=None, consumer_mesh=mesh)


def _find_older_profile(options: ReshardOptions) -> str:
    """Find the version whose files of ranks are known, and nothing else of the consumer; empty for any other."""
    name, _, version = (options.consumer or "").partition("@")
    if options.to != _PER_RANK_LAYOUT or name != "vllm" or not version or options.vllm_profile is not None:
        return ""
    return "" if has_profile(f"{name}@{version}") else version


def warn_of_unchecked(reshard_options: ReshardOptions | None, applied: ReshardOptions) -> tuple[str, ...]:
    """Warn of a consumer that `apply_consumer` left out, because its version has no profile."""
    if reshard_options is None or reshard_options.consumer is None or applied.consumer is not None:
        return ()
    return (f"{reshard_options.consumer} has no profile here: whether it loads the result was not checked",)


def merge_lone_adapter(
    path: str | Path, reshard_options: ReshardOptions, source_options: SourceOptions
) -> tuple[str | Path, ReshardOptions, SourceOptions]:
    """Return the base as the source, with the adapter to be merged, where the source is an adapter alone.

    A consumer serves a whole model. The base is what --complete-from names, or the directory that the adapter's config
    names. Adapters that are to stay adapters (`--experts split`, `--only adapter`) are returned as they are.
    Raises SourceError if the base is not found, and UnsupportedError for an adapter that is not on this machine.
    """
    if reshard_options.experts != "keep" or reshard_options.only is not None or reshard_options.merge:
        return path, reshard_options, source_options
    with closing(open_source(path)) as source:
        if find_lone_adapter(source) is None:
            return path, reshard_options, source_options
        if source.folder is None:
            raise UnsupportedError(
                f"{path} is an adapter, which is merged from a directory of this machine only",
                hint=f"download it and give its base: reshard BASE DST --merge DIR --for {reshard_options.consumer}",
            )
        folder, values = source.folder, read_json(source, ADAPTER_CONFIG, CONFIG_TEXT)
    named = values.get("base_model_name_or_path") if isinstance(values, dict) else None
    base = source_options.complete_from or (named if isinstance(named, str) and os.path.isdir(named) else None)  # noqa: PTH112 - a name may be too long
    if base is None:
        of = f" of {named}" if isinstance(named, str) and named else ""
        raise SourceError(
            f"{path} is an adapter{of}, and the weights of its base are not here",
            hint="give its base with --complete-from BASE, a directory or owner/name on the Hub",
        )
    merged = replace(reshard_options, merge=(folder,))
    return base, merged, replace(source_options, complete_from=None)


def warn_of_merge(adapter: str | Path, base: str | Path) -> tuple[str, ...]:
    """Warn that an adapter is merged, and of a tokenizer next to it, which the base's takes the place of."""
    own = sorted(name for name in TOKENIZER_FILES if os.path.isfile(os.path.join(adapter, name)))  # noqa: PTH113, PTH118
    left = f"; its own {own[0]} is left behind" if own else ""
    return (f"{adapter} is an adapter, and is merged into {base}{left}",)


def locate_run(path: str | Path, options: SourceOptions) -> tuple[str | Path, SourceOptions]:
    """Find the weights of a local run, with the config and the tokenizer that the run keeps elsewhere.

    What the options name stays as they name it, and what is not a local path is returned as it is.
    """
    if not os.path.exists(path):  # noqa: PTH110 - an address is not a path
        return path, options
    found = find_run_files(Path(path), options.container)
    if options.config is None and found.config is not None:
        options = replace(options, config=found.config)
    if options.complete_from is None and found.tokenizer is not None:
        options = replace(options, complete_from=str(found.tokenizer))
    return found.weights, options


def fit_consumer(checkpoint: OpenedCheckpoint, work: PlannedConversion, destination: str | Path) -> PlannedConversion:
    """Return a conversion whose result the consumer should load, with the verdict of the check.

    Names that the source has stay if they are ones that the consumer loads; else they become those of the Hub.
    Raises UnsupportedError if the result would not load.
    """
    options = work.reshard_options
    profile = find_profile(options.consumer or "")
    verdict = _check_written(work, profile, destination)
    if verdict.reasons and options.names is None and work.layout == "hf":
        try:
            renamed = plan_conversion(checkpoint, replace(options, names="hub"))
            work, verdict = renamed, _check_written(renamed, profile, destination)
        except UnsupportedError:
            pass  # the class cannot save them: the first verdict says why they do not load
    if verdict.reasons:
        raise UnsupportedError(
            f"the result would not load in {profile.label}: {verdict.reasons[0]}",
            hint="; ".join(verdict.reasons[1:])
            or f"see what {profile.label} loads with verify --for {options.consumer}",
        )
    if verdict.unlisted:
        raise UnsupportedError(
            f"it is not known whether {profile.label} loads the result: {verdict.unlisted}",
            hint="--to hf in place of --for writes the files without this check",
        )
    return replace(work, consumer=verdict)


def _check_written(work: PlannedConversion, profile: ConsumerProfile, destination: str | Path) -> ConsumerVerdict:
    mesh, per_rank = work.reshard_options.consumer_mesh or Mesh.of(), work.layout == _PER_RANK_LAYOUT
    path = str(destination).removeprefix("hf://")  # consumers call a repository owner/name
    return check_consumer(profile, _describe_written(work), mesh, path, per_rank=per_rank)


def _describe_written(work: PlannedConversion) -> StoredModel:
    """Describe the directory that a conversion will write, from the headers that it has made."""
    sides = {side.name: side.content for side in work.carried}
    made = sides.get(CONFIG)
    config = json.loads(made) if made is not None else work.checkpoint.config if CONFIG in sides else None
    files = {*work.plan.want.files, *sides}
    written = _list_written_arrays(work.plan.want)
    arrays = {name: dtype for name, (dtype, _) in written.items()}
    shapes = {name: shape for name, (_, shape) in written.items()}
    return describe_model(work.checkpoint, arrays, files, config, shapes=shapes)


def _list_written_arrays(want: Manifest) -> Mapping[str, tuple[DType, tuple[int, ...]]]:
    """List the arrays of the safetensors files at the top of the result from the new headers: types and shapes."""
    found: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for path, file in want.files.items():
        if "/" not in path and path.endswith(SAFETENSORS):
            header = json.loads(file.literals[0][1][_LENGTH_BYTES:])
            del header[METADATA]
            found |= {name: (BY_NAME[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()}
    return found
