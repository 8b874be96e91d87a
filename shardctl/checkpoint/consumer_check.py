"""Describes an opened checkpoint, or what a conversion makes of one, as a consumer such as vLLM will see it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardctl.checkpoint.config_files import CONFIG
from shardctl.models import find_family
from shardctl.models.names.hub import SAVED_FOR_NOBODY, find_conversions, list_state_arrays
from shardctl.verify.consumer import StoredModel, check_consumer, require_axes
from shardctl.verify.rank_files import list_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.libraries.consumers.profile import ConsumerProfile
    from shardctl.tensors.mesh import Mesh
    from shardctl.verify.consumer import ConsumerVerdict

_RANK_SCHEMA = "vllm"
"""The schema of files that a server's ranks load (`sharded_state`)."""
_PROFILE_FACT = "profile"
"""Where a dialect of that schema says which server, and which version of it, has such files."""
_PLAIN_FORMATS = frozenset({"safetensors", "torch"})
"""Formats whose arrays are those of the model, under its own names."""


def describe_model(
    checkpoint: OpenedCheckpoint,
    arrays: Mapping[str, DType],
    files: Collection[str],
    config: Mapping[str, Any] | None,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    extra: tuple[str, ...] = (),
) -> StoredModel:
    """Describe a directory with these arrays and files, whose tensors and class are those of an opened checkpoint.

    `shapes` are those of the arrays, and `extra` are arrays that the class does not have.
    """
    model = checkpoint.model
    if model is None or config is None:
        known = checkpoint.config is not None and find_family(checkpoint.config) is not None
        misfit = checkpoint.model_error.message if known and checkpoint.model_error is not None else ""
        return StoredModel(config, arrays, files, known=False, misfit=misfit)
    tensors = checkpoint.manifest.tensors
    conversions = find_conversions(model.architecture, config, as_on_hub=True)
    state = (array.name for array in list_state_arrays(model, tensors.values(), config) if array.name in arrays)
    unsaved = [name for name in state if conversions.changes_any([name])]
    unsaved += [name for name in arrays if conversions.lacks_prefix(name)]
    for name, fusion in model.fusions.items():  # the same array, transposed
        if fusion.tensors == (name,) and shapes.get(name) == fusion.places.shape != model.tensors[name].shape:
            unsaved.append(name)
    return StoredModel(
        config,
        arrays,
        files,
        missing=tuple(tensor.name for tensor in model.own() if not tensor.spare and tensor.name not in tensors),
        unsaved=() if model.architecture in SAVED_FOR_NOBODY else tuple(dict.fromkeys(unsaved)),
        extra=extra,
    )


def check_stored(profile: ConsumerProfile, checkpoint: OpenedCheckpoint, mesh: Mesh, path: str) -> ConsumerVerdict:
    """Check a stored checkpoint for a consumer, by its headers, its config and the names of its files.

    `mesh` is the one that the consumer runs on; of files of ranks, which are cut for one, it is theirs.
    Raises UsageError for a mesh that the consumer has no options for.
    """
    require_axes(profile, mesh)
    files, dialect = checkpoint.source.files(), checkpoint.stored.dialect
    config = checkpoint.config if CONFIG in files else None
    if dialect is not None and dialect.schema == _RANK_SCHEMA and profile.sharded:
        stored = describe_model(checkpoint, {}, files, config, shapes={})
        verdict = check_consumer(profile, stored, dialect.mesh or mesh, path, per_rank=True)
        written = dialect.facts.get(_PROFILE_FACT)
        if written != profile.rank_profile:
            verdict = replace(verdict, reasons=(f"its files of ranks are those of profile {written}", *verdict.reasons))
        return verdict
    arrays = {name: tensor.dtype for name, tensor in checkpoint.stored.tensors.items()}
    extra = tuple(each.name for each in checkpoint.list_extra_tensors() if not each.kept)
    shapes = {name: tensor.shape for name, tensor in checkpoint.stored.tensors.items()}
    stored = describe_model(checkpoint, arrays, files, config, shapes=shapes, extra=extra)
    verdict = check_consumer(profile, stored, mesh, path, per_rank=False)
    if checkpoint.stored.format not in _PLAIN_FORMATS or list_ranks(checkpoint.stored):
        reason = f"it does not read {checkpoint.stored.format} files; reshard --for {profile.option} converts them"
        return replace(verdict, reasons=(reason,), unknown=())
    return verdict
