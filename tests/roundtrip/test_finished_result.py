"""A command that ended well ends well again: the destination holds its result, and nothing is written."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import config_of, save

from shardctl.base.errors import OccupiedDestinationError
from shardctl.cli.program import run
from shardctl.options import DestinationOptions, ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

TP2 = ReshardOptions(mesh=Mesh.of(tp=2))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("made")
    source = save(place / "source", config_of("llama")).path
    (source / "tokenizer.json").write_text("{}")
    reshard(source, place / "out", TP2)
    return place


@pytest.fixture
def place(made, tmp_path):
    return shutil.copytree(made, tmp_path / "place")


def look(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_the_same_command_again_writes_nothing_and_says_so(place, capfd):
    before = look(place)
    assert run(["reshard", str(place / "source"), str(place / "out"), "--tp", "2", "--json"]) == 0
    said = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (said["done_before"], said["written_bytes"]) == (True, 0)
    assert run(["reshard", str(place / "source"), str(place / "out"), "--tp", "2"]) == 0
    assert "holds exactly this result, and nothing was written" in capfd.readouterr().out
    assert look(place) == before


def test_a_worker_that_is_started_again_after_all_was_finished_ends_well(place, capfd):
    shutil.rmtree(place / "out")
    worker = ["reshard", str(place / "source"), str(place / "out"), "--tp", "2", "--worker"]
    assert [run([*worker, "0/2"]), run([*worker, "1/2"]), run(["finish", str(place / "out")])] == [0, 0, 0]
    before = look(place)
    capfd.readouterr()
    for number in range(2):
        assert run([*worker, f"{number}/2", "--json"]) == 0
        said = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert (said["finished"], said["written_bytes"], said["workers_missing"]) == (True, 0, [])
    assert look(place) == before


@pytest.mark.parametrize(
    "options", [["--tp", "1"], ["--tp", "2", "--dtype", "bf16"], ["--tp", "2", "--hash", "sha256"]], ids=" ".join
)
def test_another_result_is_in_the_way(place, options, capfd):
    before = look(place)
    assert run(["reshard", str(place / "source"), str(place / "out"), *options]) == 6
    assert "already holds a finished checkpoint" in capfd.readouterr().err
    assert look(place) == before


def test_other_values_in_the_source_are_another_result(place, capfd):
    path = place / "source" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, path, {"format": "pt"})
    assert run(["reshard", str(place / "source"), str(place / "out"), "--tp", "2"]) == 6
    assert "model.norm.weight has changed since" in capfd.readouterr().err


def test_another_tokenizer_in_the_source_is_another_result(place, capfd):
    (place / "source" / "tokenizer.json").write_text("[]")
    assert run(["reshard", str(place / "source"), str(place / "out"), "--tp", "2"]) == 6
    assert "tokenizer.json has changed since" in capfd.readouterr().err


@pytest.mark.parametrize("damage", ["header", "missing", "short", "record", "more"])
def test_a_destination_that_is_not_as_recorded_is_in_the_way(place, damage):
    file = min((place / "out").glob("*.safetensors"))
    if damage == "header":
        content = bytearray(file.read_bytes())
        content[20] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "more":
        shutil.copy(file, place / "out" / "model.safetensors")
    else:
        (place / "out" / "shardctl.json").write_text("{}")
    with pytest.raises(OccupiedDestinationError):
        reshard(place / "source", place / "out", TP2)


def test_overwrite_writes_again(place):
    before = look(place / "out")
    done = reshard(place / "source", place / "out", TP2, destination_options=DestinationOptions(overwrite=True))
    assert not done.done_before
    assert {path: content for path, (_, content) in look(place / "out").items()} == {
        path: content for path, (_, content) in before.items()
    }
    assert look(place / "out") != before
