"""Waiting between tries: ever longer, as long as asked, and not for ever."""

import time
from email.utils import formatdate

import pytest

from shardctl.errors import Interrupted, SourceError, TransientError
from shardctl.storage import retries as patience
from shardctl.storage.hub.statuses import parse_retry_after
from shardctl.storage.retries import RetryBackoff, TroubleError
from shardctl.workers import StopRequest


@pytest.fixture
def slept(monkeypatch):
    slept = []
    monkeypatch.setattr(RetryBackoff, "_sleep", lambda _, seconds: slept.append(seconds))
    return slept


def test_waits_double_up_to_half_a_minute(slept):
    waiting = RetryBackoff("reading", StopRequest(), tries=12)
    for _ in range(11):
        waiting.wait(TroubleError("busy"))
    for number, seconds in enumerate(slept):
        usual = min(0.5 * 2**number, 30)
        assert usual / 2 <= seconds <= usual
    with pytest.raises(TransientError, match="reading failed 12 times, the last time because busy"):
        waiting.wait(TroubleError("busy"))


def test_a_server_may_ask_for_more(slept):
    waiting = RetryBackoff("reading", StopRequest())
    waiting.wait(TroubleError("busy", 77.0))
    waiting.wait(TroubleError("busy", patience.LONGEST_ASKED))
    assert slept == [77.0, patience.LONGEST_ASKED]


def test_one_that_asks_for_an_hour_is_not_waited_for_in_silence(slept):
    with pytest.raises(
        TransientError, match="reading failed because busy, and another try is asked for in 3,600 s"
    ) as e:
        RetryBackoff("reading", StopRequest()).wait(TroubleError("busy", 3600.0))
    assert "run the same command again then" in e.value.hint
    assert slept == []


def test_success_counts_anew(slept):
    waiting = RetryBackoff("reading", StopRequest(), tries=2)
    for _ in range(5):
        waiting.wait(TroubleError("busy"))
        waiting.succeed()
    assert len(slept) == 5


def test_the_last_error_may_be_another_one():
    with pytest.raises(SourceError, match="mine"):
        RetryBackoff("reading", StopRequest(), tries=1).wait(TroubleError("busy"), last=SourceError("mine"))


def test_a_signal_ends_a_wait():
    stop = StopRequest()
    stop.signal = 15
    with pytest.raises(Interrupted) as ended:
        RetryBackoff("reading", stop).wait(TroubleError("busy", 100))
    assert ended.value.exit_code == 143


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-3"}, None),
        ({"ratelimit": '"resolvers";r=0;t=55'}, 56.0),
        ({"ratelimit": '"resolvers";r=12;t=55'}, None),
        ({"ratelimit": '"resolvers";r=0;t=55', "retry-after": "2"}, 2.0),
    ],
)
def test_how_servers_ask(headers, seconds):
    assert parse_retry_after(headers) == seconds


def test_they_may_name_a_time():
    assert 8 < parse_retry_after({"retry-after": formatdate(time.time() + 10, usegmt=True)}) < 11
    assert parse_retry_after({"retry-after": formatdate(time.time() - 10, usegmt=True)}) == 0
