"""Measures how far a long task is: bytes, files, the rate of this run alone, and the time left.

rich keeps the samples, the rate and the estimate; this module says what counts as work of this run.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from rich.progress import Progress
from rich.text import Text

from shardctl.base.amounts import format_duration, format_file_size, format_memory_size, format_percent

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Task

_RATE_WINDOW_SECONDS: Final = 30.0
"""Seconds over which the rate is taken: longer is steadier, shorter sooner tells of a disk that became slow."""
_MAX_SILENCE_SECONDS: Final = 30.0
"""Seconds after which a line is due in any case: a two-hour job that says nothing looks dead."""
_PROGRESS_STEP_COUNT: Final = 20
"""A line is due for every one of this many equal parts (5 %)."""
_LOCATION_UPDATE_SECONDS: Final = 5.0
"""Seconds after which a new place is due where nobody knows how much there is to do."""
_FIRST_ESTIMATE: Final = 2.0
"""Seconds over which the rate is measured before the time left is worked out from it."""
_MIN_LINE_INTERVAL_SECONDS: Final = 1.0
"""Seconds between two lines at least."""
_MAX_BAR_COLUMNS: Final = 16
_MIN_BAR_COLUMNS: Final = 6
"""A bar of fewer columns says less than the percentage next to it."""
_MIN_NAME_COLUMNS: Final = 10
"""Columns below which the name of a phase or a file, cut short, says nothing."""
_BAR_STYLES: Final = {"share": "progress.percentage", "left": "progress.remaining", "rate": "progress.data.speed"}
_GAP: Final = "  "
"""What stands between two parts of the line that a terminal shows."""


class TransferMeter:
    """Counts bytes and files; `advance` and `finish_file` may be called from any thread, the rest from one.

    ```python
    meter = TransferMeter()
    meter.begin(total_bytes=1000, files=4)
    meter.advance(250)
    meter.sample()
    ```
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Count in a task of rich's that nobody sees."""
        self.total_bytes = 0
        """0 if not known."""
        self.files = 0
        self.files_done = 0
        self.done_bytes = 0
        """Bytes in place, those of earlier runs included."""
        self.kept_bytes = 0
        """Bytes of earlier runs."""
        self.phase = ""
        """What is being done, such as `content`; empty where the verb says it all."""
        self.place = ""
        """The file, or the part of a model, that is worked on."""
        self._clock = clock
        self._lock = threading.Lock()
        self._progress = Progress(disable=True, get_time=clock)
        self._progress.speed_estimate_period = _RATE_WINDOW_SECONDS
        self._task_id = self._progress.add_task("", total=None)
        self._sampled_bytes = 0
        self._sampled_since: float | None = None
        self._sampled_kept = 0
        self._finding = False
        self._resumption_said = False
        self._said_at = clock()
        self._said_bytes = 0
        self._said_place = ""

    @property
    def _task(self) -> Task:
        return self._progress.tasks[self._task_id]

    def begin(self, total_bytes: int, files: int = 0, phase: str = "") -> None:
        """Begin a phase of this size, 0 if it is not known; the rate is that of the phase."""
        with self._lock:
            self.total_bytes, self.files, self.phase, self.place = total_bytes, files, phase, ""
            self.done_bytes = self.kept_bytes = self.files_done = 0
            self._sampled_bytes = self._sampled_kept = self._said_bytes = 0
            self._finding = False
            self._sampled_since, self._said_place = None, ""
            self._progress.reset(self._task_id, total=total_bytes or None)

    def advance(self, nbytes: int, *, kept: bool = False) -> None:
        """Count bytes that are in place; `kept` if an earlier run had written them."""
        with self._lock:
            self.done_bytes += nbytes
            self.kept_bytes += nbytes if kept else 0

    def finish_file(self) -> None:
        """Count one more file that is complete."""
        with self._lock:
            self.files_done += 1

    def sample(self) -> None:
        """Take the rate's next sample; called about twice a second.

        The rate is that of this run: bytes of an earlier one move the bar, but are no samples, and neither is the time
        before this run's first byte, nor that in which mostly bytes of an earlier one were found.
        """
        with self._lock:
            fresh, found = self.done_bytes - self.kept_bytes, self.kept_bytes - self._sampled_kept
            self._sampled_kept = self.kept_bytes
            self._finding = found > fresh - self._sampled_bytes
            if self._finding:  # work of an earlier run was looked through, in time that is none of the rest's
                self._progress.reset(self._task_id, total=self.total_bytes or None)
                self._sampled_bytes, self._sampled_since = fresh, None
            elif fresh > self._sampled_bytes or self._sampled_since is not None:
                self._progress.advance(self._task_id, fresh - self._sampled_bytes)
                self._sampled_bytes = fresh
                self._sampled_since = self._clock() if self._sampled_since is None else self._sampled_since
            self._task.completed = self.done_bytes

    @property
    def rate(self) -> float:
        """Bytes of this run a second, over the last half minute."""
        return self._task.speed or 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the rest takes at the present rate; None if that cannot be said, or not yet."""
        if not self.total_bytes or not self.rate or self._sampled_since is None:
            return None
        if self._clock() - self._sampled_since < _FIRST_ESTIMATE:
            return None
        return max(self.total_bytes - self.done_bytes, 0) / self.rate

    def is_line_due(self) -> bool:
        """Return whether it is time for a line; if so, it counts as said.

        It is 5 % or 30 s after the last, or 5 s where only the place changes.
        """
        since = self._clock() - self._said_at
        news = self.done_bytes - self._said_bytes
        stepped = (
            self.total_bytes and news * _PROGRESS_STEP_COUNT >= self.total_bytes and since >= _MIN_LINE_INTERVAL_SECONDS
        )
        moved = not self.total_bytes and self.place != self._said_place and since >= _LOCATION_UPDATE_SECONDS
        if not stepped and not moved and since < _MAX_SILENCE_SECONDS:
            return False
        self._said_at, self._said_bytes, self._said_place = self._clock(), self.done_bytes, self.place
        return True

    def is_resumed(self) -> bool:
        """Return, once, whether this run goes on after an earlier one whose bytes were all found."""
        if self._resumption_said or self._finding or not self.kept_bytes or self.done_bytes == self.kept_bytes:
            return False
        self._resumption_said = True
        return True

    def format_resumption(self, verb: str) -> str:
        """Format how much of the work an earlier run did, in one plain line."""
        return (
            f"{verb}: resuming, {format_file_size(self.kept_bytes)} of {format_file_size(self.total_bytes)} are there\n"
        )

    def render_bar(self, columns: int, held: int) -> Text:
        """Render what a terminal of so many columns shows in one line.

        Where it is too narrow, parts go in this order: memory, bytes of an earlier run, place, files, amount, bar, and
        the rate. The percentage and the time left stay.
        """
        share = format_percent(self.done_bytes, self.total_bytes) if self.total_bytes else ""
        amount = f" of {format_file_size(self.total_bytes)}" if self.total_bytes else ""
        left, rate = self.seconds_left, f"{format_file_size(self.rate)}/s" if self.rate else ""
        parts = {
            "phase": self.phase or ("" if self.total_bytes or self.done_bytes else "reading headers"),
            "bar": "",
            "share": share,
            "left": f"{format_duration(left)} left" if left is not None else "",
            "rate": rate,
            "amount": f"{format_file_size(self.done_bytes)}{amount}" if self.done_bytes or amount else "",
            "files": f"{self.files_done:,}/{self.files:,} files" if self.files else "",
            "place": self.place,
            "kept": f"{format_file_size(self.kept_bytes)} were there" if self.kept_bytes else "",
            "held": format_memory_size(held) if held else "",
        }
        room, shown = columns, dict[str, Text]()
        for name in ("share", "left", "phase", "rate", "bar", "amount", "files", "place", "kept", "held"):
            free = room - (len(_GAP) if shown else 0)
            fitted = self._fit_part(name, parts[name], free)
            if fitted.cell_len:
                shown[name] = fitted
                room = free - fitted.cell_len
        return Text(_GAP, no_wrap=True).join(shown[name] for name in parts if name in shown)

    def _fit_part(self, name: str, text: str, free: int) -> Text:
        """Return a part in at most `free` columns: names are cut short, the bar is narrowed, numbers are left out."""
        if name == "bar":
            size = min(free, _MAX_BAR_COLUMNS) if self.total_bytes and free >= _MIN_BAR_COLUMNS else 0
            full = size * min(self.done_bytes, self.total_bytes) // (self.total_bytes or 1)
            return Text.assemble(("━" * full, "bar.complete"), ("━" * (size - full), "bar.back"))
        fitted = Text(text, style=_BAR_STYLES.get(name, ""))
        if name in {"phase", "place"} and free >= _MIN_NAME_COLUMNS:
            fitted.truncate(free, overflow="ellipsis")
        return fitted if fitted.cell_len <= free else Text()

    def format_line(self, verb: str, held: int) -> str:
        """Format all of it in one plain line; `held` is the memory in use in bytes, 0 if not known."""
        parts = [self.phase] if self.phase else []
        if self.total_bytes:
            share = format_percent(self.done_bytes, self.total_bytes)
            parts.append(f"{format_file_size(self.done_bytes)} of {format_file_size(self.total_bytes)} ({share})")
        elif self.done_bytes or not self.phase:
            parts.append(format_file_size(self.done_bytes))
        if self.rate:
            parts.append(f"{format_file_size(self.rate)}/s")
        if self.seconds_left is not None:
            parts.append(f"{format_duration(self.seconds_left)} left")
        if self.files:
            parts.append(f"{self.files_done:,} of {self.files:,} files")
        if self.place:
            parts.append(self.place)
        if held:
            parts.append(f"{format_memory_size(held)} held")
        return f"{verb}: {', '.join(parts)}\n"
