"""Derived rules are proved with a small model of the same class before they are used, or said not to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from shardctl.api import Mesh, ReshardOptions
from shardctl.base import limited_child
from shardctl.base.errors import Mismatch
from shardctl.cli.program import run
from shardctl.models.rules.fused_orders import FusedOrders
from shardctl.tensors.record import parse_record
from shardctl.verbs import rule_proof
from shardctl.verbs.reshard import reshard
from shardctl.verbs.small_proof import prove_small_model

SARVAM = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


@pytest.fixture(scope="module")
def sarvam(tmp_path_factory):
    """A model under the names of the Hub, whose class is the Hub's own code there."""
    folder = tmp_path_factory.mktemp("sarvam")
    AutoModelForCausalLM.from_config(CONFIG_MAPPING["sarvam_moe"](**SARVAM)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["SarvamMoEForCausalLM"]}))
    return folder


@pytest.fixture(scope="module")
def nobody(tmp_path_factory):
    """A model that nobody knows."""
    folder = tmp_path_factory.mktemp("nobody")
    config = {"architectures": ["HeronForCausalLM"], "model_type": "heron", "num_attention_heads": 4, "vocab_size": 96}
    (folder / "config.json").write_text(json.dumps(config))
    layer = {f"layers.0.attn.{name}_proj.weight": torch.randn(32, 32) for name in "qkvo"}
    save_file({**layer, "embed_tokens.weight": torch.randn(96, 32)}, folder / "model.safetensors")
    return folder


def read_options(folder):
    return parse_record((folder / "shardctl.json").read_bytes()).options


def test_a_small_model_proves_the_rules_and_the_output_says_so(sarvam, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(rule_proof, "_MAX_SECONDS", 300)  # other tests may run beside this one
    arguments = ["reshard", str(sarvam), str(tmp_path / "ranks"), "--tp", "2"]
    assert run(arguments) == 0
    assert "derived, rules proved: small model" in capfd.readouterr().out
    assert read_options(tmp_path / "ranks")["rules_proof"] == "rules proved: small model"
    assert run([*arguments, "--json"]) == 0  # it is there already
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["rules_proof"] == "rules proved: small model"


def test_a_result_that_is_proved_needs_no_small_model(sarvam, tmp_path, capfd):
    assert run(["reshard", str(sarvam), str(tmp_path / "ranks"), "--tp", "2", "--prove"]) == 0
    assert "derived, rules proved: the result" in capfd.readouterr().out
    assert read_options(tmp_path / "ranks")["rules_proof"] == "rules proved: the result"


def test_what_several_workers_write_is_not_proved(nobody, tmp_path, capfd):
    for worker in ("0/2", "1/2"):
        assert run(["reshard", str(nobody), str(tmp_path / "ranks"), "--tp", "2", "--worker", worker]) == 0
    assert run(["finish", str(tmp_path / "ranks")]) == 0
    assert "derived, rules not proved" in capfd.readouterr().out


def test_a_class_that_is_not_there_is_said_and_the_work_goes_on(nobody, tmp_path, capfd):
    assert run(["reshard", str(nobody), str(tmp_path / "ranks"), "--tp", "2", "--json"]) == 0
    said = "rules not proved: transformers has no class HeronForCausalLM"
    assert json.loads(capfd.readouterr().out)["rules_proof"] == said
    assert read_options(tmp_path / "ranks")["rules_proof"] == said


def test_a_small_model_stays_within_the_memory(sarvam, tmp_path):
    done = reshard(sarvam, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2), host_memory=128 << 20))
    assert done.record.options["rules_proof"].startswith("rules not proved: it needs ")
    assert done.record.options["rules_proof"].endswith("--memory is 134.2 MB")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("find_spec", lambda name: None if name == "transformers" else name, "transformers is not installed"),
        ("_MAX_SECONDS", 0, "a small model takes more than 0 s"),
        ("_measure_memory", lambda _: 1 << 40, "a small model takes more than --memory 1.1 GB"),
    ],
    ids=["library", "time", "memory"],
)
def test_what_keeps_a_small_model_from_running_is_said(sarvam, tmp_path, monkeypatch, name, value, reason):
    monkeypatch.setattr(limited_child if name == "_measure_memory" else rule_proof, name, value)
    done = reshard(sarvam, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert done.record.options["rules_proof"] == f"rules not proved: {reason}"


def test_a_small_model_finds_wrong_rules(tmp_path, monkeypatch):
    """If the rows of Sarvam's fused array were cut by groups of heads, ranks would compute something else."""
    monkeypatch.setattr(FusedOrders, "find_attention_order", lambda *_: "grouped")
    request = {
        "architecture": "SarvamMoEForCausalLM",
        "class": "Glm4MoeForCausalLM",
        "config": {**SARVAM, "model_type": "sarvam_moe"},
        "rules": [],
        "meshes": ["tp"],
        "kv_heads": None,
        "rules_from": None,
    }
    with pytest.raises(Mismatch, match="does not compute what the source computes"):
        prove_small_model(request, tmp_path)


def test_wrong_rules_are_not_used(sarvam, tmp_path, monkeypatch):
    failed = json.dumps({"status": "failed", "reason": "layers.0 is cut wrong"})

    class Child:
        """A child that found something."""

        returncode = 0

        def __init__(self, arguments, **_):
            Path(arguments[-1], "result.json").write_text(failed)

        def wait(self, *_):
            return 0

        def kill(self):
            pass

    monkeypatch.setattr(limited_child.subprocess, "Popen", Child)
    with pytest.raises(Mismatch, match=r"the derived rules are wrong: .*layers\.0 is cut wrong"):
        reshard(sarvam, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert not (tmp_path / "ranks").exists()
