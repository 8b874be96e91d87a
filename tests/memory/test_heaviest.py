"""The ranks that stand for their stages are the heaviest of them, and hold what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from known_models import stock

from shardctl.base.errors import PartitionError
from shardctl.estimate.model.heaviest import HeaviestRanks
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.tensors.mesh import Mesh

CONFIGS = sorted((Path(__file__).parents[2] / "fixtures" / "configs").glob("*.json"))
MESHES = ("tp=2", "pp=2,fsdp=3", "tp=2,pp=2,fsdp=2,dp=2,ep=2")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_they_hold_what_hold_says_and_no_rank_holds_more(path):
    inventory = stock(json.loads(path.read_text()))
    heaviest = HeaviestRanks(inventory)
    for mesh in (*map(Mesh.parse, MESHES), Mesh.parse(MESHES[0])):
        pp = mesh.degree("pp")
        if pp > max(inventory.layers, 1):
            continue
        half = inventory.layers // 2
        stages = (half, inventory.layers - half) if pp == 2 else (inventory.layers,)
        try:
            every = {one.rank: one for one in list_rank_shards(inventory, mesh, stages)}
        except PartitionError:
            with pytest.raises(PartitionError):
                heaviest.hold(mesh, stages)
            continue
        found = heaviest.hold(mesh, stages)
        assert heaviest.hold(mesh, stages, most=1) == found[:1]
        assert HeaviestRanks(inventory).hold(mesh, stages, most=1) == found[:1]
        assert [one.stage for one in found] == list(range(pp))
        assert sum(one.ranks for one in found) == mesh.world
        for one in found:
            same = every[one.rank]
            assert (one.label, one.coordinate, one.layers, one.parts) == (
                same.label,
                same.coordinate,
                same.layers,
                same.parts,
            )
            of_stage = [other for other in every.values() if other.stage == one.stage]
            assert one.nbytes == max(other.nbytes for other in of_stage)
            assert one.gathered() == max(other.gathered() for other in of_stage)
