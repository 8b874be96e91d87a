"""The program on models of the Hub, as users run it: exit codes, progress, signals, memory."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub_models import content, large, model, write
from hub_server import dropped, sha256, status

from shardctl.options import ReshardOptions
from shardctl.storage.read_ahead import KEPT
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

NAME = "someone/llama"


@pytest.fixture
def environment(hub, tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DOWNLOAD_TIMEOUT": "5"}


@pytest.fixture
def start(environment, tmp_path):
    def start(*args, **more):
        return subprocess.Popen(
            [sys.executable, "-m", "shardctl", *map(str, args)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment | more,
        )  # fmt: skip

    return start


@pytest.fixture
def say(start):
    def say(*args, **more):
        child = start(*args, **more)
        out, err = child.communicate(timeout=120)
        return child.returncode, out, err

    return say


def test_a_plan_is_made_and_followed_at_its_commit(hub, say, tmp_path):
    """What is pushed after the plan was made is not what the plan was made for."""
    hub.add(NAME, model())
    code, _, err = say("plan", NAME, "--tp", 2, "--out", "plan.json")
    assert code == 0, err
    hub.repositories[NAME].push(model(seed=8))
    code, _, err = say("reshard", "--plan", "plan.json", "out")
    assert code == 0, err
    reshard(write(model(), tmp_path / "here"), tmp_path / "right", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert content(tmp_path / "out") == content(tmp_path / "right")
    code, out, err = say("verify", "out", "--against", NAME, "--json")
    assert code == 3, "the branch has moved"
    commit = json.loads((tmp_path / "out" / "shardctl.json").read_text())["source"]["address"]
    code, out, err = say("verify", "out", "--level", "full", "--against", commit)
    assert code == 0, out + err
    code, out, err = say("diff", commit, "out")
    assert code == 0, out + err


def test_a_config_is_read_from_the_hub_by_the_models_name(hub, say, tmp_path):
    hub.add(NAME, model())
    here = write(model(), tmp_path / "here")
    (here / "config.json").rename(tmp_path / "config.json")
    code, _, err = say("reshard", "here", "out", "--config", NAME, "--for", "vllm")
    assert code == 0, err
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((tmp_path / "config.json").read_text())
    code, _, err = say("plan", "here", "--config", NAME, "--tp", 2)
    assert code == 0, err
    assert say("plan", "here", "--config", "someone/nothing", "--tp", 2)[0] == 4
    code, _, err = say("plan", "here", "--config", "lost/config.json", "--tp", 2)
    assert code == 4
    assert "lost/config.json cannot be read: No such file or directory" in err
    hub.add("someone/empty", {"README.md": b"x"})
    code, _, err = say("plan", "here", "--config", "someone/empty", "--tp", 2)
    assert code == 4
    assert "someone/empty on the Hub has no config.json" in err


def test_exit_codes(hub, say):
    hub.add(NAME, model(), gated=True)
    code, _, err = say("inspect", NAME)
    assert code == 5
    assert err.startswith("error: someone/llama is gated")
    assert "\nhint:  accept its terms at " in err
    assert say("inspect", NAME, HF_TOKEN="hf_good")[0] == 0  # noqa: S106 - of a Hub that lives for a second
    assert say("inspect", NAME, HF_TOKEN="hf_bad")[0] == 5  # noqa: S106
    assert say("inspect", "someone/nothing")[0] == 4
    assert say("inspect", "hf://one")[0] == 2
    code, _, err = say("inspect", NAME, HF_HUB_OFFLINE="1")
    assert code == 4
    assert "HF_HUB_OFFLINE is set" in err


def test_the_hub_that_is_not_there_is_passing_trouble(say):
    code, _, err = say("inspect", "someone/llama", HF_ENDPOINT="http://127.0.0.1:9")
    assert code == 7
    assert "cannot be reached" in err
    assert "Traceback" not in err


def test_a_signal_ends_a_run_that_waits_and_the_next_one_goes_on(hub, start, say, tmp_path):
    files = model(hidden_size=256, vocab_size=8192)
    hub.add(NAME, files)
    last = sha256(files["model-00003-of-00003.safetensors"])
    hub.fail("cdn", None, None, *[status(429, Retry_After="100")] * 498, path=last)
    child = start("reshard", NAME, "out", "--tp", 2)
    while hub.faults_left > 497 and child.poll() is None:
        time.sleep(0.05)
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert time.monotonic() - began < 10, "within five seconds on an idle machine"
    hub._faults.clear()
    code, out, err = say("reshard", NAME, "out", "--tp", 2, "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["kept_bytes"]
    reshard(write(files, tmp_path / "here"), tmp_path / "right", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert content(tmp_path / "out") == content(tmp_path / "right")


def test_a_run_that_is_killed_goes_on(hub, start, say, tmp_path):
    files = model(hidden_size=256, vocab_size=8192)
    hub.add(NAME, files)
    slow = lambda handler, *_: (time.sleep(30), dropped(handler))  # noqa: E731
    hub.fail("cdn", *[None] * 7, *[slow] * 20)
    child = start("reshard", NAME, "out", "--tp", 2)
    while hub.faults_left > 18 and child.poll() is None:
        time.sleep(0.05)
    child.kill()
    child.communicate()
    assert not (tmp_path / "out").exists()
    hub._faults.clear()
    assert say("reshard", NAME, "out", "--tp", 2)[0] == 0
    reshard(write(files, tmp_path / "here"), tmp_path / "right", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert content(tmp_path / "out") == content(tmp_path / "right")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured through /proc")
def test_memory_stays_within_what_was_said(hub, start):
    """A model of 600 MB, in shards of zeros that the server makes up."""
    files = large(
        shards=4, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, vocab_size=64_000, hashed=True
    )
    assert sum(map(len, files.values())) > 600e6
    hub.add(NAME, files)
    child = start("reshard", NAME, "out", "--tp", 2, "--memory", "256MiB", "--json")
    peak = 0
    while child.poll() is None:
        try:
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        except OSError:
            break
        held = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)
        peak = max(peak, held)
        time.sleep(0.01)
    out, err = child.communicate(timeout=200)
    assert child.returncode == 0, err
    said = json.loads(out.splitlines()[-1])["projected_memory_bytes"]
    print(f"said {said / 2**20:.0f} MiB, held {peak / 2**20:.0f} MiB")
    assert KEPT < peak < said <= 256 << 20


def test_the_library_is_loaded_only_where_it_is_needed(environment, tmp_path):
    write(model(), tmp_path / "here")
    code = "import sys; from shardctl.cli.program import run; run(['inspect', 'here']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    assert "huggingface_hub" not in done.stdout.splitlines()[-1].split()
