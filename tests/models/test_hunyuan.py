"""Hunyuan: published sizes, and the names of the Hub, layers that predict included."""

from __future__ import annotations

import pytest
from model_oracle import fixture, stored

from shardctl.base.errors import UnsupportedError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.models import describe_model
from shardctl.models.names.naming import bind_manifest


def test_it_has_its_published_size():
    """295 B without the layer that predicts (the page of Hy3-preview on the Hub)."""
    assert round(describe_model({"model_type": "hy_v3"}).parameters / 1e9) == 295


A13B = {
    "model_type": "hunyuan_v1_moe",
    "vocab_size": 128167,
    "intermediate_size": 3072,
    "num_key_value_heads": 8,
    "num_experts": 64,
    "moe_topk": [8] * 32,
    "tie_word_embeddings": True,
}


def test_hunyuan_a13b_has_its_published_size():
    """80 B, of which 13 B work on each token (the page of Hunyuan-A13B-Instruct on the Hub)."""
    assert round(describe_model(A13B).parameters / 1e9) == 80
    assert {layer.experts.chosen for layer in build_layer_graph(A13B).layers} == {8}
    with pytest.raises(UnsupportedError, match="other numbers of experts"):
        build_layer_graph({**A13B, "moe_topk": [8] * 31 + [4]})


@pytest.mark.parametrize(
    ("hub", "meant"),
    [
        ("model.layers.1.mlp.router.gate.weight", "model.layers.1.mlp.gate.weight"),
        ("model.layers.1.mlp.expert_bias", "model.layers.1.mlp.e_score_correction_bias"),
        ("model.layers.1.mlp.shared_mlp.up_proj.weight", "model.layers.1.mlp.shared_experts.up_proj.weight"),
        ("model.layers.2.mlp.router.gate.weight", "model.layers.2.mlp.gate.weight"),
        ("model.layers.2.eh_proj.weight", "model.layers.2.eh_proj.weight"),
        ("model.layers.2.final_layernorm.weight", "model.layers.2.final_layernorm.weight"),
    ],
)
def test_names_of_the_hub_are_known(hub, meant):
    """transformers' `conversion_mapping.py`; those of the last layer, which predicts, in vLLM's `hy_v3_mtp.py`."""
    model = describe_model(fixture("hy_v3"))
    assert [*bind_manifest(model, stored([(hub, model.tensors[meant].shape)]), partial=True).tensors] == [meant]
    assert model.tensors[meant].optional == (".layers.2." in meant)


@pytest.mark.parametrize(
    ("hub", "meant"),
    [
        ("model.layers.1.hc_attn_layer.hc_pre.hc_fn", "model.layers.1.attn_hc.fn"),
        ("model.layers.1.hc_mlp_layer.hc_pre.hc_scale", "model.layers.1.ffn_hc.scale"),
        ("model.hc_head.hc_head_base", "model.hc_head.hc_base"),
        ("model.layers.1.self_attn.learnable_sink_param", "model.layers.1.self_attn.sinks"),
        ("model.layers.1.self_attn.linear_gate.weight", "model.layers.1.self_attn.gate_proj.weight"),
        ("model.mtp_layers.0.self_attn.linear_gate.weight", "model.mtp_layers.0.self_attn.gate_proj.weight"),
        ("model.mtp_layers.0.self_attn.indexer.wk.weight", "model.mtp_layers.0.self_attn.indexer.wk.weight"),
        ("model.mtp_layers.0.final_layernorm.weight", "model.mtp_layers.0.final_layernorm.weight"),
    ],
)
def test_names_of_hunyuan_4_are_known(hub, meant):
    """transformers' `conversion_mapping.py`; those of the layer that predicts in engines' loaders (vLLM, SGLang)."""
    model = describe_model(fixture("hy_v4"))
    assert [*bind_manifest(model, stored([(hub, model.tensors[meant].shape)]), partial=True).tensors] == [meant]
    assert model.tensors[meant].optional == (".mtp_layers." in meant)
