"""`reshard --worker` and `finish` as people start them: in processes of their own, one of them killed in the middle."""

import json
import re
import signal
import time

import pytest
from cli_checkpoints import large, shardctl, start

MESH = ("--tp", 2, "--pp", 2, "--hash", "sha256")


def tree(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def one(say, source, tmp_path):
    assert say("reshard", source, tmp_path / "one", *MESH).code == 0
    return tree(tmp_path / "one")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_three_workers_in_any_order_give_the_bytes_of_one(say, source, one, tmp_path, order):
    out = tmp_path / "out"
    for number in order:
        written = say("reshard", source, out, *MESH, "--worker", f"{number}/3")
        assert written.code == 0
        assert (f"next: shardctl finish {out}\n" in written.err) is (number == order[-1])
    found = say("finish", out)
    assert (found.code, found.err) == (0, f"next: shardctl verify {out} --level full\n")
    count = len(json.loads((out / "shardctl.json").read_text())["tensors"])
    held = f"{out} holds {count} tensors, sharded for pp2 x tp2 ("
    assert found.out.startswith(f"done: {held}")
    assert ", written by 3 workers, assembled in " in found.out.splitlines()[0]
    assert found.out.splitlines()[-1] == f"digest {say('digest', source).out.split()[0]}"
    assert tree(out) == one
    again = say("finish", out)
    assert again.code == 0
    assert again.out.startswith(f"done before: {held}")
    assert again.out.splitlines()[0].endswith(", nothing was written)")
    assert "finished before; nothing was changed" in again.out
    assert say("verify", out, "--level", "full", "--against", source).code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "out"]


def test_what_a_worker_says(say, source, tmp_path):
    out = tmp_path / "out"
    lines = say("reshard", source, out, *MESH, "--worker", "0/2").out.splitlines()
    assert re.fullmatch(
        rf"done: part 0/2 of {re.escape(str(out))} \([\d.]+ [kM]?B, \d+ files?, [\d.]+ m?s\); 1 of 2 parts is written",
        lines[0],
    )
    assert [line.split()[0] for line in lines[1:]] == ["part", "moved", "there"]
    assert lines[-1].endswith("1 of 2 parts")
    again = say("reshard", source, out, *MESH, "--worker", "0/2").out
    assert again.startswith(f"done before: part 0/2 of {out} (")
    assert again.splitlines()[0].endswith(", nothing was written); 1 of 2 parts is written")
    assert "all of it: an earlier run had finished this part" in again
    last = json.loads(say("reshard", source, out, *MESH, "--worker", "1/2", "--json").out.splitlines()[-1])
    assert (last["schema"], last["status"], last["worker"], last["workers"]) == ("shardctl.reshard/1", "ok", 1, 2)
    assert last["verdict"].endswith("; 2 of 2 parts are written")
    assert last["workers_missing"] == []
    assert last["written_bytes"] > 0
    document = json.loads(say("finish", out, "--json").out)
    assert (document["schema"], document["workers"], document["finished_before"]) == ("shardctl.finish/1", 2, False)
    assert document["digest"] == say("digest", out).out.split()[0]
    late = say("reshard", source, out, *MESH, "--worker", "0/2").out
    assert late.startswith(f"done before: {out} is finished, nothing was written\n")


def test_finish_names_the_workers_that_are_missing(say, source, tmp_path):
    out = tmp_path / "out"
    assert say("finish", out).code == 4
    say("reshard", source, out, *MESH, "--worker", "1/3")
    found = say("finish", out)
    assert found.code == 3
    error, hint = found.err.splitlines()
    assert error.endswith("2 of 3 workers have not finished their part of " + f"{out}: 0/3, 2/3")
    assert hint == "hint:  run them, in any order: the same reshard with --worker 0/3"
    assert json.loads(say("finish", out, "--json").out)["exit_code"] == 3


def test_two_plans_for_one_destination_are_refused(say, source, tmp_path):
    out = tmp_path / "out"
    say("reshard", source, out, *MESH, "--worker", "0/2")
    found = say("reshard", source, out, "--tp", 2, "--worker", "1/2")
    assert found.code == 6
    assert "is being written by 2 workers with another plan" in found.err


def test_the_launcher_says_which_worker_it_is(source, tmp_path):
    for rank in (1, 0):
        done = shardctl(
            "reshard", source, tmp_path / "out", *MESH, "--worker", "auto", SLURM_PROCID=str(rank), SLURM_NTASKS="2"
        )
        assert done.returncode == 0, done.stderr
    assert shardctl("finish", tmp_path / "out").returncode == 0


def test_a_wrong_worker_is_refused_before_anything_is_read(say, tmp_path):
    found = say("reshard", tmp_path / "absent", tmp_path / "out", "--worker", "3/3")
    assert found.code == 2
    assert "there is no worker 3 of 3" in found.err


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_ended_in_the_middle_is_run_again(tmp_path, sent):
    source, out = large(tmp_path / "source"), tmp_path / "out"
    assert shardctl("reshard", source, tmp_path / "one", "--tp", 4).returncode == 0
    assert shardctl("reshard", source, out, "--tp", 4, "--worker", "2/3").returncode == 0
    command = ("reshard", source, out, "--tp", 4, "--worker", "0/3", "--threads", 1)
    staged = tmp_path / ".out.shardctl"
    others = set(staged.glob("*/shard-*"))
    with start(*command) as process:
        while not set(staged.glob("*/shard-*")) - others and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(sent)
        process.communicate(timeout=60)
    if process.returncode:
        assert process.returncode in {-signal.SIGKILL, 143}
        assert shardctl("finish", out).returncode == 3
    assert shardctl(*command).returncode == 0
    assert shardctl("reshard", source, out, "--tp", 4, "--worker", "1/3").returncode == 0
    assert shardctl("finish", out).returncode == 0
    record = json.loads((out / "shardctl.json").read_text())
    assert record == json.loads((tmp_path / "one" / "shardctl.json").read_text())
    for path in record["files"]:
        assert (out / path).read_bytes() == (tmp_path / "one" / path).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "out", "source"]
