"""A plan on disk is done exactly, or refused with the reason."""

from __future__ import annotations

import cProfile
import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from cli_checkpoints import llama

from shardctl.base.errors import ChangedError, DestinationError, HostileError, SourceError, UsageError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.conversion import expansion, plan_file
from shardctl.conversion.conversion_plan import plan_conversion
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.record import RECORD
from shardctl.tensors.record import parse_record as load_record
from shardctl.verbs import plan as planning
from shardctl.verbs.reshard import reshard

FIXTURES = Path(__file__).parents[2] / "fixtures"
CONVERSIONS = {
    "ranks": ReshardOptions(mesh=Mesh.of(tp=2)),
    "stages": ReshardOptions(mesh=Mesh.parse("tp=2,pp=2"), stages="1,1"),
    "balanced": ReshardOptions(mesh=Mesh.of(pp=2, fsdp=2)),
    "hf": ReshardOptions(max_shard_size=50_000, dtype="bf16", keep_fp32="norm"),
    "filtered": ReshardOptions(include="layers", exclude="mlp", names="keep", to="ranks"),
    "part": ReshardOptions(only="**.weight"),
}


def decide(source, path, reshard_options=CONVERSIONS["ranks"], source_options=None):
    """What `shardctl plan --out` does."""
    with open_checkpoint(source, source_options) as checkpoint:
        plan_file.write_plan_file(path, plan_conversion(checkpoint, reshard_options), source_options)
    return path


