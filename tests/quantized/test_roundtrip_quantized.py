"""Quantized checkpoints keep their bits, and each rank can read its part with its own scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from codes import CODECS, LLAMA, encoded, plain_state, write
from reading import assert_same, of, read
from transformers.integrations.bitnet import pack_weights

from shardctl.base.errors import UnsupportedError
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import compute_rank_boxes
from shardctl.verbs.digest import digest
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


CASES = [
    (name, mesh)
    for name in CODECS
    for mesh in (MESHES if name in {"fp8-blocks", "gptq-4", "awq"} else ("tp2-pp2", "fsdp3"))
]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_there_and_back_is_the_identity(quantised, tmp_path, name, mesh):
    source = quantised(name)
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=MESHES[mesh]))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "back"), read(source))
    assert digest(source).digest == digest(tmp_path / "ranks").digest == digest(tmp_path / "back").digest
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=source)).ok
    assert not inspect(source).warnings


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", CODECS)
def test_a_rank_reads_from_its_own_files_the_part_of_the_weight_that_is_its_own(quantised, tmp_path, name, tp):
    codec, source, mesh = CODECS[name], quantised(name), Mesh.of(tp=tp)
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=mesh))
    whole, plain = read(source), describe_model(LLAMA)
    for rank in range(tp):
        mine, compared = read(tmp_path / "ranks", rank), 0
        for tensor in plain.own():
            module = tensor.name.removesuffix(".weight")
            if f"{module}.weight" in whole and whole[f"{module}.weight"].dtype == torch.bfloat16:
                continue
            (box,) = compute_rank_boxes(tensor.shape, tensor.spec, mesh, mesh.coordinate(rank))
            assert torch.equal(codec.decode(of(module, mine)), codec.decode(of(module, whole))[box.slices()]), module
            compared += 1
        assert compared == 14


def test_a_method_that_is_not_known_is_converted_on_one_device_and_named_for_a_mesh(tmp_path):
    state = plain_state(LLAMA)
    state["model.layers.0.mlp.up_proj.W_q"] = state.pop("model.layers.0.mlp.up_proj.weight")
    source = write(tmp_path / "source", {**LLAMA, "quantization_config": {"quant_method": "eetq"}}, state)
    reshard(source, tmp_path / "hf", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "hf"), read(source))
    with pytest.raises(UnsupportedError, match="the weights are quantized: EETQ") as caught:
        reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert "without --dtype" in caught.value.hint


def test_packed_weights_of_bitnet_stay_on_one_device_and_those_rounded_as_they_run_are_cut(tmp_path):
    config = json.loads((Path(__file__).parents[2] / "fixtures" / "configs" / "bitnet.json").read_text())
    settings = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    packed = plain_state(config)
    for name in [name for name in packed if name.endswith("_proj.weight")]:
        packed[name] = pack_weights(packed[name].sign().to(torch.int8))
        packed[f"{name}_scale"] = torch.ones(1).bfloat16()
    offline = {**config, "quantization_config": {**settings, "quantization_mode": "offline"}}
    source = write(tmp_path / "packed", offline, packed)
    reshard(source, tmp_path / "hf", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "hf"), read(source))
    with pytest.raises(UnsupportedError, match="packed weights of BitNet cannot be cut: each byte holds four rows"):
        reshard(source, tmp_path / "no", ReshardOptions(mesh=Mesh.of(tp=2)))
    online = {**config, "quantization_config": {**settings, "quantization_mode": "online"}}
    source = write(tmp_path / "online", online, plain_state(config))
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "back"), read(source))
    assert read(tmp_path / "ranks", 0)["model.layers.0.self_attn.o_proj.weight"].shape == (32, 16)


def test_a_mesh_to_another_mesh_directly(quantised, tmp_path):
    source = quantised("gptq-4")
    reshard(source, tmp_path / "tp2", ReshardOptions(mesh=Mesh.of(tp=2)))
    reshard(tmp_path / "tp2", tmp_path / "tp4", ReshardOptions(mesh=Mesh.of(tp=4)))
    reshard(source, tmp_path / "direct", ReshardOptions(mesh=Mesh.of(tp=4)))
    for rank in range(4):
        assert_same(read(tmp_path / "tp4", rank), read(tmp_path / "direct", rank))


def test_experts_are_placed_with_their_scales(tmp_path):
    config = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    codec = CODECS["fp8-blocks"]
    plain = {t.name: torch.randn(t.shape).bfloat16() for t in describe_model(config).own()}
    routers = {name: tensor for name, tensor in plain.items() if name.endswith("block_sparse_moe.gate.weight")}
    state = encoded(codec, {n: t for n, t in plain.items() if n not in routers}) | routers
    source = write(tmp_path / "source", {**config, "quantization_config": codec.settings}, state)
    mesh = Mesh.of(tp=2, ep=2)
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=mesh))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "back"), read(source))
    assert digest(tmp_path / "ranks").digest == digest(source).digest
    mine = read(tmp_path / "ranks", 1)
    held = {name.split(".experts.")[1].split(".")[0] for name in mine if ".experts." in name}
    assert held == {"2", "3"}
    arrays = {n: mine[f"model.layers.0.block_sparse_moe.experts.2.w1.{n}"] for n in ("weight", "weight_scale_inv")}
    assert [tuple(t.shape) for t in arrays.values()] == [(256, 128), (16, 4)]
