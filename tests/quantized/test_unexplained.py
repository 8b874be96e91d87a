"""Codes that no config explains are named, and regular expressions of a config end soon."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from codes import CODECS, LLAMA, plain_state, write

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models import describe_model
from shardctl.models.quantization import expressions
from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard


@pytest.mark.parametrize("name", CODECS)
def test_codes_that_no_config_explains_are_named(quantised, tmp_path, name):
    source = shutil.copytree(quantised(name), tmp_path / "source")
    (source / "config.json").write_text(json.dumps(LLAMA))
    assert "but config.json does not say how weights are quantized" in inspect(source).why_no_model
    with pytest.raises(UnsupportedError, match="does not say how weights are quantized") as caught:
        plan(source, ReshardOptions(mesh=Mesh.of(tp=2)))
    assert "hf_quant_config.json" in caught.value.hint
    reshard(source, tmp_path / "out", ReshardOptions(to="hf"))  # on one device they need no explanation


def test_weights_that_are_fp8_and_nothing_else_are_planned_as_they_are(tmp_path):
    state = {n: t.to(torch.float8_e4m3fn) if "up_proj" in n else t for n, t in plain_state(LLAMA).items()}
    source = write(tmp_path / "source", LLAMA, state)
    found = plan(source, ReshardOptions(mesh=Mesh.of(tp=2)))
    assert found.weight_types == ("BF16", "F8_E4M3")
    (said,) = found.warnings
    assert said.startswith("config.json does not say how model.layers.0.mlp.up_proj.weight")
    assert said.endswith("were quantized to F8_E4M3; they are taken for plain numbers")


ENDLESS = [
    "(a*)*b",
    "(.*)+$",
    r"(\w+\.?)+x",
    "(a|a)*b",
    "(a|a)(a|a)" * 20,
    "a?" * 40,
    ".*" * 9 + "x",
    "(a?){40}b",
    "(?:(?:a)*)*",
]


class TestExpressions:
    @pytest.mark.parametrize("text", ENDLESS)
    @pytest.mark.parametrize("form", ["transformers", "compressed-tensors"])
    def test_one_that_could_take_for_ever_is_refused(self, text, form):
        fp8 = {"quant_method": "fp8", "modules_to_not_convert": [text]}
        groups = {"config_groups": {"0": {"targets": [f"re:{text}"], "weights": {"num_bits": 8, "type": "float"}}}}
        packed = {"quant_method": "compressed-tensors", "format": "float-quantized", **groups}
        started = time.monotonic()
        with pytest.raises(SourceError, match="a regular expression that could take for ever"):
            describe_model({**LLAMA, "quantization_config": fp8 if form == "transformers" else packed})
        assert time.monotonic() - started < 5

    @pytest.mark.parametrize(
        "text",
        [
            r".*mlp\.(gate|up|gate_up|down)_proj.*",
            r"model\.layers\.(\d+)\.self_attn\.[qkv]_proj$",
            r"^(?!.*lm_head).*$",
            r".*\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj",
            r"(?:model\.)?layers\.[0-9]{1,3}\.mlp",
            "[*+](a){3}",
        ],
    )
    def test_those_of_real_configs_are_not(self, text):
        expressions.compile_expression(text, "config.json")

    def test_all_together_have_a_limit(self, monkeypatch):
        monkeypatch.setattr(expressions, "_MAX_MATCHING_SECONDS", 0.0)
        settings = {"quant_method": "fp8", "modules_to_not_convert": [".*up_proj"]}
        with pytest.raises(SourceError, match=r"the regular expressions of config\.json take more than 0 seconds"):
            describe_model({**LLAMA, "quantization_config": settings})


def test_gpt2_keeps_its_masks(tmp_path):
    path = Path(__file__).parents[2] / "fixtures" / "configs" / "gpt2.json"
    config = json.loads(path.read_text())
    state = {t.name: torch.zeros(t.shape) for t in describe_model(config).own()}
    state["transformer.h.0.attn.bias"] = torch.ones(
        (1, 1, config["n_positions"], config["n_positions"]), dtype=torch.uint8
    )
    assert inspect(write(tmp_path / "source", config, state)).why_no_model == ""
