"""Llama 4 in Meta's `consolidated.NN.pth`: as its own code divides it, read and written, and refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from fixtures.meta import make_llama4
from shardctl.base.errors import PartitionError, SourceError, UnsupportedError, UsageError
from shardctl.libraries.meta.llama4_params import build_llama4_params
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA4 = FIXTURES / "meta" / "llama4"
SCOUT = {
    "model_type": "llama4_text",
    "architectures": ["Llama4ForCausalLM"],
    "hidden_size": 5120,
    "num_hidden_layers": 4,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}


def to_meta(ranks: int) -> ReshardOptions:
    return ReshardOptions(to="meta", mesh=Mesh.of(tp=ranks))


def stored(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    state = torch.load(folder / f"consolidated.{rank:02d}.pth", weights_only=False)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and name != "rope.freqs"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The model as transformers has it."""
    place = tmp_path_factory.mktemp("llama4") / "hf"
    reshard(LLAMA4 / "mp1", place, ReshardOptions(to="hf"))
    return place


def test_names_and_shapes_are_those_of_transformers(whole):
    ours, given = load_file(whole / "model.safetensors"), make_llama4.weights()
    q, k, v = given["layers.1.attention.wqkv.weight"].split([16, 8, 8])
    layer = "language_model.model.layers.1"
    at = "layers.1.feed_forward.experts.moe_w"
    experts = [given[f"{at}_{name}_eD_F"].view(2, 16, 32) for name in ("in", "swiglu")]
    expected = {
        f"{layer}.self_attn.q_proj.weight": q,
        f"{layer}.self_attn.k_proj.weight": k,
        f"{layer}.self_attn.v_proj.weight": v,
        f"{layer}.feed_forward.router.weight": given["layers.1.feed_forward.router_DE"].T,
        f"{layer}.feed_forward.experts.gate_up_proj": torch.cat(experts, dim=-1),
        f"{layer}.feed_forward.experts.down_proj": given["layers.1.feed_forward.experts.moe_w_out_eF_D"].view(
            2, 32, 16
        ),
        f"{layer}.feed_forward.shared_expert.up_proj.weight": given["layers.1.feed_forward.w_swiglu_FD.weight"],
        "language_model.model.layers.0.feed_forward.up_proj.weight": given["layers.0.feed_forward.mlp.fc1_weight"][56:],
        "language_model.lm_head.weight": given["output.weight"],
        "multi_modal_projector.linear_1.weight": given["vision_projection.weight"],
        "vision_model.patch_embedding.linear.weight": given["vision_embeddings.vision_encoder.conv1._linear.weight"],
    }
    assert [name for name, tensor in expected.items() if not torch.equal(ours[name], tensor)] == []
    config = json.loads((whole / "config.json").read_text())
    assert ours.keys() == {tensor.name for tensor in describe_model(config).own()}
    assert config["text_config"]["intermediate_size_mlp"] == make_llama4.DENSE


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_array_is_as_metas_code_divides_it(ranks, whole, tmp_path):
    made = reshard(whole, tmp_path / "out", to_meta(ranks))
    for rank in range(ranks):
        theirs, ours = stored(LLAMA4 / f"mp{ranks}", rank), stored(tmp_path / "out", rank)
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert verify(tmp_path / "out", VerifyOptions(against=str(whole))).ok
    assert made.record.digest == digest(LLAMA4 / f"mp{ranks}").digest


def test_params_and_config_say_the_same_both_ways(whole, tmp_path):
    reshard(whole, tmp_path / "out", to_meta(1))
    (tmp_path / "out" / "config.json").unlink()
    (tmp_path / "out" / "shardctl.json").unlink()
    reshard(tmp_path / "out", tmp_path / "again", ReshardOptions(to="hf"))
    assert (tmp_path / "again" / "config.json").read_text() == (whole / "config.json").read_text()


