"""Several checkpoints at once: each of a pattern, and the newest of a run that is whole."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardctl.cli.program import run
from shardctl.tensors.record import RECORD, parse_record


@pytest.fixture
def training(tmp_path):
    """A run of four checkpoints: 9 and 10 are whole, 11 is cut short, and 100 has no weights."""
    for step in (9, 10, 11):
        folder = tmp_path / "run" / f"iter_{step}"
        folder.mkdir(parents=True)
        save_file({"up.weight": np.full((4, 8), step, np.float32)}, folder / "model.safetensors")
    cut = tmp_path / "run" / "iter_11" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-8])
    (tmp_path / "run" / "iter_100").mkdir()
    (tmp_path / "run" / "logs").mkdir()
    return tmp_path / "run"


def read_values(path):
    return load_file(path / "model.safetensors")["up.weight"][0, 0]


def test_each_is_converted_and_a_failure_stops_none(training, tmp_path, capfd):
    code = run(["reshard", str(training / "iter_*"), str(tmp_path / "out"), "--each", "--dtype", "bf16", "--to", "hf"])
    assert code == 4
    out = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in out] == ["converted", "converted", "failed", "failed", "4"]
    assert out[-1] == "4 checkpoints: 2 converted, 2 failed"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["iter_10", "iter_9"]
    assert parse_record((tmp_path / "out" / "iter_9" / RECORD).read_bytes()).options["dtype"] == "bf16"


def test_a_second_run_converts_what_is_left(training, tmp_path, capfd):
    asked = ["reshard", str(training / "iter_*"), str(tmp_path / "out"), "--each", "--json"]
    assert run(asked) == 4
    capfd.readouterr()
    kept = (tmp_path / "out" / "iter_9" / "model.safetensors").stat()
    shutil.rmtree(training / "iter_100")
    shutil.copy(training / "iter_10" / "model.safetensors", training / "iter_11")
    assert run(asked) == 0
    last = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert {key: last[key] for key in ("converted", "kept", "failed", "untried")} == {
        "converted": 1,
        "kept": 2,
        "failed": 0,
        "untried": 0,
    }
    assert (tmp_path / "out" / "iter_9" / "model.safetensors").stat() == kept
    assert read_values(tmp_path / "out" / "iter_11") == 10


def test_a_source_that_was_written_since_is_not_taken_for_converted(training, tmp_path, capfd):
    asked = ["reshard", str(training / "iter_9"), str(tmp_path / "out"), "--each"]
    assert run(asked) == 0
    save_file({"up.weight": np.full((4, 8), 7, np.float32)}, training / "iter_9" / "model.safetensors")
    later = (tmp_path / "out" / "iter_9" / RECORD).stat().st_mtime_ns + 10**9
    os.utime(training / "iter_9" / "model.safetensors", ns=(later, later))
    assert run(asked) == 6
    assert "--overwrite" in capfd.readouterr().out
    assert run([*asked, "--overwrite"]) == 0
    assert read_values(tmp_path / "out" / "iter_9") == 7


def test_the_first_failure_ends_it_if_asked(training, tmp_path, capfd):
    shutil.rmtree(training / "iter_9")
    (training / "iter_9").mkdir()
    assert run(["reshard", str(training / "iter_*"), str(tmp_path / "out"), "--each", "--fail-fast", "--json"]) == 4
    last = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert [each["status"] for each in last["each"]] == ["failed"]
    assert len(last["not_tried"]) == 3


@pytest.mark.parametrize(
    ("more", "code", "word"),
    [
        (["--each", "--worker", "0/2"], 2, "one process"),
        (["--fail-fast"], 2, "--each"),
    ],
)
def test_what_does_not_go_together_is_refused(training, tmp_path, capfd, more, code, word):
    assert run(["reshard", str(training / "iter_9"), str(tmp_path / "out"), *more]) == code
    assert word in capfd.readouterr().err


def test_a_pattern_that_matches_nothing_or_one_name_twice_is_refused(training, tmp_path, capfd):
    assert run(["reshard", str(training / "step_*"), str(tmp_path / "out"), "--each"]) == 4
    shutil.copytree(training, tmp_path / "run2")
    assert run(["reshard", str(tmp_path / "run*" / "iter_9"), str(tmp_path / "out"), "--each"]) == 2
    assert "would both become iter_9" in capfd.readouterr().err


def test_the_newest_that_is_whole_is_named_alone(training, capfd):
    assert run(["verify", str(training), "--newest-good"]) == 0
    said = capfd.readouterr()
    assert said.out == "iter_10\n"
    assert "iter_11 is passed over: " in said.err
    assert run(["verify", str(training), "--newest-good", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["newest"] == "iter_10"
    assert [each["name"] for each in document["passed_over"]] == ["iter_100", "iter_11"]
    assert all(each["reasons"] for each in document["passed_over"])


def test_no_whole_checkpoint_is_exit_code_3(training, capfd):
    for step in (9, 10):
        (training / f"iter_{step}" / "model.safetensors").unlink()
    assert run(["verify", str(training), "--newest-good"]) == 3
    assert capfd.readouterr().out == ""
    assert run(["verify", str(training / "logs"), "--newest-good"]) == 4


def test_without_numbers_the_last_change_is_the_newest(training, capfd):
    for step, name in ((9, "best"), (10, "last")):
        (training / f"iter_{step}").rename(training / name)
    for rest in ("iter_11", "iter_100"):
        shutil.rmtree(training / rest)
    for name, when in (("best", 2_000_000_000), ("last", 1_000_000_000), ("logs", 500_000_000)):
        for path in (training / name, *(training / name).iterdir()):
            os.utime(path, (when, when))
    assert run(["verify", str(training), "--newest-good"]) == 0
    assert capfd.readouterr().out == "best\n"
