"""No run removes a file that shardctl did not write, or writes a plan, a report or a log over a file that it reads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import get_args

import pytest

from shardctl.cli.app import FUNCTIONS
from shardctl.cli.chosen_settings import _list_parameters
from shardctl.options.declaration import PathAccess
from shardctl.storage.path_overlap import find_same_file, is_same_or_inside

OUTPUTS = [
    ("inspect", "--log"),
    ("plan", "--log"),
    ("reshard", "--log"),
    ("verify", "--log"),
    ("verify", "--junit"),
    ("verify", "--summary"),
    ("digest", "--log"),
]


WEIGHTS = ("model/model.safetensors", "hard", "soft")


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def place(source, tmp_path, monkeypatch):
    """A folder to work in, with a checkpoint `model` of one's own."""
    shutil.copytree(source, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def record(source, tmp_path_factory):
    """A record that shardctl wrote."""
    from shardctl.cli.program import run

    out = tmp_path_factory.mktemp("record") / "out"
    assert run(["reshard", str(source), str(out), "--tp", "2", "-q"]) == 0
    return (out / "shardctl.json").read_bytes()


RECORDS = {
    "notes": lambda _: b"notes\n",
    "empty": lambda _: b"",
    "object": lambda _: b"{}",
    "cut short": lambda record: record[: len(record) // 2],
    "changed": lambda record: record.replace(b'"layout": "ranks"', b'"layout": "hf"'),
    "later": lambda record: record.replace(b"shardctl.checkpoint/1", b"shardctl.checkpoint/2"),
    "other tool": lambda _: json.dumps({"name": "shardctl", "files": {"thesis.txt": 6}}).encode(),
}


class TestOverwrite:
    @pytest.mark.parametrize("kind", RECORDS)
    def test_a_directory_whose_record_cannot_be_read_is_not_replaced(self, say, place, record, kind):
        out = place / "out"
        out.mkdir()
        (out / "thesis.txt").write_text("thesis")
        (out / "shardctl.json").write_bytes(RECORDS[kind](record))
        before = read_all(out)
        for more in (["--overwrite"], ["--overwrite", "--dry-run"], ["--overwrite", "--worker", "0/2"], []):
            code, _, err = say("reshard", "model", out, "--tp", 2, *more)
            assert code == 6, err
            assert "does not show that shardctl wrote it" in err or not more
        assert say("reshard", "mod*", place, "--each", "--tp", 2).code == 6, "each goes into a directory of its name"
        assert read_all(out) == before
        assert {path.name for path in place.iterdir()} == {"model", "out"}

    @pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to(path.parent / "real.json"), os.mkfifo])
    def test_a_record_that_is_no_file_is_none(self, say, place, record, make):
        out = place / "out"
        out.mkdir()
        (out / "real.json").write_bytes(record)
        make(out / "shardctl.json")
        code, _, err = say("reshard", "model", out, "--tp", 2, "--overwrite")
        assert (code, "it is not a regular file" in err) == (6, True)
        assert (out / "real.json").read_bytes() == record

    def test_a_directory_in_the_staging_area_that_shardctl_did_not_make_is_left_alone(self, say, place):
        mine = place / ".out.shardctl" / "mine"
        mine.mkdir(parents=True)
        (mine / "thesis.txt").write_text("thesis")
        code, _, err = say("reshard", "model", place / "out", "--tp", 2, "--no-resume")
        assert code == 6
        assert f"{place}/.out.shardctl holds directories that shardctl did not make" in err
        assert (mine / "thesis.txt").read_text() == "thesis"

    def test_what_is_read_beside_the_source_is_not_replaced(self, say, place):
        assert say("reshard", "model", "base", "--tp", 2).code == 0
        before = read_all(place / "base")
        for option in (["--complete-from", "base"], ["--config", "base/config.json"], ["--merge", "base/../base"]):
            code, _, err = say("reshard", "model", "base", "--overwrite", *option)
            assert code == 6
            assert f"error: base holds what {option[0]} reads: {option[1]}" in err
        assert read_all(place / "base") == before


