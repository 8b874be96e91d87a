"""Drafters are named for what they are, and other models are not taken for drafters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardctl.cli.program import run
from shardctl.models import describe_model
from shardctl.models.submodels.draft_models import name_draft_model

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
CLASSES = {
    "EagleLlamaForCausalLM": "EAGLE",
    "EagleMistralLarge3ForCausalLM": "EAGLE",
    "EagleDeepSeekMTPModel": "EAGLE",
    "Eagle3LlamaForCausalLM": "EAGLE-3",
    "LlamaForCausalLMEagle3": "EAGLE-3",
    "Eagle3Qwen2_5vlForCausalLM": "EAGLE-3",
    "PEagleDraftModel": "P-EAGLE",
    "PeagleLlamaForCausalLM": "P-EAGLE",
    "DFlashDraftModel": "DFlash",
    "DFlash2DraftModel": "DFlash",
    "DFlashLagunaForCausalLM": "DFlash",
    "MedusaModel": "Medusa",
    "MLPSpeculatorPreTrainedModel": "MLP speculator",
    "DeepSeekMTPModel": "MTP",
    "Qwen3NextMTP": "MTP",
    "Exaone4_5_MTP": "MTP",
    "MiMoV2OmniMTPModel": "MTP",
    "Eagle2_5_VLForConditionalGeneration": "",
    "LlamaForCausalLM": "",
}
"""Classes of vLLM's registry, and what they are."""
NAMES = {
    "EAGLE": {"fc.weight": (8, 16), "layers.0.self_attn.q_proj.weight": (8, 8)},
    "EAGLE-3": {"fc.weight": (8, 24), "midlayer.self_attn.q_proj.weight": (8, 16), "d2t": (4,), "t2d": (16,)},
    "Medusa": {"medusa_head.0.0.linear.weight": (8, 8)},
    "MTP": {"mtp.fc.weight": (8, 16), "mtp.layers.0.input_layernorm.weight": (8,)},
}


@pytest.mark.parametrize("architecture", CLASSES)
def test_classes_say_it(architecture):
    assert name_draft_model({"architectures": [architecture]}, {}) == CLASSES[architecture]


@pytest.mark.parametrize("kind", NAMES)
def test_names_say_it_without_a_config(kind, tmp_path, capfd):
    assert name_draft_model(None, NAMES[kind]) == kind
    tensors = {name: torch.ones(shape) for name, shape in NAMES[kind].items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert run(["inspect", str(tmp_path)]) == 0
    assert f"drafter  {kind}: " in capfd.readouterr().out
    assert run(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["drafter"] == kind


def test_keys_say_it():
    assert name_draft_model({"speculators_model_type": "eagle3"}, {}) == "EAGLE-3"
    assert name_draft_model({"architectures": ["Qwen3ForCausalLM"], "dflash_config": {"block_size": 8}}, {}) == "DFlash"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_no_other_model_is_taken_for_one(path):
    config = json.loads(path.read_text())
    shapes = {tensor.name: tensor.shape for tensor in describe_model(config).tensors.values()}
    assert name_draft_model(config, shapes) == ""
