"""LongCat-Flash: its published size, two attentions in a layer, idle experts, and the layer that predicts."""

from __future__ import annotations

import pytest
from model_oracle import fixture, stored

from shardctl.base.errors import PartitionError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.models import describe_model
from shardctl.models.names.naming import bind_manifest
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import check_cuts

EXPERTS = "model.layers.0.mlp.experts"


def test_it_has_its_published_size():
    """560 B (the page of LongCat-Flash-Chat on the Hub), without what only transformers has of idle experts."""
    model = describe_model({"model_type": "longcat_flash"})
    idle = sum(t.shape[0] * t.shape[1] for t in model.own() if t.spare)
    assert round((model.parameters - idle) / 1e9) in (560, 561)
    assert idle == 28 * 256 * 2 * 2048 * 6144


def test_each_layer_caches_two_latents():
    layers = build_layer_graph({"model_type": "longcat_flash"}).layers
    assert len(layers) == 28
    assert {(layer.halves, layer.attention.latent, layer.norms, layer.experts.count) for layer in layers} == {
        (2, 576, 4, 768)
    }


def test_files_need_no_idle_experts():
    model = describe_model(fixture("longcat_flash"))
    have = stored((t.name, t.shape) for t in model.own() if not t.spare)
    bound = bind_manifest(model, have)
    assert f"{EXPERTS}.7.up_proj.weight" in bound.tensors
    assert f"{EXPERTS}.8.up_proj.weight" not in bound.tensors
    assert any("experts.8.gate_proj" in warning for warning in bound.warnings)


def test_idle_experts_are_divided_by_themselves():
    model = describe_model(fixture("longcat_flash"))
    assert {(t.spec.member.index, t.spec.member.count) for t in model.own() if t.spare} == {(n, 4) for n in range(4)}
    few = describe_model(fixture("longcat_flash", zero_expert_num=2))
    idle = few.tensors[f"{EXPERTS}.8.up_proj.weight"]
    with pytest.raises(PartitionError, match="over ep=4: 2 experts"):
        check_cuts(idle.name, idle.shape, idle.spec, Mesh.of(dp=4, ep=4))


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens",
        "layers.0.eh_proj",
        "layers.0.enorm.m",
        "layers.0.self_attn.q_b_proj",
        "layers.0.transformer_layer.mlp.down_proj",
        "norm",
    ],
)
def test_the_layer_that_predicts_has_its_names(name):
    """Those that vLLM reads (`longcat_flash_mtp.py`, `new_to_old_names_mapping`)."""
    model = describe_model(fixture("longcat_flash"))
    assert model.tensors[f"model.mtp.{name}.weight"].optional
    assert len([t for t in model.tensors if ".mtp." in t]) == 18 + 2  # with the biases of attention
