"""Chooses which tensors of a checkpoint a conversion takes, and which types they get."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME, CASTABLE, FLOATS, DType
from shardctl.base.errors import SourceError, UsageError, format_first_few
from shardctl.checkpoint.left_tensors import format_modules
from shardctl.checkpoint.name_selection import NameSelection, compile_pattern
from shardctl.conversion.optimizer_states import filter_states, get_states
from shardctl.models.names.binding import UNGATHERED_HINT, list_ungathered_weights
from shardctl.models.names.extra_names import format_extra_tensors, list_reported_extra
from shardctl.storage.excluded_names import has_passed_over

if TYPE_CHECKING:
    import re
    from collections.abc import Collection

    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.options import ReshardOptions
    from shardctl.tensors.manifest import Manifest, Tensor

_LIST_TENSORS_HINT: Final = "shardctl inspect SRC --tensors lists the names"


def filter_tensors(checkpoint: OpenedCheckpoint, reshard_options: ReshardOptions) -> Manifest:
    """Return the tensors that `--include` and `--exclude` leave of a checkpoint, and a warning of the others.

    Raises UsageError for none, and for a pattern that matches none; SourceError for weights that are left and were
    saved without their elements.
    """
    manifest = checkpoint.manifest
    selection = NameSelection.parse(reshard_options.include, reshard_options.exclude)
    if selection is None:
        _refuse_ungathered(manifest)
        return manifest
    by_arrays = checkpoint.stored.dialect is None  # those of another library's ranks are not the model's
    every = [*checkpoint.unselected, *manifest.tensors.values(), *manifest.extra.values()]
    excluded = any(selection.excludes_tensor(tensor, by_arrays=by_arrays) for tensor in every)
    if reshard_options.exclude is not None and not excluded and not has_passed_over(checkpoint.source):
        raise UsageError(f"--exclude {reshard_options.exclude!r} matches no tensor", hint=_LIST_TENSORS_HINT)
    kept, extra = manifest.tensors, manifest.extra
    if not checkpoint.unselected:  # else the stored names have been selected, and what is left is a whole model
        kept = {n: t for n, t in kept.items() if selection.takes_tensor(t, by_arrays=by_arrays)}
        extra = {n: t for n, t in extra.items() if selection.takes_tensor(t, by_arrays=by_arrays)}
    if not kept:
        raise UsageError("--include and --exclude leave no tensor", hint=_LIST_TENSORS_HINT)
    taken = {*map(id, kept.values()), *map(id, extra.values())}
    left = [tensor for tensor in every if id(tensor) not in taken]
    told = (f"left out: {format_modules(left, kept)}",) if left else ()
    chosen = replace(manifest, tensors=kept, extra=extra, warnings=(*manifest.warnings, *told))
    _refuse_ungathered(chosen)
    return filter_states(chosen, kept)


def choose_extra_tensors(checkpoint: OpenedCheckpoint, have: Manifest, reshard_options: ReshardOptions) -> Manifest:
    """Return the manifest with those extra tensors that are kept: all or none.

    Raises SourceError if there are some and none is allowed; those that transformers ignores always are.
    """
    if not have.extra or reshard_options.extra_tensors == "keep":
        return have
    reported = list_reported_extra(checkpoint.model, have.extra.values()) if checkpoint.model is not None else []
    if reshard_options.extra_tensors == "error" and checkpoint.model is not None and reported:
        raise SourceError(
            f"{checkpoint.model.architecture} does not have {format_extra_tensors(reported)}",
            hint="--extra-tensors keep stores them beside the weights, and drop leaves them out",
        )
    return replace(have, extra={})


def _refuse_ungathered(have: Manifest) -> None:
    """Raise SourceError for weights without elements: a loader would reject what is written, or initialize them."""
    empty = list_ungathered_weights(have.tensors)
    if empty:
        count = f"{len(empty):,} of {len(have.tensors):,} tensors"
        raise SourceError(f"{count} have no elements: {format_first_few(empty)}", hint=UNGATHERED_HINT)


def choose_dtypes(
    have: Manifest,
    reshard_options: ReshardOptions,
    coded: Collection[str] = frozenset(),
    plain: Collection[str] = frozenset(),
) -> dict[str, DType]:
    """Choose the type that each tensor will have, by name.

    `coded` are arrays of quantized weights, `plain` 8-bit floats that are cast as others are.

    Raises UsageError for a `--keep-fp32` that keeps none.
    """
    if reshard_options.dtype == "keep":
        return {name: tensor.dtype for name, tensor in have.tensors.items()}
    want, keep = get_cast_type(reshard_options), compile_pattern("--keep-fp32", reshard_options.keep_fp32 or r"(?!)")
    states = get_states(have)
    if reshard_options.keep_fp32 is not None:
        _require_kept(have, reshard_options.keep_fp32, keep, want)

    def chosen(tensor: Tensor) -> DType:
        kept = (
            tensor.name in states
            or tensor.name in coded
            or (tensor.dtype == BY_NAME["F32"] and keep.search(tensor.name))
        )
        castable = tensor.dtype.name in CASTABLE or tensor.name in plain
        return tensor.dtype if kept or not castable else want

    return {name: chosen(tensor) for name, tensor in have.tensors.items()}


def list_coded_arrays(checkpoint: OpenedCheckpoint) -> frozenset[str]:
    """List the arrays of quantized weights, and scales of the cache, which belong to the quantization, too."""
    model = checkpoint.model
    if model is None or not model.encodings:
        return frozenset()
    added = model.tensors.keys() - model.plain.tensors.keys() if model.plain is not None else set()
    return frozenset(e.name(array) for e in model.encodings.values() for array in e.arrays) | added


def _require_kept(have: Manifest, text: str, keep: re.Pattern[str], want: DType) -> None:
    """Raise UsageError if no name matches, or if those that do are not in fp32 and would be cast all the same."""
    matching = [tensor for name, tensor in have.tensors.items() if keep.search(name)]
    if not matching:
        raise UsageError(f"--keep-fp32 {text!r} matches no tensor", hint=_LIST_TENSORS_HINT)
    cast = [tensor for tensor in matching if tensor.dtype.name in CASTABLE and tensor.dtype != want]
    if cast and all(tensor.dtype != BY_NAME["F32"] for tensor in matching):
        raise UsageError(
            f"--keep-fp32 {text!r} matches no tensor that is in fp32: {cast[0].name} is in {cast[0].dtype.name}",
            hint="leave it out; --keep-fp32 keeps what is in fp32, and casts nothing to it",
        )


def get_cast_type(reshard_options: ReshardOptions) -> DType:
    """Return the type that `--dtype` names; raises UsageError if it names none."""
    if reshard_options.dtype not in FLOATS:
        raise UsageError(f"unknown --dtype {reshard_options.dtype!r}", hint=f"use keep, {', '.join(FLOATS)}")
    return FLOATS[reshard_options.dtype]
