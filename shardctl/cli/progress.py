"""Shows how a long task goes on: a bar for a person, plain lines for a log, JSON lines for a program."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from shardctl.amounts import duration, file_size, memory_size
from shardctl.cli import streams
from shardctl.report.documents import progressed
from shardctl.report.meter import Meter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import TaskID

    from shardctl.execute.progress import Progress
    from shardctl.workers import Effort

_TICK: Final = 0.5
"""Seconds between samples of the rate, and between looks at whether something is due."""


class _View(Protocol):
    """Shows a meter; called about twice a second, and once at the end."""

    def show(self, meter: Meter) -> None: ...

    def close(self) -> None: ...


class _Watch:
    """Is told by the threads that work, and lets one thread of its own do all the showing."""

    def __init__(self, view: _View) -> None:
        self._view = view
        self._meter = Meter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="shardctl-progress", daemon=True)
        self._thread.start()

    def begin(self, total_bytes: int, files: int) -> None:
        self._meter.begin(total_bytes, files)

    def advance(self, nbytes: int, *, kept: bool = False) -> None:
        self._meter.advance(nbytes, kept=kept)

    def file_done(self, path: str) -> None:  # noqa: ARG002 - only their number is shown
        self._meter.file_done()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._view.close()

    def _tick(self) -> None:
        while not self._over.wait(_TICK):
            self._meter.sample()
            self._view.show(self._meter)


class _Lines:
    """A plain line every 5 % or 30 s."""

    def __init__(self, verb: str) -> None:
        self._verb = verb

    def show(self, meter: Meter) -> None:
        if meter.due():
            streams.talk(meter.line(self._verb, memory_held()))

    def close(self) -> None:
        """Leave the lines."""


class _Records:
    """A JSON line as often."""

    def show(self, meter: Meter) -> None:
        if meter.due():
            streams.record(progressed(meter) | {"held_bytes": memory_held()})

    def close(self) -> None:
        """Leave the records."""


class _Bar:
    """A bar that goes away when the task is done."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._bar = Progress(
            BarColumn(bar_width=16),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=Console(stderr=True),
            transient=True,
        )
        self._task: TaskID = self._bar.add_task("reading headers", total=None)
        self._bar.start()

    def show(self, meter: Meter) -> None:
        left = meter.seconds_left
        words = [
            file_size(meter.done_bytes) + (f" of {file_size(meter.total_bytes)}" if meter.total_bytes else ""),
            f"{file_size(meter.rate)}/s",
            *([f"{duration(left)} left"] if left is not None else []),
            *([f"{meter.files_done:,}/{meter.files:,} files"] if meter.files else []),
            memory_size(memory_held()),
        ]
        total = meter.total_bytes or None
        self._bar.update(self._task, total=total, completed=meter.done_bytes, description="  ".join(words))

    def close(self) -> None:
        self._bar.stop()


@contextmanager
def watching(verb: str, *, json: bool = False) -> Iterator[Progress]:
    """Someone to tell how a task goes on."""
    view: _View = _Records() if json else _Bar() if streams.is_terminal(sys.stderr) else _Lines(verb)
    watch = _Watch(view)
    try:
        yield watch
    finally:
        watch.close()


@contextmanager
def effort(verb: str, threads: int | None) -> Iterator[Effort]:
    """How much to spend on a task that reads everything, and someone to watch it."""
    from shardctl.workers import Effort

    with watching(verb) as watch:
        yield Effort(watcher=watch) if threads is None else Effort(threads=threads, watcher=watch)


def memory_held() -> int:
    """Bytes of anonymous memory of this process; 0 where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
