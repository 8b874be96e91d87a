"""The manifest of a checkpoint of Megatron-LM: its arrays, its optimizer's states, and what was saved beside them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.errors import SourceError, UnsupportedError
from shardctl.formats.dcp.checkpoint import METADATA, SUFFIX
from shardctl.formats.dcp.save import writers
from shardctl.formats.sharded_backend import COMMON, MARK, TRACKER
from shardctl.formats.side_files import side_files
from shardctl.formats.torch_dist.common import Common, read_common
from shardctl.formats.torch_dist.config import own_config, written_for
from shardctl.formats.torch_dist.flattened import unflattened
from shardctl.formats.torch_dist.keys import Keys, dialect, sort_keys
from shardctl.manifest import Manifest, Opaque, Training
from shardctl.schemas.megatron.arguments import zero_centred
from shardctl.training import state_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.formats.dcp.save import Save
    from shardctl.formats.format import Weights
    from shardctl.manifest import Tensor

_MASTERS: Final = ("param", "fp32_param")
"""What optimizers call their own copy of the weights."""
_VERSIONS: Final = (None, 2.0, 3.0)
"""Of the order of rows in fused projections; all that can be saved so have the same (`checkpoint_version`)."""
_FOLDER: Final = re.compile(r"(iter_[0-9]{7}|release)/.+")
_FRAMEWORK: Final = frozenset({MARK, TRACKER, COMMON, METADATA, "integrity.json", "modelopt_run_config.yaml"})
_EXTRA: Final = "._extra_state/"
_SHOWN: Final = 3


def manifest(name: str, save: Save, folder: str, weights: Weights) -> Manifest:
    """The manifest of a save in `folder`; `weights` says which copy of them is meant where there are two.

    Raises as `scan` of the format says.
    """
    common = read_common(save, folder)
    if common is not None and common.version not in _VERSIONS:
        raise UnsupportedError(f"{common.file or 'the common state'} has checkpoint_version {common.version:g}")
    keys = sort_keys(save.tensors)
    if not keys.weights:
        raise SourceError(f"{save.source.name} holds no weights, only {', '.join(list(save.tensors)[:_SHOWN])}")
    tensors = {name: _tensor(save, key, name) for key, name in keys.weights.items()}
    warnings: list[str] = []
    states = dict(_states(save, keys, tensors, warnings))
    masters = {p: states.pop(n) for s in _MASTERS for p in tensors if (n := state_name(s, p)) in states}
    if weights == "master" and not masters:
        raise SourceError(f"{save.source.name} has no weights of an optimizer", hint="leave --weights out")
    if weights != "module":
        tensors |= {p: replace(master, name=p) for p, master in masters.items()}
    side, left = _side(save, folder)
    mesh = written_for(common)
    return Manifest(
        format=name,
        tensors=tensors,
        files=dict(sorted(save.files.items())),
        objects=(*side, *_objects(save, keys, common)),
        warnings=(*warnings, *left),
        training=Training(
            writer="Megatron-LM",
            ranks=mesh.world if common is not None and common.arguments else writers(save.files),
            step=_step(common),
            states=states,
            notes=tuple(_notes(keys, common, masters, weights)),
        ),
        dialect=dialect(
            {each.name: each.shape for each in tensors.values()},
            mesh,
            centred=common is not None and zero_centred(common.arguments),
        ),
        own_config=own_config(common, tensors),
    )


def _tensor(save: Save, key: str, name: str) -> Tensor:
    found = save.tensor(key, name)
    shape = save.metadata[0].flattened.get(key)
    return unflattened(found, shape) if shape is not None else found


def _states(save: Save, keys: Keys, tensors: dict[str, Tensor], warnings: list[str]) -> Iterator[tuple[str, Tensor]]:
    """States by canonical name; those that cannot be told from each other, or have no weight, are left behind."""
    strange: list[str] = []
    seen: dict[str, str] = {}
    for key, (state, parameter) in keys.states.items():
        name = state_name(state, parameter)
        if parameter not in tensors:
            strange.append(key)
            continue
        if name in seen:
            raise SourceError(f"{key!r} and {seen[name]!r} are both the state {state} of {parameter}")
        seen[name] = key
        yield name, _tensor(save, key, name)
    if strange:
        warnings.append(
            f"{len(strange)} optimizer states such as {strange[0]!r} are left behind: their weights are not here"
        )
    if keys.buckets:
        warnings.append(
            f"{len(keys.buckets)} tensors such as {keys.buckets[0]!r} are left behind: the optimizer keeps them in "
            "buckets of its own order, from which only the same mesh can resume (distrib_optim_sharding_type)"
        )


def _side(save: Save, folder: str) -> tuple[list[Opaque], tuple[str, ...]]:
    """Files beside the checkpoint's own; those of other iterations are not even listed."""
    own = {*save.files, *(each.path for each in save.metadata)}
    files = save.source.files()
    own |= {path for path in files if path.startswith(folder) and path.removeprefix(folder) in _FRAMEWORK}
    own |= {path for path in files if path in _FRAMEWORK or (folder and _FOLDER.fullmatch(path))}
    others = {path for path in files if path not in own and path.endswith(SUFFIX)}
    return [o for o in side_files(save.source, own)[0] if o.name not in others], tuple(
        f"{path} is not part of this checkpoint; it is left behind" for path in sorted(others)[:_SHOWN]
    )


def _objects(save: Save, keys: Keys, common: Common | None) -> Iterator[Opaque]:
    objects = save.metadata[0].objects
    for key in (*(key for key in objects if _EXTRA not in key), *keys.buckets):
        yield Opaque(key, "drop")
    extra = sum(_EXTRA in key for key in objects)
    if extra:
        yield Opaque(f"{_EXTRA.strip('./')} of {extra} modules", "drop")
    if common is not None:
        for name in common.names:
            yield Opaque(f"{common.file or 'common_state'}:{name}", "drop", file=common.file)


def _step(common: Common | None) -> int | None:
    if common is None:
        return None
    return common.step if common.step is not None else common.iteration


def _notes(keys: Keys, common: Common | None, masters: dict[str, Tensor], weights: Weights) -> Iterator[str]:
    """How the keys were understood."""
    if keys.wrapper:
        yield f"arrays are named by what follows {keys.wrapper!r} in the keys"
    if common is None:
        yield f"there is no {COMMON}: what the model is, only a config can say"
    if masters:
        which = "the module's own" if weights == "module" else "the optimizer's, in fp32,"
        yield f"of the two copies of weights, {which} are read"
