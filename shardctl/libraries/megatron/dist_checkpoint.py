"""Builds the manifest of a `torch_dist` checkpoint: arrays, optimizer states, and the rest."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError, UsageError
from shardctl.libraries.dcp.save import count_writers
from shardctl.libraries.files.file_names import DCP, DCP_METADATA
from shardctl.libraries.files.sharded_backend import COMMON, INTEGRITY, MARK, TRACKER
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.megatron.arguments import convert_arguments_to_config, has_zero_centred_norms
from shardctl.libraries.megatron.dist_buckets import unpack_buckets
from shardctl.libraries.megatron.dist_common import (
    USED,
    USED_OF_STATES,
    CommonState,
    is_used,
    read_common,
    read_local_optimizers,
)
from shardctl.libraries.megatron.dist_groups import UNASSIGNED, assign_parameters, read_clipping
from shardctl.libraries.megatron.dist_keys import MegatronKeys, build_dialect, sort_keys
from shardctl.libraries.megatron.dist_parameters import UnknownOrderError
from shardctl.libraries.megatron.dist_samples import compare_samples
from shardctl.libraries.megatron.fsdp_keys import SAVED, is_read, read_fsdp_common, sort_fsdp_keys
from shardctl.libraries.megatron.library_settings import build_library_settings
from shardctl.libraries.megatron.namespace import require_no_weight_shards
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Manifest, OpaqueObject, Region, TrainingState, locate_dense_run
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.training import MOMENTUM, format_state_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from shardctl.base.settings import Setting
    from shardctl.libraries.dcp.save import DcpSave
    from shardctl.libraries.reader import Weights
    from shardctl.tensors.manifest import OwnConfig, Tensor

_MASTER_WEIGHT_STATES: Final = ("param", "fp32_param")
"""What optimizers call their own copy of the weights."""
_SUPPORTED_VERSIONS: Final = (None, 2.0, 3.0)
"""Of the order of rows in fused projections; all that can be saved so have the same (`checkpoint_version`)."""
_ITERATION_FOLDER_PATTERN: Final = re.compile(r"(iter_[0-9]{7}|release)/.+")
_FRAMEWORK_FILES: Final = frozenset({MARK, TRACKER, COMMON, DCP_METADATA, INTEGRITY, "modelopt_run_config.yaml"})
_EXTRA_STATE_INFIX: Final = "._extra_state/"
_MAX_NAMES_SHOWN: Final = 3

_PARALLEL_DEGREE_LIMIT: Final = 1 << 20


def build_manifest(name: str, save: DcpSave, folder: str, weights: Weights, *, fsdp: bool = False) -> Manifest:
    """Build the manifest of a save in `folder`; `weights` says which copy of them is meant where there are two.

    `fsdp` says that it is one of Megatron-FSDP, whose weights are the optimizer's.

    Raises as `scan` of the format says.
    """
    common = read_fsdp_common(save) if fsdp else read_common(save, folder)
    if common is not None and common.version not in _SUPPORTED_VERSIONS:
        raise UnsupportedError(f"{common.file or 'the common state'} has checkpoint_version {common.version:g}")
    keys = sort_fsdp_keys(save.tensors) if fsdp else sort_keys(save.tensors)
    if common is not None:
        require_no_weight_shards(common.arguments, common.file or save.source.name, whole=not (fsdp or keys.buckets))
    if not keys.weights:
        raise SourceError(
            f"{save.source.name} holds no weights, only {', '.join(list(save.tensors)[:_MAX_NAMES_SHOWN])}"
        )
    tensors = {name: _build_tensor(save, key, name) for key, name in keys.weights.items()}
    warnings: list[str] = []
    states = dict(_build_states(save, keys, tensors, warnings))
    mesh = _build_written_mesh(common)
    left, notes = _unpack_states(save, keys, tensors, states, mesh)
    warnings += left
    step, groups = _find_settings(save, keys, common)
    masters = _take_masters(states, tensors)
    if weights == "master" and not masters and not fsdp:
        raise SourceError(f"{save.source.name} has no weights of an optimizer", hint="leave --weights out")
    if weights != "module":
        tensors |= {p: replace(master, name=p) for p, master in masters.items()}
    by_momentum = {parameter for parameter in tensors if format_state_name(MOMENTUM, parameter) in states}
    parted = assign_parameters(groups, tensors, by_momentum) if states else ()
    if groups and states and not parted:
        warnings.append(UNASSIGNED)
    side, others = _list_side_objects(save, folder)
    return Manifest(
        format=name,
        tensors=tensors,
        files=dict(sorted(save.files.items())),
        objects=(*side, *_list_objects(save, keys.buckets if left else (), common, trained=bool(states))),
        warnings=(*warnings, *others),
        training=TrainingState(
            writer="Megatron-LM",
            ranks=mesh.world if common is not None and common.arguments else count_writers(save.files),
            step=step,
            states=states,
            groups=parted,
            progress=common.progress if common is not None else {},
            clipping=read_clipping(common.arguments) if common is not None else None,
            notes=(*((SAVED,) if fsdp else ()), *_list_notes(keys, common, masters, weights), *notes),
        ),
        dialect=build_dialect(
            {each.name: each.shape for each in tensors.values()},
            mesh,
            centred=common is not None and has_zero_centred_norms(common.arguments),
        ),
        settings=build_library_settings(common.arguments) if common is not None else None,
        own_config=_build_own_config(common, tensors),
    )


def _build_tensor(save: DcpSave, key: str, name: str) -> Tensor:
    found = save.tensor(key, name)
    shape = save.metadata[0].flattened.get(key)
    return _unflatten_tensor(found, shape) if shape is not None else found


def _build_states(
    save: DcpSave, keys: MegatronKeys, tensors: dict[str, Tensor], warnings: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Build states by canonical name; those that cannot be told from each other, or have no weight, are left behind."""
    strange: list[str] = []
    seen: dict[str, str] = {}
    for key, (state, parameter) in keys.states.items():
        name = format_state_name(state, parameter)
        if parameter not in tensors:
            strange.append(key)
            continue
        if name in seen:
            raise SourceError(f"{key!r} and {seen[name]!r} are both the state {state} of {parameter}")
        seen[name] = key
        yield name, _build_tensor(save, key, name)
    if strange:
        warnings.append(
            f"{len(strange)} optimizer states such as {strange[0]!r} are left behind: their weights are not here"
        )


