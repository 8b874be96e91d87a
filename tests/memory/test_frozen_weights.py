"""What layers keep of which only some weights are trained is what autograd saves, to the byte, and what PEFT's do.

A product keeps its input for the gradient of its matrix alone, so that each kind of weights is trained by itself here.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

import torch
from model_oracle import FIXTURES, fixture
from saved_bytes import build_model, layer_paths
from test_saved_bytes import NOT_COUNTED, NOT_KNOWN, ROUTING, TOKENS, describe, estimate, measure

from shardctl.api import PlanOptions, plan
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.training import activations
from shardctl.estimate.training.activations import RankActivations
from shardctl.estimate.training.trained_weights import count_trained_weights, find_weight_role

PEFT = json.loads((Path(__file__).parents[2] / "fixtures/peft/saved_bytes.json").read_text())
STACKED = {
    "experts in": re.compile(r"(?<!shared_)experts\.(gate_up_proj|up_proj)$"),
    "experts out": re.compile(r"(?<!shared_)experts\.down_proj$"),
}
"""What transformers calls the arrays of all experts."""
KNOWN = [
    name
    for name in FIXTURES
    if name not in NOT_COUNTED
    and name not in NOT_KNOWN
    and name != "llama4"  # transformers 5.24 reads `image_outputs` of an output without it; llama4_text is here
    and any(n.weights for n in build_layer_graph(describe(name)).layers)
]
FURTHER = {"apertus": 0.1, "deberta-v2": 0.02, "deberta-v2-shared": 0.04, "gemma4": 0.05, "gemma4_text-moe": 0.05}
"""Fixtures that keep something further, which is counted as if all were trained: how much of it is too much at most."""


def train_alone(model, paths, anatomy, role):
    """Train the weights of one role and nothing else; return the layers that have any."""
    found = set()
    for name, weight in model.named_parameters():
        weight.requires_grad_(False)
        for number, path in enumerate(paths):
            if not name.startswith(f"{path}.") or not anatomy.layers[number].weights:
                continue
            stacked = role in STACKED and STACKED[role].search(name)
            if stacked or find_weight_role(anatomy.layers[number], name) == role:
                weight.requires_grad_(True)
                found.add(number)
    return found


@pytest.mark.parametrize("name", KNOWN)
def test_layers_keep_what_autograd_saves_for_some_weights(name, monkeypatch):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = describe(name)
    kind = "sdpa" if build_model(config, "sdpa") is not None else "eager"
    model, anatomy, paths = build_model(config, kind), build_layer_graph(config), layer_paths(config)
    model.enable_input_require_grads()
    compared = 0
    for role in sorted({place.role for layer in anatomy.layers for place in layer.weights}):
        numbers = train_alone(model, paths, anatomy, role)
        some, many = (measure(model, paths, batch) for batch in (2, 4))
        wide = anatomy.style.wide_router
        trained = {
            n: count_trained_weights(
                layer, [place.role for place in layer.weights if place.role == role], wide_router=wide
            )
            for n, layer in enumerate(anatomy.layers)
        }
        monkeypatch.setattr(activations, "find_trained_weights", lambda *_, found=trained, **__: found)
        few, more = (estimate(anatomy, kind, batch) for batch in (2, 4))
        for n in numbers:
            grown, near = many[n] - some[n], FURTHER.get(name, 0)
            assert grown <= more[n] - few[n] <= grown * (1 + near), (role, n)
            compared += 1
    assert compared


def count_layers(path, case):
    """How much two sequences more make each layer keep, by a plan of an adapter."""
    kept = []
    for batch in (2, 4):
        found = []

        def note(self, anatomy, holding, mesh, work, stages, begin=RankActivations.__init__, found=found):
            begin(self, anatomy, holding, mesh, work, stages)
            found.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RankActivations, "__init__", note)
            options = PlanOptions(
                use="train",
                profile="hf",
                seq_len=TOKENS,
                batch=batch,
                attention=case["attention"],
                precision=case["precision"],
                lora_rank=8,
                lora_targets=case["targets"],
                lora_dropout=case["dropout"],
                base_dtype="nf4" if "prepared" in case else "bf16",
                prepare_base=case.get("prepared"),
            )
            plan(path, plan_options=options)
        one = found[0]
        kept.append(
            [
                sum(w * n for a in one.kind_of[number].kept.values() for name, w, n in a.factors if name not in ROUTING)
                for number in one.numbers
            ]
        )
    return [more - few for few, more in zip(*kept, strict=True)]


@pytest.mark.parametrize("case", PEFT, ids=lambda c: " ".join(map(str, [*c.values()][:-1])))
def test_layers_keep_what_autograd_saves_with_adapters(case, tmp_path):
    wider = {"hidden_size": 64, "intermediate_size": 192, "torch_dtype": "bfloat16"} if "prepared" in case else {}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fixture(case["config"]) | wider))
    assert count_layers(path, case) == case["saved"]
