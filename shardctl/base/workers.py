"""Runs threads that share a queue of work, stop at the first error, and can be asked to stop."""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import field, replace
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from shardctl.base.errors import Interrupted, MachineError, UsageError
from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Item = TypeVar("Item")


class StopRequest:
    """A request to stop soon; falsy until a signal's number is set."""

    def __init__(self, *, kept: bool = False) -> None:
        """`kept` says whether what was done until then is there for the next run."""
        self.signal = 0
        self.kept = kept

    def __bool__(self) -> bool:
        return self.signal != 0


def raise_if_stopped(stop: StopRequest) -> None:
    """Raise Interrupted if a signal asked to stop."""
    if stop and stop.kept:
        raise Interrupted(
            "interrupted; everything finished so far is kept",
            signal=stop.signal,
            hint="run the same command again: it resumes where this one stopped",
        )
    if stop:
        raise Interrupted("interrupted before the end", signal=stop.signal, hint="run the same command again")


class ProgressWatcher(Protocol):
    """Is told how work goes on; called from several threads, and must not raise."""

    def warn(self, messages: Sequence[str]) -> None:
        """Note what is odd about the work that is about to begin."""

    def begin(self, total_bytes: int, files: int = 0, phase: str = "") -> None:
        """Begin a phase of this many bytes in this many files; 0 where that is not known."""

    def work_on(self, place: str) -> None:
        """Note the file, or the part of a model, that is worked on."""

    def advance(self, nbytes: int, *, kept: bool = False) -> None:
        """Note that so many bytes more are done; `kept` if an earlier run had done them."""

    def file_done(self, path: str) -> None:
        """Note that a file is complete and on stable storage."""


class NullWatcher:
    """Watches nothing."""

    def warn(self, messages: Sequence[str]) -> None:
        """Ignore."""

    def begin(self, total_bytes: int, files: int = 0, phase: str = "") -> None:
        """Ignore."""

    def work_on(self, place: str) -> None:
        """Ignore."""

    def advance(self, nbytes: int, *, kept: bool = False) -> None:
        """Ignore."""

    def file_done(self, path: str) -> None:
        """Ignore."""


@value_class
class ProgressUpdate:
    """How far a task is: what a callable that is given as `progress` gets."""

    phase: str
    """What is being done, such as `content`; empty where the verb says it all."""
    done_bytes: int
    """Bytes in place, those that an earlier run had written included."""
    total_bytes: int
    """Bytes of this phase; 0 if not known."""
    kept_bytes: int
    """Those that an earlier run had written."""
    files_done: int
    files: int
    """Files of this phase; 0 if not known."""
    place: str
    """The file, or the part of a model, that is worked on."""


class CallbackWatcher:
    """Tells a callable how far a task is, from one thread at a time; what it raises ends the task."""

    def __init__(self, callback: Callable[[ProgressUpdate], object]) -> None:
        self._callback = callback
        self._update = ProgressUpdate("", 0, 0, 0, 0, 0, "")
        self._lock = threading.RLock()
        self._called_at = -math.inf

    def warn(self, messages: Sequence[str]) -> None:
        """Ignore: the result has the warnings."""

    def begin(self, total_bytes: int, files: int = 0, phase: str = "") -> None:
        """Begin a phase, and tell."""
        self._tell(ProgressUpdate(phase, 0, total_bytes, 0, 0, files, ""))

    def work_on(self, place: str) -> None:
        """Note the file, or the part of a model, that is worked on."""
        with self._lock:
            self._tell(replace(self._update, place=place), rarely=True)

    def advance(self, nbytes: int, *, kept: bool = False) -> None:
        """Note bytes, and tell unless that was done just now."""
        with self._lock:
            done, found = self._update.done_bytes + nbytes, self._update.kept_bytes + (nbytes if kept else 0)
            self._tell(replace(self._update, done_bytes=done, kept_bytes=found), rarely=True)

    def file_done(self, path: str) -> None:  # noqa: ARG002 - only their number counts
        """Note a file, and tell."""
        with self._lock:
            self._tell(replace(self._update, files_done=self._update.files_done + 1))

    def finish(self) -> None:
        """Tell how it ended."""
        self._tell(self._update)

    def _tell(self, update: ProgressUpdate, *, rarely: bool = False) -> None:
        with self._lock:
            self._update = update
            if not rarely or time.monotonic() - self._called_at >= _CALL_PAUSE:
                self._callback(update)
                self._called_at = time.monotonic()