def test_one_that_does_not_see(tmp_path):
    config = json.loads((FIXTURES / "configs" / "llama4_text.json").read_text()) | {"attention_bias": False}
    config |= {"head_dim": config["hidden_size"] // config["num_attention_heads"]}
    source = tmp_path / "source"
    source.mkdir()
    random = np.random.default_rng(3)
    tensors = {t.name: random.normal(size=t.shape).astype(np.float32) for t in describe_model(config).own()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(config))
    made = reshard(source, tmp_path / "out", to_meta(2))
    assert "vision_args" not in json.loads((tmp_path / "out" / "params.json").read_text())
    assert made.record.digest == reshard(tmp_path / "out", tmp_path / "back", ReshardOptions(to="hf")).record.digest


def test_what_training_left_is_dropped(tmp_path):
    place = Path(shutil.copytree(LLAMA4 / "mp1", tmp_path / "mp1"))
    state = torch.load(place / "consolidated.00.pth", weights_only=False)
    state["layers.1.feed_forward.global_gate_stats_3E"] = torch.zeros(3, 2)
    torch.save(state, place / "consolidated.00.pth")
    found = inspect(place)
    assert {"rope.freqs", "layers.1.feed_forward.global_gate_stats_3E", "params.json"} <= set(found.dropped)
    assert digest(place).digest == digest(LLAMA4 / "mp1").digest


class TestRefusals:
    def change(self, whole: Path, place: Path, part: str, **said: object) -> Path:
        shutil.copytree(whole, place)
        (place / "shardctl.json").unlink()
        config = json.loads((place / "config.json").read_text())
        config[part] |= said
        (place / "config.json").write_text(json.dumps(config))
        return place

    def test_more_ranks_than_heads(self, whole, tmp_path):
        with pytest.raises(PartitionError, match="heads"):
            reshard(whole, tmp_path / "out", to_meta(4))
        with pytest.raises(PartitionError, match="those of tp ranks, but the mesh is dp2 x tp2"):
            reshard(whole, tmp_path / "out", ReshardOptions(to="meta", mesh=Mesh.of(dp=2, tp=2)))

    def test_the_cut_of_llama_2(self, whole, tmp_path):
        with pytest.raises(UsageError, match="Llama 4 cuts the embedding along the vocabulary"):
            reshard(whole, tmp_path / "out", ReshardOptions(to="meta", meta_embedding="hidden"))

    @pytest.mark.parametrize(
        ("part", "said", "message"),
        [
            ("text_config", {"hidden_act": "gelu"}, "has hidden_act silu, not gelu"),
            ("text_config", {"no_rope_layers": [1, 0, 0, 1]}, "layers without positions in steps, but they are 1, 2"),
            ("text_config", {"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "embeddings of type 'yarn'"),
            ("vision_config", {"projector_output_dim": 24, "vision_output_dim": 24, "hidden_act": "relu"}, "not relu"),
            ("vision_config", {"pixel_shuffle_ratio": 0.25}, "to 256, not to intermediate_size 64"),
        ],
    )
    def test_what_metas_code_cannot_be_told(self, part, said, message, whole, tmp_path):
        with pytest.raises(UnsupportedError, match=message):
            reshard(self.change(whole, tmp_path / "in", part, **said), tmp_path / "out", to_meta(1))

    def test_scales_and_params_that_make_no_sense(self, tmp_path):
        place = Path(shutil.copytree(LLAMA4 / "mp1", tmp_path / "mp1"))
        said = {**make_llama4.PARAMS, "vision_args": {**make_llama4.PARAMS["vision_args"], "mlp_ratio": -1}}
        (place / "params.json").write_text(json.dumps(said))
        with pytest.raises(SourceError, match="mlp_ratio -1, which is not a positive number"):
            digest(place)
        (place / "int4_scales_0.pt").write_bytes(b"")
        with pytest.raises(UnsupportedError, match="quantized to 4 bits"):
            digest(place)

    def test_a_file_that_is_missing_at_the_end(self, tmp_path):
        place = Path(shutil.copytree(LLAMA4 / "mp2", tmp_path / "mp2"))
        (place / "consolidated.01.pth").unlink()
        with pytest.raises(SourceError, match=r"has shape \[16, 16\], but the model gives it \[32, 16\]"):
            digest(place)


def test_the_published_models_have_their_published_widths():
    said = build_llama4_params(SCOUT, describe_model(SCOUT))
    assert (said["multiple_of"], said["ffn_dim_multiplier"], said["ffn_exp"]) == (2048, 1.2, 4.0)
    assert (said["rope_scaling_factor"], said["rope_high_freq_factor"], said["nope_layer_interval"]) == (16.0, 1.0, 4)
