"""What the estimator says a rank's weights take is, byte for byte, what resharding writes into that rank's files."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from tiny_models import FIXTURES, config_of

from shardctl.checkpoint.opening import open_checkpoint
from shardctl.estimate.model.inventory import build_inventory
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.models import describe_model
from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

MESHES = ("tp=2,pp=2,fsdp=2", "fsdp=3")
EXPERT_MESHES = ("tp=2,pp=2,fsdp=2", "tp=2,ep=2", "pp=2,dp=2,ep=2", "fsdp=4,ep=2")


def header(file):
    """The entries of a safetensors file, by the format's own description: eight bytes of length, then JSON."""
    with file.open("rb") as data:
        entries = json.loads(data.read(int.from_bytes(data.read(8), "little")))
    entries.pop("__metadata__")
    return entries


def payloads(folder, model):
    """Bytes of tensors in the files of each rank, apart for experts and for all else, a tie's names counted once."""
    of_expert = {name for name, tensor in model.tensors.items() if tensor.spec.of_expert}
    of_expert |= {name for name, fusion in model.fusions.items() if not of_expert.isdisjoint(fusion.tensors)}
    found = Counter()
    seen = set()
    for file in sorted(folder.glob("*.safetensors")):
        rank = int(re.match(r"shard-([0-9]+)-", file.name)[1]) - 1
        part = re.search(r"model-([0-9]+)-", file.name)[1]
        for name, entry in header(file).items():
            begin, end = entry["data_offsets"]
            tensor = model.aliases.get(name, name)
            if (rank, part, tensor) not in seen:
                found[rank, name in of_expert] += end - begin
            seen.add((rank, part, tensor))
    return found


def dense(mesh, rank):
    """The place of a rank as far as weights that are no expert's are concerned."""
    at = mesh.coordinate(rank)
    return tuple(at[axis] for axis in ("pp", "fsdp", "tp"))


@pytest.mark.parametrize("name", FIXTURES)
def test_weights_of_each_rank_are_what_its_files_hold(tiny, tmp_path, name, subtests):
    source = tiny(name)
    mixture = any(t.spec.of_expert for t in describe_model(config_of(name)).own())
    for mesh in EXPERT_MESHES if mixture else MESHES:
        with subtests.test(mesh=mesh):
            check_weights_of_each_rank(source, tmp_path / mesh, Mesh.parse(mesh))


def check_weights_of_each_rank(source, ranks, mesh):
    record = reshard(source.path, ranks, ReshardOptions(mesh=mesh)).record
    with open_checkpoint(source.path) as checkpoint:
        model, tensors = checkpoint.model, checkpoint.manifest.tensors
    specs = {tensor: model.tensors[tensor].spec for tensor in tensors}
    inventory = build_inventory(tensors.values(), specs, model.layers)
    written = payloads(ranks, model)
    holdings = list_rank_shards(inventory, mesh, record.stages)
    for holding in holdings:
        experts = sum(part.nbytes for part in holding.parts if part.kind.spec.of_expert)
        assert experts == written[holding.rank, True]
        # Of what all dp ranks hold alike, the first one's files have it.
        writer = next(rank for rank in range(mesh.world) if dense(mesh, rank) == dense(mesh, holding.rank))
        assert holding.nbytes - experts == written[writer, False]
    assert sum(holding.ranks for holding in holdings) == mesh.world