def _take_masters(states: dict[str, Tensor], tensors: Iterable[str]) -> dict[str, Tensor]:
    """Take the optimizer's copies of weights out of `states`, where two of one weight are replicas."""
    found: dict[str, Tensor] = {}
    for kind in _MASTER_WEIGHT_STATES:
        for parameter in tensors:
            copy = states.pop(format_state_name(kind, parameter), None)
            if copy is not None:
                first = found.get(parameter)
                found[parameter] = replace(copy, chunks=(*first.chunks, *copy.chunks)) if first is not None else copy
    return found


def _unpack_states(
    save: DcpSave, keys: MegatronKeys, tensors: dict[str, Tensor], states: dict[str, Tensor], mesh: Mesh
) -> tuple[list[str], list[str]]:
    """Add states that the optimizer keeps in buckets; returns what to warn of, and how they were understood."""
    if not keys.buckets:
        return [], []

    others = {parameter for _, parameter in keys.states.values()}  # of another optimizer, such as Muon
    mine = {name: tensor for name, tensor in tensors.items() if name not in others}

    def check(found: Mapping[str, Tensor]) -> int:
        masters = {
            p: s for p in tensors for kind in _MASTER_WEIGHT_STATES if (s := found.get(format_state_name(kind, p)))
        }
        return compare_samples(save.source, masters, tensors)

    try:
        found = unpack_buckets({key: save.tensor(key, key) for key in keys.buckets}, mine, mesh, check)
    except UnknownOrderError as error:
        left = (
            f"{len(keys.buckets)} tensors such as {keys.buckets[0]!r} are left behind: the optimizer keeps them in "
            f"buckets (distrib_optim_sharding_type dp_reshardable), and {error}"
        )
        return [left], []
    states |= found.states
    checked = f"{found.compared:,} values of its weights are the model's" if found.compared else "it has no weights"
    return [], [f"the optimizer's buckets are taken apart in the order {found.title}; {checked}"]


def _list_side_objects(save: DcpSave, folder: str) -> tuple[list[OpaqueObject], tuple[str, ...]]:
    """List files beside the checkpoint's own; those of other iterations are not even listed."""
    own = {*save.files, *(each.path for each in save.metadata)}
    files = save.source.files()
    own |= {path for path in files if path.startswith(folder) and path.removeprefix(folder) in _FRAMEWORK_FILES}
    own |= {
        path for path in files if path in _FRAMEWORK_FILES or (folder and _ITERATION_FOLDER_PATTERN.fullmatch(path))
    }
    others = {path for path in files if path not in own and path.endswith(DCP)}
    return [o for o in list_side_files(save.source, own)[0] if o.name not in others], tuple(
        f"{path} is not part of this checkpoint; it is left behind" for path in sorted(others)[:_MAX_NAMES_SHOWN]
    )


