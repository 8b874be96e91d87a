"""What lies beside the weights is compared with the source's: each setting of the config, and each side file."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from forward_models import CONFIGS, FIXTURES, config_of, save
from safetensors.numpy import load_file, save_file

from shardctl.cli.program import run
from shardctl.mesh import Mesh
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.record import RECORD
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


def test_a_config_that_calls_weights_quantised_is_not_the_same(pair, capfd):
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
    assert found == {"merges.txt": "error", "README.md": "warning", "generation_config.json": "warning"}
    changes = {change.file: change.kind for change in diff(whole, shards).file_changes}
    assert changes == {"merges.txt": "content", "README.md": "content", "generation_config.json": "only_in_a"}


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
