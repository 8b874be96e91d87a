"""Checks that each rank's files hold just what the mesh gives to the rank: its layers, experts, rows and columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import PartitionError, format_first_few
from shardctl.tensors.box import Box, BoxIndex, subtract_indexed
from shardctl.tensors.manifest import Region
from shardctl.verify.finding import CheckFinding
from shardctl.verify.rank_files import find_rank

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardctl.tensors.manifest import Manifest, Tensor
    from shardctl.tensors.mesh import Mesh
    from shardctl.tensors.pieces import PlacedCheckpoint

CHECK: Final = "ranks"
_RankBoxes = dict[int, set[Box]]


def check_rank_parts(
    manifest: Manifest, placed: PlacedCheckpoint, known: Collection[str] = ()
) -> Iterator[CheckFinding]:
    """Yield one finding for each tensor whose parts are not on the ranks that the mesh gives them to.

    `placed` has the tensors of `manifest`, under canonical names. Tensors in `known` have a finding already.
    Ranks that only repeat what an earlier rank holds may have no files.
    """
    try:
        written, held = _list_given_boxes(placed, replicas=False), _list_given_boxes(placed, replicas=True)
    except PartitionError as error:
        yield CheckFinding("error", CHECK, f"the mesh {placed.mesh} cannot have made these files: {error.message}")
        return
    last = max((find_rank(path) or 0 for path in manifest.files), default=0)
    if last >= placed.mesh.world:
        message = f"the mesh {placed.mesh} has {placed.mesh.world} ranks, and there are files of rank {last}"
        yield CheckFinding("error", CHECK, message)
        return
    for name, tensor in manifest.tensors.items():
        found = _compare_ranks(tensor, written.get(name, {}), held.get(name, {}), placed.mesh)
        if found is not None and name not in known:
            yield found


def _list_given_boxes(placed: PlacedCheckpoint, *, replicas: bool) -> Mapping[str, _RankBoxes]:
    """List what the mesh gives to each rank by tensor; without `replicas`, only to the first that holds a part."""
    given: dict[str, _RankBoxes] = {}
    for rank, shards in placed.ranks(replicas=replicas):
        for shard in shards:
            given.setdefault(shard.tensor.name, {})[rank] = set(shard.boxes)
    return given


def _compare_ranks(tensor: Tensor, written: _RankBoxes, held: _RankBoxes, mesh: Mesh) -> CheckFinding | None:
    """Find the first rank that lacks a part of a tensor, and the first that has a part of another rank."""
    stored: _RankBoxes = {}
    files: dict[int, str] = {}
    for chunk in tensor.chunks:
        rank = find_rank(chunk.where.file) if isinstance(chunk.where, Region) else None
        if rank is not None and isinstance(chunk.where, Region):
            stored.setdefault(rank, set()).add(chunk.box)
            files.setdefault(rank, chunk.where.file)
    lacking = _find_first_difference(written, stored)
    beyond = _find_first_difference(stored, held)
    said = []
    for found, ends in ((lacking, ("lacks", "")), (beyond, ("has", ", which the mesh does not give to it"))):
        if found is not None:
            at, parts = found
            said.append(f"rank {at} ({mesh.label(at)}) {ends[0]} {format_first_few(parts)}{ends[1]}")
    first = beyond or lacking
    if first is None:
        return None
    message = f"{tensor.name} {list(tensor.shape)}: {'; '.join(said)}"
    return CheckFinding("error", CHECK, message, tensor.name, files.get(first[0], ""), format_first_few(first[1]))


def _find_first_difference(ours: _RankBoxes, theirs: _RankBoxes) -> tuple[int, list[Box]] | None:
    """Find the first rank of `ours` that has a part that it does not have in `theirs`, and these parts."""
    for rank in sorted(ours):
        parts = _subtract_boxes(ours[rank], theirs.get(rank, set()))
        if parts:
            return rank, parts
    return None


def _subtract_boxes(boxes: set[Box], others: set[Box]) -> list[Box]:
    """Return what no box of `others` covers of `boxes`."""
    left = boxes - others
    if not left:
        return []
    index = BoxIndex(list(others))
    return [part for box in sorted(left, key=str) for part in subtract_indexed(box, index)]
