"""The levels of `verify`: what each proves, what it says, and what becomes of one that cannot be run."""

from __future__ import annotations

import json
import shutil
import sys
from math import inf
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import shardctl.running.device_levels
from shardctl.base.errors import UsageError
from shardctl.cli.program import run
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.report.annotations import MOST, format_github_annotations
from shardctl.running import forward as forward_level
from shardctl.running.forward import (
    BlockError,
    DistanceTolerance,
    ForwardResult,
    GeneratedTexts,
    PromptContinuation,
    SecondOpinion,
)
from shardctl.running.forward.by_processes import choose_process_count
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify
from shardctl.verify.finding import CheckFinding
from shardctl.verify.forward_result import ComputedShare, JoinedWeights
from shardctl.verify.level import LevelResult, VerifyResult

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
GPU = torch.cuda.is_available()


def checkpoint(place, config="llama", **changes):
    said = {**json.loads((CONFIGS / f"{config}.json").read_text()), "dtype": "float32", **changes}
    random = np.random.default_rng(11)
    tensors = {t.name: random.standard_normal(t.shape, np.float32) for t in describe_model(said).own()}
    place.mkdir(parents=True)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps(said))
    return place


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    base = tmp_path_factory.mktemp("levels")
    checkpoint(base / "source", num_attention_heads=4, num_key_value_heads=2)
    for name, mesh in (("fsdp3", Mesh.of(fsdp=3)), ("tp2pp2", Mesh.of(tp=2, pp=2))):
        reshard(base / "source", base / name, ReshardOptions(mesh=mesh))
    return base


@pytest.fixture
def source(kept):
    return kept / "source"


@pytest.fixture
def ranks(kept, tmp_path):
    return shutil.copytree(kept / "tp2pp2", tmp_path / "ranks")


@pytest.fixture
def say(capfd, monkeypatch):
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)

    def call(*args):
        code = run([str(arg) for arg in args])
        return code, *capfd.readouterr()

    return call


def level(verified, name):
    return next(found for found in verified.levels if found.name == name)


def flip(file, name, bit=6):
    """Turn over one bit of the first element of an array; returns the file's name."""
    data = bytearray(file.read_bytes())
    length = 8 + int.from_bytes(data[:8], "little")
    data[length + json.loads(data[8:length])[name]["data_offsets"][0]] ^= 1 << bit
    file.write_bytes(data)
    return file.name


def shard(place, rank):
    return next(place.glob(f"shard-{rank + 1:05d}-*"))


UP = "model.layers.0.mlp.up_proj.weight"