class TestOutputs:
    @pytest.mark.parametrize(("verb", "option"), OUTPUTS)
    def test_no_output_replaces_a_file_of_the_source(self, say, place, verb, option):
        os.link("model/model.safetensors", "hard")
        os.link("model/config.json", "config")
        Path("soft").symlink_to("model/model.safetensors")
        Path("folder").symlink_to("model")
        before = read_all(place)
        destination = ["out"] if verb == "reshard" else []
        for path in (
            *("model/model.safetensors", "model/config.json", "hard", "soft", "folder/config.json", "config"),
            *("model/../model/tokenizer.json", place / "model" / "config.json"),
        ):
            code, _, err = say(verb, "model", *destination, option, path)
            assert code == 6, path
            which = "exists and is not a text file" if path in WEIGHTS else "is a file of SRC model"
            assert f"error: {option} {path} {which}, and would be overwritten" in err
        assert read_all(place) == before

    def test_weights_that_are_not_read_are_not_replaced_either(self, say, place):
        shutil.copytree("model", "other")
        before = read_all(place)
        for option in ("--junit", "--summary", "--log"):
            assert say("verify", "model", option, "other/model.safetensors").code == 6
        assert read_all(place) == before

    @pytest.mark.parametrize(
        ("args", "label"),
        [
            (["verify", "model", "--against", "other"], "--against other"),
            (["verify", "model", "--against", "model", "--merge", "other"], "--merge other"),
            (["diff", "model", "other"], "B other"),
            (["reshard", "model", "out", "--complete-from", "other"], "--complete-from other"),
            (["plan", "model", "--for", "train", "--extra-model", "other"], "--extra-model other"),
            (["plan", "model", "--config", "other/config.json"], "--config other/config.json"),
            (["plan", "model", "--rules", "other/config.json"], "--rules other/config.json"),
            (["plan", "model", "--for", "train", "--calibrate", "other/config.json"], "--calibrate other/config.json"),
            (["digest", "other/model.safetensors"], "SRC other/model.safetensors"),  # whose config lies beside it
            (["reshard", "oth*", "out", "--each"], "SRC other"),
            (["reshard", "--plan", "other.json", "out"], "SRC {place}/other"),
        ],
        ids=lambda each: each if isinstance(each, str) else None,
    )
    def test_nor_a_file_of_anything_else_that_is_read(self, say, place, args, label):
        shutil.copytree("model", "other")
        assert say("plan", "other", "--tp", 2, "--out", "other.json").code == 0
        before = read_all(place)
        code, _, err = say(*args, "--log", "other/config.json")
        assert code == 6
        assert f"--log other/config.json is a file of {label.format(place=place)}" in err
        assert read_all(place) == before

    def test_a_file_that_is_named_is_never_replaced_even_by_its_own_kind(self, say, place):
        assert say("plan", "model", "--tp", 2, "--out", "plan.json", "--log", "run.log").code == 0
        before = read_all(place)
        assert say("reshard", "--plan", "plan.json", "out", "--log", "plan.json").code == 6
        assert say("plan", "model", "--for", "train", "--calibrate", "run.log", "--log", "run.log").code == 6
        assert read_all(place) == before

    def test_a_value_from_a_variable_is_refused_as_well(self, say, place, monkeypatch):
        before = read_all(place)
        monkeypatch.setenv("SHARDCTL_VERIFY_JUNIT", "model/config.json")
        code, _, err = say("verify", "model")
        assert (code, "--junit model/config.json is a file of SRC model" in err) == (6, True)
        assert read_all(place) == before

    def test_no_output_lies_in_a_destination(self, say, place):
        assert say("plan", "model", "--tp", 2, "--out", "plan.json").code == 0
        for path in ("out/run.log", "out", "x/../out/run.log", ".out.shardctl/journal.jsonl", "out/.shardctl/lock"):
            for args in (["reshard", "model", "out"], ["reshard", "--plan", "plan.json", "out"], ["finish", "out"]):
                code, _, err = say(*args, "--log", path)
                assert (code, f"--log {path} lies in the destination out" in err) == (6, True)
        code, _, err = say("reshard", "mod*", "many", "--each", "--log", "many/model/run.log")
        assert (code, "lies in the destination many/model" in err) == (6, True)
        assert {path.name for path in place.iterdir()} == {"model", "plan.json"}

    def test_two_outputs_are_two_files(self, say, place):
        for one, other in (("a.xml", "./a.xml"), ("a.xml", "A.xml"), ("a.xml", "model/../a.xml")):
            code, _, err = say("verify", "model", "--junit", one, "--summary", other)
            assert (code, "--junit and --summary name one file: " in err) == (2, True)
        assert say("verify", "model", "--junit", "/dev/null", "--log", "/dev/null").code == 0
        assert {path.name for path in place.iterdir()} == {"model"}

    def test_a_report_within_a_source_is_written_again_by_the_next_run(self, say, place):
        files = {f"--{name}": f"model/r.{name}" for name in ("junit", "summary", "log")} | {"--report": "model/r.html"}
        for _ in range(2):
            assert say("verify", "model", *(each for pair in files.items() for each in pair)).code == 0
        assert (place / "model" / "r.log").read_text().count("exit code 0") == 2

    @pytest.mark.parametrize("verb", FUNCTIONS)
    def test_every_option_that_names_a_path_says_what_is_done_with_it(self, verb):
        known = {each.parameter: each.access for each in FUNCTIONS[verb].named_paths}
        assert PathAccess.READ in known.values() or verb == "finish"
        for parameter, info in _list_parameters(FUNCTIONS[verb]):
            kinds = {parameter.annotation, *get_args(parameter.annotation)}
            if Path in kinds or info.metavar in {"FILE", "FILE.html", "PATH", "DIR", "LOG", "SRC", "DST", "BASE"}:
                assert parameter.name in known, f"{verb} --{parameter.name} lacks CommandOption.access"


class TestPaths:
    def test_a_name_in_other_letters_is_within_a_folder_that_does_not_exist_yet(self, tmp_path):
        assert is_same_or_inside(tmp_path / "OUT" / "é.log", tmp_path / "out")
        assert is_same_or_inside(tmp_path / "cafe\u0301" / "x", tmp_path / "caf\u00e9")
        assert not is_same_or_inside(tmp_path / "outer" / "x", tmp_path / "out")

    def test_the_same_file_is_found_by_its_number_whatever_it_is_called(self, tmp_path):
        """On a file system that ignores the case of letters, another spelling has the same number."""
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "Config.json").write_text("{}")
        os.link(tmp_path / "a" / "Config.json", tmp_path / "config.json")
        assert find_same_file(tmp_path / "config.json", tmp_path / "a") == tmp_path / "a" / "Config.json"
        assert find_same_file(tmp_path / "absent", tmp_path / "a") is None
