"""Tensors that the model's class does not have: they are kept beside the model, dropped or refused."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_wrapped_names import FIXTURE, WEIGHTS, save_dcp, save_pt, save_safetensors, wrap

from shardctl.base.errors import SourceError, UsageError
from shardctl.cli.program import run
from shardctl.models import load_families
from shardctl.models.names.extra_names import EVERYWHERE, IGNORED_BY_CLASS, IGNORED_PATTERNS
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.record import RECORD, parse_record
from shardctl.verbs.diff import diff
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

EXTRA = {
    "loss.weight": torch.arange(5.0),
    "v_head.summary.bias": torch.zeros(1, dtype=torch.bfloat16),
    "pretrained.model.layers.0.self_attn._extra_state": torch.arange(3, dtype=torch.uint8),
    "steps": torch.tensor(7),
}
FILE = "extra/extra_tensors.safetensors"


@pytest.fixture
def options(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(json.loads(FIXTURE.read_text()) | {"dtype": "float32"}))
    return SourceOptions(config=tmp_path / "config.json")


@pytest.fixture
def trained(tmp_path):
    """A model in a trainer's class, with other tensors around it."""
    return save_pt(tmp_path / "trained", wrap("pretrained.") | EXTRA)


@pytest.fixture
def doubled(tmp_path):
    """A model and its moving average, which has other values."""
    average = {f"ema.module.{name}": tensor + 1 for name, tensor in WEIGHTS.items()}
    return save_safetensors(tmp_path / "doubled", wrap("model.") | average | {"loss.weight": torch.ones(3)})


def read(folder):
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in wanted.items()
    )


def convert(source, place, options, **wanted):
    done = reshard(source, place, ReshardOptions(**wanted), source_options=options)
    checked = verify(place, VerifyOptions(level="full", against=source), source_options=options)
    assert checked.ok, checked.findings
    return done


def test_they_are_kept_in_a_file_that_no_loader_of_the_model_reads(trained, options, tmp_path):
    done = convert(trained, tmp_path / "hf", options, to="hf")
    assert_equal(read(tmp_path / "hf"), WEIGHTS)
    assert_equal(load_file(tmp_path / "hf" / FILE), EXTRA)
    assert {(each.name, each.nbytes, each.kept) for each in done.extra} == {
        (name, tensor.nbytes, True) for name, tensor in EXTRA.items()
    }
    record = parse_record((tmp_path / "hf" / RECORD).read_bytes())
    assert {name for name in record.tensors if name.startswith("extra/")} == {f"extra/{name}" for name in EXTRA}
    assert all(record.tensors[f"extra/{name}"].digest for name in EXTRA)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(model.lm_head.weight, WEIGHTS["lm_head.weight"])


def test_the_digest_is_that_of_the_model_alone(trained, options, tmp_path):
    done = convert(trained, tmp_path / "hf", options, to="hf")
    plain = save_safetensors(tmp_path / "plain", WEIGHTS)
    assert done.record.digest == digest(plain, source_options=options).digest
    assert digest(tmp_path / "hf").digest == done.record.digest


def test_a_damaged_one_is_found(trained, options, tmp_path):
    convert(trained, tmp_path / "hf", options, to="hf")
    file = tmp_path / "hf" / FILE
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    checked = verify(tmp_path / "hf", VerifyOptions(level="full"))
    assert not checked.ok
    assert any("extra/" in finding.message for finding in checked.findings)


def test_they_travel_on_to_other_layouts_and_back(trained, options, tmp_path):
    convert(trained, tmp_path / "ranks", options, mesh=Mesh.of(tp=2))
    convert(tmp_path / "ranks", tmp_path / "dcp", options, to="dcp")
    convert(tmp_path / "dcp", tmp_path / "hf", options, to="hf")
    assert_equal(read(tmp_path / "hf"), WEIGHTS)
    assert_equal(load_file(tmp_path / "hf" / FILE), EXTRA)
    assert diff(trained, tmp_path / "hf", source_options_a=options).changes == ()
    convert(tmp_path / "dcp", tmp_path / "bare", options, to="hf", extra_tensors="drop")
    assert not (tmp_path / "bare" / "extra").exists()


def test_they_can_be_dropped_or_refused(trained, options, tmp_path):
    done = convert(trained, tmp_path / "hf", options, to="hf", extra_tensors="drop")
    assert_equal(read(tmp_path / "hf"), WEIGHTS)
    assert not (tmp_path / "hf" / "extra").exists()
    assert {(each.name, each.kept) for each in done.extra} == {(name, False) for name in EXTRA}
    assert any("loss.weight (20 bytes)" in line for line in done.warnings)
    with pytest.raises(SourceError, match=r"LlamaForCausalLM does not have loss\.weight \(20 bytes\)"):
        reshard(trained, tmp_path / "no", ReshardOptions(to="hf", extra_tensors="error"), source_options=options)


def test_a_mesh_can_be_planned_and_they_are_on_no_device(trained, options):
    planned = plan(trained, ReshardOptions(mesh=Mesh.of(tp=2)), source_options=options)
    assert planned.parameters == sum(tensor.numel() for tensor in WEIGHTS.values())
    assert {each.name for each in planned.extra} == EXTRA.keys()


