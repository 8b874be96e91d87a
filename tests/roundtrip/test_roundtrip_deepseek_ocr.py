"""DeepSeek-OCR and DeepSeek-VL2: the text model inside is known by its class, and has latent attention or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import assert_same, stored

from shardctl.api import Mesh, PlanOptions, ReshardOptions, VerifyOptions, plan, reshard, verify
from shardctl.models import describe_model
from shardctl.options.plan_options import find_device

FIXTURES = Path(__file__).parents[2] / "fixtures"
PLAIN = json.loads((FIXTURES / "configs_hub" / "deepseek.json").read_text())
TEXT = {**PLAIN, "architectures": ["DeepseekV2ForCausalLM"]}
TEXT |= dict.fromkeys(("q_lora_rank", "kv_lora_rank")) | {"use_mla": False, "qk_nope_head_dim": 0, "v_head_dim": 0}
del TEXT["model_type"]
OCR = {
    "architectures": ["DeepseekOCRForCausalLM"],
    "model_type": "deepseek_vl_v2",
    "language_config": TEXT,
    "vision_config": {"image_size": 1024, "model_type": "vision"},
    "projector_config": {"input_dim": 2048, "n_embed": 32},
    "hidden_size": 32,
}
TOWERS = {
    "sam_model.blocks.0.attn.qkv.weight": (24, 8),
    "vision_model.transformer.layers.0.self_attn.qkv_proj.weight": (24, 8),
    "projector.layers.weight": (32, 16),
    "image_newline": (32,),
    "view_seperator": (32,),
}
LATENT = json.loads((FIXTURES / "configs" / "deepseek_v2.json").read_text())
VL2 = {
    "architectures": ["DeepseekVLV2ForCausalLM"],
    "model_type": "deepseek_vl_v2",
    "language_config": {key: value for key, value in LATENT.items() if key != "model_type"},
    "vision_config": {"layers": 2, "model_type": "vision"},
}


def write(folder, config, shapes):
    folder.mkdir()
    made = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=["OCR", "VL2"])
def whole(request, tmp_path_factory):
    """A checkpoint with the names of DeepSeek's own classes, and the name of the family inside."""
    folder = tmp_path_factory.mktemp("deepseek") / "whole"
    if request.param == "OCR":  # the text model is the outer one's own `model`, beside the towers
        plain = {tensor.name: tensor.shape for tensor in describe_model(PLAIN).own()}
        towers = {f"model.{name}": shape for name, shape in TOWERS.items()}
        return write(folder, OCR, {**plain, **towers}), "deepseek", "model."
    inner = {f"language.{tensor.name}": tensor.shape for tensor in describe_model(LATENT).own()}
    balance = {"language.model.layers.1.mlp.gate.e_score_correction_bias": (LATENT["n_routed_experts"],)}
    return write(folder, VL2, {**inner, **balance, "vision.blocks.0.weight": (8, 8)}), "deepseek_v2", "language.model."


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(tp=4, ep=2, etp=2), Mesh.of(pp=2)], ids=str)
def test_the_text_model_is_cut_by_its_table_and_comes_back(whole, tmp_path, mesh):
    folder, family, base = whole
    done = reshard(folder, tmp_path / "ranks", ReshardOptions(mesh=mesh))
    said = [line for line in done.warnings if f"has {family} inside, {base}**, which is cut by its table" in line]
    assert said or mesh.degree("tp") == 1
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=folder)).ok
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(folder))


def test_a_plan_of_the_config_alone_counts_keys_and_values(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OCR))
    found = plan(tmp_path, ReshardOptions(mesh=Mesh.of(tp=2)), plan_options=PlanOptions(device=find_device("h200")))
    assert not found.forecast.unmodelled
    assert any(term.name == "keys and values" for rank in found.forecast.estimate.ranks for term in rank.terms)
