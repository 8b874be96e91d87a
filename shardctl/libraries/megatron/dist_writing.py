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
from typing import TYPE_CHECKING, Final

from shardctl.box import Box
from shardctl.dialect import LibraryDialect
from shardctl.errors import CutError, UnsupportedError
from shardctl.libraries.arrays.composing import build_manifest
from shardctl.libraries.arrays.composite import round_up_to_multiple
from shardctl.libraries.dcp.file_writer import DcpFiles, format_file_prefix
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
    check_stack,
    list_cells,
)
from shardctl.libraries.megatron.dist_states import (
    SCHEDULE,
    SHARDING,
    build_optimizer_state,
    build_schedule,
    find_array_name,
    list_state_cells,
    list_trained,
    note_unknown_progress,
)
from shardctl.libraries.megatron.further_layers import COUNT, count_complete_layers
from shardctl.libraries.megatron.layers import TITLE, count_experts, get_embedding_name
from shardctl.libraries.megatron.names import EXTRA_STATE
from shardctl.libraries.safetensors.hf_writing import USUAL_SHARD
from shardctl.libraries.torch_save.item_writer import encode_object
from shardctl.libraries.torch_save.pickle_writer import PickleObject
from shardctl.libraries.writer import Layout
from shardctl.manifest import CheckpointFile, Chunk, compute_dense_strides
from shardctl.pieces import split_layers_evenly

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardctl.dialect import Fact
    from shardctl.dtype import DType
    from shardctl.libraries.torch_save.pickle_writer import Value
    from shardctl.libraries.writer import PackRequest
    from shardctl.manifest import Manifest, TrainingState

