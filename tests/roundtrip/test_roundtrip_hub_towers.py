"""ERNIE 4.5 VL, Mistral Large 4 and Step-3.7 as transformers writes them: with the names and orders of the Hub."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, assert_same, loaded, stored

from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.serving.kv_cache import count_elements_per_token
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

EYES = {
    "ernie4_5_vl_moe": "model.layers.1.mlp.gate.weight_1",
    "mistral_large4": "vision_encoder.transformer.layers.0.attention.wq.weight",
    "step3p7": "vision_model.transformer.resblocks.0.attn.in_proj_weight",
}
"""What the Hub has in another order than the class."""
CONFIGS_OF = {name: json.loads((CONFIGS.with_name("configs_hub") / f"{name}.json").read_text()) for name in EYES}


def class_of(name):
    """The class of a model."""
    return getattr(transformers, CONFIGS_OF[name]["architectures"][0])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Gives what `save_pretrained` wrote of a model whose every tensor is random."""
    paths = {}

    def give(name):
        if name not in paths:
            kind, generator = class_of(name), torch.Generator().manual_seed(0)
            model = kind(kind.config_class.from_dict(CONFIGS_OF[name])).to(torch.bfloat16)
            with torch.no_grad():
                for each, tensor in model.state_dict().items():
                    near = 1 if "norm" in each and each.endswith("weight") else 0
                    tensor.copy_(near + 0.05 * torch.randn(tensor.shape, generator=generator))
            paths[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(paths[name])
        return paths[name]

    return give


@pytest.mark.parametrize("mesh", ["tp=2", "tp=2,ep=2", "pp=2", "fsdp=2"])
@pytest.mark.parametrize("name", EYES)
def test_there_and_back_is_the_identity_and_computes_the_same(made, tmp_path, name, mesh):
    source = made(name)
    assert EYES[name] in stored(source)
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.parse(mesh)))
    found = verify(tmp_path / "ranks", VerifyOptions(level="forward", against=source))
    assert found.ok
    assert found.levels[-1].status == "passed"
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(source))
    assert digest(tmp_path / "back").digest == digest(source).digest
    kind = class_of(name)
    assert_same(loaded(tmp_path / "back", kind).state_dict(), loaded(source, kind).state_dict())


def test_names_of_the_class_stay_as_they_are(made, tmp_path):
    """Its routers are not transposed, though theirs on the Hub, which end alike, are."""
    model = loaded(made("ernie4_5_vl_moe"), class_of("ernie4_5_vl_moe"))
    model.save_pretrained(tmp_path / "source", save_original_format=False)
    assert "model.language_model.layers.1.mlp.text_moe.gate.weight" in stored(tmp_path / "source")
    reshard(tmp_path / "source", tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(tmp_path / "source"))
    assert digest(tmp_path / "back").digest == digest(tmp_path / "source").digest


def test_every_stage_has_what_scales_its_rotary_frequencies(made, tmp_path):
    source = made("mistral_large4")
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(pp=2)))
    files = sorted(tmp_path.glob("ranks/*.safetensors"))
    holders = {file.name.split("-")[1] for file in files if "model.language_model.rotary_emb.alpha" in load_file(file)}
    assert holders == {"00001", "00002"}


def test_layers_that_predict_are_kept_apart(made, tmp_path):
    source = made("mistral_large4")
    (tmp_path / "more").mkdir()
    (tmp_path / "more/config.json").write_text((source / "config.json").read_text())
    more = {**stored(source), "mtp_dspark.layers.0.attention_norm.weight": torch.ones(32)}
    save_file(more, tmp_path / "more/model.safetensors", {"format": "pt"})
    reshard(tmp_path / "more", tmp_path / "out", ReshardOptions(mesh=Mesh.of(tp=2)))
    kept = load_file(tmp_path / "out/extra/extra_tensors.safetensors")
    assert kept.keys() == {"mtp_dspark.layers.0.attention_norm.weight"}


def test_layers_cache_latents_of_their_own_or_those_of_an_earlier_one():
    attentions = [layer.attention for layer in build_layer_graph(CONFIGS_OF["mistral_large4"]).layers]
    assert [(one.shares_kv, count_elements_per_token(one, 1), bool(one.indexer)) for one in attentions] == [
        (False, 16, True),
        (True, 12, False),
        (False, 12, True),
        (False, 16, False),
    ]