_CALL_PAUSE: Final = 0.1
"""Seconds between two calls while bytes move: often enough for a bar, and no burden on the threads that wait."""
_MOST_THREADS: Final = 1024
"""Beyond, they wait for one another: 64 are enough for any network, and a machine has a few hundred cores at most."""


def check_threads(count: int) -> None:
    """Raise UsageError for a number of threads that no machine has a use for."""
    if not 0 < count <= _MOST_THREADS:
        raise UsageError(
            f"{count:,} threads are asked for" if count < 1 << 63 else "more threads are asked for than there could be",
            hint=f"use 1 to {_MOST_THREADS:,}, or leave it to shardctl",
        )


def choose_thread_count(*, far: bool = False) -> int:
    """Choose one thread a core and one more, because some wait for the disk.

    Up to eight, beyond which it decides alone.

    Always eight where files are `far`, on the other side of a network, because most wait for that.
    """
    return 8 if far else min((os.cpu_count() or 1) + 1, 8)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; raises MachineError if the machine has no memory or no number left for one."""
    try:
        thread.start()
    except RuntimeError as error:
        raise MachineError(
            f"this machine cannot start another thread: {error}",
            hint="use fewer --threads, or raise the limits on memory and processes (ulimit -v, ulimit -u)",
        ) from error


@value_class
class ExecutionOptions:
    """How much is spent on a task, who watches, and who may stop it."""

    threads: int = field(default_factory=choose_thread_count)
    watcher: ProgressWatcher = field(default_factory=NullWatcher)
    stop: StopRequest = field(default_factory=StopRequest)
    block: int = 8 << 20
    """Bytes that each thread holds at once, a few times over."""

    def __post_init__(self) -> None:
        check_threads(self.threads)


def run_in_threads(
    items: Iterator[Item], worker: Callable[[], Callable[[Item], None]], threads: int, stop: StopRequest
) -> None:
    """Give every item to one of `threads` threads; each calls `worker` once, for a function with its own buffers.

    Returns when no item is left; raises the first error of any thread, after all have ended, or Interrupted.
    """
    lock = threading.Lock()
    errors: list[BaseException] = []

    def following() -> Item | None:
        with lock:
            return None if stop or errors else next(items, None)

    def work() -> None:
        try:
            handle = worker()
            while (item := following()) is not None:
                handle(item)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the calling thread
            with lock:
                errors.append(error)

    running = [threading.Thread(target=work, name=f"shardctl-{i}", daemon=True) for i in range(threads)]
    started: list[threading.Thread] = []
    try:
        for thread in running:
            start_thread(thread)
            started.append(thread)
    except MachineError as error:
        with lock:
            errors.insert(0, error)  # which ends those that run: they must not write behind the caller's back
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    raise_if_stopped(stop)


def split_into_batches(
    items: Iterable[Item], most: int | None, count_bytes: Callable[[Item], int]
) -> Iterator[list[Item]]:
    """Yield items in batches of at most `most` bytes; a larger one is alone, and without a limit all are together.

    >>> list(split_into_batches([3, 4, 9, 1, 2], 7, lambda nbytes: nbytes))
    [[3, 4], [9], [1, 2]]
    """
    batch: list[Item] = []
    size = 0
    for item in items:
        nbytes = count_bytes(item)
        if batch and most is not None and size + nbytes > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += nbytes
    if batch:
        yield batch
