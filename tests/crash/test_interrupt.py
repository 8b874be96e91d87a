"""Ctrl-C and SIGTERM: the first keeps the state and stops soon, the second ends at once; a rerun finishes."""

import json
import signal
import time

import pytest
from crash_site import snapshot
from test_kill import clean, finish

SLOW = {"delay": 0.05}
SOON = 5
"""Seconds within which a first signal must have ended the run."""


def wait_for_work(site):
    """Until the journal has a line, so that there is something to keep."""
    deadline = time.monotonic() + 60
    while not site.journalled():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_signal_stops_soon_and_keeps_what_is_done(site, number, threads):
    wanted, _ = clean(site)
    run = site.start(SLOW, threads=threads)
    wait_for_work(site)
    sent = time.monotonic()
    run.send_signal(number)
    said, _ = run.communicate(timeout=60)
    assert time.monotonic() - sent < SOON
    stopped = json.loads(said)
    assert stopped["code"] == 128 + number
    assert stopped["error"] == "Interrupted"
    assert "same command" in stopped["hint"]
    assert snapshot(site.destination) is None
    assert not (site.staging / "lock").exists()
    assert finish(site, wanted, threads=threads)["kept"] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_at_once(site, number):
    wanted, _ = clean(site)
    run = site.start({"delay": 20})
    deadline = time.monotonic() + 60
    while not (site.staging / "journal.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    run.send_signal(number)
    time.sleep(0.2)
    assert run.poll() is None, "the first signal waits for the write"
    run.send_signal(number)
    run.communicate(timeout=SOON)
    assert run.returncode == -number
    finish(site, wanted)


def test_an_ignored_signal_stays_ignored(site):
    wanted, _ = clean(site)
    run = site.start({"delay": 0.01}, ignored=[signal.SIGINT])
    wait_for_work(site)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert json.loads(said)["code"] == 0
    assert snapshot(site.destination) == wanted
