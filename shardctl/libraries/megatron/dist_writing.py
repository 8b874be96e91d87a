"""Plans Megatron-LM's distributed checkpoints, which its `--load` reads into any mesh.

What is there, and under which names, is what `dist_checkpointing.save` of Megatron-LM core 0.16 writes of a GPT model
on such a mesh: the same boxes of the same arrays, `common.pt`, and `metadata.json`. Its loader asks for an object under
the name of every module that keeps an extra state, and takes None for it; those of Transformer Engine's modules are
there, too, because layers of either kind may read the files.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from shardctl.libraries.arrays.composing import build_manifest
from shardctl.libraries.arrays.composite import round_up_to_multiple
from shardctl.libraries.dcp.file_writer import format_file_prefix
from shardctl.libraries.megatron.args_writing import DIVISIBLE, FOLDER, TRACKER, VERSION, build_arguments
from shardctl.libraries.megatron.dist_arrays import (
    EXPERTS,
    HALVES,
    LAYERS,
    NAME,
    SCHEMA,
    SPELT,
    VOCABULARY,
    StackCell,
    list_cells,
)
from shardctl.libraries.megatron.dist_cells import CellWriter
from shardctl.libraries.megatron.dist_states import (
    COPIES,
    SCHEDULE,
    SHARDING,
    add_progress,
    build_optimizer_state,
    build_schedule,
    collect_states,
    find_array_name,
    find_iteration,
    has_muon,
    is_half,
    list_state_cells,
    list_trained,
    note_unknown_progress,
)
from shardctl.libraries.megatron.further_layers import COUNT, count_complete_layers
from shardctl.libraries.megatron.hybrid_layers import format_patterns
from shardctl.libraries.megatron.layers import count_experts, get_embedding_name, is_hybrid
from shardctl.libraries.megatron.names import EXTRA_STATE
from shardctl.libraries.torch_save.item_writer import encode_object
from shardctl.libraries.writer import Layout
from shardctl.tensors.manifest import CheckpointFile
from shardctl.tensors.naming_scheme import NamingScheme
from shardctl.tensors.pieces import split_layers_evenly

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.base.dtype import DType
    from shardctl.libraries.torch_save.pickle_writer import Value
    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.manifest import Manifest
    from shardctl.tensors.naming_scheme import Fact

_BACKEND_METADATA: Final = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_CONTENT_METADATA: Final = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""What Megatron-LM 0.16 itself says of how names are made, and reads back (`megatron/training/checkpointing.py`)."""
_FOLDER_KEY: Final = "folder"
"""The fact that says in which folder the files are."""
_WEIGHT_SUFFIX_PATTERN: Final = re.compile(r"\.weight(_w|_v|\.[a-z]+)?$")
_LAYER_PATTERN: Final = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)")
_BEHIND_ATTENTION: Final = ".linear_proj"
_STATELESS_MODULES: Final = ("router", "embeddings", "output_layer")
"""Modules that keep no extra state, whatever layers are used."""
_OUTPUT_LAYER_MODULE: Final = "output_layer"
"""The one of these that does in a hybrid model, which does not take its state away, as a GPT model does."""


def pack_torch_dist(order: PackRequest) -> Manifest:
    """Return the files of every rank that holds weights no earlier replica holds.

    Raises as `Layout.pack` says.
    """
    from shardctl.libraries.megatron.embedding_copies import note_copies  # which needs NumPy

    SCHEMA.check(order.model)
    mesh, training, trained = order.mesh, order.have.training, list_trained(order, muon=True)
    folder = f"iter_{find_iteration(training):07d}/" if trained and training is not None else FOLDER
    padded = round_up_to_multiple(
        order.model.tensors[get_embedding_name(order.model)].shape[0], DIVISIBLE * mesh.degree("tp")
    )
    facts: dict[str, Fact] = {
        LAYERS: is_hybrid(order.model) or _has_unlike_layers(order),
        EXPERTS: False,
        HALVES: False,
        VOCABULARY: padded,
        SPELT: True,
        _FOLDER_KEY: folder,
    }
    further = count_complete_layers(order)
    facts[COUNT] = further
    stages = order.stages or split_layers_evenly(order.model.layers, mesh.degree("pp"))
    dialect = NamingScheme(NAME, mesh, stages=stages, facts=facts)
    cells = list(list_cells(order.model, dialect))
    further_cells = list(_list_state_cells(order, cells, trained))
    doubled = {find_array_name(each.name) for each in further_cells if each.name.split(".")[2] in COPIES}
    writer = CellWriter(
        order,
        dialect,
        folder,
        (*cells, *further_cells),
        is_copy=lambda cell, _: cell.name in doubled,
        list_objects=partial(_list_extra_states, hybrid=is_hybrid(order.model)),
    )
    writer.write()
    files = writer.files.finished(None)
    common = _build_common_state(order, padded, further, writer.dtypes)
    common |= _build_training_state(order, common["args"], trained) if trained else {}
    for path, content in (
        (f"{folder}common.pt", encode_object(common)),
        (TRACKER, (str(find_iteration(training)) if trained else "release").encode()),
        (f"{folder}metadata.json", json.dumps(_BACKEND_METADATA).encode()),
    ):
        files[path] = CheckpointFile(path, len(content), ((0, content),))
    states = training.states if training is not None else {}
    weights = replace(order.have, tensors={n: t for n, t in order.have.tensors.items() if n not in states})
    stored = [each for each in writer.stored if each[0] not in states]
    built = build_manifest(
        NAME, replace(order, have=weights), SCHEMA, dialect, files, stored, note_copies(order, further)
    )
    said = _note_training(order, trained) if trained else ()
    return replace(
        built,
        tensors={**built.tensors, **collect_states(training, writer.stored)},
        warnings=(*built.warnings, *said),
    )


