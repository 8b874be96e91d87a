"""GLM-5.3-Flash: its published size, the names of its files, and what its layers cache."""

from __future__ import annotations

from math import prod

import pytest
from model_oracle import fixture, stored

from shardctl.base.errors import SourceError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.models import describe_model
from shardctl.models.names.naming import bind_manifest

FLASH = {"model_type": "glm5_next", "text_config": {"index_kpool": 4}, "vision_config": {"out_hidden_size": 4096}}
LAYER = "model.language_model.layers"


def test_it_has_its_published_size():
    """On the Hub 6.926 B elements in BF16 and 314.397 B in FP8; 7.43 B of them predict, and 0.56 B see."""
    model = describe_model(FLASH)
    predicting = sum(prod(t.shape) for t in model.tensors.values() if t.optional and f"{LAYER}.45." in t.name)
    seeing = sum(prod(t.shape) for t in model.own() if ".visual." in t.name)
    assert [round(n / 1e9, 2) for n in (model.parameters + predicting, predicting, seeing)] == [321.32, 7.43, 0.56]


def test_one_layer_in_four_caches_a_latent_and_keys_of_pools():
    layers = build_layer_graph(FLASH).layers
    latent = [layer.attention for layer in layers if layer.attention is not None]
    assert (len(layers), len(latent)) == (45, 11)
    assert {(one.latent, one.chosen, *((c.tokens, c.packed) for c in one.besides)) for one in latent} == {
        (512, 2048, (4, 132))
    }


@pytest.mark.parametrize(
    ("hub", "meant"),
    [
        ("1.hc_attn_fn", "1.attn_hc.fn"),
        ("1.hc_ffn_scale", "1.ffn_hc.scale"),
        ("0.self_attn.A_log", "0.self_attn.A_log"),
        ("0.self_attn.q_conv1d.weight", "0.self_attn.q_conv1d.weight"),
        ("1.self_attn.indexer.index_kpool_compress_gate", "1.self_attn.indexer.index_kpool_compress_gate"),
        ("3.self_attn.indexer.index_kpool_compress_ape", "3.self_attn.indexer.index_kpool_compress_ape"),
        ("3.shared_head.norm.weight", "3.shared_head.norm.weight"),
        ("3.mlp.experts.2.up_proj.weight", "3.mlp.experts.2.up_proj.weight"),
    ],
)
def test_names_of_the_hub_are_known(hub, meant):
    """transformers' `conversion_mapping.py`; those of the last layer, which predicts, in the files on the Hub."""
    model = describe_model(fixture("glm5_next"))
    name = f"{LAYER}.{meant}"
    have = stored([(f"{LAYER}.{hub}", model.tensors[name].shape)])
    assert [*bind_manifest(model, have, partial=True).tensors] == [name]
    assert model.tensors[name].optional == (meant[0] == "3")


def test_a_layer_of_another_kind_is_refused():
    config = fixture("glm5_next")
    config["text_config"]["layer_types"] = ["linear_attention", "full_attention", "sliding_attention"]
    with pytest.raises(SourceError, match=r"layer_types = .* linear_attention or indexed_attention"):
        describe_model(config)
