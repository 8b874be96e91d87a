import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from cli_checkpoints import llama
from fuzzed_texts import resealed

from shardctl.checkpoint.opening import open_checkpoint
from shardctl.cli.program import run
from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import _check_ranks


@pytest.fixture(scope="module")
def result(source, tmp_path_factory):
    place = tmp_path_factory.mktemp("result") / "out"
    assert run(["reshard", str(source), str(place), "--tp", "2"]) == 0
    return place


@pytest.fixture
def damaged(result, tmp_path):
    """A copy of the result with one bit of one weight turned over, in the second rank's half of it."""
    place = tmp_path / "damaged"
    shutil.copytree(result, place)
    file = next(place.glob("shard-00002-*"))
    data = bytearray(file.read_bytes())
    length = 8 + int.from_bytes(data[:8], "little")
    start = json.loads(data[8:length])["lm_head.weight"]["data_offsets"][0]
    data[length + start] ^= 0x40
    file.write_bytes(data)
    return place


def test_verify_says_what_was_checked_and_ok(say, result, source):
    found = say("verify", result, "--level", "full", "--against", source)
    assert (found.code, found.err) == (0, "")
    lines = found.out.splitlines()
    assert lines[0] == f"ok: every byte read, equal to {source}"
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["structure", "passed"],
        ["content", "passed"],
        ["identity", "passed"],
    ]
    assert lines[2].split()[2:6] == ["21", "tensors", "86.7", "kB"]
    assert lines[-1] == f"digest {say('digest', source).out.split()[0]}"


def test_the_answer_says_what_it_rests_on(say, result, source):
    def answer(*options):
        found = say("verify", *options)
        document = json.loads(say("verify", *options, "--json").out)
        assert (found.code, document["verdict"]) == (0, found.out.splitlines()[0])
        return document["verdict"]

    assert answer(result) == "ok (headers only: values were not read; add --level full)"
    assert answer(result, "--level", "full") == "ok: every byte read, equal to what was recorded"
    assert answer(result, "--against", source) == f"ok: equal to {source}"
    alone = answer(source, "--level", "full")
    assert alone == "ok: every byte read, but compared with nothing: add --against SRC; 1 warning"


def test_verify_finds_one_bit_and_answers_with_exit_code_3(say, damaged, source):
    assert say("verify", damaged).code == 0
    found = say("verify", damaged, "--level", "full")
    assert (found.code, found.err) == (3, "")
    lines = found.out.splitlines()
    assert lines[0] == "NOT OK: 1 of 21 tensors changed: lm_head.weight"
    assert lines[2].startswith("content    failed  21 tensors")
    assert lines[3].startswith("    read by safetensors ")
    assert lines[4].startswith("error: [digest] ")
    assert "shard-00002" in lines[4]
    compared = say("verify", damaged, "--level", "full", "--against", source).out.splitlines()[0]
    assert compared == f"{lines[0]} in shard-00002-model-00001-of-00001.safetensors"


def test_what_is_odd_about_either_checkpoint_is_said_with_whose_it_is(say, result, source, tmp_path):
    odd = tmp_path / "odd"
    shutil.copytree(source, odd)
    weights = {
        line["name"]: "model.safetensors"
        for line in json.loads(say("inspect", odd, "--tensors", "--json").out)["tensors"]
    }
    (odd / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 5}, "weight_map": weights})
    )
    words = "model.safetensors.index.json says 5 bytes of tensors; those that it names have 86,656"
    assert f"warning: [reading] {words}" in say("verify", odd).out.splitlines()
    found = say("verify", result, "--against", odd)
    said = found.out.splitlines()
    assert (found.code, said[0], said[3:]) == (
        0,
        f"ok: equal to {odd}; 1 warning",
        [f"warning: [reading] in {odd}: {words}"],
    )
    _, identity = json.loads(say("verify", result, "--against", odd, "--json").out)["levels"]
    assert [(each["check"], each["message"]) for each in identity["findings"]] == [("reading", f"in {odd}: {words}")]
    assert say("diff", odd, source).err == f"warning: in {odd}: {words}\n"
    assert json.loads(say("diff", result, odd, "--json").out)["warnings"] == [f"in {odd}: {words}"]


def test_verify_skips_what_makes_no_sense_any_more(say, damaged, source):
    next(damaged.glob("shard-00001-*")).unlink()
    found = say("verify", damaged, "--level", "full", "--against", source)
    assert found.code == 3
    assert [line.split()[1] for line in found.out.splitlines()[1:4]] == ["failed", "skipped", "skipped"]
    assert "files are not as recorded" in found.out


