"""Decides how often and after how long a failed request is retried."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NoReturn

from shardctl.base.errors import TransientError
from shardctl.base.workers import raise_if_stopped

if TYPE_CHECKING:
    from tenacity import RetryCallState, Retrying

    from shardctl.base.errors import ShardctlError
    from shardctl.base.workers import StopRequest

FIRST_WAIT: Final = 0.5
"""Seconds before the first repetition; each wait is twice as long as the one before."""
LONGEST_WAIT: Final = 30.0
"""Seconds, unless a server says how long."""
LONGEST_ASKED: Final = 600.0
"""Seconds that a server may ask for, and is granted; the Hub counts requests over 5 minutes."""
USUAL_TRIES: Final = 8
"""In a row without success: about a minute and a half."""
_POLL_INTERVAL_SECONDS: Final = 0.1
"""Seconds between two looks at whether to stop."""


class TroubleError(Exception):
    """Something that may be gone the next time."""

    def __init__(self, what: str, after: float | None = None, *, last: ShardctlError | None = None) -> None:
        """`after` is how many seconds the other side asks to wait; `last` is what to raise after the last try."""
        super().__init__(what)
        self.after = after
        self.last = last


def make_retrying(doing: str, stop: StopRequest, tries: int = USUAL_TRIES) -> Retrying:
    """Return what calls a function again that raises TroubleError, after ever longer waits, until it succeeds.

    When so many tries in a row have failed, it raises the trouble's `last`, or TransientError if that has none; after a
    signal, Interrupted.
    """
    from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential
    from tenacity import wait_random_exponential as wait_randomly

    first, longest = FIRST_WAIT / 2, LONGEST_WAIT / 2
    usual = wait_exponential(first, longest) + wait_randomly(first, longest)  # threads do not return all at once

    def choose_wait(state: RetryCallState) -> float:
        trouble = _get_trouble(state)
        if trouble.after is not None and trouble.after > LONGEST_ASKED:
            raise TransientError(
                f"{doing} failed because {trouble}, and the server asks to try again in {trouble.after:,.0f} s",
                hint="run the same command again then: it resumes where this one stopped",
            ) from trouble
        return usual(state) if trouble.after is None else trouble.after

    def give_up(state: RetryCallState) -> NoReturn:
        trouble = _get_trouble(state)
        raise trouble.last or TransientError(
            f"{doing} failed {state.attempt_number} times, the last time because {trouble}",
            hint="run the same command again later: it resumes where this one stopped",
        ) from trouble

    return Retrying(
        retry=retry_if_exception_type(TroubleError),
        wait=choose_wait,
        stop=stop_after_attempt(tries),
        sleep=lambda seconds: sleep_unless_stopped(seconds, stop),
        retry_error_callback=give_up,
    )


def sleep_unless_stopped(seconds: float, stop: StopRequest) -> None:
    """Sleep; raises Interrupted as soon as a signal asks to stop."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        raise_if_stopped(stop)
        time.sleep(min(left, _POLL_INTERVAL_SECONDS))
    raise_if_stopped(stop)


def _get_trouble(state: RetryCallState) -> TroubleError:
    trouble = state.outcome.exception() if state.outcome is not None else None
    assert isinstance(trouble, TroubleError)  # noqa: S101 - nothing else is tried again
    return trouble
