"""Gemma 4: layers that borrow keys and values cache none, and those that see every token have wider heads."""

from __future__ import annotations

import pytest
from cache_bytes import bytes_per_token
from model_oracle import fixture, stored

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.models import describe_model
from shardctl.models.names.naming import bind_manifest


def test_only_layers_with_keys_of_their_own_cache_them():
    anatomy = build_layer_graph(fixture("gemma4_text"))
    assert [(one.attention.shares_kv, one.attention.head_dim, one.attention.window) for one in anatomy.layers] == [
        (False, 8, 16),
        (False, 16, None),
        (True, 8, 16),
        (True, 16, None),
    ]
    assert bytes_per_token(anatomy, dtype="BF16") == 4 * 2 * (8 + 16) * 2  # heads, k and v, elements, bytes
    assert [layer.mlp for layer in anatomy.layers] == [48, 48, 96, 96]


def test_files_may_have_the_projections_that_borrowing_layers_lack():
    """transformers ignores them (`_keys_to_ignore_on_load_unexpected` of `Gemma4TextModel`)."""
    model = describe_model(fixture("gemma4_text"))
    spare = {n for n, t in model.tensors.items() if t.optional and "inv_freq" not in n}
    assert {n.split(".")[2] for n in spare} == {"2", "3"}
    assert {n.split(".")[4] for n in spare} == {"k_norm", "k_proj", "v_proj"}
    bound = bind_manifest(model, stored((n, t.shape) for n, t in model.tensors.items() if "inv_freq" not in n))
    assert spare <= bound.tensors.keys()


def test_sizes_by_layer_mean_what_those_of_the_hub_do():
    """`per_layer_config` is what transformers 5.23 writes in place of `global_head_dim`."""
    hub = fixture("gemma4_text-moe")
    saved = {k: v for k, v in hub.items() if k not in {"global_head_dim", "num_global_key_value_heads"}}
    saved["per_layer_config"] = {"1": {"head_dim": 16}, "03": {"head_dim": 16, "num_key_value_heads": 4}}
    assert describe_model(saved).state() == describe_model(hub).state()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"1": {"head_dim": 16}, "3": {"head_dim": 8}}, UnsupportedError),
        ({"0": {"head_dim": 16}}, UnsupportedError),
        ({"1": {"head_dim": 16, "rope": 1}, "3": {"head_dim": 16, "rope": 1}}, UnsupportedError),
        ({"one": {}}, SourceError),
        ([16], SourceError),
    ],
)
def test_sizes_by_layer_that_are_not_understood_are_refused(given, error):
    with pytest.raises(error, match="per_layer_config"):
        describe_model(fixture("gemma4_text", per_layer_config=given))
