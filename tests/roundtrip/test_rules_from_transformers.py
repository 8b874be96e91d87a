"""Rules for unknown architectures, borrowed from the plan of the transformers that is installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tiny_models import Tiny, assert_same, config_of, loaded, save, stored

from shardctl.base.errors import PartitionError, UnsupportedError, UsageError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.cli.program import run
from shardctl.models import find_family
from shardctl.models.rules import transformers_plan
from shardctl.models.rules.transformers_plan import read_plan
from shardctl.options import InspectOptions, ReshardOptions, SourceOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard

BORROWED = SourceOptions(rules_from="transformers")
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
UNKNOWN = {"granite_swa": "GraniteSWAForCausalLM", "jais2": "Jais2ForCausalLM"}
"""Architectures without a table here; one that gets a table leaves this list."""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Gives a tiny saved model of an architecture that no table knows."""
    made = {}

    def give(kind) -> Tiny:
        if kind not in made:
            config = {**SIZES, "architectures": [UNKNOWN[kind]], "model_type": kind}
            assert find_family(config) is None
            made[kind] = save(tmp_path_factory.mktemp(kind) / "source", config)
        return made[kind]

    return give


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(pp=2), Mesh.of(tp=2, pp=2, fsdp=3)], ids=str)
@pytest.mark.parametrize("kind", UNKNOWN)
def test_there_and_back_is_the_identity(foreign, tmp_path, kind, mesh):
    source = foreign(kind)
    done = reshard(source.path, tmp_path / "ranks", ReshardOptions(mesh=mesh), source_options=BORROWED)
    assert done.warnings[0].startswith(f"shardctl has no table for {UNKNOWN[kind]}; its cuts are those of ")
    assert f"of transformers {transformers.__version__}" in done.warnings[0]
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(stored(tmp_path / "back"), stored(source.path))
    assert digest(tmp_path / "ranks").digest == digest(source.path).digest
    assert_same(loaded(tmp_path / "ranks", source.kind).state_dict(), source.model.state_dict())


def test_what_is_cut_is_what_the_plan_of_the_loaded_class_cuts(foreign):
    source = foreign("jais2")
    with open_checkpoint(source.path, BORROWED) as checkpoint:
        model = checkpoint.require_model("a test")
    for name, tensor in model.tensors.items():
        module, _, what = name.rpartition(".")
        style = source.model.tp_plan.get(".".join("*" if p.isdecimal() else p for p in module.split(".")), "")
        expected = (
            {0} if style.startswith("colwise") else {1} if style.startswith("rowwise") and what != "bias" else set()
        )
        dims = {dim for dim, cuts in enumerate(tensor.spec.cuts) if any(cut.axis == "tp" for cut in cuts)}
        assert dims == expected, name
    assert any(cut.axis == "tp" for t in model.tensors.values() for dim in t.spec.cuts for cut in dim)
    where = {name: tensor.spec.where[0] for name, tensor in model.tensors.items()}
    assert where["model.embed_tokens.weight"] == ("first", 0)
    assert where["model.norm.weight"] == where["lm_head.weight"] == ("last", 0)
    assert where["model.layers.1.mlp.up_proj.weight"] == ("layer", 1)


def test_heads_stay_whole_although_the_plan_does_not_know_them(foreign, tmp_path):
    with pytest.raises(PartitionError, match=r"k_proj\.weight \[16, 32\] over tp=4: 2 heads") as caught:
        reshard(
            foreign("granite_swa").path, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=4)), source_options=BORROWED
        )
    assert caught.value.hint == "use --tp 1 or 2"


def test_every_written_out_plan_is_read_as_transformers_has_it():
    kinds = ["llama", "qwen3_moe", "phi3", "deepseek_v3", "smollm3", "gpt_neox", "cohere2", "ministral"]
    for kind in kinds:
        config = transformers.AutoConfig.for_model(kind)
        assert read_plan(kind, "").tp == config.base_model_tp_plan
        assert read_plan(kind, "").pp == tuple(config.base_model_pp_plan or ())
    assert read_plan("smollm3", "SmolLM3ForCausalLM").head == transformers.SmolLM3ForCausalLM._tp_plan


