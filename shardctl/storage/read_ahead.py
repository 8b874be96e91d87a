"""Merges small reads of remote files: each read also fetches what follows, for the next ones.

A large read is fetched as it is. A small one fetches a window of `GLANCE` bytes, or of `STRIDE` where the file is
read on from where the last fetch ended; at most so much is read without being asked for, and what follows is
asked for as a rule, since tensors are read in the order of the file. At the end of a file a window begins earlier,
because archives are read from there. `KEPT` bytes of windows are held.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from shardctl.base.workers import StopRequest, run_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardctl.storage import Span

GLANCE: Final = 64 << 10
"""Bytes; most headers fit, and a request costs as much time as so many bytes."""
STRIDE: Final = 1 << 20
"""Bytes; a tenth of a second of a slow connection."""
KEPT: Final = 16 << 20
AT_ONCE: Final = 8
"""Spans fetched together by `expect`."""


class RangeFetch(Protocol):
    """Reads a stretch of a file from where it is."""

    def __call__(self, path: str, offset: int, into: memoryview, /) -> None:
        """Fill `into`, or raise."""


@dataclass(slots=True, eq=False)
class _FetchedWindow:
    start: int
    data: bytearray
    ready: threading.Event = field(default_factory=threading.Event)
    failed: bool = False

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


class ReadAheadCache:
    """What was fetched of some files and may be asked for again; shared by threads."""

    def __init__(self, fetch: RangeFetch, sizes: Callable[[str], int]) -> None:
        self._fetch = fetch
        self._size = sizes
        self._lock = threading.Lock()
        self._kept: OrderedDict[_FetchedWindow, str] = OrderedDict()
        """Each with its path, the one that was used last at the end; two may begin at the same byte."""
        self._by_path: dict[str, list[_FetchedWindow]] = {}
        self._held = 0
        self._ends: dict[str, int] = {}

    def read(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from byte `offset`, from windows as far as they go; another thread's fetch is waited for."""
        done = 0
        while done < len(into):
            start, rest = offset + done, into[done:]
            with self._lock:
                window = self._find_window(path, start)
                ours = window is None
                if window is None:
                    end = self._ends.get(path)
                    on = end is not None and 0 <= start - end <= GLANCE
                    length = STRIDE if on else GLANCE
                    self._ends[path] = start + max(len(rest), length)
                    if len(rest) < length:
                        window = self._add(path, start if on else min(start, max(self._size(path) - length, 0)), length)
            if window is None:
                self._fetch(path, start, rest)
                return
            if ours:
                self._fill(path, window)
            elif not window.ready.wait() or window.failed:
                continue  # whoever fetched it has the error; it may not be ours
            size = min(window.stop - start, len(rest))
            rest[:size] = memoryview(window.data)[start - window.start :][:size]
            done += size

    def find(self, path: str, offset: int, into: memoryview) -> bool:
        """Fill `into` if one window has all of it; fetches nothing."""
        with self._lock:
            window = self._find_window(path, offset)
        if window is None or window.stop < offset + len(into) or not window.ready.is_set() or window.failed:
            return False
        into[:] = memoryview(window.data)[offset - window.start :][: len(into)]
        return True

    def expect(self, spans: Iterable[Span]) -> None:
        """Fetch windows for what will be read, several at once; those that cannot be held are left for later.

        Neighbours in a file that less than `GLANCE` bytes divide are one.
        """
        wanted = []
        with self._lock:
            room = KEPT
            for path, offset, size in _merge_spans(spans):
                length = min(size, self._size(path) - offset)
                room -= length
                if room < 0:
                    break
                self._ends[path] = offset + length
                if length > 0 and self._find_window(path, offset) is None:
                    wanted.append((path, self._add(path, offset, length)))
        try:
            run_in_threads(
                iter(wanted), lambda: lambda each: self._fill(*each), min(AT_ONCE, len(wanted)), StopRequest()
            )
        finally:
            for path, window in wanted:  # after an error others were never begun
                if not window.ready.is_set():
                    self._drop_window(path, window)

    def _fill(self, path: str, window: _FetchedWindow) -> None:
        try:
            self._fetch(path, window.start, memoryview(window.data))
        except BaseException:
            self._drop_window(path, window)
            raise
        window.ready.set()

    def _drop_window(self, path: str, window: _FetchedWindow) -> None:
        with self._lock:
            if self._kept.pop(window, None) is not None:
                self._by_path[path].remove(window)
                self._held -= len(window.data)
        window.failed = True
        window.ready.set()

    def _find_window(self, path: str, at: int) -> _FetchedWindow | None:
        for window in self._by_path.get(path, ()):
            if window.start <= at < window.stop:
                self._kept.move_to_end(window)
                return window
        return None

    def _add(self, path: str, start: int, length: int) -> _FetchedWindow:
        window = _FetchedWindow(start, bytearray(min(length, self._size(path) - start)))
        self._kept[window] = path
        self._by_path.setdefault(path, []).append(window)
        self._held += len(window.data)
        while self._held > KEPT and len(self._kept) > 1:
            oldest, other = self._kept.popitem(last=False)
            self._by_path[other].remove(oldest)
            self._held -= len(oldest.data)
        return window


def _merge_spans(spans: Iterable[Span]) -> Iterator[Span]:
    held: Span | None = None
    for path, offset, size in spans:
        if held is not None and held[0] == path and 0 <= offset - held[1] <= held[2] + GLANCE:
            held = path, held[1], max(held[2], offset + size - held[1])
        else:
            if held is not None:
                yield held
            held = path, offset, size
    if held is not None:
        yield held
