"""What lies beside the weights is compared with the source's: each setting of the config, and each side file."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from forward_models import CONFIGS, FIXTURES, config_of, save
from safetensors.numpy import load_file, save_file

from shardctl.cli.program import run
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.record import RECORD
from shardctl.verbs.diff import diff
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify
from shardctl.verify.config_comparison import compare_configs

EDITS = {
    "llama": {
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-3,
        "num_hidden_layers": 1,
        "max_position_embeddings": 7,
        "bos_token_id": 5,
        "attention_dropout": 0.5,
        "dtype": "bfloat16",
        "architectures": ["MistralForCausalLM"],
    },
    "mixtral": {"num_experts_per_tok": 1, "sliding_window": 3},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 7},
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Gives a model with side files, and its shards without a record, by the fixture's name."""
    base = tmp_path_factory.mktemp("companions")

    def give(name):
        whole, shards = base / name, base / f"{name}-tp2"
        if not whole.exists():
            save(whole, config_of(name))
            (whole / "tokenizer_config.json").write_text('{"model_max_length": 64}')
            (whole / "merges.txt").write_text("a b\n")
            (whole / "README.md").write_text("about it\n")
            reshard(whole, shards, ReshardOptions(mesh=Mesh.of(tp=2)))
            (shards / RECORD).unlink()
        return whole, shards

    return give


@pytest.fixture
def pair(kept, tmp_path):
    def give(name):
        whole, shards = kept(name)
        return whole, shutil.copytree(shards, tmp_path / "changed")

    return give


def edit(path, **changes):
    content = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in (content | changes).items() if v != "absent"}))


def find_identity(verified):
    return next(level for level in verified.levels if level.name == "identity")


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in EDITS.items() for key in keys])
def test_a_setting_that_is_not_the_source_s_is_an_error(pair, name, key):
    whole, shards = pair(name)
    assert find_identity(verify(shards, VerifyOptions(against=whole))).status == "passed"
    edit(shards / "config.json", **{key: EDITS[name][key]})
    verified = verify(shards, VerifyOptions(against=whole))
    findings = [finding for level in verified.levels for finding in level.errors]
    assert findings, "a changed setting went through"
    changes = diff(whole, shards).config_changes if key != "num_hidden_layers" else ()
    assert key == "num_hidden_layers" or changes


@pytest.mark.parametrize(
    "changes",
    [{"model_type": "mistral"}, {"model_type": "absent"}, {"architectures": "absent"}, {"architectures": []}],
    ids=["another type", "no type", "no class", "an empty list of classes"],
)
def test_what_names_the_class_must_be_the_source_s_and_there(pair, changes):
    whole, shards = pair("llama")
    edit(shards / "config.json", **changes)
    (key,) = changes
    errors = [each.message for each in find_identity(verify(shards, VerifyOptions(against=whole))).errors]
    assert any(message.startswith(f"config.json has {key} ") for message in errors)
    assert key in {change.key for change in diff(whole, shards).config_changes}


def test_a_class_that_only_the_result_names_is_no_error(pair):
    whole, shards = pair("llama")
    named = shutil.copytree(whole, shards.with_name("nameless"))
    edit(named / "config.json", architectures="absent")
    assert find_identity(verify(shards, VerifyOptions(against=named))).status == "passed"


def test_both_values_are_named(pair, capfd):
    whole, shards = pair("llama")
    edit(shards / "config.json", rms_norm_eps=0.25)
    assert run(["verify", str(shards), "--against", str(whole)]) == 3
    assert "config.json has rms_norm_eps 0.25; the source has 1e-" in capfd.readouterr().out
    assert run(["diff", str(whole), str(shards)]) == 3
    assert "~ config.json rms_norm_eps  1e-" in capfd.readouterr().out


def test_the_forward_pass_runs_the_shards_with_their_own_config(pair):
    whole, shards = pair("llama")
    reshard(whole, shards.with_name("recorded"), ReshardOptions(mesh=Mesh.of(tp=2)))
    edit(shards / "config.json", hidden_act="relu")
    found = verify(shards, VerifyOptions(against=whole, level="forward"))
    forward = next(level for level in found.levels if level.name == "forward")
    assert forward.status == "failed"
    assert forward.forward.output_error > 1e-3
    assert any("hidden_act" in note for note in forward.notes)