def files(place):
    return {p.relative_to(place).as_posix(): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


@pytest.fixture
def copied(source, tmp_path):
    """A source of one's own, to change."""
    return Path(shutil.copytree(source, tmp_path / "copied"))


@pytest.fixture
def plan(copied, tmp_path):
    return decide(copied, tmp_path / "plan.json")


@pytest.mark.parametrize("name", CONVERSIONS)
def test_reshard_does_what_the_plan_says(say, source, tmp_path, name):
    plan = decide(source, tmp_path / "plan.json", CONVERSIONS[name])
    said = say("reshard", "--plan", plan, tmp_path / "planned")
    assert said.code == 0, said.err
    reshard(source, tmp_path / "asked", CONVERSIONS[name])
    assert files(tmp_path / "planned") == files(tmp_path / "asked")


def test_the_plan_is_what_the_record_says_was_done(say, source, tmp_path):
    plan = decide(source, tmp_path / "plan.json")
    assert say("reshard", "--plan", plan, tmp_path / "out").code == 0
    assert load_record((tmp_path / "out" / RECORD).read_bytes()).plan == plan_file.read_plan_file(plan).identity


def test_how_the_source_is_read_is_in_the_plan(say, source, tmp_path):
    bare, config = tmp_path / "bare", tmp_path / "elsewhere.json"
    bare.mkdir()
    shutil.copy(source / "model.safetensors", bare)
    shutil.copy(source / "config.json", config)
    source_options = SourceOptions(config=config, kv_heads="replicate", strict=True)
    plan = decide(bare, tmp_path / "plan.json", ReshardOptions(mesh=Mesh.of(tp=4)), source_options)
    assert plan_file.read_plan_file(plan).source_options == source_options
    said = say("reshard", "--plan", plan, tmp_path / "out")
    assert said.code == 0, said.err
    config.write_text(config.read_text() + " ")
    said = say("reshard", "--plan", plan, tmp_path / "again")
    assert said.code == 4
    assert "elsewhere.json has" in said.err


def test_a_sidecar_that_says_how_weights_are_quantized_is_remembered(say, tmp_path):
    source = shutil.copytree(FIXTURES / "modelopt" / "nvfp4-fp8", tmp_path / "source")
    sidecar = source / "hf_quant_config.json"
    for number, place in enumerate((source, source / "model.safetensors")):
        plan = decide(place, tmp_path / f"{number}.json")
        sidecar.write_text(sidecar.read_text() + " ")
        said = say("reshard", "--plan", plan, tmp_path / "out")
        assert (said.code, "hf_quant_config.json has" in said.err) == (4, True), said.err


def test_a_plan_says_all_that_shapes_the_result(plan):
    document = json.loads(plan.read_text())
    assert document["schema"] == "shardctl.plan-file/1"
    assert document["reshard_options"].keys() == {field.name for field in fields(ReshardOptions)} - {
        "host_memory",
        "consumer_mesh",
    } | {"memory"}
    assert document["source_options"].keys() == {field.name for field in fields(SourceOptions)} - {
        "described",
        "unbound",
        "untied",
        "unpadded",
    }
    assert document["reshard_options"]["to"] == "ranks"
    assert document["reshard_options"]["mesh"] == {
        "axes": {"pp": 1, "dp": 1, "fsdp": 1, "cp": 1, "tp": 2},
        "ep": 1,
        "etp": 2,
    }
    assert document["source"]["files"].keys() == {"config.json", "model.safetensors", "tokenizer.json"}


def test_balanced_stages_are_decided_in_the_plan(source, tmp_path):
    plan = decide(source, tmp_path / "plan.json", ReshardOptions(mesh=Mesh.of(pp=2)))
    assert plan_file.read_plan_file(plan).reshard_options.stages == "1,1"


@pytest.mark.parametrize("reshard_options", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_plan_reads_back_as_it_was(source, tmp_path, reshard_options):
    read = plan_file.read_plan_file(decide(source, tmp_path / "plan.json", reshard_options))
    assert read.source == str(source.absolute())
    with open_checkpoint(source) as checkpoint:
        work = plan_conversion(checkpoint, reshard_options)
        assert read.drafted(checkpoint, read.reshard_options).identity() == work.identity() == read.identity
        with pytest.raises(UsageError, match="the conversion differs"):
            read.drafted(checkpoint, ReshardOptions(mesh=Mesh.of(tp=4)))


def test_effort_may_be_another(say, plan, tmp_path):
    said = say("reshard", "--plan", plan, tmp_path / "out", "--memory", "256MiB", "--threads", 1, "--strict")
    assert said.code == 0, said.err


@pytest.mark.parametrize("more", [["--tp", 2], ["--dtype", "keep"], ["--config", "x"], ["--kv-heads", "error"]])
def test_options_that_shape_the_result_are_refused_beside_a_plan(say, plan, tmp_path, more):
    said = say("reshard", "--plan", plan, tmp_path / "out", *more)
    assert said.code == 2
    assert said.err.startswith(f"error: --plan and {more[0]} are both given\n")
    assert not (tmp_path / "out").exists()


def test_without_a_plan_both_places_are_needed(say, tmp_path):
    said = say("reshard", tmp_path)
    assert said.code == 2
    assert "missing argument 'DST'" in said.err


def test_a_dry_run_follows_the_plan_too(say, plan, copied, tmp_path):
    said = say("reshard", "--plan", plan, tmp_path / "out", "--dry-run", "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["plan"]["mesh"]["axes"]["tp"] == 2
    (copied / "tokenizer.json").unlink()
    assert say("reshard", "--plan", plan, tmp_path / "out", "--dry-run").code == 4


class TestChangedSources:
    """What became of the source is named, and nothing is written."""

    @pytest.fixture
    def refused(self, say, plan, copied, tmp_path):
        def refuse():
            said = say("reshard", "--plan", plan, tmp_path / "out")
            assert said.code == 4
            assert not (tmp_path / "out").exists()
            head = f"error: {copied} has changed since {plan} was made: "
            assert said.err.startswith(head)
            return said.err.removeprefix(head).splitlines()[0]

        return refuse

    def test_a_file_that_is_gone(self, copied, refused):
        (copied / "tokenizer.json").unlink()
        assert refused() == "tokenizer.json is gone"

    def test_a_file_that_is_new(self, copied, refused):
        (copied / "vocab.txt").write_text("a")
        assert refused() == "vocab.txt is new"

    def test_another_size(self, copied, refused):
        (copied / "tokenizer.json").write_text("{ }")
        assert refused() == "tokenizer.json has 3 bytes, and had 2"

    def test_another_config_of_the_same_size(self, copied, refused):
        text = (copied / "config.json").read_text()
        (copied / "config.json").write_text(text.replace(", ", " ,", 1))
        assert refused() == "config.json has different content"

    def test_another_header_of_the_same_size(self, copied, refused):
        path = copied / "model.safetensors"
        data = path.read_bytes()
        up, down = b"layers.0.mlp.up_proj", b"layers.1.mlp.up_proj"
        path.write_bytes(data.replace(up, b"-").replace(down, up).replace(b"-", down, 1))
        assert path.stat().st_size == len(data)
        assert refused() == "the header of model.safetensors differs"

    def test_several_changes_are_counted(self, copied, refused):
        (copied / "tokenizer.json").unlink()
        (copied / "vocab.txt").write_text("a")
        assert refused() == "tokenizer.json is gone (and 1 more changes)"


def test_another_source_will_do_if_it_is_the_same(say, plan, copied, tmp_path):
    copied.rename(tmp_path / "moved")
    assert say("reshard", "--plan", plan, tmp_path / "out").code == 4
    said = say("reshard", "--plan", plan, tmp_path / "moved", tmp_path / "out")
    assert said.code == 0, said.err
    other = llama(tmp_path / "other", num_hidden_layers=3)
    said = say("reshard", "--plan", plan, other, tmp_path / "out2")
    assert said.code == 4
    assert f"{other} has changed since" in said.err


def test_a_plan_that_would_be_done_otherwise_now_is_refused(say, plan, tmp_path):
    document = json.loads(plan.read_text())
    plan.write_text(json.dumps(document | {"plan": "0" * 32, "version": "0.0.1"}))
    said = say("reshard", "--plan", plan, tmp_path / "out")
    assert said.code == 4
    assert "shardctl 0.0.1 made it" in said.err


class TestMalformedPlans:
    """The key is named."""

    @staticmethod
    def edited(plan, keys, value):
        document = inner = json.loads(plan.read_text())
        for key in keys[:-1]:
            inner = inner[key]
        if value is None:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value
        plan.write_text(json.dumps(document))

    @pytest.mark.parametrize(
        "keys",
        [
            ["source"],
            ["plan"],
            ["version"],
            ["source", "files"],
            ["source", "files", "config.json", "size"],
            ["reshard_options", "mesh", "ep"],
            ["reshard_options", "dtype"],
            ["source_options", "config"],
        ],
        ids=".".join,
    )
    def test_a_key_that_is_missing(self, say, plan, tmp_path, keys):
        self.edited(plan, keys, None)
        said = say("reshard", "--plan", plan, tmp_path / "out")
        assert said.code == 4
        assert said.err.startswith(f"error: {plan} has no {'.'.join(keys)}\n")

    @pytest.mark.parametrize(
        ("keys", "value", "expected"),
        [
            (["source"], [], "an object"),
            (["source", "path"], 3, "a string"),
            (["source", "files", "config.json", "size"], "3", "a whole number"),
            (["source", "files", "config.json", "size"], -3, "a whole number"),
            (["reshard_options", "mesh", "axes", "tp"], 1.5, "a whole number"),
            (["reshard_options", "max_shard_size"], True, "a whole number"),
            (["reshard_options", "to"], 5, "a string"),
            (["source_options", "strict"], "yes", "true or false"),
            (["plan"], {}, "a string"),
        ],
        ids=lambda value: ".".join(value) if isinstance(value, list) else str(value),
    )
    def test_a_value_of_another_kind(self, say, plan, tmp_path, keys, value, expected):
        self.edited(plan, keys, value)
        said = say("reshard", "--plan", plan, tmp_path / "out")
        assert said.code == 4
        assert said.err.startswith(f"error: {plan} has {'.'.join(keys)} that is not {expected}\n")

    @pytest.mark.parametrize(
        "keys", [["more"], ["reshard_options", "more"], ["source_options", "more"], ["source", "more"]], ids=".".join
    )
    def test_a_key_that_is_not_known(self, say, plan, tmp_path, keys):
        self.edited(plan, keys, 1)
        said = say("reshard", "--plan", plan, tmp_path / "out")
        assert said.code == 4
        assert f"{plan} has {'.'.join(keys)}, which this shardctl does not know" in said.err

    def test_a_value_that_only_the_layouts_know(self, say, plan, tmp_path):
        self.edited(plan, ["reshard_options", "to"], "some")
        said = say("reshard", "--plan", plan, tmp_path / "out")
        assert said.code == 4
        assert "plan.json cannot be carried out: unknown layout 'some'" in said.err

    def test_a_mesh_that_is_none(self, plan):
        self.edited(plan, ["reshard_options", "mesh", "ep"], 7)
        with pytest.raises(SourceError, match=r"reshard_options\.mesh that is not a mesh: ep=7"):
            plan_file.read_plan_file(plan)

    def test_a_value_that_means_nothing(self, say, plan, tmp_path):
        self.edited(plan, ["reshard_options", "experts"], "some")
        said = say("reshard", "--plan", plan, tmp_path / "out")
        assert said.code == 4
        assert "plan.json has reshard_options.experts that is not one of keep, fused, fused@0.18, split" in said.err

    @pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"schema": "shardctl.plan/1"}', "\xff"])
    def test_what_is_no_plan(self, say, tmp_path, content):
        path = tmp_path / "plan.json"
        path.write_bytes(content.encode("latin-1"))
        said = say("reshard", "--plan", path, tmp_path / "out")
        assert said.code == 4
        assert said.err.startswith(f"error: {path} ")


class TestWriting:
    """Where plans may be written."""

    def test_an_earlier_plan_is_replaced(self, source, plan):
        decide(source, plan, CONVERSIONS["hf"])
        assert plan_file.read_plan_file(plan).reshard_options.to == "hf"

    def test_nothing_else_is(self, source, tmp_path):
        path = tmp_path / "notes.json"
        path.write_text("{}")
        with pytest.raises(DestinationError, match="is not a plan"):
            decide(source, path)
        assert path.read_text() == "{}"
        with pytest.raises(DestinationError):
            decide(source, tmp_path)

    def test_the_source_does_not_hold_its_own_plan(self, copied):
        with pytest.raises(DestinationError, match="inside the source"):
            decide(copied, copied / "plan.json")

    def test_a_folder_that_is_missing(self, source, tmp_path):
        with pytest.raises(DestinationError):
            decide(source, tmp_path / "none" / "plan.json")


def test_a_file_as_source(copied, tmp_path):
    plan = decide(copied / "model.safetensors", copied / "plan.json")
    read = plan_file.read_plan_file(plan)
    done = reshard(read.source, tmp_path / "out", plan=read)
    assert done.record.plan == read.identity
    (copied / "config.json").write_text((copied / "config.json").read_text() + "\n")
    with pytest.raises(ChangedError, match=r"config\.json has"):
        reshard(read.source, tmp_path / "again", plan=read)


def test_the_work_for_many_ranks_with_files_of_their_own_grows_with_their_number(tmp_path):
    """It grew with its square: 56,000 ranks took minutes. Calls are counted, because timings depend on the machine."""
    source = llama(tmp_path / "source", vocab_size=2048)
    calls = []
    for ranks in (400, 400, 1600):  # the first of all imports modules and fills caches
        profile = cProfile.Profile()
        profile.runcall(planning.plan, source, ReshardOptions(to="ranks", mesh=Mesh.of(fsdp=ranks)))
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert calls[2] < 5 * calls[1]


def test_a_plan_file_permits_nothing(say, tmp_path, monkeypatch):
    """Neither as it is written, nor after an edit by hand; the run itself is given the permission."""
    monkeypatch.setattr(expansion, "_EXPANSION_ALLOWANCE_BYTES", 0)
    source = tmp_path / "shared.pt"
    torch.save(dict.fromkeys((f"t{n}" for n in range(80)), torch.zeros(1 << 12)), source)
    assert say("plan", source, "--fsdp", 1, "--allow-expansion", "--out", tmp_path / "plan.json").code == 0
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["reshard_options"]["allow_expansion"] is document["source_options"]["allow_unverified"] is False
    document["reshard_options"]["allow_expansion"] = document["source_options"]["allow_unverified"] = True
    (tmp_path / "plan.json").write_text(json.dumps(document))
    found = say("reshard", "--plan", tmp_path / "plan.json", tmp_path / "out")
    assert (found.code, "add --allow-expansion" in found.err) == (4, True)
    read = plan_file.read_plan_file(tmp_path / "plan.json")
    assert not read.reshard_options.allow_expansion
    assert not read.source_options.allow_unverified
    with pytest.raises(HostileError):
        reshard(source, tmp_path / "out", plan=read)
    assert not (tmp_path / "out").exists()
    assert say("reshard", "--plan", tmp_path / "plan.json", tmp_path / "out", "--allow-expansion").code == 0


def test_a_plan_file_does_not_say_that_a_result_may_be_replaced(say, plan, copied, tmp_path):
    assert say("reshard", copied, tmp_path / "out").code == 0
    document = json.loads(plan.read_text())
    for place in (document, document["reshard_options"], document["source_options"]):
        place["overwrite"] = True
        plan.write_text(json.dumps(document))
        found = say("reshard", "--plan", plan, tmp_path / "out")
        assert (found.code, "overwrite, which this shardctl does not know" in found.err) == (4, True)
        del place["overwrite"]
    plan.write_text(json.dumps(document))
    assert say("reshard", "--plan", plan, tmp_path / "out").code == 6
