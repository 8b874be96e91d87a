"""Ray on this machine: two workers at a time, one of them killed in the middle, and the bytes of one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed")

sys.path.insert(0, str(Path(__file__).parent / "cli"))
from cli_checkpoints import large, llama, shardctl

LIMIT = 400


def tree(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two processors, which outlives the programs that use it."""
    import ray

    context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield context.address_info["address"]
    ray.shutdown()


def start(cluster, *args):
    environment = {**os.environ, "RAY_ADDRESS": cluster, "COLUMNS": "80"}
    command = [sys.executable, "-m", "shardctl", "reshard", *map(str, args), "--engine", "ray"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def owners(staging):
    """The processes that are at work, by worker."""
    found = {}
    for path in staging.glob("worker-*.lock"):
        try:
            if path.with_suffix(".journal").exists():
                found[path.stem] = json.loads(path.read_text())["pid"]
        except (OSError, ValueError):
            continue
    return found


def test_a_worker_that_is_killed_is_started_again_and_nothing_is_left_over(cluster, tmp_path):
    source, out = large(tmp_path / "source"), tmp_path / "out"
    assert shardctl("reshard", source, tmp_path / "one", "--tp", 4).returncode == 0
    run = start(cluster, source, out, "--tp", 4, "--threads", 1)
    killed, deadline = {}, time.monotonic() + LIMIT
    while not killed and run.poll() is None:
        assert time.monotonic() < deadline
        killed = owners(tmp_path / ".out.shardctl")
        time.sleep(0.005)
    victim = min(killed.values())
    os.kill(victim, signal.SIGKILL)
    said, talk = run.communicate(timeout=LIMIT)
    assert run.returncode == 0, talk
    assert tree(out) == tree(tmp_path / "one")
    assert said.splitlines()[-1] == f"digest {json.loads((out / 'shardctl.json').read_text())['digest']}"
    assert "of 4 files" in talk, "nobody was told how it goes on"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "out", "source"]


def test_errors_of_tasks_are_those_of_one_process(cluster, tmp_path):
    source = llama(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("")
    run = start(cluster, source, tmp_path / "out", "--tp", 2)
    _, talk = run.communicate(timeout=LIMIT)
    assert run.returncode == 6, talk
    assert "is not empty and was not written by shardctl" in talk


def test_an_interrupted_run_goes_on(cluster, tmp_path):
    source, out = large(tmp_path / "source"), tmp_path / "out"
    run = start(cluster, source, out, "--tp", 4, "--threads", 1)
    deadline = time.monotonic() + LIMIT
    while not owners(tmp_path / ".out.shardctl") and run.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    run.send_signal(signal.SIGTERM)
    _, talk = run.communicate(timeout=LIMIT)
    assert run.returncode == 143, talk
    assert not out.exists()
    again = start(cluster, source, out, "--tp", 4, "--threads", 2)
    _, talk = again.communicate(timeout=LIMIT)
    assert again.returncode == 0, talk
    assert shardctl("verify", out, "--level", "full", "--against", source).returncode == 0