def test_verify_as_json(say, damaged):
    found = say("verify", damaged, "--level", "full", "--json")
    document = json.loads(found.out)
    assert list(document) == [
        *("schema", "status", "exit_code", "path", "against", "ok", "verdict", "digest", "unchecked", "consumer"),
        "levels",
    ]
    assert (document["schema"], document["status"], document["exit_code"]) == ("shardctl.verify/1", "no", 3)
    assert found.code == 3
    content = document["levels"][1]
    assert list(content) == [
        *(
            "name",
            "status",
            "reason",
            "tensors",
            "tensor_bytes",
            "seconds",
            "findings",
            "notes",
            "safetensors",
            "downloads",
        )
    ]
    assert set(content["findings"][0]) == {"severity", "check", "message", "tensor", "file", "box"}


def test_verify_as_junit(say, damaged, source, tmp_path):
    file = tmp_path / "verify.xml"
    assert say("verify", damaged, "--level", "full", "--against", source, "--junit", file).code == 3
    root = ET.parse(file).getroot()  # noqa: S314 - our own file
    assert [(suite.get("name"), suite.get("failures")) for suite in root] == [
        ("structure", "0"),
        ("content", "1"),
        ("identity", "1"),
    ]
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("3", "2", "0")
    failure = root.find("testsuite[@name='content']/testcase[@name='content']/failure")
    assert "has changed" in failure.get("message")


def test_skipped_levels_are_skipped_in_junit(say, damaged, tmp_path):
    next(damaged.glob("shard-00001-*")).unlink()
    say("verify", damaged, "--level", "full", "--junit", tmp_path / "verify.xml")
    root = ET.parse(tmp_path / "verify.xml").getroot()  # noqa: S314 - our own file
    assert root.get("skipped") == "1"
    assert root.find("testsuite[@name='content']/testcase/skipped").get("message") == "files are not as recorded"


def test_verify_as_markdown(say, damaged, tmp_path):
    file = tmp_path / "summary.md"
    say("verify", damaged, "--level", "full", "--summary", file)
    text = file.read_text()
    assert text.startswith("### shardctl verify: NOT OK: 1 of 21 tensors changed: lm\\_head.weight\n")
    assert (
        "| level | status | tensors | read | time | rate |\n|---|---|---|---|---|---|\n| structure | passed |" in text
    )
    assert "| error | digest |" in text


def test_a_report_that_cannot_be_written_is_an_error(say, result, tmp_path):
    assert say("verify", result, "--junit", tmp_path / "no" / "such.xml").code == 6


def test_diff_of_equal_checkpoints_in_two_layouts(say, source, result):
    assert say("diff", source, result) == (0, "equal: 21 tensors (86.7 kB compared)\n", "")


def test_diff_names_the_tensor_and_the_first_element(say, source, damaged):
    found = say("diff", source, damaged)
    assert (found.code, found.err) == (3, "")
    answer, change, _, layer = found.out.splitlines()
    assert re.fullmatch(r"  +\d+\.\d{3}%  1 of 1 tensor  lm_head *", layer)
    where = "~ lm_head.weight  F32 [96, 32]  1 of 3,072 elements differ, first at [48:49, 0:1]"
    assert change.startswith(f"{where}, apart by ")
    assert answer == "1 of 21 tensors: values differ (86.7 kB compared)"


def test_diff_of_other_tensors(say, source, tmp_path):
    deeper = llama(tmp_path / "deeper", num_hidden_layers=3, tie_word_embeddings=True)
    found = say("diff", source, deeper)
    assert found.code == 3
    assert found.out.splitlines()[0].endswith("settings not the same")
    assert f" only in {source}" in found.out.splitlines()[0]
    assert f" only in {deeper}" in found.out.splitlines()[0]
    assert "- lm_head.weight  F32 [96, 32]\n" in found.out
    assert "+ model.layers.2.mlp.up_proj.weight  F32 [48, 32]\n" in found.out