@pytest.mark.parametrize("name", FIXTURES)
def test_spellings_and_defaults_of_one_config_are_the_same(name):
    import transformers

    stored = json.loads((CONFIGS / f"{name}.json").read_text())
    kind = getattr(transformers, stored["architectures"][0], None)
    if kind is None:
        pytest.skip("transformers has no such class")
    filled = kind.config_class.from_dict(stored).to_dict() | {"architectures": stored["architectures"]}
    found = compare_configs(stored, json.loads(json.dumps(filled, default=str)))
    assert [change for change in found.changes if not change.harmless] == []


def test_a_setting_of_one_part_does_not_hide_that_of_another():
    stored = json.loads((CONFIGS / "qwen3_vl.json").read_text())
    other = json.loads(json.dumps(stored))
    other["text_config"]["hidden_act"] = "relu"
    other["vision_config"]["hidden_act"] = "relu"
    stored["vision_config"].pop("hidden_act", None)
    keys = {change.key for change in compare_configs(stored, other).changes}
    assert keys == {"text_config.hidden_act", "vision_config.hidden_act"}


def test_rotary_embeddings_in_three_spellings():
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    new = {"rope_parameters": {"rope_theta": 500000, "rope_type": "linear", "factor": 2.0}}
    assert not compare_configs(old, new).changes
    assert [c.key for c in compare_configs(old, {"rope_theta": 5e5}).changes if c.certain] == [
        "rope_parameters.rope_type"
    ]


def test_a_key_of_one_config_whose_default_nobody_knows_is_a_warning():
    (change,) = compare_configs(
        {"architectures": ["ForeignForCausalLM"], "depth": 3}, {"architectures": ["ForeignForCausalLM"]}
    ).changes
    assert (change.key, change.a, change.b, change.certain) == ("depth", "3", "absent", False)


def test_a_config_that_calls_weights_quantized_is_not_the_same(pair, capfd):
    """diff said equal: the class of transformers that fills in defaults was not told of this key."""
    whole, shards = pair("llama")
    edit(shards / "config.json", quantization_config={"quant_method": "fp8"})
    (finding,) = [
        f for f in find_identity(verify(shards, VerifyOptions(against=whole))).findings if f.check == "config"
    ]
    assert finding.severity == "error"
    assert finding.message == 'config.json has quantization_config.quant_method "fp8"; the source has absent'
    assert run(["diff", str(shards), str(whole)]) == 3
    assert 'config.json quantization_config.quant_method  "fp8" -> absent' in capfd.readouterr().out


def test_side_files(pair):
    whole, shards = pair("llama")
    (shards / "merges.txt").write_text("a c\n")
    (shards / "README.md").write_text("else\n")
    (shards / "tokenizer_config.json").write_text('{ "model_max_length":64, "transformers_version": "5" }')
    (shards / "generation_config.json").unlink()
    found = {f.file: f.severity for f in find_identity(verify(shards, VerifyOptions(against=whole))).findings}
    assert found == {"merges.txt": "error", "README.md": "warning", "generation_config.json": "error"}
    changes = {change.file: change.kind for change in diff(whole, shards).file_changes}
    assert changes == {"merges.txt": "content", "README.md": "content", "generation_config.json": "only_in_a"}


def list_findings(path, against, **options):
    """The findings of a comparison by file: severity and message."""
    found = verify(path, VerifyOptions(against=against), source_options=SourceOptions(**options))
    return {finding.file: (finding.severity, finding.message) for finding in found.findings}


TEMPLATE, CODE, REFERENCE = "chat_template.jinja", "modeling_x.py", {"AutoModel": "someone/else--modeling.X"}
NEEDED = ("tokenizer.json", "tokenizer_config.json", TEMPLATE, "generation_config.json")


@pytest.fixture
def served(kept, tmp_path):
    """A model with all files that from_pretrained reads."""
    whole = shutil.copytree(kept("llama")[0], tmp_path / "served")
    (whole / "tokenizer.json").write_text("{}")
    (whole / TEMPLATE).write_text("{{ messages }}")
    (whole / CODE).write_text("class X: pass")
    return whole