def test_nothing_of_transformers_is_run(foreign):
    code = f"""
import sys
from shardctl.verbs.inspect import inspect
from shardctl.options import SourceOptions
assert inspect({str(foreign("granite_swa").path)!r}, source_options=SourceOptions(rules_from="transformers")).rules
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_line_says_where_the_rules_are_from(foreign, capfd):
    assert run(["inspect", str(foreign("granite_swa").path), "--rules-from", "transformers", "--show-rules"]) == 0
    said = capfd.readouterr()
    assert "GraniteSWAConfig of transformers" in said.err
    assert "model.layers.*.self_attn.q_proj.weight" in said.out


def test_where_rules_are_refused_an_unknown_architecture_is_too(foreign, tmp_path):
    refusing = SourceOptions(rules_from="none")
    with pytest.raises(UnsupportedError, match="GraniteSWAForCausalLM is not known"):
        reshard(
            foreign("granite_swa").path, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)), source_options=refusing
        )
    rules = inspect(foreign("granite_swa").path, InspectOptions(show_rules=True), source_options=refusing).rules
    assert {axis for rule in rules for axes in rule.axes for axis in axes} == {"fsdp"}


def test_a_rule_file_goes_before_the_plan(foreign, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[rules]\n"**.up_proj.weight" = []\n')
    source_options = SourceOptions(rules_from="transformers", rules=rules)
    with open_checkpoint(foreign("granite_swa").path, source_options) as checkpoint:
        tensors = checkpoint.require_model("a test").tensors
    assert tensors["model.layers.0.mlp.up_proj.weight"].spec.cuts == ((), ())
    assert tensors["model.layers.0.mlp.gate_proj.weight"].spec.axes == ("tp", "fsdp")


def test_a_matrix_that_the_plan_leaves_whole_is_named(foreign, tmp_path):
    config = json.loads((foreign("granite_swa").path / "config.json").read_text())
    state = stored(foreign("granite_swa").path) | {"model.layers.0.mlp.extra_proj.weight": torch.ones(4, 4)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(state, tmp_path / "model.safetensors")
    warnings = inspect(tmp_path, source_options=BORROWED).warnings
    assert warnings[1] == "that plan leaves model.layers.*.mlp.extra_proj.weight whole on every tp rank"


class TestRefusals:
    def of(self, tmp_path, state=None, **changes):
        config = {**SIZES, "architectures": ["GraniteSWAForCausalLM"], "model_type": "granite_swa", **changes}
        source = tmp_path / "source"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(config))
        save_file(state or {"a.weight": torch.ones(4, 4)}, source / "model.safetensors")
        return source

    def test_a_known_architecture_has_a_table(self, tmp_path):
        source = save(tmp_path / "source", config_of("llama"))
        with pytest.raises(UsageError, match="not known, and LlamaForCausalLM is") as caught:
            inspect(source.path, source_options=BORROWED)
        assert caught.value.hint == "leave it out"

    def test_no_config(self, tmp_path):
        source = self.of(tmp_path)
        (source / "config.json").unlink()
        with pytest.raises(UsageError, match="there is no config"):
            inspect(source, source_options=BORROWED)

    def test_transformers_is_not_there(self, tmp_path, monkeypatch):
        monkeypatch.setattr(transformers_plan, "find_spec", lambda _name: None)
        with pytest.raises(UsageError, match="needs transformers, which is not installed"):
            inspect(self.of(tmp_path), source_options=BORROWED)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model_type": "mpt"}, "has no tensor-parallel plan for mpt"),
            ({"model_type": "../../etc"}, "has no tensor-parallel plan for ../../etc"),
            ({"model_type": ""}, "no tensor-parallel plan for a config without model_type"),
            ({"quantization_config": {"quant_method": "fp8"}}, "does not cover quantized weights"),
            ({}, "which the checkpoint has nowhere"),
        ],
    )
    def test_what_cannot_be_followed_is_named(self, tmp_path, changes, message):
        with pytest.raises(UnsupportedError, match=message):
            reshard(
                self.of(tmp_path, **changes),
                tmp_path / "out",
                ReshardOptions(mesh=Mesh.of(tp=2)),
                source_options=BORROWED,
            )

    def test_names_that_fit_in_two_places(self, tmp_path):
        state = {f"{tower}.layers.0.self_attn.q_proj.weight": torch.ones(4, 4) for tower in ("text", "vision")}
        with pytest.raises(UnsupportedError, match=r"in several places \(text., vision.\)"):
            reshard(
                self.of(tmp_path, state), tmp_path / "out", ReshardOptions(mesh=Mesh.of(tp=2)), source_options=BORROWED
            )
