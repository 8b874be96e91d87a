"""Phi-4-multimodal as Microsoft stores it: adapters beside the linears of its Phi-3, cut as vLLM cuts LoRA."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import assert_same, config_of, save, stored

import shardctl
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

RANKS = {"vision": 6, "speech": 10}
LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
TP = Mesh.of(tp=2)


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    """Phi-3 as transformers saves it, under the names of Microsoft's own class, with a tower."""
    folder = tmp_path_factory.mktemp("phi4mm")
    tiny = save(folder / "phi3", {**config_of("phi3"), "dtype": "float32"})
    tensors, made = {}, torch.Generator().manual_seed(5)
    for name, tensor in stored(tiny.path).items():
        module = name.removesuffix(".weight")
        if not module.endswith(LINEARS):
            tensors[name] = tensor
            continue
        tensors[f"{module}.base_layer.weight"] = tensor
        for adapter, rank in RANKS.items():
            tensors[f"{module}.lora_A.{adapter}.weight"] = torch.randn(rank, tensor.shape[1], generator=made)
            tensors[f"{module}.lora_B.{adapter}.weight"] = torch.randn(tensor.shape[0], rank, generator=made)
    tensors["model.embed_tokens_extend.image_embed.img_projection.0.weight"] = torch.randn(32, 24, generator=made)
    (folder / "whole").mkdir()
    save_file(tensors, folder / "whole" / "model.safetensors", {"format": "pt"})
    named = {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"}
    ranks = {f"{name}_lora": {"r": rank, "lora_alpha": 2 * rank} for name, rank in RANKS.items()}
    config = {**json.loads((tiny.path / "config.json").read_text()), **named, **ranks}
    (folder / "whole" / "config.json").write_text(json.dumps(config))
    return folder / "whole"


def test_it_comes_back_whole(phi, tmp_path):
    reshard(phi, tmp_path / "ranks", ReshardOptions(mesh=TP))
    found = verify(tmp_path / "ranks", VerifyOptions(level="full", against=phi))
    assert found.ok, found.findings
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(phi))


def test_a_rank_adds_to_its_part_of_a_linear_what_the_adapter_adds_there(phi, tmp_path):
    """Of the query and key rows, the gate's and up's, and of what the others read: the products are those of both."""
    reshard(phi, tmp_path / "ranks", ReshardOptions(mesh=TP))
    whole = stored(phi)
    ranks = [shardctl.load(tmp_path / "ranks", rank=number) for number in range(TP.world)]
    module = "model.layers.0.mlp.down_proj"
    for adapter in RANKS:
        down = f"{module}.lora_A.{adapter}.weight"
        assert torch.equal(torch.cat([rank[down] for rank in ranks], 1), whole[down])
        assert all(rank[down].shape[1] == whole[down].shape[1] // 2 for rank in ranks)
        name = f"model.layers.0.mlp.gate_up_proj.lora_B.{adapter}.weight"
        gates, ups = whole[name].chunk(2)
        for number, rank in enumerate(ranks):
            assert torch.equal(rank[name], torch.cat([gates.chunk(2)[number], ups.chunk(2)[number]]))
    with open_checkpoint(phi) as checkpoint:
        model = checkpoint.find_placement(TP)
        uncut = [n for n, t in model.tensors.items() if ".lora_" in n and "tp" not in t.spec.axes]
        assert {name.split(".lora_")[0].split(".", 3)[3] + name.split(".lora_")[1][0] for name in uncut} == {
            "self_attn.qkv_projA", "self_attn.o_projB", "mlp.gate_up_projA", "mlp.down_projB",
        }  # fmt: skip
        assert model.warnings[-1].startswith("Phi4MMForCausalLM has phi3 inside, model.**, which is cut by its table")


def test_a_config_alone_has_the_adapters_that_it_speaks_of(phi):
    config = json.loads((phi / "config.json").read_text())
    found = {name: tensor.shape for name, tensor in describe_model(config).tensors.items() if ".lora_" in name}
    expected = {name: tuple(tensor.shape) for name, tensor in stored(phi).items() if ".lora_" in name}
    assert {name.removeprefix("language_model."): shape for name, shape in found.items()} == expected