_BACKEND: Final = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_CONTENT: Final = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""What Megatron-LM 0.16 itself says of how names are made, and reads back (`megatron/training/checkpointing.py`)."""
_FOLDER: Final = "folder"
"""The fact that says in which folder the files are."""
_COUNTS: Final = ("consumed_train_samples", "consumed_valid_samples")
_NOTHING: Final = encode_object([None])
_WEIGHT: Final = re.compile(r"\.weight(_w|_v)?$")
_LAYER: Final = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)")
_BEHIND_ATTENTION: Final = ".linear_proj"
_STATELESS: Final = ("router", "embeddings", "output_layer")
"""Modules that keep no extra state, whatever layers are used."""


def pack_torch_dist(order: PackRequest) -> Manifest:
    """Return the files of every rank that holds weights no earlier replica holds.

    Raises as `Layout.pack` says.
    """
    from shardctl.libraries.megatron.embedding_copies import note_copies  # which needs NumPy

    SCHEMA.check(order.model)
    mesh, training, trained = order.mesh, order.have.training, list_trained(order)
    folder = f"iter_{_find_iteration(training):07d}/" if trained and training is not None else FOLDER
    padded = round_up_to_multiple(
        order.model.tensors[get_embedding_name(order.model)].shape[0], DIVISIBLE * mesh.degree("tp")
    )
    facts: dict[str, Fact] = {
        LAYERS: _has_unlike_layers(order),
        EXPERTS: False,
        HALVES: False,
        VOCABULARY: padded,
        SPELT: True,
        _FOLDER: folder,
    }
    further = count_complete_layers(order)
    facts[COUNT] = further
    stages = order.stages or split_layers_evenly(order.model.layers, mesh.degree("pp"))
    dialect = LibraryDialect(NAME, mesh, stages=stages, facts=facts)
    writer = _CellWriter(order, dialect, trained)
    writer.write()
    files = writer.files.finished(None)
    common = _build_common_state(order, padded, further, writer.dtypes)
    common |= _build_training_state(order, common["args"]) if trained else {}
    for path, content in (
        (f"{folder}common.pt", encode_object(common)),
        (TRACKER, (str(_find_iteration(training)) if trained else "release").encode()),
        (f"{folder}metadata.json", json.dumps(_BACKEND).encode()),
    ):
        files[path] = CheckpointFile(path, len(content), ((0, content),))
    states = training.states if training is not None else {}
    weights = replace(order.have, tensors={n: t for n, t in order.have.tensors.items() if n not in states})
    stored = [each for each in writer.stored if each[0] not in states]
    built = build_manifest(
        NAME, replace(order, have=weights), SCHEMA, dialect, files, stored, note_copies(order, further)
    )
    chunks: dict[str, list[Chunk]] = {}
    for name, chunk in writer.stored:
        chunks.setdefault(name, []).append(chunk)
    kept = {n: replace(states[n], dtype=c[0].dtype, chunks=tuple(c)) for n, c in chunks.items() if n in states}
    said = note_unknown_progress(training) if trained and training is not None else ()
    return replace(built, tensors={**built.tensors, **kept}, warnings=(*built.warnings, *said))


def _find_iteration(training: TrainingState | None) -> int:
    """Find the number of the iteration: the loop's own, or the optimizer's steps."""
    said = training.progress.get("iteration") if training is not None else None
    return said if isinstance(said, int) else (training.step if training is not None else None) or 0


def _build_training_state(order: PackRequest, args: Value) -> dict[str | int, Value]:
    """Build what of `common.pt` only a checkpoint with optimizer states has, and change `args` accordingly."""
    training = order.have.training
    assert training is not None  # noqa: S101 - something is trained
    assert isinstance(args, PickleObject)  # noqa: S101 - as `build_arguments` makes it
    number = {name: training.progress[name] for name in _COUNTS if name in training.progress}
    said = args.state if isinstance(args.state, dict) else {}
    said |= {"use_distributed_optimizer": True, "no_save_optim": False, "no_save_rng": True, **number}
    said["iteration"] = _find_iteration(training)
    said |= {"clip_grad": training.clipping} if training.clipping is not None else {}
    return {
        "iteration": _find_iteration(training),
        "optimizer": build_optimizer_state(training, routed=count_experts(order.model) > 0 and order.mesh.ep > 1),
        SCHEDULE: build_schedule(training),
        "content_metadata": {**_CONTENT, "distrib_optim_sharding_type": SHARDING},
    }


def _has_unlike_layers(order: PackRequest) -> bool:
    """Return whether layers are of several kinds, so that Megatron-LM gives each its own arrays (`moe_layer_freq`)."""
    kinds: dict[str, set[str]] = {}
    for tensor in order.model.own():
        found = _LAYER.fullmatch(tensor.name)
        if found is not None:
            kinds.setdefault(found[1], set()).add(found[2])
    return len(set(map(frozenset, kinds.values()))) > 1


class _CellWriter:
    """Puts every part of every cell where a rank writes it."""

    def __init__(self, order: PackRequest, dialect: LibraryDialect, trained: Collection[str]) -> None:
        self.order = order
        self.mesh = dialect.mesh
        self.trained = trained
        self.files = DcpFiles(order.max_shard_size or USUAL_SHARD, dialect.text(_FOLDER))
        self.stored: list[tuple[str, Chunk]] = []
        self.experts = count_experts(order.model)
        self.stage_of = [stage for stage, count in enumerate(dialect.stages) for _ in range(count)]
        arrays: dict[str, list[StackCell]] = {}
        cells = list(list_cells(order.model, dialect))
        for cell in (*cells, *list_state_cells(cells, trained)):
            arrays.setdefault(cell.name, []).append(cell)
        for same in arrays.values():
            check_stack(same)
        self.cells = [cell for same in arrays.values() for cell in same]
        self.dtypes = {name: self._dtype(same) for name, same in arrays.items()}
        self.ranks: dict[tuple[str, int, int, int], int] = {}
        for rank in range(self.mesh.world):
            at = self.mesh.coordinate(rank)
            self.ranks.setdefault(("tp", at["pp"], 0, at["tp"]), rank)
            self.ranks.setdefault(("etp", at["pp"], at["ep"], at["etp"]), rank)

    def write(self) -> None:
        """Rank by rank, each in the order of the arrays, objects behind the weights of their module."""
        by_rank: dict[int, list[tuple[StackCell, int, int]]] = {}
        for cell in self.cells:
            for rank, index, count in self._shares(cell):
                by_rank.setdefault(rank, []).append((cell, index, count))
        for rank in sorted(by_rank):
            self.files.rank(rank)
            written: set[str] = set()
            for cell, index, count in by_rank[rank]:
                self._part(cell, index, count)
                for key in _list_extra_states(cell) if not index else ():
                    if key not in written:
                        written.add(key)
                        self.files.object(key, _NOTHING)

    def _shares(self, cell: StackCell) -> Iterator[tuple[int, int, int]]:
        """Yield the ranks that write a part of a cell, each with the part's index among how many."""
        first = find_array_name(cell.name).startswith("embedding.")
        stage = self.stage_of[cell.layer if cell.layer is not None else 0 if first else -1]
        axis, group = "tp", 0
        if cell.expert is not None:
            if self.experts % self.mesh.ep:
                raise CutError(f"{self.experts} experts cannot be divided over ep={self.mesh.ep}")
            axis, group = "etp", cell.expert * self.mesh.ep // self.experts
        count = self.mesh.degree(axis) if cell.dim is not None else 1
        for index in range(count):
            yield self.ranks[axis, stage, group, index], index, count

    def _part(self, cell: StackCell, index: int, count: int) -> None:
        """Add what a rank writes of a cell: a box of each piece, because gate and up are apart in the whole array."""
        dtype = self.dtypes[cell.name]
        start = 0
        for piece in cell.pieces:
            part, origin = piece, [0] * len(piece.shape)
            if cell.dim is not None:
                part = piece.share(cell.dim, index, count)
                origin[cell.dim] = index * part.shape[cell.dim]
            origin[0] += start
            start += piece.shape[0]
            box = Box((*cell.place, *origin), (*(1,) * len(cell.place), *part.shape))
            region = self.files.tensor(cell.name, cell.shape, dtype, box, part.padding * dtype.unit_bytes)
            if region is not None:
                where = replace(region, strides=compute_dense_strides(dtype, part.shape))
                stored = part.pulled(Chunk(Box.whole(part.shape), dtype, where, cell.name))
                own = cell.name == find_array_name(cell.name)
                self.stored += ((n, replace(c, aside=True) if own and n in self.trained else c) for n, c in stored)

    def _dtype(self, same: list[StackCell]) -> DType:
        """Return the one type of an array."""
        kinds: dict[DType, str] = {}
        for cell in same:
            for piece in (each for composite in cell.pieces for each in composite.pieces):
                if piece.tensor not in self.order.have.tensors:
                    raise UnsupportedError(f"{TITLE} needs every tensor, but {piece.tensor} is missing")
                kinds.setdefault(cell.dtype or self.order.dtypes[piece.tensor], piece.tensor)
        if len(kinds) > 1:
            (one, first), (two, second), *_ = kinds.items()
            raise UnsupportedError(
                f"{same[0].name} of {TITLE} cannot hold both {first}, which is {one}, and {second}, which is {two}",
                hint="cast to one type with --dtype",
            )
        dtype = next(iter(kinds))
        if dtype.unit_elements > 1 or not dtype.torch:
            raise UnsupportedError(f"{same[0].name}: {TITLE} cannot be written with weights of {dtype}")
        return dtype


def _list_extra_states(cell: StackCell) -> Iterator[str]:
    """List the keys of the extra states of a cell's module, and of attention's own, which has no weights.

    Loaders do not look at those that their layers do not ask for (`StrictHandling.ASSUME_OK_UNEXPECTED`).
    """
    module = re.sub(_WEIGHT, "", cell.name)
    if module == cell.name or cell.name != find_array_name(cell.name) or any(word in module for word in _STATELESS):
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
    }
    return {
        "args": build_arguments(order, order.mesh, dtypes["embedding.word_embeddings.weight"], more),
        "checkpoint_version": VERSION,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": dict(_CONTENT),
    }


def _format_file_prefix(dialect: LibraryDialect, rank: int) -> str:
    return dialect.text(_FOLDER, FOLDER) + format_file_prefix(rank)


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
