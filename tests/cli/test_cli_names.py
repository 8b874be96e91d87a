"""Names that a file system has and that text cannot hold, names that are too long, and names that no file can have."""

import hashlib
import json
import os
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardctl.base.errors import DestinationError, UsageError
from shardctl.conversion.bucket_output import require_object_names
from shardctl.storage.addresses import check_destination, open_source
from shardctl.storage.byte_names import name_from_text

LATIN = b"caf\xe9.md"
SIDES = (LATIN, b"\xff\xfe/\xed\xa0\x80.txt", "naïve 100%.md".encode(), b"two\nlines", b"back\\slash")


@pytest.fixture
def named(source, tmp_path):
    """A checkpoint with side files whose names are bytes, among them one that Windows-1252 would have written."""
    place = tmp_path / "named"
    shutil.copytree(source, place)
    for name in SIDES:
        path = place / os.fsdecode(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name)
    return place


def sides(place):
    """What lies in a directory under each of the names, as the file system has it."""
    return {name: (place / os.fsdecode(name)).read_bytes() for name in SIDES}


def test_a_side_file_whose_name_is_not_utf_8_travels_along(say, named, tmp_path):
    assert say("reshard", named, tmp_path / "out").code == 0
    assert sides(tmp_path / "out") == {name: name for name in SIDES}


def test_the_record_is_json_of_valid_text_and_keeps_the_name(say, named, tmp_path):
    say("reshard", named, tmp_path / "out")
    text = (tmp_path / "out" / "shardctl.json").read_text("utf-8")
    record = json.loads(text)
    json.dumps(record, ensure_ascii=False).encode()  # no lone surrogate, as every other reader of JSON demands
    assert {os.fsencode(name_from_text(name)) for name in record["files"]} >= set(SIDES)
    assert "\0caf%E9.md" in record["files"]
    assert "naïve 100%.md" in record["files"]


def test_verify_accepts_such_names_and_finds_a_change_behind_one(say, named, tmp_path):
    out = tmp_path / "out"
    say("reshard", named, out)
    assert say("verify", out, "--level", "full", "--against", named).code == 0
    (out / os.fsdecode(LATIN)).write_bytes(b"other")
    found = say("verify", out)
    assert found.code == 3
    assert "caf\\udce9.md" in found.out


def test_a_result_with_such_names_is_a_source_again(say, named, tmp_path):
    say("reshard", named, tmp_path / "cut", "--tp", 2)
    assert say("reshard", tmp_path / "cut", tmp_path / "whole", "--to", "hf").code == 0
    assert sides(tmp_path / "whole") == {name: name for name in SIDES}


def test_sha256sum_checks_files_of_any_name_and_so_does_verify(say, named, tmp_path):
    out = tmp_path / "out"
    say("reshard", named, out, "--hash", "sha256")
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=out, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert say("verify", out, "--level", "full").code == 0


def test_verify_reads_the_names_that_sha256sum_writes(say, named):
    found = subprocess.run(
        ["sha256sum", *map(os.fsdecode, SIDES), "config.json"], cwd=named, capture_output=True, check=True
    )
    (named / "SHA256SUMS").write_bytes(found.stdout)
    assert "sha256" not in say("verify", named, "--level", "full").out
    (named / "config.json").write_bytes((named / "config.json").read_bytes() + b" ")
    assert "config.json is not the file that SHA256SUMS lists" in say("verify", named, "--level", "full").out


def test_a_plan_of_such_a_source_is_done(say, named, tmp_path):
    place = tmp_path / os.fsdecode(b"mod\xe8le")
    shutil.copytree(named, place)
    plan = tmp_path / "plan.json"
    assert say("plan", place, "--out", plan).code == 0
    json.dumps(json.loads(plan.read_text("utf-8")), ensure_ascii=False).encode()
    assert say("reshard", "--plan", plan, tmp_path / "out").code == 0
    assert sides(tmp_path / "out")[LATIN] == LATIN


