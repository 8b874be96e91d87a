"""What an inventory says each rank holds is what the pieces of every tensor add up to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardctl.base.errors import PartitionError
from shardctl.estimate.model import rank_shards as holding
from shardctl.estimate.model.inventory import build_inventory
from shardctl.estimate.model.rank_shards import compute_sizes_at, list_rank_shards
from shardctl.models import describe_model
from shardctl.tensors.manifest import Tensor
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.pieces import PlacedCheckpoint

CONFIGS = sorted((Path(__file__).parents[1] / "fixtures" / "configs").glob("*.json"))
MESHES = ("tp=2", "pp=2,fsdp=2,tp=2", "dp=2,fsdp=3", "fsdp=2,tp=2,ep=2", "dp=2,cp=2,tp=1,ep=2,etp=1")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_counts_are_those_of_the_pieces(path):
    model = describe_model(json.loads(path.read_text()), kv_heads="replicate")
    tensors = tuple(Tensor(t.name, t.dtype, t.shape, ()) for t in model.own())
    specs = {t.name: model.tensors[t.name].spec for t in tensors}
    inventory = build_inventory(tensors, specs, model.layers)
    assert inventory.nbytes == sum(t.nbytes for t in tensors)
    assert inventory.elements == model.parameters
    tried = 0
    for mesh in map(Mesh.parse, MESHES):
        pp = mesh.degree("pp")
        if pp > max(model.layers, 1):
            continue
        stages = (model.layers // 2, model.layers - model.layers // 2) if pp == 2 else (model.layers,)
        try:
            placed = PlacedCheckpoint(tensors, specs, mesh, stages)
            pieces = dict(placed.ranks(replicas=True))
        except PartitionError:
            with pytest.raises(PartitionError):
                list_rank_shards(inventory, mesh, stages)
            continue
        boxes = sum(len(piece.boxes) * len(piece.names) for _, held in placed.ranks() for piece in held)
        assert placed.count_boxes() == boxes
        holdings = list_rank_shards(inventory, mesh, stages)
        for held in holdings:
            assert held.nbytes == sum(piece.nbytes for piece in pieces[held.rank])
            units = held.units().values()
            assert sum(part.nbytes for unit in units for part in unit) == held.nbytes
        assert sum(held.ranks for held in holdings) == mesh.world
        tried += 1
    assert tried


def test_of_as_many_ranks_as_there_are_each_holds_its_part(monkeypatch):
    """100,000 ranks of fsdp differ in few numbers: what their parts are is counted, and not found by cutting."""
    model = describe_model(json.loads((CONFIGS[0].parent / "llama.json").read_text()))
    tensors = tuple(Tensor(t.name, t.dtype, t.shape, ()) for t in model.own())
    inventory = build_inventory(tensors, {t.name: model.tensors[t.name].spec for t in tensors}, model.layers)
    cut = []
    monkeypatch.setattr(holding, "compute_sizes_at", lambda *args: cut.append(args) or compute_sizes_at(*args))
    mesh = Mesh.of(fsdp=100_000)
    holdings = list_rank_shards(inventory, mesh, (model.layers,))
    assert len(holdings) == 100_000
    assert len(cut) < 100
    assert sum(held.nbytes for held in holdings) == inventory.nbytes
    assert len({id(held.parts) for held in holdings}) < 10