class TestLoad:
    def test_every_rank_is_loaded_and_equal_to_the_source(self, ranks, source):
        found = verify(ranks, VerifyOptions(level="load", against=source, device="cpu"))
        assert [(one.name, one.status) for one in found.levels] == [
            (name, "passed") for name in ("structure", "content", "identity", "load")
        ]
        loaded = level(found, "load")
        sizes = [sum(tensor.nbytes for tensor in load_file(shard(ranks, rank)).values()) for rank in range(4)]
        assert [one.nbytes for one in loaded.ranks] == sizes
        assert [one.planned_bytes for one in loaded.ranks] == sizes, "what plan says, for nothing is tied"
        assert [one.peak_bytes for one in loaded.ranks] == sizes
        assert [(one.rank, one.label, one.device) for one in loaded.ranks] == [
            (0, "pp0 tp0", "cpu"), (1, "pp0 tp1", "cpu"), (2, "pp1 tp0", "cpu"), (3, "pp1 tp1", "cpu"),
        ]  # fmt: skip
        assert loaded.nbytes == sum(sizes)

    def test_the_digests_are_enough_where_there_is_no_source(self, ranks, kept):
        assert level(verify(ranks, VerifyOptions(level="load")), "load").status == "passed"
        assert level(verify(kept / "source", VerifyOptions(level="load")), "load").status == "passed"

    @pytest.mark.parametrize("against", [True, False])
    def test_what_is_not_there_on_the_device_is_found(self, ranks, source, against):
        name = flip(shard(ranks, 1), UP)
        found = verify(ranks, VerifyOptions(level="load", against=source if against else None, device="cpu"))
        loaded = level(found, "load")
        assert loaded.status == "failed"
        (finding,) = loaded.findings
        assert finding.tensor == UP
        assert name in finding.message
        if against:
            assert finding.file == name
            assert f"{UP} on rank 1 (pp0 tp1), from {name}, differs from the source in 1 elements" in finding.message
            assert finding.box == "[24:25, 0:1]"

    def test_a_copy_that_differs_is_found_by_the_rank_that_holds_it(self, ranks):
        name = flip(shard(ranks, 3), "model.norm.weight")
        loaded = level(verify(ranks, VerifyOptions(level="load")), "load")
        assert f"model.norm.weight [0:32] on rank 3 (pp1 tp1), from {name}, differs from another rank" in (
            loaded.findings[0].message
        )

    def test_a_cast_is_applied_before_it_is_compared(self, source, tmp_path):
        reshard(source, tmp_path / "half", ReshardOptions(mesh=Mesh.of(tp=2), dtype="bf16"))
        assert verify(tmp_path / "half", VerifyOptions(level="load", against=source)).ok

    @pytest.mark.parametrize(
        ("config", "reshard_options"),
        [
            ("gpt2", ReshardOptions(mesh=Mesh.of(tp=2))),
            ("mixtral", ReshardOptions(mesh=Mesh.of(dp=4, ep=2, etp=2), experts="fused")),
            ("mixtral", ReshardOptions(mesh=Mesh.of(dp=2, ep=2), experts="split")),
            ("qwen2-tied", ReshardOptions(mesh=Mesh.of(pp=2, tp=2))),
            ("phi3", ReshardOptions(mesh=Mesh.of(fsdp=2, tp=2))),
        ],
    )
    def test_other_forms(self, tmp_path, config, reshard_options):
        checkpoint(tmp_path / "source", config)
        reshard(tmp_path / "source", tmp_path / "ranks", reshard_options)
        for against in (tmp_path / "source", None):
            found = verify(tmp_path / "ranks", VerifyOptions(level="load", against=against))
            assert found.ok, found.findings
            assert all(one.planned_bytes is not None for one in level(found, "load").ranks)

    @pytest.mark.skipif(GPU, reason="there is a GPU")
    def test_where_no_device_is_asked_for_and_none_is_there_little_is_loaded_at_once(self, ranks, monkeypatch):
        whole = level(verify(ranks, VerifyOptions(level="load", device="cpu")), "load")
        monkeypatch.setattr(shardctl.running.device_levels, "_LOAD_BATCH_BYTES", 5000)
        parts = level(verify(ranks, VerifyOptions(level="load")), "load")
        assert [r.nbytes for r in parts.ranks] == [r.nbytes for r in whole.ranks]
        assert [r.peak_bytes for r in parts.ranks] == [r.peak_bytes for r in whole.ranks]
        assert parts.status == "passed"
        assert "each rank was loaded on the CPU in parts" in parts.notes[0]
        assert whole.notes == []
        name = flip(shard(ranks, 3), "lm_head.weight")
        assert name in level(verify(ranks, VerifyOptions(level="load")), "load").findings[0].message

    def test_a_rank_that_takes_more_than_it_may(self, say, ranks):
        code, out, _ = say("verify", ranks, "--load", "cpu", "--device-memory", "20kB")
        assert code == 3
        assert "error: [memory] rank 0 (pp0 tp0) took" in out
        assert "of which it may take 20,000" in out
        assert say("verify", ranks, "--load", "cpu", "--device-memory", "1MB")[0] == 0

    def test_text_json_and_reports(self, say, ranks, tmp_path):
        code, out, _ = say(
            "verify", ranks, "--load", "cpu", "--summary", tmp_path / "s.md", "--junit", tmp_path / "j.xml"
        )
        assert code == 0
        (line,) = (line.split() for line in out.splitlines() if line.startswith("    rank 3 (pp1 tp1)"))
        assert line[4] == "cpu"
        assert (line[-6], line[-3]) == ("peak", "plan")
        assert line[-5:-3] == line[-2:]
        assert "| rank 3 (pp1 tp1) | cpu |" in (tmp_path / "s.md").read_text()
        suite = ET.parse(tmp_path / "j.xml").getroot().find("testsuite[@name='load']")  # noqa: S314 - our own file
        assert [one.get("name") for one in suite.iter("property")] == [f"rank {n}" for n in range(4)]
        document = json.loads(say("verify", ranks, "--load", "cpu", "--json")[1])["levels"][-1]
        assert (document["name"], document["status"]) == ("load", "passed")
        assert set(document["ranks"][0]) == {
            *("rank", "label", "device", "loaded_bytes", "seconds", "peak_bytes", "planned_bytes")
        }


