"""Hunyuan 3: its size, and the names of the Hub, layers that predict included."""

from __future__ import annotations

import pytest
from model_oracle import fixture, stored

from shardctl.models import describe_model
from shardctl.models.naming import bind_manifest


def test_it_has_its_published_size():
    """295 B without the layer that predicts (the page of Hy3-preview on the Hub)."""
    assert round(describe_model({"model_type": "hy_v3"}).parameters / 1e9) == 295


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