class TestAddedFiles:
    @pytest.mark.parametrize("recorded", [True, False])
    def test_code_and_what_loaders_read_is_a_finding(self, kept, tmp_path, recorded):
        whole, out = kept("llama")[0], tmp_path / "out"
        reshard(whole, out, ReshardOptions(to="hf"))
        if not recorded:
            (out / RECORD).unlink()
        assert list_findings(out, whole) == {}
        (out / CODE).write_text("import os")
        (out / "custom_generate").mkdir()
        (out / "custom_generate" / "generate.py").write_text("import os")
        (out / TEMPLATE).write_text("{{ messages }}")
        (out / "results.json").write_text("{}")
        found = list_findings(out, whole)
        assert {file: severity for file, (severity, _) in found.items()} == {
            **dict.fromkeys((CODE, "custom_generate/generate.py", TEMPLATE), "error"),
            "results.json": "warning",
        }
        assert "runs it with trust_remote_code" in found[CODE][1]

    def test_a_reference_to_code_is_always_compared(self, pair):
        whole, shards = pair("llama")
        edit(shards / "config.json", auto_map=REFERENCE)
        severity, message = list_findings(shards, whole)["config.json"]
        assert severity == "error"
        assert message.startswith('config.json has auto_map {"AutoModel": "someone/else--modeling.X"}; the source has')
        assert [change.key for change in diff(whole, shards).config_changes] == ["auto_map"]
        other = shards.with_name("other")
        shutil.copytree(whole, other)
        edit(other / "config.json", auto_map={"AutoModel": "modeling_x.X"})
        assert list_findings(shards, other)["config.json"][0] == "error"
        edit(shards / "config.json", auto_map="absent")
        assert list_findings(shards, other)["config.json"] == (
            "error", 'config.json has auto_map absent; the source has {"AutoModel": "modeling_x.X"}'
        )  # fmt: skip

    def test_a_trainer_has_no_tokenizer_to_compare_with_but_code_is_a_finding(self, kept, served, tmp_path):
        dcp = tmp_path / "dcp"
        reshard(kept("llama")[0], dcp, ReshardOptions(to="dcp"))
        for path in (*dcp.glob("*.json"), dcp / "merges.txt", dcp / "README.md"):
            path.unlink()
        edit(served / "tokenizer_config.json", auto_map={"AutoTokenizer": ["someone/else--tokenization.X", None]})
        found = list_findings(served, dcp)
        errors = {file for file, (severity, _) in found.items() if severity == "error"}
        assert errors == {CODE, "tokenizer_config.json"}
        assert "its auto_map names code" in found["tokenizer_config.json"][1]
        assert found.keys() >= {"tokenizer.json", TEMPLATE, "generation_config.json", "merges.txt"}, "said as warnings"

    def test_what_the_record_says_the_origin_of_is_none(self, served, kept, tmp_path):
        bare, out = kept("llama")[0], tmp_path / "out"
        given = SourceOptions(complete_from=str(served))
        reshard(bare, out, ReshardOptions(to="hf"), source_options=given)
        assert (out / CODE).is_file()
        assert verify(out, VerifyOptions(level="full", against=bare), source_options=given).ok
        (out / RECORD).unlink()
        (out / TEMPLATE).write_text("{{ other }}")
        (out / "tokenizer.json").unlink()
        found = list_findings(out, bare, complete_from=str(served))
        assert (found[TEMPLATE][0], found["tokenizer.json"][0]) == ("error", "error")

    def test_a_config_that_was_given_may_name_code(self, served, tmp_path):
        edit(served / "config.json", auto_map={"AutoModel": "modeling_x.X"})
        bare = tmp_path / "bare"
        bare.mkdir()
        shutil.copy(served / "model.safetensors", bare)
        reshard(bare, tmp_path / "out", ReshardOptions(to="hf"), source_options=SourceOptions(config=served))
        assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]
        assert verify(tmp_path / "out", VerifyOptions(against=bare)).ok
        (tmp_path / "out" / RECORD).unlink()
        assert list_findings(tmp_path / "out", bare)["config.json"][0] == "error"

    def test_one_file_has_nothing_beside_it(self, served):
        found = verify(served, VerifyOptions(against=served / "model.safetensors"))
        assert found.ok
        assert any("auxiliary files were not compared" in note for note in find_identity(found).notes)


