"""Step-3.5 and 3.7's text model: what transformers builds, and the names and stacks of the Hub's files."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from model_oracle import CONFIGS, state, stored

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.models import describe_model
from shardctl.models.names.naming import bind_manifest

CONFIG = json.loads((CONFIGS.with_name("configs_hub") / "step3p5.json").read_text())


def test_it_has_the_state_dict_of_transformers_text_model():
    with torch.device("meta"):
        theirs = transformers.Step3p7TextModel(transformers.Step3p7TextConfig.from_dict(CONFIG))
    model = describe_model({**CONFIG, "architectures": ["Step3p7TextModel"]})
    assert model.state() == state(theirs)
    assert [*model.state()] == [*state(theirs)]
    whole = describe_model(CONFIG)
    assert {f"model.{n}": s for n, s in model.state().items()} | {"lm_head.weight": (96, 32)} == whole.state()


def test_layers_with_a_window_have_heads_of_their_own():
    layers = build_layer_graph(CONFIG).layers
    assert [(one.attention.kind, one.attention.heads, one.attention.window) for one in layers] == [
        ("full", 4, None),
        ("sliding", 6, 8),
        ("full", 4, None),
        ("sliding", 6, 8),
    ]
    assert {one.attention.kv_heads for one in layers} == {2}
    assert [one.experts.count if one.experts else 0 for one in layers] == [0, 0, 4, 4]


@pytest.mark.parametrize(
    ("hub", "meant"),
    [
        ("2.moe.gate.weight", "2.mlp.gate.weight"),
        ("2.moe.router_bias", "2.mlp.gate.e_score_correction_bias"),
        ("2.moe.experts.3.up_proj.weight", "2.mlp.experts.3.up_proj.weight"),
        ("2.share_expert.up_proj.weight", "2.mlp.shared_experts.up_proj.weight"),
        ("4.enorm.weight", "4.enorm.weight"),
        ("4.self_attn.g_proj.weight", "4.self_attn.g_proj.weight"),
        ("4.transformer.shared_head.norm.weight", "4.shared_head.norm.weight"),
        ("4.transformer.shared_head.output.weight", "4.shared_head.head.weight"),
    ],
)
def test_names_of_the_hub_are_known(hub, meant):
    """transformers' `conversion_mapping.py`, and vLLM's `step3p5.py` and `step3p5_mtp.py`."""
    model = describe_model(CONFIG)
    meant = f"model.layers.{meant}"
    bound = bind_manifest(model, stored([(f"model.layers.{hub}", model.tensors[meant].shape)]), partial=True)
    assert [*bound.tensors] == [meant]
    assert model.tensors[meant].optional == (".layers.4." in meant)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_the_stacks_of_the_hub_are_the_experts(name):
    model = describe_model(CONFIG)
    shape = (4, 32, 16) if name == "down_proj" else (4, 16, 32)
    bound = bind_manifest(model, stored([(f"model.layers.2.moe.{name}.weight", shape)]), partial=True)
    assert [*bound.tensors] == [f"model.layers.2.mlp.experts.{n}.{name}.weight" for n in range(4)]


def test_a_layer_that_predicts_has_the_heads_that_the_config_says():
    model = describe_model(CONFIG)
    assert model.tensors["model.layers.4.self_attn.q_proj.weight"].shape == (48, 32)
    full = describe_model({**CONFIG, "layer_types": [*CONFIG["layer_types"][:4], "full_attention"]})
    assert full.tensors["model.layers.4.self_attn.q_proj.weight"].shape == (32, 32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"moe_layers_enum": "2,x"}, SourceError, "moe_layers_enum = '2,x' where numbers of layers"),
        ({"attention_other_setting": {"num_attention_groups": 3}}, UnsupportedError, "num_attention_groups = 3"),
    ],
)
def test_what_is_not_known_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        describe_model({**CONFIG, **changes})