class TestUnchecked:
    def test_what_was_not_looked_at_is_said(self, say, ranks, tmp_path):
        headers = "not checked: only headers were read; --level full reads every byte"
        nothing = "not checked: there is no shardctl.json, so values were compared with nothing; --against SRC compares"
        foreign = shutil.copytree(ranks, tmp_path / "foreign")
        (foreign / "shardctl.json").unlink()
        for place, options, said in (
            (ranks, (), [headers]),
            (ranks, ("--level", "full"), []),
            (foreign, (), [headers, nothing]),
            (foreign, ("--level", "full"), [nothing]),
            (foreign, ("--against", ranks), []),
        ):
            code, out, _ = say("verify", place, *options, "--summary", tmp_path / "s.md")
            assert code == 0
            found = [line for line in out.splitlines() if line.startswith("not checked: ")]
            assert len(found) == len(said)
            assert all(map(str.startswith, found, said))
            document = json.loads(say("verify", place, *options, "--json")[1])
            assert document["unchecked"] == [line.removeprefix("not checked: ") for line in found]
            assert (tmp_path / "s.md").read_text().count("Not checked: ") == len(said)


class TestSkipped:
    @pytest.mark.skipif(GPU, reason="there is a GPU")
    def test_a_level_that_cannot_be_run_is_skipped_and_said_so(self, say, ranks, tmp_path):
        code, out, _ = say("verify", ranks, "--load", "cuda", "--require", "full", "--junit", tmp_path / "j.xml")
        assert code == 0
        assert "load       skipped\n" in out
        assert out.splitlines()[0] == "ok, but skipped: load"
        assert "skipped: load: there is no CUDA device for cuda" in out
        root = ET.parse(tmp_path / "j.xml").getroot()  # noqa: S314 - our own file
        assert (root.get("skipped"), root.get("failures")) == ("1", "0")

    @pytest.mark.skipif(GPU, reason="there is a GPU")
    def test_unless_it_is_required(self, say, ranks, tmp_path, monkeypatch):
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        assert say("verify", ranks, "--load", "cuda")[0] == 3, "it was asked for"
        code, out, err = say("verify", ranks, "--load", "cuda", "--require", "load", "--junit", tmp_path / "j.xml")
        assert code == 3
        assert out.splitlines()[0] == "NOT OK: load is required and was skipped"
        assert f"::error file={ranks},title=shardctl load::load is required and was skipped: there is no CUDA" in err
        root = ET.parse(tmp_path / "j.xml").getroot()  # noqa: S314 - our own file
        assert (root.get("skipped"), root.get("failures")) == ("0", "1")
        assert say("verify", ranks, "--load", "cuda", "--require", "full")[0] == 0

    def test_what_is_required_is_run(self, say, ranks):
        names = [one["name"] for one in json.loads(say("verify", ranks, "--require", "full", "--json")[1])["levels"]]
        assert names == ["structure", "content"]

    def test_without_torch(self, ranks, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        found = verify(ranks, VerifyOptions(level="forward"))
        assert [one.status for one in found.levels] == ["passed", "passed", "skipped", "skipped"]
        assert all("pip install 'torch>=2.9' 'transformers>=5.17'" in one.reason for one in found.levels[2:])
        assert not any(one.notes for one in found.levels)
        assert not found.ok
        assert verify(ranks, VerifyOptions(level="forward", require="full")).ok

    def test_an_unknown_level(self, say, ranks):
        assert say("verify", ranks, "--level", "all")[0] == 2
        assert say("verify", ranks, "--require", "identity")[0] == 2


class TestWrongFiles:
    """Every one is named, with what shardctl remembers and, where it can be told, without."""

    @pytest.mark.parametrize("level", ["quick", "full"])
    def test_two_ranks_files_exchanged(self, say, ranks, level):
        one, other = shard(ranks, 0), shard(ranks, 1)
        kept = one.rename(ranks / "kept")
        other.rename(one)
        kept.rename(other)
        code, out, err = say("verify", ranks, "--level", level)
        assert code == 3
        assert one.name in out + err
        assert other.name in out + err

    def test_a_stale_shard_of_another_run(self, say, kept, ranks, tmp_path):
        checkpoint(tmp_path / "source", num_attention_heads=4, num_key_value_heads=2)
        values = load_file(tmp_path / "source" / "model.safetensors")
        save_file({n: v + 1 for n, v in values.items()}, tmp_path / "source" / "model.safetensors", {"format": "pt"})
        reshard(tmp_path / "source", tmp_path / "other", ReshardOptions(mesh=Mesh.of(tp=2, pp=2)))
        stale = shard(ranks, 2)
        shutil.copy(shard(tmp_path / "other", 2), stale)
        code, out, _ = say("verify", ranks, "--level", "full")
        assert code == 3
        assert stale.name in out
        code, out, _ = say("verify", ranks, "--against", kept / "source")
        assert code == 3
        assert f"in {stale.name}" in out
        (ranks / "shardctl.json").unlink()
        code, out, _ = say("verify", ranks, "--level", "full")
        assert code == 3
        assert f"copies differ in 32 elements, first at [0:1] in {shard(ranks, 3).name}" in out, "of tp ranks 2 and 3"

    def test_a_shard_of_another_mesh(self, say, kept, ranks):
        shutil.copy(shard(kept / "fsdp3", 1), ranks / "shard-00005-model-00001-of-00001.safetensors")
        for _ in range(2):
            code, out, err = say("verify", ranks)
            assert code in {3, 4}
            assert "shard-00005" in out + err
            (ranks / "shardctl.json").unlink(missing_ok=True)

    def test_without_a_record_the_mesh_is_named(self, say, ranks, source):
        (ranks / "shardctl.json").unlink()
        _, out, _ = say("verify", ranks)
        assert (
            "shardctl did not check which rank should hold what: neither shardctl.json nor --mesh names the mesh" in out
        )
        mesh = ("--mesh", "pp=2,tp=2")
        code, out, _ = say("verify", ranks, *mesh, "--forward", "--against", source)
        assert (code, "was not checked" in out, "4 virtual ranks in one process" in out) == (0, False, True)
        for mesh in ("tp=4", "tp=2,pp=2", "fsdp=2,tp=2", "tp=2", "pp=2"):
            assert say("verify", ranks, "--mesh", mesh)[0] in {2, 3}, mesh
        one, other = shard(ranks, 0), shard(ranks, 2)
        one_name, other_name = one.name, other.name
        one.rename(ranks / "x")
        other.rename(ranks / one_name)
        (ranks / "x").rename(ranks / other_name)
        code, out, _ = say("verify", ranks, "--mesh", "pp=2,tp=2")
        assert code == 3
        assert "which the mesh does not give to it" in out

    def test_a_mesh_for_what_has_no_ranks(self, say, ranks, source):
        assert say("verify", source, "--mesh", "tp=2")[0] == 2
        assert say("verify", ranks, "--mesh", "tp=4")[0] == 2
        assert say("verify", ranks, "--stages", "1,1")[0] == 2

    def test_a_rank_file_that_is_missing(self, say, ranks):
        gone = shard(ranks, 1)
        gone.unlink()
        code, out, _ = say("verify", ranks)
        assert code == 3
        assert f"{gone.name} is missing" in out
        (ranks / "shardctl.json").unlink()
        code, out, err = say("verify", ranks)
        assert code in {3, 4}
        assert "are stored in no file; the rest is in shard-00001" in out + err

    def test_all_rank_files_missing(self, say, ranks):
        for rank in range(4):
            shard(ranks, rank).unlink()
        code, out, _ = say("verify", ranks)
        assert code == 3
        assert "shard-00004-model-00001-of-00001.safetensors is missing" in out

    @pytest.mark.wrong_result
    def test_a_fused_projection_that_was_cut_as_one(self, say, tmp_path):
        """Every element is there once, and the ranks compute nonsense."""
        checkpoint(tmp_path / "phi3", "phi3")
        rules = """
            [rules]
            "model.layers.*.mlp.gate_up_proj.weight" = ["tp"]
            """
        (tmp_path / "rules.toml").write_text(rules)
        assert (
            say("reshard", tmp_path / "phi3", tmp_path / "cut", "--rules", tmp_path / "rules.toml", "--tp", 2)[0] == 0
        )
        for _ in range(2):
            code, out, _ = say("verify", tmp_path / "cut", "--level", "full", "--against", tmp_path / "phi3")
            assert code == 3
            assert [line.split()[1] for line in out.splitlines()[1:4]] == ["failed", "passed", "passed"]
            assert "error: [alignment] model.layers.0.mlp.gate_up_proj.weight is not cut as" in out
            (tmp_path / "cut" / "shardctl.json").unlink(missing_ok=True)


RESULT = ForwardResult(
    "failed",
    engine="4 virtual ranks in one process",
    versions={"torch": "2.11.0", "transformers": "5.17.0"},
    blocks=(
        BlockError("model.embed_tokens", 0.0),
        BlockError("model.layers.1", 0.25, "rank 1 (tp1)"),
        BlockError("lm_head", inf),
    ),
    share=ComputedShare(0.75, (JoinedWeights("joined: it is loose", 0.25, ("bias",)),)),
    output="logits",
    output_error=0.125,
    flips=3,
    positions=64,
    tolerance=DistanceTolerance(1e-5, 1e-4, 1e-4, 6.5e-6),
    findings=(CheckFinding("error", "forward", "model.layers.1 computes something else", "model.layers.1"),),
    notes=("attention was assembled",),
    opinion=SecondOpinion("differs", "rank 1 is off", 0.5),
    generated=GeneratedTexts(
        "Once", PromptContinuation((1, 2), " upon a time"), PromptContinuation((1, 3), " in a while")
    ),
    read_bytes=1000,
)


class TestForward:
    def test_the_model_of_the_shards_computes_what_the_source_computes(self, ranks, source):
        found = verify(ranks, VerifyOptions(level="forward", against=source, device="cpu"))
        assert found.ok, found.findings
        result = level(found, "forward").forward
        assert result.worst.error < 1e-5
        assert result.output_error < 1e-5

    @pytest.fixture
    def told(self, monkeypatch):
        """What the forward pass is asked, and an answer."""
        asked = []

        def forward(*args):
            asked.append(args)
            return RESULT

        monkeypatch.setattr(forward_level, "compare_forward_passes", forward)
        return asked

    def test_what_it_is_asked(self, say, ranks, source, told):
        say("verify", ranks, "--against", source, "--prompt", "Once", "--tokens", 3, "--dtype", "bf16", "--load", "cpu")
        ((candidate, original, options),) = told
        assert (options.dtype, options.device, options.prompt, options.tokens) == ("bf16", "cpu", "Once", 3)
        assert not options.second_opinion
        assert (str(candidate.mesh), candidate.stages) == ("pp2 x tp2", (1, 1))
        assert original.folder == source
        assert not [name for name in original.stored.files if name.startswith("shard")]

    @pytest.mark.parametrize(("given", "processes"), [((), 0), (["--virtual"], 0), (["--processes", 3], 3)])
    def test_in_how_many_processes(self, say, ranks, told, given, processes):
        say("verify", ranks, "--forward", "--load", "cpu", *given)
        assert told[0][2].processes == processes

    def test_processes_of_their_own_are_for_large_models(self):
        assert choose_process_count(["cpu"], 1 << 30) == 0
        assert choose_process_count(["cpu"], 8 << 30) >= 1

    def test_a_comparison_with_itself_is_said_to_be_one(self, say, ranks, source):
        _, out, _ = say("verify", source, "--forward")
        assert "note: forward: the model was compared with itself, which shows only that it runs" in out
        (ranks / "shardctl.json").unlink()
        _, out, _ = say("verify", ranks, "--forward")
        assert "note: forward: neither shardctl.json nor --mesh says which mesh the ranks form" in out
        assert "note: forward: the model was compared with itself, which shows only that it runs" in out
        code, out, _ = say("verify", ranks, "--forward", "--against", source)
        assert code == 0
        assert "compared with" not in out

    def test_text(self, say, ranks, told):
        code, out, _ = say("verify", ranks, "--forward", "--load", "cpu")
        assert len(told) == 1
        assert code == 3
        assert [line.rstrip() for line in out.splitlines() if line.startswith(("    ", "note"))][5:] == [
            "    engine          4 virtual ranks in one process, fp32 on cpu; torch 2.11.0, transformers 5.17.0",
            "    by ranks        75.0% of the weights, each rank with what it holds",
            "    not by ranks    25.0% of the weights, bias: joined: it is loose",
            "    worst block     lm_head not comparable, allowed 1e-05, rounding 6.5e-06",
            "    logits          1.2e-01 off, allowed 1e-04; 3 of 64 positions choose another token",
            "    second opinion  transformers' tensor parallelism differs, 5.0e-01 off",
            "    prompt          'Once'",
            "    source          ' upon a time'",
            "    shards          ' in a while'",
            (
                "note: forward: the model was compared with the same elements on one device; --against "
                "SRC compares with the source"
            ),
            "note: forward: attention was assembled",
        ]
        assert "error: [forward] model.layers.1 computes something else" in out

    def test_json(self, say, ranks, told):
        document = json.loads(say("verify", ranks, "--forward", "--load", "cpu", "--json")[1])["levels"][-1]
        assert len(told) == 1
        assert document["status"] == "failed"
        forward = document["forward"]
        assert forward["worst"] == {"name": "lm_head", "error": None}
        assert forward["blocks"][1] == {
            "name": "model.layers.1",
            "error": 0.25,
            "rank": "rank 1 (tp1)",
            "miscut": False,
            "cosine": 1.0,
            "largest": 0.0,
        }
        joined = {"reason": "joined: it is loose", "share": 0.25, "names": ["bias"]}
        assert forward["share"] == {"own": 0.75, "joined": [joined]}
        assert forward["generated"]["same"] is False
        assert forward["opinion"] == {"status": "differs", "reason": "rank 1 is off", "error": 0.5}
        assert forward["tolerance"]["floor"] == 6.5e-6

    def test_reports(self, say, ranks, told, tmp_path):
        say(
            "verify", ranks, "--forward", "--load", "cpu", "--junit", tmp_path / "j.xml", "--summary", tmp_path / "s.md"
        )
        assert len(told) == 1
        suite = ET.parse(tmp_path / "j.xml").getroot().find("testsuite[@name='forward']")  # noqa: S314 - our own file
        properties = {one.get("name"): one.get("value") for one in suite.iter("property")}
        assert properties["worst block"].startswith("lm_head")
        assert suite.get("failures") == "1"
        assert "| engine | 4 virtual ranks in one process" in (tmp_path / "s.md").read_text()


def test_reports_of_what_cannot_be_read(say, ranks, tmp_path, monkeypatch):
    junit, summary = tmp_path / "j.xml", tmp_path / "s.md"
    assert say("verify", ranks, "--junit", junit, "--summary", summary)[0] == 0
    case = ET.parse(junit).getroot().find("testsuite/testcase")  # noqa: S314 - our own file
    assert float(case.get("time")) >= 0
    assert "shardctl verify: ok" in summary.read_text()
    shard(ranks, 1).write_bytes(b"no header")
    (ranks / "shardctl.json").unlink()
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    code, *said = say("verify", ranks, "--junit", junit, "--summary", summary)
    assert code == 4
    root = ET.parse(junit).getroot()  # noqa: S314
    assert (root.get("tests"), root.get("errors"), root.get("failures")) == ("1", "1", "0")
    assert shard(ranks, 1).name in root.find("testsuite/testcase/error").get("message")
    assert "shardctl verify: NOT VERIFIED" in summary.read_text()
    assert "::error file=" in "".join(said)


def test_an_old_report_does_not_stay(ranks, tmp_path, monkeypatch):
    def end(*_args, **_options):
        raise KeyboardInterrupt

    (tmp_path / "j.xml").write_text("<old/>")
    monkeypatch.setattr("shardctl.verbs.verify.verify", end)
    run(["verify", str(ranks), "--junit", str(tmp_path / "j.xml")])
    assert not (tmp_path / "j.xml").exists()


def test_annotations_are_at_most_ten_and_one_line_each():
    many = LevelResult("content")
    many.add(CheckFinding("error", "digest", f"w{n} 100%\nbroken", f"w{n}", f"a,b:{n}.safetensors") for n in range(30))
    lines = format_github_annotations(VerifyResult("dir", "", "", (many,))).splitlines()
    assert len(lines) == MOST
    assert lines[0] == "::error file=dir/a%2Cb%3A0.safetensors,title=shardctl digest::w0 100%25\\nbroken"
    said = "NOT OK: 30 of 30 tensors changed: first w0 in a,b:0.safetensors; 21 more findings"
    assert lines[-1] == f"::error file=dir,title=shardctl verify::{said}"
    assert format_github_annotations(VerifyResult("dir", "", "", (LevelResult("content"),))) == ""


@pytest.mark.parametrize("layout", ["dcp", "torch_dist"])
def test_boxes_of_one_name_in_one_file_are_loaded_each_for_itself(tmp_path, layout):
    """A rank of GPT-2 has three boxes of every fused c_attn, and one of Megatron has boxes of every layer."""
    source = checkpoint(tmp_path / "source", "gpt2")
    reshard(source, tmp_path / layout, ReshardOptions(to=layout, mesh=Mesh.of(tp=2)))
    verified = verify(tmp_path / layout, VerifyOptions(level="load", against=source))
    assert level(verified, "load").status == "passed", verified.findings


@pytest.mark.parametrize("layout", ["trtllm", "vllm"])
def test_ranks_of_other_libraries_are_loaded_one_by_one(tmp_path, kept, layout):
    reshard(kept / "source", tmp_path / layout, ReshardOptions(to=layout, mesh=Mesh.of(tp=2)))
    load = level(verify(tmp_path / layout, VerifyOptions(level="load", against=kept / "source")), "load")
    assert load.status == "passed", load.findings
    assert [(rank.rank, rank.label, rank.planned_bytes) for rank in load.ranks] == [(0, "tp0", None), (1, "tp1", None)]


def test_what_orbax_wrote_is_verified_too(tmp_path):
    """Its arrays are no files of the directory; what was made of it has the names of the rule file already."""
    pytest.importorskip("tensorstore", reason="needs tensorstore")
    orbax, right = CONFIGS.parent / "orbax", CONFIGS.parent / "trtllm" / "llama_pp3" / "source"
    source_options = SourceOptions(rules=orbax / "names.toml", config=right / "config.json")
    found = verify(orbax / "zarr", VerifyOptions(level="full"), source_options=source_options)
    assert found.ok, found.findings
    assert found.digest == digest(right).digest
    reshard(orbax / "zarr", tmp_path / "cut", ReshardOptions(mesh=Mesh.of(tp=2)), source_options=source_options)
    assert verify(tmp_path / "cut", VerifyOptions(against=orbax / "zarr"), source_options=source_options).ok


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ({"processes": 2}, "--forward or --engine"),
        ({"dtype": "bf16"}, "--forward or --engine"),
        ({"virtual": True, "level": "load"}, "--forward"),
        ({"device_memory": 1 << 30, "level": "full"}, "--load DEVICE"),
        ({"tokens": 3, "forward": True}, "--prompt TEXT"),
        ({"engine_python": Path("python"), "forward": True}, "--engine"),
    ],
)
def test_an_option_of_a_level_that_is_not_run_is_refused(tmp_path, given, needed):
    """`verify --processes 2` said ok without running anything."""
    with pytest.raises(UsageError, match=f"has an effect only with {needed}\n"):
        verify(tmp_path, VerifyOptions(**given))


def test_a_checkpoint_without_tensors_is_not_whole(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    found = verify(tmp_path, VerifyOptions(level="full"))
    assert not found.ok
    said = [finding.message for finding in found.findings if finding.severity == "error"]
    assert said == ["there is no tensor in it"]


def test_a_checkpoint_that_is_compared_with_itself_says_so(tmp_path):
    """A path that was typed twice is no proof."""
    checkpoint(tmp_path / "one")
    said = "--against names the checkpoint itself, so its values were compared with no other"
    (tmp_path / "link").symlink_to(tmp_path / "one")
    for path in (tmp_path / "one", tmp_path / "link"):
        assert said in verify(path, VerifyOptions(against=tmp_path / "one")).unchecked
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert said not in verify(tmp_path / "one", VerifyOptions(against=tmp_path / "two")).unchecked