def test_text_and_json_list_each_with_its_size(trained, options, tmp_path, capfd):
    command = ["reshard", str(trained), str(tmp_path / "hf"), "--to", "hf", "--config", str(options.config)]
    assert run(command) == 0
    lines = [line.strip() for line in capfd.readouterr().out.splitlines()]
    assert "extra    4 tensors, 33 bytes, in extra/extra_tensors.safetensors" in lines
    assert "v_head.summary.bias: 2 bytes" in lines
    assert run(["inspect", str(trained), "--config", str(options.config), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["extra_tensors"]
    assert found[0] == {"name": "loss.weight", "dtype": "F32", "shape": [5], "tensor_bytes": 20, "kept": False}


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ({"exclude": "^loss"}, {"loss.weight"}),
        ({"exclude": "^(loss|v_head|steps)|_extra_state"}, EXTRA.keys()),
        ({"include": "^pretrained"}, {"loss.weight", "v_head.summary.bias", "steps"}),
    ],
)
def test_patterns_are_applied_to_the_stored_names_first(trained, options, tmp_path, wanted, left):
    convert(trained, tmp_path / "hf", options, to="hf", **wanted)
    assert_equal(read(tmp_path / "hf"), WEIGHTS)
    kept = {name: tensor for name, tensor in EXTRA.items() if name not in left}
    assert_equal(load_file(tmp_path / "hf" / FILE) if kept else {}, kept)
    assert (tmp_path / "hf" / "extra").exists() == bool(kept)


def test_patterns_still_take_names_of_the_class(trained, options, tmp_path):
    convert(trained, tmp_path / "hf", options, to="hf", exclude=r"^model\.layers\.1\.", extra_tensors="drop")
    assert read(tmp_path / "hf").keys() == {name for name in WEIGHTS if not name.startswith("model.layers.1.")}


def test_of_two_models_one_is_named(doubled, options, tmp_path):
    with pytest.raises(
        SourceError, match=r"below 'model\.' and those below 'ema\.module\.' are both a whole"
    ) as caught:
        reshard(doubled, tmp_path / "hf", ReshardOptions(to="hf"), source_options=options)
    assert caught.value.hint == "say which is meant with --subtree model or --subtree ema.module"
    found = inspect(doubled, source_options=options)
    assert [(each.prefix, each.tensors) for each in found.subtrees] == [("ema.module", 21), ("model", 21)]


@pytest.mark.parametrize(
    ("subtree", "wanted", "more"),
    [("model", {}, 0), ("ema", {}, 1), (None, {"exclude": "^ema"}, 0), (None, {"exclude": "^model"}, 1)],
)
def test_the_one_that_is_named_is_written(doubled, tmp_path, options, subtree, wanted, more):
    named = SourceOptions(config=options.config, subtree=subtree)
    reshard(doubled, tmp_path / "hf", ReshardOptions(to="hf", **wanted), source_options=named)
    assert_equal(read(tmp_path / "hf"), {name: tensor + more for name, tensor in WEIGHTS.items()})
    # The record says how the source was read, for whoever compares the two.
    assert verify(tmp_path / "hf", VerifyOptions(level="full", against=doubled), source_options=options).ok


def test_names_that_need_no_change_win_over_a_copy(options, tmp_path):
    average = {f"ema.{name}": tensor + 1 for name, tensor in WEIGHTS.items()}
    source = save_safetensors(tmp_path / "source", WEIGHTS | average)
    convert(source, tmp_path / "hf", options, to="hf")
    assert_equal(read(tmp_path / "hf"), WEIGHTS)
    assert [each.prefix for each in inspect(source, source_options=options).subtrees] == ["", "ema"]


def test_a_subtree_needs_no_config(doubled, tmp_path):
    reshard(doubled, tmp_path / "hf", ReshardOptions(to="hf"), source_options=SourceOptions(subtree="ema.module"))
    assert_equal(read(tmp_path / "hf"), {name: tensor + 1 for name, tensor in WEIGHTS.items()})


def test_a_subtree_without_tensors_is_refused(doubled):
    with pytest.raises(UsageError, match=r"no tensor is below 'teacher\.'"):
        inspect(doubled, source_options=SourceOptions(subtree="teacher"))


def test_their_optimizer_states_go_with_them_and_leave_the_groups(options, tmp_path):
    source = save_dcp(tmp_path / "source", wrap("model.") | {"v_head.weight": torch.ones(1, 4)})
    convert(source, tmp_path / "ranks", options, to="ranks", optimizer_states="keep")
    groups = json.loads((tmp_path / "ranks" / "optimizer.json").read_text())["groups"]
    assert {name for group in groups for name in group["parameters"]} == WEIGHTS.keys()
    extra = load_file(tmp_path / "ranks" / FILE)
    assert torch.equal(extra["optimizer.exp_avg.v_head.weight"], torch.full((1, 4), 2.0))
    convert(source, tmp_path / "hf", options, to="hf")
    assert load_file(tmp_path / "hf" / FILE).keys() == {"v_head.weight"}


def test_what_transformers_ignores_is_what_the_installed_one_ignores():
    found: dict[str, set[str]] = {}
    for family in load_families():
        for name in family.classes:
            kind = getattr(transformers, name, None)
            patterns = set(getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ())
            found.setdefault(family.name, set()).update(patterns - set(IGNORED_BY_CLASS.get(name, ())))
    assert {name: patterns for name, patterns in found.items() if patterns} == {
        name: set(patterns) for name, patterns in IGNORED_PATTERNS.items()
    }
    for name, patterns in IGNORED_BY_CLASS.items():
        assert set(patterns) <= set(getattr(transformers, name)._keys_to_ignore_on_load_unexpected)
    assert EVERYWHERE == (r"rotary_emb\.inv_freq",)


def test_a_plan_names_them_in_json_if_there_are_some(trained, options, capfd):
    assert run(["plan", str(trained), "--config", str(options.config), "--tp", "2", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)["extra_tensors"]
    assert [each["name"] for each in found] == list(EXTRA)