class TestMissingFiles:
    @pytest.mark.parametrize("layout", ["hf", "ranks", "vllm", "trtllm"])
    def test_what_from_pretrained_or_an_engine_reads_is_a_finding(self, served, tmp_path, layout):
        reshard(served, tmp_path / "out", ReshardOptions(to=layout))
        (tmp_path / "out" / RECORD).unlink()
        for name in (*NEEDED, CODE, "merges.txt"):
            (tmp_path / "out" / name).unlink()
        found = {file: severity for file, (severity, _) in list_findings(tmp_path / "out", served).items()}
        assert {name: found[name] for name in (*NEEDED, CODE)} == dict.fromkeys((*NEEDED, CODE), "error")
        assert found["merges.txt"] == "warning"

    def test_for_a_trainer_it_is_a_warning_unless_the_record_lists_it(self, served, tmp_path):
        reshard(served, tmp_path / "out", ReshardOptions(to="dcp"))
        for name in NEEDED:
            (tmp_path / "out" / name).unlink()
        recorded = list_findings(tmp_path / "out", served)
        assert {name: recorded[name][0] for name in NEEDED} == dict.fromkeys(NEEDED, "error")
        (tmp_path / "out" / RECORD).unlink()
        found = list_findings(tmp_path / "out", served)
        assert {name: found[name][0] for name in NEEDED} == dict.fromkeys(NEEDED, "warning")


def test_a_config_that_is_missing(pair):
    whole, shards = pair("llama")
    kept = (shards / "config.json").read_bytes()
    (shards / "config.json").unlink()
    found = verify(shards, VerifyOptions(against=whole))
    assert any(finding.message == "config.json is missing; the source has one" for finding in found.findings)
    assert not found.ok
    (shards.parent / "config.json").write_bytes(kept)
    given = SourceOptions(config=shards.parent / "config.json")
    assert verify(shards, VerifyOptions(against=whole), source_options=given).ok


def test_a_cast_changes_the_declared_type_and_nothing_else(kept, tmp_path):
    whole, _ = kept("llama")
    reshard(whole, tmp_path / "cast", ReshardOptions(dtype="bf16"))
    assert find_identity(verify(tmp_path / "cast", VerifyOptions(against=whole))).status == "passed"


def test_a_cast_that_no_record_tells_of_is_compared_and_said(kept, tmp_path, capfd):
    whole, _ = kept("llama")
    reshard(whole, tmp_path / "half", ReshardOptions(dtype="bf16"))
    (tmp_path / "half" / RECORD).unlink()
    level = find_identity(verify(tmp_path / "half", verify_options=VerifyOptions(against=whole)))
    assert level.status == "passed"
    assert any("was cast to the types here before it was compared" in f.message for f in level.findings)
    for a, b in ((whole, tmp_path / "half"), (tmp_path / "half", whole)):
        changes = diff(a, b).changes
        assert {(change.kind, change.count, change.cast) for change in changes} == {("dtype", 0, "BF16")}
    values = np.memmap(tmp_path / "half" / "model.safetensors", np.uint16, "r+")
    values[-1] ^= 1 << 10
    values.flush()
    assert find_identity(verify(tmp_path / "half", verify_options=VerifyOptions(against=whole))).status == "failed"
    (change,) = (change for change in diff(whole, tmp_path / "half").changes if change.count)
    assert (change.kind, change.count) == ("dtype", 1)
    assert run(["diff", str(whole), str(tmp_path / "half")]) == 3
    assert ", as BF16 1 of " in capfd.readouterr().out


def test_a_cast_is_no_config_of_its_own_for_the_forward_pass(kept, tmp_path):
    whole, _ = kept("llama")
    reshard(whole, tmp_path / "cast", ReshardOptions(dtype="bf16", mesh=Mesh.of(tp=2)))
    found = verify(tmp_path / "cast", VerifyOptions(level="forward", against=whole))
    assert found.ok
    assert not any("their own config.json" in note for level in found.levels for note in level.notes)


def test_how_far_values_are_apart(kept, tmp_path):
    whole, _ = kept("llama")
    shutil.copytree(whole, tmp_path / "other")
    tensors = load_file(whole / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    changed = tensors[name].copy()
    changed[0, :2] += np.float32(0.5), np.float32(-0.25)
    changed[1, 0] = np.nan
    save_file(tensors | {name: changed}, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    (change,) = diff(tmp_path / "other", whole).changes
    moved = np.abs(changed[0, :2].astype(np.float64) - tensors[name][0, :2])
    distance = change.distance
    assert (change.count, distance.nonfinite) == (3, 1)
    assert distance.largest == moved.max()
    assert distance.mean == pytest.approx(moved.mean())
    assert distance.relative == pytest.approx(moved.sum() / np.abs(tensors[name][0, :2]).sum())
