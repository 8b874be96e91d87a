"""Ctrl-C and SIGTERM: the first keeps the state and stops soon, the second ends at once; a rerun finishes."""

import json
import signal
import time

import pytest
from crash_site import snapshot
from test_kill import clean, finish

SLOW = {"delay": 0.05}
SOON = 60
"""Seconds within which a signal must have ended the run, on a machine that has much else to do."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_signal_stops_soon_and_keeps_what_is_done(site, tmp_path, number, threads):
    wanted, _ = clean(site)
    run = site.started(tmp_path / "gate", SLOW, threads=threads)
    run.send_signal(number)
    (tmp_path / "gate").touch()
    said, _ = run.communicate(timeout=SOON)
    stopped = json.loads(said)
    assert stopped["code"] == 128 + number
    assert stopped["error"] == "Interrupted"
    assert "same command" in stopped["hint"]
    assert snapshot(site.destination) is None
    assert not (site.staging / "lock").exists()
    assert finish(site, wanted, threads=threads)["kept"] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_at_once(site, tmp_path, number):
    wanted, _ = clean(site)
    run = site.started(tmp_path / "gate that stays shut")
    run.send_signal(number)
    time.sleep(1)
    assert run.poll() is None, "the first signal waits for the write"
    run.send_signal(number)
    run.communicate(timeout=SOON)
    assert run.returncode == -number
    finish(site, wanted)


def test_an_ignored_signal_stays_ignored(site, tmp_path):
    wanted, _ = clean(site)
    run = site.started(tmp_path / "gate", ignored=[signal.SIGINT])
    run.send_signal(signal.SIGINT)
    (tmp_path / "gate").touch()
    said, _ = run.communicate(timeout=300)
    assert json.loads(said)["code"] == 0
    assert snapshot(site.destination) == wanted