def _list_objects(
    save: DcpSave, buckets: Iterable[str], common: CommonState | None, *, trained: bool
) -> Iterator[OpaqueObject]:
    """List what is not read; `trained` says whether optimizer states are, and with them the settings of groups."""
    objects = save.metadata[0].objects
    left = (
        key
        for key in objects
        if _EXTRA_STATE_INFIX not in key and not is_read(key) and not is_used(key, trained=trained)
    )
    for key in (*left, *buckets):
        yield OpaqueObject(key, "drop")
    extra = sum(_EXTRA_STATE_INFIX in key for key in objects)
    if extra:
        yield OpaqueObject(f"{_EXTRA_STATE_INFIX.strip('./')} of {extra} modules", "drop")
    if common is not None:
        used = USED | USED_OF_STATES if trained else USED
        for name in (each for each in common.names if each not in used):
            yield OpaqueObject(f"{common.file or 'common_state'}:{name}", "drop", file=common.file)


def _find_settings(
    save: DcpSave, keys: MegatronKeys, common: CommonState | None
) -> tuple[int | None, tuple[Mapping[str, Setting], ...]]:
    """Find the steps done, and the settings of the optimizer's groups of parameters."""
    if keys.buckets:
        step, groups = read_local_optimizers(save)
        more = common.groups if common is not None else ()  # of what is not in buckets
        return step if step is not None or common is None else common.iteration, (*groups, *more)
    if common is None:
        return None, ()
    return common.step if common.step is not None else common.iteration, common.groups


def _list_notes(
    keys: MegatronKeys, common: CommonState | None, masters: dict[str, Tensor], weights: Weights
) -> Iterator[str]:
    """List how the keys were understood."""
    if keys.wrapper:
        yield f"the names of arrays are the parts of the keys after {keys.wrapper!r}"
    if common is None:
        yield f"there is no {COMMON}: only a config can say which model this is"
    if masters:
        which = "the module's own" if weights == "module" else "the optimizer's, in fp32,"
        yield f"there are two copies of the weights; {which} are read"


def _build_own_config(common: CommonState | None, names: Collection[str]) -> OwnConfig | None:
    """Build the config of transformers that follows from arguments; `names` are those of arrays."""
    if common is None or not common.arguments:
        return None
    return convert_arguments_to_config(common.arguments, tied="output_layer.weight" not in names)


def _build_written_mesh(common: CommonState | None) -> Mesh:
    """Build the mesh; one device if nothing says what it was."""
    arguments = common.arguments if common is not None else {}

    def degree(name: str, default: int = 1) -> int:
        value = arguments.get(name)
        return value if type(value) is int and 0 < value < _PARALLEL_DEGREE_LIMIT else default

    tp, pp = degree("tensor_model_parallel_size"), degree("pipeline_model_parallel_size")
    routed = bool(arguments.get("num_experts"))
    try:
        return Mesh.of(
            pp=pp,
            dp=degree("data_parallel_size"),
            cp=degree("context_parallel_size"),
            tp=tp,
            ep=degree("expert_model_parallel_size") if routed else 1,
            etp=degree("expert_tensor_parallel_size", tp) if routed else tp,
        )
    except UsageError:
        return Mesh.of(pp=pp, tp=tp)


def _unflatten_tensor(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor that was saved so, in the `shape` that it has.

    Raises SourceError if the shape does not fit, UnsupportedError for runs that are not stored one element after
    another.
    """
    *grid, length = tensor.shape or (0,)
    fits = len(grid) == len(shape) and all(n > 0 and extent % n == 0 for n, extent in zip(grid, shape, strict=True))
    local = tuple(extent // n for n, extent in zip(grid, shape, strict=True)) if fits else ()
    if not fits or prod(local) != length:
        raise SourceError(
            f"{tensor.name} {list(tensor.shape)} is said to be {list(shape)}, flattened, which does not fit"
        )
    chunks = tuple(part for chunk in tensor.chunks for part in _unflatten_chunk(chunk, local))
    return replace(tensor, shape=shape, chunks=chunks)


def _unflatten_chunk(chunk: Chunk, local: tuple[int, ...]) -> Iterator[Chunk]:
    *_, start = chunk.box.origin
    *ones, length = chunk.box.shape
    if not isinstance(chunk.where, Region) or set(ones) - {1}:
        raise UnsupportedError(f"{chunk.name}: {chunk.box} is a box of several flattened parts")
    if chunk.where.strides[-1] != chunk.dtype.unit_bytes:
        raise UnsupportedError(f"{chunk.name}: {chunk.box} is not stored one element after another")
    at = tuple(n * extent for n, extent in zip(chunk.box.origin[:-1], local, strict=True))
    strides, places = locate_dense_run(chunk.dtype, local, start, start + length)
    for box, shift in places:
        where = Region(chunk.where.file, chunk.where.offset + shift, strides)
        moved = Box(tuple(a + b for a, b in zip(at, box.origin, strict=True)), box.shape)
        yield replace(chunk, box=moved, where=where)
