"""Shows the progress of a long task: a bar for a person, plain lines for a log, JSON lines for a program."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TextIO, cast

from shardctl.base.amounts import format_file_size
from shardctl.cli import streams
from shardctl.report.documents import build_progress_document
from shardctl.report.meter import TransferMeter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console
    from rich.text import Text

    from shardctl.base.workers import ExecutionOptions, ProgressWatcher

_SAMPLING_INTERVAL_SECONDS: Final = 0.5
"""Seconds between samples of the rate, and between looks at whether something is due."""


class _ProgressView(Protocol):
    """Shows a meter; `show` is called about twice a second."""

    meter: TransferMeter

    def show(self) -> None: ...

    def close(self) -> None: ...


class _ProgressWatch:
    """Takes the news of the threads that work, and lets one thread of its own do all the showing."""

    def __init__(self, view: _ProgressView, said: set[str]) -> None:
        self._view, self._said = view, said
        self._meter = view.meter
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._refresh_view, name="shardctl-progress", daemon=True)
        from shardctl.base.workers import start_thread

        start_thread(self._thread)

    def warn(self, messages: Sequence[str]) -> None:
        streams.print_warnings(messages)
        self._said.update(messages)

    def begin(self, total_bytes: int, files: int = 0, phase: str = "") -> None:
        amount = f" of {format_file_size(total_bytes)}" if total_bytes else ""
        streams.print_detail(f"{phase or 'work'}{amount} begins\n")
        self._meter.begin(total_bytes, files, phase)

    def work_on(self, place: str) -> None:
        self._meter.place = place

    def advance(self, nbytes: int, *, kept: bool = False) -> None:
        self._meter.advance(nbytes, kept=kept)

    def file_done(self, path: str) -> None:  # noqa: ARG002 - only their number is shown
        self._meter.finish_file()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._view.close()

    def _refresh_view(self) -> None:
        while not self._over.wait(_SAMPLING_INTERVAL_SECONDS):
            self._view.show()


class _LogLines:
    """Writes a plain line every 5 % or 30 s."""

    def __init__(self, verb: str) -> None:
        self.meter = TransferMeter()
        self._verb = verb

    def show(self) -> None:
        self.meter.sample()
        if self.meter.is_resumed():
            streams.print_progress(self.meter.format_resumption(self._verb))
        if self.meter.is_line_due():
            streams.print_progress(self.meter.format_line(self._verb, measure_held_memory()))

    def close(self) -> None:
        """Leave the lines."""


class _JsonRecords:
    """Writes a JSON line as often."""

    def __init__(self) -> None:
        self.meter = TransferMeter()

    def show(self) -> None:
        self.meter.sample()
        if self.meter.is_line_due():
            streams.print_record(build_progress_document(self.meter) | {"held_bytes": measure_held_memory()})

    def close(self) -> None:
        """Leave the records."""


class _TerminalBar:
    """Draws a bar that goes away when the task is done."""

    def __init__(self, verb: str, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console(file=cast("TextIO", streams.LastingStream(sys.stderr)))
        self.meter = TransferMeter()
        self._verb = verb
        self._live = Live(console=self._console, get_renderable=self._render, transient=True, refresh_per_second=10)
        self._live.start()

    def _render(self) -> Text:
        return self.meter.render_bar(self._console.width, measure_held_memory())

    def show(self) -> None:
        self.meter.sample()
        if streams.RUN.file is not None and self.meter.is_line_due():
            streams.RUN.write(self.meter.format_line(self._verb, measure_held_memory()))

    def close(self) -> None:
        self._live.stop()


def _choose_terminal_view(verb: str) -> _ProgressView:
    watched = streams.is_terminal(sys.stderr) and not streams.RUN.talk.quiet
    return _TerminalBar(verb) if watched else _LogLines(verb)


@contextmanager
def watch_progress(verb: str, *, json: bool = False, said: set[str] | None = None) -> Iterator[ProgressWatcher]:
    """Give someone to tell how a task goes on; the warnings that it is told are added to `said`."""
    watch = _ProgressWatch(_JsonRecords() if json else _choose_terminal_view(verb), set() if said is None else said)
    try:
        yield watch
    finally:
        watch.close()


@contextmanager
def watch_effort(verb: str, threads: int | None) -> Iterator[ExecutionOptions]:
    """Give how much to spend on a task that reads everything, and show how it goes on."""
    from shardctl.base.workers import ExecutionOptions

    with watch_progress(verb) as watch:
        yield ExecutionOptions(watcher=watch) if threads is None else ExecutionOptions(threads=threads, watcher=watch)


def measure_held_memory() -> int:
    """Measure bytes of anonymous memory of this process; 0 where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