@pytest.mark.parametrize("verb", ["inspect", "plan", "reshard", "verify", "diff", "digest"])
def test_json_on_stdout_is_valid_text_whatever_the_names_are(say, named, tmp_path, verb):
    more = {"reshard": [tmp_path / "out"], "diff": [named]}.get(verb, [])
    code, out, _ = say(verb, named, *more, "--json")
    assert code == 0
    for line in out.splitlines() if verb == "reshard" else [out]:
        json.dumps(json.loads(line), ensure_ascii=False).encode()


def test_reports_about_such_names_are_written(say, named, tmp_path):
    out = tmp_path / "out"
    say("reshard", named, out)
    (out / os.fsdecode(LATIN)).write_bytes(b"other")
    found = say("verify", out, "--junit", tmp_path / "r.xml", "--summary", tmp_path / "r.md", "--json")
    assert found.code == 3
    assert "udce9.md" in (tmp_path / "r.md").read_text("utf-8")
    assert (tmp_path / "r.xml").stat().st_size
    assert say("plan", named, "--report", tmp_path / "r.html").code == 0


def test_a_name_that_no_object_can_have_is_refused_for_a_bucket():
    class Work:
        carried = (type("Side", (), {"name": "caf\udce9.md"}),)

    with pytest.raises(DestinationError, match="not UTF-8"):
        require_object_names(Work)


@pytest.mark.parametrize("length", [245, 246, 250, 255])
@pytest.mark.parametrize("letter", ["d", "é"])
def test_a_destination_may_have_the_longest_name_there_is(say, source, tmp_path, length, letter):
    name = (letter * length).encode()[:length].decode("utf-8", "ignore")
    name += "d" * (length - len(name.encode()))
    place = tmp_path / name
    assert say("reshard", source, place).code == 0
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    assert say("reshard", source, place, "--overwrite").code == 0
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_workers_of_a_long_name_find_one_another(say, source, tmp_path):
    place = tmp_path / ("d" * 255)
    for worker in ("0/2", "1/2"):
        assert say("reshard", source, place, "--tp", 2, "--worker", worker).code == 0
    assert say("finish", place).code == 0
    assert say("verify", place, "--level", "full").code == 0


@pytest.mark.parametrize("name", ["d" * 256, "d/" * 2500, "d" * 5000], ids=["256", "path", "5000"])
def test_a_name_that_is_too_long_is_the_fault_of_its_place(say, source, tmp_path, name):
    place = f"{tmp_path}/{name}"
    for verb in (["inspect"], ["plan"], ["verify"], ["digest"], ["reshard", "--to", "hf"]):
        more = [tmp_path / "out"] if verb[0] == "reshard" else []
        found = say(verb[0], place, *more, *verb[1:])
        assert found.code == 4
        assert "File name too long" in found.err
    for more in ([], ["--dry-run"], ["--worker", "0/2"]):
        found = say("reshard", source, place, *more)
        assert found.code == 6
        assert "File name too long" in found.err
    assert say("finish", place).code == 6
    assert not list(tmp_path.iterdir())


def test_a_source_below_a_file_is_not_there(say, source):
    found = say("inspect", source / "config.json" / "x")
    assert found.code == 4
    assert "Not a directory" in found.err


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"])
def test_a_text_that_no_path_can_be_is_refused(text):
    with pytest.raises(UsageError, match="no name can have"):
        open_source(text)
    with pytest.raises(UsageError, match="no name can have"):
        check_destination(text)


def test_a_tensor_whose_name_no_folder_can_have_is_refused_where_names_become_folders(say, tmp_path):
    place = tmp_path / "odd"
    place.mkdir()
    save_file({"a\0b": np.zeros(4, np.float32)}, place / "model.safetensors")
    found = say("reshard", place, tmp_path / "out", "--to", "universal")
    assert found.code == 4
    assert found.err.startswith("error: 'a\\x00b' cannot be the name of a folder\n")
    assert say("reshard", place, tmp_path / "out", "--to", "hf").code == 0


def test_the_bytes_of_a_result_say_nothing_of_the_length_of_its_name(say, source, tmp_path):
    digests = set()
    for name in ("short", "d" * 255):
        say("reshard", source, tmp_path / name)
        digests.add(hashlib.sha256((tmp_path / name / "shardctl.json").read_bytes()).hexdigest())
    assert len(digests) == 1
