"""Waiting between tries: ever longer, as long as asked, and not for ever."""

import time
from email.utils import formatdate

import pytest

from shardctl.base.errors import Interrupted, SourceError, TransientError
from shardctl.base.workers import StopRequest
from shardctl.storage import retries as patience
from shardctl.storage.hub.statuses import parse_retry_after
from shardctl.storage.retries import TroubleError, make_retrying


@pytest.fixture
def slept(monkeypatch):
    slept = []
    monkeypatch.setattr(patience, "sleep_unless_stopped", lambda seconds, _: slept.append(seconds))
    return slept


def fail_with(*troubles):
    """A function that raises one trouble after another, and then gives 7."""
    left = list(troubles)

    def act():
        if left:
            raise left.pop(0)
        return 7

    return act


def test_waits_double_up_to_half_a_minute(slept):
    retrying = make_retrying("reading", StopRequest(), tries=12)
    with pytest.raises(TransientError, match="reading failed 12 times, the last time because busy"):
        retrying(fail_with(*[TroubleError("busy")] * 12))
    assert len(slept) == 11
    for number, seconds in enumerate(slept):
        usual = min(0.5 * 2**number, 30)
        assert usual / 2 <= seconds <= usual
    assert len({seconds / min(0.5 * 2**number, 30) for number, seconds in enumerate(slept)}) == 11  # none like another


def test_a_server_may_ask_for_more(slept):
    troubles = TroubleError("busy", 77.0), TroubleError("busy", patience.LONGEST_ASKED), TroubleError("busy", 0.0)
    assert make_retrying("reading", StopRequest())(fail_with(*troubles)) == 7
    assert slept == [77.0, patience.LONGEST_ASKED, 0.0]


def test_one_that_asks_for_an_hour_is_not_waited_for_in_silence(slept):
    with pytest.raises(
        TransientError, match="reading failed because busy, and the server asks to try again in 3,600 s"
    ) as e:
        make_retrying("reading", StopRequest())(fail_with(TroubleError("busy", 3600.0)))
    assert "run the same command again then" in e.value.hint
    assert slept == []


def test_progress_counts_anew(slept):
    failed = 0
    for attempt in make_retrying("reading", StopRequest(), tries=2):
        with attempt:
            failed += 1
            attempt.retry_state.attempt_number = 1
            if failed <= 5:
                raise TroubleError("busy")
    assert len(slept) == 5
    assert max(slept) <= 0.5


def test_only_trouble_is_tried_again(slept):
    with pytest.raises(SourceError, match="mine"):
        make_retrying("reading", StopRequest())(fail_with(SourceError("mine")))
    assert slept == []


def test_the_last_error_may_be_another_one():
    with pytest.raises(SourceError, match="mine"):
        make_retrying("reading", StopRequest(), tries=1)(fail_with(TroubleError("busy", last=SourceError("mine"))))


def test_a_signal_ends_a_wait():
    stop = StopRequest()
    stop.signal = 15
    with pytest.raises(Interrupted) as ended:
        make_retrying("reading", stop)(fail_with(TroubleError("busy", 100)))
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
