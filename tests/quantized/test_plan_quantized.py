"""What `plan` says each rank of a quantized model will hold and write is what `reshard` writes, byte for byte."""

from __future__ import annotations

import json

import pytest
import torch
from codes import CODECS, LLAMA, encoded, plain_state, write

from shardctl.base.errors import PartitionError
from shardctl.cli.program import run
from shardctl.models import describe_model
from shardctl.options import PlanOptions, ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard

MESHES = (Mesh.of(tp=2, pp=2), Mesh.of(fsdp=3), Mesh.of(tp=4))


def spans(file):
    """Bytes of the tensors in a safetensors file, by the format's own description."""
    with file.open("rb") as data:
        entries = json.loads(data.read(int.from_bytes(data.read(8), "little")))
    return {
        name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in entries.items() if name[0] != "_"
    }


def assert_planned(source, target, mesh):
    reshard_options = ReshardOptions(mesh=mesh)
    planned = plan(source, reshard_options, plan_options=PlanOptions(use="serve"))
    reshard(source, target, reshard_options)
    said = set()
    for rank in planned.ranks:
        said |= {*rank.files}
        held = [spans(target / name) for name in rank.files]
        assert rank.file_bytes == sum((target / name).stat().st_size for name in rank.files)
        assert rank.weight_bytes == sum(sum(tensors.values()) for tensors in held), rank.label
    assert said == {file.name for file in target.glob("*.safetensors")}
    return planned


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_each_rank_holds_and_writes_what_was_planned(quantised, tmp_path, name, mesh):
    planned = assert_planned(quantised(name), tmp_path / "ranks", mesh)
    whole = sum(spans(quantised(name) / "model.safetensors").values())
    assert planned.weight_bytes == whole
    assert planned.replication == sum(rank.weight_bytes for rank in planned.ranks) / whole


def test_experts_with_scales_of_their_own(tmp_path):
    config = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    codec = CODECS["fp8-blocks"]
    plain = {t.name: torch.randn(t.shape).bfloat16() for t in describe_model(config).own()}
    routers = {name: tensor for name, tensor in plain.items() if name.endswith("block_sparse_moe.gate.weight")}
    state = encoded(codec, {n: t for n, t in plain.items() if n not in routers}) | routers
    source = write(tmp_path / "source", {**config, "quantization_config": codec.settings}, state)
    assert_planned(source, tmp_path / "ranks", Mesh.of(tp=4, ep=4))


@pytest.mark.parametrize("name", CODECS)
def test_the_degrees_that_work_are_listed_unasked_and_are_those_that_can_be_planned(quantised, name):
    found = plan(quantised(name), ReshardOptions()).quantised_degrees["tp"]
    for degree in range(1, 17):
        if degree in found.allowed:
            plan(quantised(name), ReshardOptions(mesh=Mesh.of(tp=degree)))
        else:
            with pytest.raises(PartitionError):
                plan(quantised(name), ReshardOptions(mesh=Mesh.of(tp=degree)))
    assert not set(found.allowed) & set(found.blocked)


def test_a_plan_says_which_degrees_would_cut_blocks(quantised, capsys):
    source = quantised("fp8-blocks")
    found = plan(source, ReshardOptions()).quantised_degrees["tp"]
    assert found.blocked
    assert run(["plan", str(source)]) == 0
    assert "would cut blocks of quantized weights" in capsys.readouterr().out


def test_a_model_that_is_not_quantized_has_no_such_degrees(tmp_path):
    source = write(tmp_path / "source", LLAMA, plain_state(LLAMA))
    assert plan(source, ReshardOptions()).quantised_degrees == {}
