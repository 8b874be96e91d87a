"""The memory law with buckets at either end: what a run says it will need is what it needs at most."""

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cloud_models import llama, put

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured through /proc")


def measured(*args):
    """Peak of anonymous memory and the last record of `shardctl reshard` with these arguments."""
    command = [sys.executable, "-m", "shardctl", "reshard", *map(str, args), "--json"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak, over = 0, threading.Event()

    def watch():
        nonlocal peak
        while not over.wait(0.004):
            with contextlib.suppress(OSError):  # it has just ended
                for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
                    if line.startswith("RssAnon"):
                        peak = max(peak, int(line.split()[1]) * 1024)

    watcher = threading.Thread(target=watch)
    watcher.start()
    said, talk = child.communicate(timeout=300)
    over.set()
    watcher.join()
    assert child.returncode == 0, talk
    return peak, json.loads(said.splitlines()[-1])


@pytest.fixture
def heavy(tmp_path):
    return llama(tmp_path / "heavy", vocab_size=300_000)


@pytest.mark.parametrize("memory", [160, 1024])
def test_writing_to_a_bucket(bucket, heavy, memory):
    peak, last = measured(heavy, f"s3://{bucket}/out", "--tp", 2, "--memory", f"{memory}MiB", "--threads", 1)
    assert peak < last["projected_memory_bytes"] <= memory * MIB


@pytest.mark.parametrize("memory", [256, 1024])
def test_reading_from_a_bucket(s3, bucket, heavy, tmp_path, memory):
    put(s3, bucket, "in/", heavy)
    peak, last = measured(f"s3://{bucket}/in", tmp_path / "out", "--tp", 2, "--memory", f"{memory}MiB")
    assert peak < last["projected_memory_bytes"] <= memory * MIB


def test_less_than_sending_takes_is_refused(bucket, heavy):
    command = [sys.executable, "-m", "shardctl", "reshard", str(heavy), f"s3://{bucket}/out", "--memory", "96MiB"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--memory 96MiB cannot hold this conversion" in refused.stderr
