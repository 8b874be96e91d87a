"""How far a long task is: bytes, files, the rate of this run alone, and the time left."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from shardctl.amounts import duration, file_size, memory_size, percent

if TYPE_CHECKING:
    from collections.abc import Callable

_WINDOW: Final = 30.0
"""Seconds over which the rate is taken: what a resumed run finds in place must not flatter it."""
_QUIET: Final = 30.0
"""Seconds after which something is said in any case: a silent two-hour job looks dead."""
_STEP: Final = 20
"""One part in so many (5 %) is worth a line."""
_BREATH: Final = 1.0
"""Seconds between lines at least."""


class Meter:
    """Counts; `advance` and `file_done` may be called from any thread, the rest from one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_bytes = 0
        """0 if not known."""
        self.files = 0
        self.files_done = 0
        self.done_bytes = 0
        """Bytes in place, those of earlier runs included."""
        self.kept_bytes = 0
        """Bytes of earlier runs."""
        self._clock = clock
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])
        self._said_at = clock()
        self._said_bytes = 0

    def begin(self, total_bytes: int, files: int) -> None:
        """Note the size of the task."""
        self.total_bytes, self.files = total_bytes, files

    def advance(self, nbytes: int, *, kept: bool = False) -> None:
        """So many bytes more are in place."""
        with self._lock:
            self.done_bytes += nbytes
            self.kept_bytes += nbytes if kept else 0

    def file_done(self) -> None:
        """One more file is complete."""
        with self._lock:
            self.files_done += 1

    def sample(self) -> None:
        """Take the rate's next sample; called about twice a second."""
        now = self._clock()
        self._samples.append((now, self.done_bytes - self.kept_bytes))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _WINDOW:  # noqa: PLR2004 - two ends of a window
            self._samples.popleft()

    @property
    def rate(self) -> float:
        """Bytes of this run a second, lately."""
        (began, first), (now, last) = self._samples[0], self._samples[-1]
        return (last - first) / (now - began) if now > began else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At the present rate; None if that cannot be said."""
        if not self.total_bytes or not self.rate:
            return None
        return max(self.total_bytes - self.done_bytes, 0) / self.rate

    def due(self) -> bool:
        """Whether it is time for a line: 5 % or 30 s after the last; if so, counts as said."""
        since = self._clock() - self._said_at
        news = self.done_bytes - self._said_bytes
        stepped = self.total_bytes and news * _STEP >= self.total_bytes and since >= _BREATH
        if not stepped and since < _QUIET:
            return False
        self._said_at, self._said_bytes = self._clock(), self.done_bytes
        return True

    def line(self, verb: str, held: int) -> str:
        """All of it in one plain line; `held` is the memory in use, 0 if not known."""
        parts = [file_size(self.done_bytes)]
        if self.total_bytes:
            parts[0] += f" of {file_size(self.total_bytes)} ({percent(self.done_bytes, self.total_bytes)})"
        parts.append(f"{file_size(self.rate)}/s")
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        if self.files:
            parts.append(f"{self.files_done:,} of {self.files:,} files")
        if held:
            parts.append(f"{memory_size(held)} held")
        return f"{verb}: {', '.join(parts)}\n"
