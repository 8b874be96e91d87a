"""gpt-oss in Megatron-LM's formats: columns that take turns are copied, digested, resumed and shared among workers."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from interrupting import InterruptingProgress
from safetensors.torch import load_file, save_file

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import PartitionError, ShardctlError, UnsupportedError, UsageError
from shardctl.cli.program import run
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.bands import BandBuffer, ChunkIndex
from shardctl.tensors.box import Box
from shardctl.tensors.copyplan import cover_tensor
from shardctl.tensors.manifest import Chunk, Region, Tensor
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.turns import unfold_tensors
from shardctl.verbs.digest import digest
from shardctl.verbs.finish import finish
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures"
MODEL = FIXTURES / "megatron" / "hf" / "gpt-oss"
CONFIG = SourceOptions(config=MODEL)
MESH = Mesh.of(tp=2, ep=2, etp=1)
U16 = BY_NAME["U16"]


def tree(at):
    return {path.relative_to(at): path.read_bytes() for path in at.rglob("*") if path.is_file()}


class _Memory:
    """A file in memory."""

    def __init__(self, values):
        self.data = values.tobytes()

    def read_at(self, _, offset, into):
        into[:] = self.data[offset : offset + len(into)]


@pytest.mark.parametrize("edges", [(0, 12), (0, 5, 12), (0, 3, 4, 5, 12), (0, 1, 11, 12), (0, 2, 7, 8, 12)])
@pytest.mark.parametrize("turns", [2, 3])
def test_boxes_with_any_edges_are_unfolded(edges, turns):
    values = np.arange(36, dtype=np.uint16).reshape(3, 12)
    parts = [Chunk(Box((0, a), (3, b - a)), U16, Region("f", 2 * a, (24, 2))) for a, b in pairwise(edges)]
    marker = Chunk(Box((0, 0, 0), (0, 0, 0)), U16, Region("f", 0, (24, 2 * turns, 2)), turns=turns)
    tensor = Tensor("w", U16, (3, 12), tuple(parts))
    unfolded, _ = unfold_tensors(tensor, replace(tensor, chunks=(marker,)))
    assert (unfolded.shape, unfolded.turns) == ((3, 12 // turns, turns), turns)
    into = np.empty(72, np.uint8)
    box = Box.whole(unfolded.shape)
    assert BandBuffer(1 << 16).read(_Memory(values), ChunkIndex(cover_tensor(unfolded)), box, into) == 36
    assert np.array_equal(into.view(np.uint16).reshape(3, 12), values)


def test_who_does_not_unfold_is_told():
    part = Chunk(Box((0, 0, 1), (3, 6, 1)), U16, Region("f", 2, (24, 4, 2)), turns=2)
    with pytest.raises(UnsupportedError, match="w is stored in parts whose elements take turns"):
        cover_tensor(Tensor("w", U16, (3, 12), (part,)))


@pytest.mark.parametrize("layout", ["megatron", "torch_dist", "fsdp_dtensor"])
def test_there_and_back_under_little_memory(layout, tmp_path):
    wish = ReshardOptions(to=layout, mesh=MESH, host_memory=256 << 20, threads=2)
    there = reshard(MODEL, tmp_path / "there", wish)
    assert there.record.digest == digest(MODEL).digest == digest(tmp_path / "there").digest
    assert verify(tmp_path / "there", VerifyOptions(level="full", against=str(MODEL))).ok
    reshard(tmp_path / "there", tmp_path / "back", ReshardOptions(to="hf"))
    ours, theirs = (load_file(at / "model.safetensors") for at in (tmp_path / "back", MODEL))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    other = ReshardOptions(to=layout, mesh=Mesh.of(dp=2) if layout == "fsdp_dtensor" else Mesh.of(pp=2))
    reshard(tmp_path / "there", tmp_path / "other", other)
    reshard(MODEL, tmp_path / "direct", other)
    kept = [path for path in tree(tmp_path / "direct") if path.suffix in {".pt", ".distcp"}]
    assert kept
    assert all((tmp_path / "other" / path).read_bytes() == (tmp_path / "direct" / path).read_bytes() for path in kept)


@pytest.mark.parametrize("layout", ["megatron", "torch_dist"])
def test_an_interrupted_run_goes_on(layout, tmp_path):
    wish = ReshardOptions(to=layout, mesh=MESH, threads=1)
    reshard(MODEL, tmp_path / "whole", wish)
    with pytest.raises(ShardctlError, match="interrupted"):
        reshard(MODEL, tmp_path / "out", wish, progress=InterruptingProgress())
    assert reshard(MODEL, tmp_path / "out", wish).kept_bytes > 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("more", [("megatron",), ("torch_dist", "--max-shard-size", "2KB")])
def test_workers_share_the_parts(more, tmp_path):
    said = [str(MODEL), "--to", *more, "--tp", "2", "--ep", "2", "--etp", "1", "--quiet"]
    assert run(["reshard", *said[:1], str(tmp_path / "whole"), *said[1:]]) == 0
    for number in range(3):
        assert run(["reshard", *said[:1], str(tmp_path / "out"), *said[1:], "--worker", f"{number}/3"]) == 0
    finish(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_one_changed_element_is_found_where_it_is(tmp_path):
    state = load_file(MODEL / "model.safetensors")
    state["model.layers.1.mlp.experts.gate_up_proj"][2, 7, 9] += 1
    (tmp_path / "changed").mkdir()
    (tmp_path / "changed" / "config.json").write_bytes((MODEL / "config.json").read_bytes())
    save_file(state, tmp_path / "changed" / "model.safetensors", {"format": "pt"})
    reshard(MODEL, tmp_path / "there", ReshardOptions(to="megatron", mesh=MESH))
    found = verify(tmp_path / "there", VerifyOptions(level="full", against=str(tmp_path / "changed")))
    assert not found.ok
    assert "[2:3, 7:8, 9:10]" in str(found)


def test_blocks_of_mxfp4_are_decoded_on_the_way(tmp_path):
    config = json.loads((FIXTURES / "configs" / "gpt_oss.json").read_text())
    config["rope_parameters"] = json.loads((MODEL / "config.json").read_text())["rope_parameters"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    seed, source = torch.Generator().manual_seed(0), tmp_path / "source"
    state = {
        name: torch.randint(100 if name.endswith("scales") else 0, 150, shape, generator=seed, dtype=torch.uint8)
        if name.endswith(("_blocks", "_scales"))
        else torch.randn(shape, generator=seed).bfloat16()
        for name, shape in describe_model(config).state().items()
    }
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_file(state, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match="stores quantized weights in formats") as told:
        reshard(source, tmp_path / "out", ReshardOptions(to="megatron"))
    assert "--dtype bf16" in told.value.hint
    plain = reshard(source, tmp_path / "plain", ReshardOptions(to="hf", dtype="bf16")).record.digest
    for layout in ("megatron", "torch_dist", "fsdp_dtensor"):
        wish = ReshardOptions(to=layout, mesh=MESH, dtype="bf16")
        assert reshard(source, tmp_path / layout, wish).record.digest == plain == digest(tmp_path / layout).digest


@pytest.mark.parametrize(
    ("wish", "kind", "message"),
    [
        (
            ReshardOptions(to="megatron", mesh=Mesh.of(tp=2, etp=2)),
            PartitionError,
            "divides no experts that have biases",
        ),
        (
            ReshardOptions(to="torch_dist", mesh=Mesh.of(tp=2, etp=2)),
            PartitionError,
            "divides no experts that have biases",
        ),
        (ReshardOptions(to="megatron", megatron="layers=local,experts=grouped"), UsageError, "experts with biases"),
        (
            ReshardOptions(to="fsdp_dtensor", mesh=Mesh.of(dp=2, ep=2), megatron="experts=grouped"),
            UnsupportedError,
            "counts the biases of grouped experts on every rank from 0",
        ),
    ],
)
def test_what_core_has_not_is_refused(wish, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        reshard(MODEL, tmp_path / "out", wish)
