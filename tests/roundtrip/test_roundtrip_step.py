"""Step-3.5's files as on the Hub, whose class transformers lacks: over meshes and back bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import CONFIGS, assert_same, stored

from shardctl.models import describe_model
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

CONFIG = json.loads((CONFIGS.with_name("configs_hub") / "step3p5.json").read_text())
HUB = {
    "mlp.gate.e_score_correction_bias": "moe.router_bias",
    "mlp.gate.": "moe.gate.",
    "mlp.shared_experts": "share_expert",
    "shared_head.head": "transformer.shared_head.output",
    "shared_head.norm": "transformer.shared_head.norm",
}
STACKS = {"gate_proj": (4, 16, 32), "up_proj": (4, 16, 32), "down_proj": (4, 32, 16)}


def hub_tensors():
    """Every tensor of the model under its name on the Hub, experts in three stacks of a layer."""
    generator = torch.Generator().manual_seed(0)
    shapes = {f"model.layers.{n}.moe.{name}.weight": shape for n in (2, 3) for name, shape in STACKS.items()}
    for tensor in describe_model(CONFIG).tensors.values():
        if ".experts." not in tensor.name and not tensor.row.buffer:
            ours = next((ours for ours in HUB if ours in tensor.name), "")
            shapes[tensor.name.replace(ours, HUB[ours]) if ours else tensor.name] = tensor.shape
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,ep=2", "pp=2,tp=2", "fsdp=3"])
def test_there_and_back_is_the_identity(tmp_path, mesh):
    tensors, source, ranks = hub_tensors(), tmp_path / "source", tmp_path / "ranks"
    source.mkdir()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(CONFIG))
    reshard(source, ranks, ReshardOptions(mesh=Mesh.parse(mesh)))
    reshard(ranks, tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), tensors)
    assert verify(ranks, VerifyOptions(level="full", against=source)).ok
    names = set().union(*(stored(file) for file in ranks.glob("*.safetensors")))
    assert {"model.layers.2.mlp.experts.gate_up_proj", "model.layers.4.shared_head.head.weight"} <= names
