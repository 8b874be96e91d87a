"""MiMo-V2: two kinds of attention, whose heads and caches differ, and layers that predict with a window."""

from __future__ import annotations

import pytest
from model_oracle import fixture, on_meta, state, stored

from shardctl.base.errors import UnsupportedError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.models import describe_model
from shardctl.models.names.naming import bind_manifest

FLASH = {"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash"}


def test_it_has_its_published_size():
    """309 B without the layers that predict (MiMo-V2-Flash's page on the Hub)."""
    assert round(describe_model(FLASH).parameters / 1e9) == 309


def test_layers_with_a_window_cache_twice_the_heads_of_those_tokens():
    first, second = build_layer_graph(FLASH).layers[:2]
    assert (first.attention.kv_heads, first.attention.window) == (4, None)
    assert (second.attention.kv_heads, second.attention.window) == (8, 129)
    assert {(one.attention.head_dim, one.attention.value_dim) for one in (first, second)} == {(192, 128)}


def test_silent_configs_have_windows_where_transformers_has():
    config = {
        key: value for key, value in fixture("mimo_v2_flash", num_hidden_layers=8).items() if "layer_types" not in key
    }
    assert describe_model(config).state() == state(on_meta(config))
    marks = [0, 1, 1, 1, 1, 0, 1, 1]
    assert describe_model({**config, "hybrid_layer_pattern": marks}).state() == describe_model(config).state()
    with pytest.raises(UnsupportedError, match=r"hybrid_layer_pattern = .* are expected to have a window"):
        describe_model({**config, "hybrid_layer_pattern": marks[::-1]})


@pytest.mark.parametrize(
    ("hub", "meant"),
    [
        ("model.layers.1.self_attn.attention_sink_bias", "model.layers.1.self_attn.sinks"),
        ("model.mtp.layers.0.self_attn.attention_sink_bias", "model.mtp.layers.0.self_attn.sinks"),
        ("model.mtp.layers.0.pre_mlp_layernorm.weight", "model.mtp.layers.0.pre_mlp_layernorm.weight"),
        ("model.mtp.layers.0.self_attn.k_proj.weight", "model.mtp.layers.0.self_attn.k_proj.weight"),
    ],
)
def test_names_of_the_hub_are_known(hub, meant):
    """Those of layers that predict stand in vLLM's `mimo_v2_mtp.py`."""
    model = describe_model(fixture("mimo_v2_flash"))
    assert [*bind_manifest(model, stored([(hub, model.tensors[meant].shape)]), partial=True).tensors] == [meant]
    if "k_proj" in hub:
        assert model.tensors[meant].shape == (4 * 12, 32)
