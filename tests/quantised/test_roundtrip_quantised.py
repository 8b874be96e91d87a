"""Quantised checkpoints keep their bits, and each rank can read its part with its own scales."""

from __future__ import annotations

import pytest
import torch
from codes import CODECS, LLAMA
from safetensors.torch import load_file

from shardctl.mesh import Mesh
from shardctl.models import describe
from shardctl.placement import boxes
from shardctl.verbs.digest import digest
from shardctl.verbs.drafting import Wish
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

MESHES = {
    "tp2": Mesh.of(tp=2),
    "tp4": Mesh.of(tp=4),
    "pp2": Mesh.of(pp=2),
    "fsdp3": Mesh.of(fsdp=3),
    "tp2-pp2": Mesh.of(tp=2, pp=2),
    "tp2-fsdp2": Mesh.of(tp=2, fsdp=2),
}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def read(path, rank=None):
    """Every tensor of a directory, or of one rank's files."""
    pattern = "*.safetensors" if rank is None else f"shard-{rank + 1:05d}-*.safetensors"
    found = {}
    for file in sorted(path.glob(pattern)):
        found |= load_file(file)
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CODECS)
def test_there_and_back_is_the_identity(quantised, tmp_path, name, mesh):
    source = quantised(name)
    reshard(source, tmp_path / "ranks", Wish(mesh=MESHES[mesh]))
    reshard(tmp_path / "ranks", tmp_path / "back", Wish(to="hf"))
    assert_same(read(tmp_path / "back"), read(source))
    assert digest(source).digest == digest(tmp_path / "ranks").digest == digest(tmp_path / "back").digest
    assert verify(tmp_path / "ranks", level="full", against=source).ok
    assert not inspect(source).warnings


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", CODECS)
def test_a_rank_reads_from_its_own_files_the_part_of_the_weight_that_is_its_own(quantised, tmp_path, name, tp):
    codec, source, mesh = CODECS[name], quantised(name), Mesh.of(tp=tp)
    reshard(source, tmp_path / "ranks", Wish(mesh=mesh))
    whole, plain = read(source), describe(LLAMA)
    for rank in range(tp):
        mine, compared = read(tmp_path / "ranks", rank), 0
        for tensor in plain.own():
            module = tensor.name.removesuffix(".weight")
            if f"{module}.weight" in whole and whole[f"{module}.weight"].dtype == torch.bfloat16:
                continue
            (box,) = boxes(tensor.shape, tensor.spec, mesh, mesh.coordinate(rank))
            assert torch.equal(codec.decode(of(module, mine)), codec.decode(of(module, whole))[box.slices()]), module
            compared += 1
        assert compared == 14


def of(module, state):
    """A module's arrays, by the names that follow its own."""
    return {name.removeprefix(f"{module}."): t for name, t in state.items() if name.startswith(f"{module}.")}
