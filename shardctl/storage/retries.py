"""How often something that failed is tried again, and after how long; for places on the other side of a network."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

from shardctl.errors import TransientError
from shardctl.workers import raise_if_stopped

if TYPE_CHECKING:
    from shardctl.errors import ShardctlError
    from shardctl.workers import StopRequest

FIRST_WAIT: Final = 0.5
"""Seconds before the first repetition; each wait is twice as long as the one before."""
LONGEST_WAIT: Final = 30.0
"""Seconds, unless a server says how long."""
LONGEST_ASKED: Final = 600.0
"""Seconds that a server may ask for, and is granted; the Hub counts requests over 5 minutes."""
USUAL_TRIES: Final = 8
"""In a row without success: about a minute and a half."""
_LOOK: Final = 0.1
"""Seconds between two looks at whether to stop."""


class TroubleError(Exception):
    """Something that may be gone the next time; `after` is how many seconds the other side asks to wait."""

    def __init__(self, what: str, after: float | None = None) -> None:
        super().__init__(what)
        self.after = after


class RetryBackoff:
    """Waits between the tries of one transfer, ever longer, until it succeeds or the tries are used up."""

    def __init__(self, doing: str, stop: StopRequest, tries: int = USUAL_TRIES) -> None:
        self._doing = doing
        self._stop = stop
        self._tries = tries
        self._failures = 0

    def succeed(self) -> None:
        """Begin to count anew."""
        self._failures = 0

    def wait(self, trouble: TroubleError, *, last: ShardctlError | None = None) -> None:
        """Sleep before the next try; raises `last`, or TransientError, if there is none, Interrupted after a signal."""
        self._failures += 1
        if trouble.after is not None and trouble.after > LONGEST_ASKED:
            raise TransientError(
                f"{self._doing} failed because {trouble}, and another try is asked for in {trouble.after:,.0f} s",
                hint="run the same command again then: it goes on where this one stopped",
            ) from trouble
        if self._failures >= self._tries:
            raise last or TransientError(
                f"{self._doing} failed {self._failures} times, the last time because {trouble}",
                hint="run the same command again later: it goes on where this one stopped",
            ) from trouble
        usual = min(FIRST_WAIT * 2 ** (self._failures - 1), LONGEST_WAIT)
        spread = random.uniform(0.5, 1.0)  # noqa: S311 - so that threads do not return all at once
        self._sleep(usual * spread if trouble.after is None else trouble.after)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            raise_if_stopped(self._stop)
            time.sleep(min(left, _LOOK))
        raise_if_stopped(self._stop)