def test_diff_says_how_tensors_differ_and_prints_the_first_twenty(say, source, tmp_path):
    assert say("reshard", source, tmp_path / "bf16", "--dtype", "bf16").code == 0
    lines = say("diff", source, tmp_path / "bf16").out.splitlines()
    assert lines[0].startswith("21 of 21 tensors: F32 -> BF16, equal after rounding (86.7 kB compared)")
    assert (len(lines), lines[-1]) == (22, "and 2 more; --all prints them")
    every = say("diff", source, tmp_path / "bf16", "--all").out.splitlines()
    assert (len(every), every[:21]) == (23, lines[:21])


def test_diff_as_json(say, source, damaged):
    document = json.loads(say("diff", source, damaged, "--json").out)
    assert list(document) == [
        *("schema", "status", "exit_code", "a", "b", "equal", "verdict", "equal_tensors", "compared_bytes"),
        *("changes", "config_changes", "file_changes", "layers", "delta", "warnings"),
    ]
    assert (document["schema"], document["exit_code"], document["equal"]) == ("shardctl.diff/1", 3, False)
    assert set(document["changes"][0]) == {*("tensor", "kind", "a", "b", "count", "size", "first", "distance", "cast")}
    assert set(document["changes"][0]["distance"]) == {"largest", "mean", "relative", "nonfinite", "rounding"}


def test_digest_is_one_line_and_equal_for_every_layout(say, source, result):
    line = say("digest", source).out
    assert line.startswith("shardctl1:")
    assert line.endswith(f"  {source}\n")
    assert line.count("\n") == 1
    assert say("digest", result).out.split()[0] == line.split()[0]


def test_digest_of_each_tensor(say, source):
    lines = say("digest", source, "--tensors").out.splitlines()
    assert len(lines) == 22
    assert lines[0].endswith("  F32  [96, 32]  lm_head.weight")
    assert lines[-1] == say("digest", source).out.rstrip()


def test_digest_of_which_another_is_expected(say, source):
    digest = say("digest", source).out.split()[0]
    other = f"{digest[:-1]}{(int(digest[-1], 16) + 1) % 16:x}"
    assert say("digest", source, "--expect", digest).code == 0
    found = say("digest", source, "--expect", other)
    assert found.code == 3
    assert found.out.splitlines()[-1] == f"FAILED: {other} was expected"
    found = json.loads(say("digest", source, "--expect", other, "--json").out)
    assert [found["status"], found["exit_code"], found["digest"], found["expected"]] == ["no", 3, digest, other]
    for failed in ("", "error", digest[:-1], f"{digest}\n"):
        assert say("digest", source, "--expect", failed).code == 2


def test_digest_as_json(say, source):
    document = json.loads(say("digest", source, "--tensors", "--json").out)
    assert list(document) == [
        *[
            "schema",
            "status",
            "exit_code",
            "path",
            "digest",
            "expected",
            "tensor_bytes",
            "source_hashes",
            "warnings",
            "tensors",
        ]
    ]
    assert document["source_hashes"] == {"verified": [], "unverified": {}}, "of a directory nothing is promised"
    assert set(document["tensors"]["lm_head.weight"]) == {"digest", "dtype", "shape"}


def test_stages_of_fewer_layers_than_tensors_name_are_said_and_no_bug(tmp_path):
    """A model of which only a part is recognised has such stages."""
    reshard(llama(tmp_path / "llama"), tmp_path / "cut", ReshardOptions(mesh=Mesh.of(pp=2, tp=2)))
    (tmp_path / "cut/shardctl.json").unlink()
    with open_checkpoint(tmp_path / "cut") as checkpoint:
        given = replace(checkpoint, given_mesh=Mesh.of(pp=2, tp=2), given_stages=(1, 0))
        (found,) = _check_ranks(given, set())
    assert found.severity == "warning"
    assert "tensors name 2 layers, and the stages have 1" in found.message


def test_stages_of_a_record_that_have_other_layers_than_the_model(say, source, tmp_path):
    out = tmp_path / "out"
    assert say("reshard", source, out, "--tp", 2, "--pp", 2).code == 0
    raw = json.loads((out / "shardctl.json").read_text())
    (out / "shardctl.json").write_bytes(resealed(raw | {"stages": [1, 100]}))
    code, said, _ = say("verify", out)
    assert code == 3
    assert "the model has 2 layers, and the stages have 101" in said


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_type_of_a_config_that_was_given_is_not_that_of_the_weights(say, source, tmp_path, dtype):
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    assert say("reshard", source, tmp_path / "out", "--tp", 2).code == 0
    found = say("verify", tmp_path / "out", "--against", source, "--config", tmp_path / "config.json")
    assert found.code == 0, found.out
