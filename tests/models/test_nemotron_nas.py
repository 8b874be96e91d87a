"""Nemotron-NAS: a Llama whose layers have parts and widths of their own."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from model_oracle import CONFIGS, state

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.models import describe_model

CONFIG = json.loads((CONFIGS.with_name("configs_hub") / "nemotron-nas.json").read_text())
WIDTHS = [256, 512, None, 768]
"""`_ffn_mult_to_intermediate_size` of vLLM for 2.625, 7 and 13 times 64."""


def block(attention=(), **ffn):
    """The first block, with some keys changed."""
    first = CONFIG["block_configs"][0]
    return {"attention": first["attention"] | dict(attention), "ffn": first["ffn"] | ffn}


def llama(width):
    config = transformers.LlamaConfig(
        **{
            key: CONFIG[key]
            for key in ("vocab_size", "hidden_size", "num_attention_heads", "attention_bias", "mlp_bias")
        },
        num_hidden_layers=4,
        num_key_value_heads=4,
        intermediate_size=width,
    )
    with torch.device("meta"):
        return state(transformers.LlamaForCausalLM(config))


def test_each_layer_is_a_llamas_less_what_it_lacks():
    expected = {}
    for layer, width in enumerate(WIDTHS):
        inside = {n: s for n, s in llama(width or 1).items() if n.startswith(f"model.layers.{layer}.")}
        lacking = (".self_attn.", ".input_layernorm.") if layer == 1 else () if width else (".mlp.", ".post_attention_")
        expected |= {n: s for n, s in inside.items() if not any(part in n for part in lacking)}
    found = describe_model(CONFIG).state()
    assert {n: s for n, s in found.items() if ".layers." in n} == expected
    assert {n: s for n, s in found.items() if ".layers." not in n} == {
        n: s for n, s in llama(1).items() if ".layers." not in n
    }


def test_layers_without_attention_cache_nothing():
    layers = build_layer_graph(CONFIG).layers
    assert [layer.mlp for layer in layers] == [256, 512, 0, 768]
    assert [layer.attention.kv_heads if layer.attention else None for layer in layers] == [4, None, 4, 4]
    assert [layer.norms for layer in layers] == [2, 1, 1, 2]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (block({"n_heads_in_group": 4}), UnsupportedError, r"\[2, 4\] query heads for each key/value head"),
        (block({"n_heads_in_group": 3}), SourceError, "n_heads_in_group = 3 in layer 3, for 8 attention heads"),
        (block({"replace_with_linear": True}), UnsupportedError, "replace_with_linear in layer 3"),
        (block({"no_op": True}, no_op=True), UnsupportedError, "a layer 3 with neither attention nor MLP"),
        (block(ffn_mult="2"), SourceError, "ffn_mult = '2' where a positive number is expected"),
        ({"attention": {}}, SourceError, "does not say attention and ffn of layer 3"),
    ],
)
def test_what_is_not_known_is_refused(changed, error, message):
    with pytest.raises(error, match=message):
        describe_model({**CONFIG, "block_configs": [*CONFIG["block_configs"][:3], changed]})
