"""Finds which files of a directory of ranks hold what a rank computes with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.tensors.manifest import Region
from shardctl.tensors.mesh import EXPERT_AXES, EXPERT_FSDP

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shardctl.models import Model
    from shardctl.tensors.manifest import Chunk, Manifest
    from shardctl.tensors.mesh import Mesh

_RANK_FILE: Final = re.compile(r"(?:.*/)?shard-([0-9]{5,})-model-[0-9]+-of-[0-9]+\.safetensors")
_DENSE_WEIGHT_AXES: Final = ("pp", "fsdp", "tp")
_EXPERT_WEIGHT_AXES: Final = ("pp", *EXPERT_AXES, EXPERT_FSDP)
"""The axes on which ranks agree that hold the same: experts, and all else."""


def find_rank(file: str) -> int | None:
    """Find the rank, counted from 0, whose file this is; None for a file of no rank.

    >>> find_rank("shard-00002-model-00001-of-00001.safetensors")
    1
    """
    found = _RANK_FILE.fullmatch(file)
    return int(found[1]) - 1 if found else None


def list_ranks(manifest: Manifest) -> list[int]:
    """List the ranks that have files, in order; none if the files are not those of ranks."""
    found = {find_rank(path) for path in manifest.files}
    return sorted(rank for rank in found if rank is not None) if None not in found else []


def list_distinct_ranks(manifest: Manifest, mesh: Mesh | None) -> list[int]:
    """List the first of each group of ranks that hold the same; without a mesh those that have files."""
    if mesh is None:
        return list_ranks(manifest)
    firsts: dict[tuple[int, ...], int] = {}
    for rank in range(mesh.world):
        at = mesh.coordinate(rank)
        firsts.setdefault(tuple(at[axis] for axis in dict.fromkeys((*_DENSE_WEIGHT_AXES, *_EXPERT_WEIGHT_AXES))), rank)
    return list(firsts.values())


def list_expert_arrays(manifest: Manifest, model: Model) -> frozenset[str]:
    """List the stored names of arrays that ep divides; `manifest` has canonical names."""
    return frozenset(
        chunk.name
        for name, tensor in manifest.tensors.items()
        if name in model.tensors and model.tensors[name].spec.of_expert
        for chunk in tensor.chunks
    )


def list_held_chunks(
    rank: int, stored: Manifest, mesh: Mesh | None, experts: Collection[str]
) -> Iterator[tuple[str, Chunk]]:
    """List each stored name and chunk that a rank computes with; what ranks of dp and cp share, only one of them wrote.

    `stored` has stored names, of which `experts` are those that ep divides. Its own files come first.
    """
    places: dict[tuple[str, bool], int] = {}

    def distance(file: str, *, expert: bool) -> int:
        """Return 0 for the rank's own files, 1 for those of one that holds the same, 2 for others."""
        key = (file, expert)
        if key not in places:
            other = find_rank(file)
            if other == rank:
                places[key] = 0
            elif other is None or mesh is None or max(other, rank) >= mesh.world:
                places[key] = 2
            else:
                mine, theirs = mesh.coordinate(rank), mesh.coordinate(other)
                places[key] = 2 - all(
                    mine[axis] == theirs[axis] for axis in (_EXPERT_WEIGHT_AXES if expert else _DENSE_WEIGHT_AXES)
                )
        return places[key]

    for name, tensor in stored.tensors.items():
        near: dict[int, list[Chunk]] = {}
        for chunk in tensor.chunks:
            if isinstance(chunk.where, Region):
                near.setdefault(distance(chunk.where.file, expert=name in experts), []).append(chunk)
        seen = set()
        for chunk in (*near.get(0, ()), *near.get(1, ())):
            if chunk.box not in seen:
                seen.add(chunk.box)
                yield name, chunk
