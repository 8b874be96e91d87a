"""Models whose names on the Hub or in memory are not those of their table are read in both, on every kind of mesh."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict

from shardctl.api import Mesh, ReshardOptions
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
CONFIGS = {
    "sarvam_moe": {**TEXT, **EXPERTS, "use_qk_norm": True},
    "exaone": TEXT,
    "kimi_k25": {
        "text_config": {
            **TEXT,
            **EXPERTS,
            **LATENT,
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "head_dim": 4,
            "qk_head_dim": 12,
        },
        "vision_config": {**TOWER, "pos_emb_height": 8, "pos_emb_width": 8},
        "projection_hidden_size": 32,
        "tie_word_embeddings": True,
    },
    "step3p7": {
        "text_config": {
            **TEXT,
            "model_type": "step3p5",
            "num_hidden_layers": 4,
            "moe_num_experts": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "share_expert_dim": 16,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": {**TOWER, "image_size": 56, "patch_size": 14},
        "tie_word_embeddings": False,
    },
}
MESHES = [Mesh.of(tp=2), Mesh.of(pp=2), Mesh.of(fsdp=2)]


def build(kind):
    """A small model of a model type, with random elements."""
    config = transformers.CONFIG_MAPPING[kind](**CONFIGS[kind])
    auto = transformers.AutoModelForImageTextToText if "vision_config" in CONFIGS[kind] else None
    torch.manual_seed(0)
    model = (auto or transformers.AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def run(request, tmp_path_factory):
    """What `save_pretrained` writes of a model, and its state and optimizer as a training run writes them."""
    folder = tmp_path_factory.mktemp(request.param)
    model = build(request.param)
    model.save_pretrained(folder / "saved")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    model.save_pretrained(folder / "saved")
    for parameter, state in optimizer.state.items():
        state["exp_avg"] = parameter.detach().clone()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(folder / "run"), no_dist=True)
    shutil.copy(folder / "saved" / "config.json", folder / "run")
    return folder


def load(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def test_a_run_has_the_digest_of_what_is_saved(run):
    assert digest(run / "run").digest == digest(run / "saved").digest


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_names_of_the_hub_come_back_from_every_mesh(run, mesh, tmp_path):
    reshard(run / "saved", tmp_path / "ranks", ReshardOptions(mesh=mesh))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_equal(load(tmp_path / "back"), load(run / "saved"))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_names_in_memory_come_back_as_those_of_the_hub_from_every_mesh(run, mesh, tmp_path):
    reshard(run / "run", tmp_path / "ranks", ReshardOptions(mesh=mesh))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf", names="hub"))
    assert_equal(load(tmp_path / "back"), load(run / "saved"))


def test_names_in_memory_are_saved_as_save_pretrained_does(run, tmp_path):
    reshard(run / "run", tmp_path / "out", ReshardOptions(to="hf", names="hub"))
    assert_equal(load(tmp_path / "out"), load(run / "saved"))


def test_names_of_kimi_that_only_transformers_knows_are_written_on_request_with_a_warning(run, tmp_path):
    if not run.name.startswith("kimi"):
        pytest.skip("it has names of its own")
    asked = reshard(run / "run", tmp_path / "asked", ReshardOptions(to="hf", names="hub"))
    assert any("nor engines do; leave --names out" in warning for warning in asked.warnings)
    assert any(name.startswith("language_model.model.blocks.") for name in load(tmp_path / "asked"))
    plain = reshard(run / "run", tmp_path / "plain", ReshardOptions(to="hf"))
    assert "names that KimiK25ForConditionalGeneration has in memory were read as those of the Hub" in plain.warnings
    assert not any("leave --names out" in warning for warning in plain.warnings)
    names = load(tmp_path / "plain").keys()
    assert not any(".blocks." in name for name in names if name.startswith("language_model."))
    assert len(names) == len(load(run / "saved"))  # a tied head is written once


def test_states_of_the_optimizer_follow_their_weights(run, tmp_path):
    """Adam's first moments are copies of the weights here."""
    reshard(run / "run", tmp_path / "dcp", ReshardOptions(to="dcp", mesh=Mesh.of(fsdp=2)))
    metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    state = {n: torch.empty(m.size) for n, m in metadata.items() if hasattr(m, "size")}
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    moments = {name: tensor for name, tensor in state.items() if name.endswith(".exp_avg")}
    assert moments
    for name, moment in moments.items():
        weight = name.removesuffix(".exp_avg").removeprefix("optim.state.")
        assert torch.equal(state[f"model.{weight}"], moment), name