def _note_training(order: PackRequest, trained: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Note what the run that goes on must be told, or must be."""
    training = order.have.training
    assert training is not None  # noqa: S101 - something is trained
    yield from note_unknown_progress(training)
    if has_muon(trained):
        from shardctl.libraries.megatron.dist_muon import note_muon  # of Muon alone

        yield from note_muon(training, halves=_has_halves(order), routed=_is_routed(order))


def _has_halves(order: PackRequest) -> bool:
    """Return whether weights are in 16 bits, so that optimizers have copies of their own."""
    return is_half(order.dtypes[get_embedding_name(order.model)])


def _is_routed(order: PackRequest) -> bool:
    """Return whether experts are divided, and have an optimizer of their own, or a group."""
    return count_experts(order.model) > 0 and order.mesh.ep > 1


def _list_state_cells(
    order: PackRequest, cells: list[StackCell], trained: Mapping[str, tuple[str, ...]]
) -> Iterator[StackCell]:
    """List the cells of states, as one distributed Adam has them, or Muon and Adam."""
    if not has_muon(trained):
        return list_state_cells(cells, trained)
    from shardctl.libraries.megatron.dist_muon import list_copies  # of Muon alone

    def list_both(cell: StackCell, states: tuple[str, ...]) -> tuple[str, ...]:
        return list_copies(cell, states, cell.dtype or order.dtypes[cell.pieces[0].pieces[0].tensor])

    return list_state_cells(cells, trained, list_both)


def _build_training_state(
    order: PackRequest, args: Value, trained: Mapping[str, tuple[str, ...]]
) -> dict[str | int, Value]:
    """Build what of `common.pt` only a checkpoint with optimizer states has, and change `args` accordingly."""
    training = order.have.training
    assert training is not None  # noqa: S101 - something is trained
    add_progress(args, training)
    routed, halves = _is_routed(order), _has_halves(order)
    if has_muon(trained):
        from shardctl.libraries.megatron.dist_muon import build_muon_state, set_optimizer  # of Muon alone

        set_optimizer(args, halves=halves)
        state = build_muon_state(training, trained, halves=halves, routed=routed)
    else:
        state = build_optimizer_state(training, routed=routed)
    return {
        "iteration": find_iteration(training),
        "optimizer": state,
        SCHEDULE: build_schedule(training),
        "content_metadata": {**_CONTENT_METADATA, "distrib_optim_sharding_type": SHARDING},
    }


def _has_unlike_layers(order: PackRequest) -> bool:
    """Return whether layers are of several kinds, so that Megatron-LM gives each its own arrays (`moe_layer_freq`)."""
    kinds: dict[str, set[str]] = {}
    for tensor in order.model.own():
        found = _LAYER_PATTERN.fullmatch(tensor.name)
        if found is not None:
            kinds.setdefault(found[1], set()).add(found[2])
    return len(set(map(frozenset, kinds.values()))) > 1


def _list_extra_states(cell: StackCell, *, hybrid: bool) -> Iterator[str]:
    """List the keys of the extra states of a cell's module, and of attention's own, which has no weights.

    Loaders do not look at those that their layers do not ask for (`StrictHandling.ASSUME_OK_UNEXPECTED`).
    """
    module = re.sub(_WEIGHT_SUFFIX_PATTERN, "", cell.name)
    if module == cell.name or cell.name != find_array_name(cell.name):
        return
    if any(word in module for word in _STATELESS_MODULES) and not (hybrid and module == _OUTPUT_LAYER_MODULE):
        return
    place = ".".join(map(str, cell.place or (0,))) + "_" + ".".join(map(str, cell.counts or (1,)))
    yield f"{module}.{EXTRA_STATE}/shard_{place}"
    if module.endswith(_BEHIND_ATTENTION):
        yield f"{module.removesuffix(_BEHIND_ATTENTION)}.core_attention.{EXTRA_STATE}/shard_{place}"


def _build_common_state(
    order: PackRequest, padded: int, further: int, dtypes: Mapping[str, DType]
) -> dict[str | int, Value]:
    """Build what `common.pt` has of any model."""
    more: dict[str, Value] = {
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": DIVISIBLE,
        "mtp_num_layers": further or None,
        "rank": 0,
        "ckpt_format": "torch_dist",
        "use_distributed_optimizer": False,
        **(format_patterns(order.model, (), further) if is_hybrid(order.model) else {}),
    }
    return {
        "args": build_arguments(order, order.mesh, dtypes["embedding.word_embeddings.weight"], more),
        "checkpoint_version": VERSION,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": dict(_CONTENT_METADATA),
    }


def _format_file_prefix(dialect: NamingScheme, rank: int) -> str:
    return dialect.text(_FOLDER_KEY, FOLDER) + format_file_prefix(rank)


LAYOUT: Final = Layout(
    NAME,
    pack_torch_dist,
    ranks="library",
    options=frozenset({"max_shard_size"}),
    states="on request",
    own_settings=True,
    trainer="Megatron-LM",
    prefix=_format_file_prefix,
)
