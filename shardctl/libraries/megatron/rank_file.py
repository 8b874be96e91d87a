"""Reads one rank's `model_optim_rng.pt`: its args, version, and arrays by megatron-core's local names.

The dictionary is that of `generate_state_dict` in `megatron/training/checkpointing.py`: ``model``, or ``model0``,
``model1``, ... for the chunks of a virtual pipeline, flat since megatron-core and nested before it.
"""

from __future__ import annotations

import re
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError
from shardctl.base.value import value_class
from shardctl.libraries.megatron.arrays import format_chunk_prefix
from shardctl.libraries.megatron.names import EXTRA_STATE, find_local_name, is_before_core
from shardctl.libraries.megatron.namespace import parse_namespace
from shardctl.libraries.torch_save.pickle_budget import VisitCounter
from shardctl.libraries.torch_save.pickle_tree import as_mapping
from shardctl.libraries.torch_save.reading import check_total_size, open_saved
from shardctl.libraries.torch_save.tensors import as_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.base.settings import Setting
    from shardctl.libraries.torch_save.tensors import SavedFile, StorageView
    from shardctl.storage import Source

_MODEL_KEY_PATTERN: Final = re.compile(r"model([0-9]{1,4})?")
_LAYER_PATTERN: Final = re.compile(r"decoder\.layers\.([0-9]{1,9})\..*")
_ROTARY_BUFFER_PATTERN: Final = re.compile(r"(.*\.)?(rotary_pos_emb|rotary_emb)\.inv_freq")
_MAX_NESTING_DEPTH: Final = 6


@value_class
class MegatronRankFile:
    """One rank's file."""

    path: str
    saved: SavedFile
    arguments: Mapping[str, Setting]
    """The `args`, as `parse_namespace` reads them."""
    version: float
    """`checkpoint_version`; 0 where there is none."""
    iteration: int | None
    views: Mapping[str, StorageView]
    """Arrays by local name, with the chunk's before it."""
    stored: Mapping[str, str]
    """For each of them, what the file calls it."""
    layers: tuple[int, ...]
    """How many each chunk has."""
    others: Mapping[str, int] = field(default_factory=dict)
    """What is no weight, by its key or by how its keys end, and how often it is there."""
    scales: bool = False
    """Whether layers keep more than nothing in their extra states."""
    before_core: bool = False
    optimizer: object = None
    """What the optimizer's own dictionary is, as a tree."""
    schedule: Mapping[str, Setting] = field(default_factory=dict)
    """The state of the learning rate's schedule."""


def read_rank_file(source: Source, path: str) -> MegatronRankFile:
    """Read one rank's file.

    Raises SourceError if it is not of this kind or damaged, HostileError if it tries to run code, UnsupportedError for
    a tensor that cannot be read as it is.
    """
    saved = open_saved(source, path)
    top = as_mapping(saved.tree)
    chunks = sorted(
        (int(m[1] or 0), key) for key in top or {} if isinstance(key, str) and (m := _MODEL_KEY_PATTERN.fullmatch(key))
    )
    if top is None or not chunks:
        raise SourceError(f"{path} holds no model of Megatron-LM", hint="its dictionary has no key 'model' or 'model0'")
    views: dict[str, StorageView] = {}
    stored: dict[str, str] = {}
    others = {str(key): 1 for key in top if not isinstance(key, str) or not _MODEL_KEY_PATTERN.fullmatch(key)}
    layers, scales, old = [], False, False
    visits = VisitCounter(path)
    for number, key in chunks:
        count = 0
        for own, node in _walk_leaves(top[key], _MAX_NESTING_DEPTH, visits):
            if own.endswith(EXTRA_STATE):
                others[EXTRA_STATE] = others.get(EXTRA_STATE, 0) + 1
                scales = scales or node is not None
                continue
            name, old = find_local_name(own), old or is_before_core(own)
            view = None if _ROTARY_BUFFER_PATTERN.fullmatch(name) else as_tensor(node, f"{path}: tensor {own!r}")
            if view is None:
                others[own] = others.get(own, 0) + 1
                continue
            full = format_chunk_prefix(number, len(chunks)) + name
            if full in views:
                raise SourceError(f"{path} has {stored[full]} and {own}, which are the same array")
            views[full], stored[full] = view, own
            layer = _LAYER_PATTERN.fullmatch(name)
            count = max(count, int(layer[1]) + 1) if layer else count
        layers.append(count)
    check_total_size(source, path, views.values())
    version, iteration = top.get("checkpoint_version", 0), top.get("iteration")
    return MegatronRankFile(
        path,
        replace(saved, tree=None),
        parse_namespace(top.get("args")),
        float(version) if isinstance(version, int | float) else -1.0,
        iteration if type(iteration) is int else None,
        views,
        stored,
        tuple(layers),
        others,
        scales,
        old,
        top.get("optimizer"),
        parse_namespace(top.get("opt_param_scheduler")),
    )


def _walk_leaves(node: object, depth: int, visits: VisitCounter) -> Iterator[tuple[str, Any]]:
    """Yield what a model's dictionaries hold, their keys joined by dots; a wrapper's ``module.`` is left out."""
    held = as_mapping(node) or {}
    visits.charge_nodes(len(held))
    for key, value in held.items():
        name = str(key).removeprefix("module.")
        inner = as_mapping(value) if depth else None
        if inner is None:
            yield name, value
        else:
            for rest, leaf in _walk_leaves(value, depth - 1, visits):
                yield (f"{name}.{rest}" if name != "module" else rest), leaf
