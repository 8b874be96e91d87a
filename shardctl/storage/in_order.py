"""Hashes of files that several threads read once from the first byte to the last, each thread a stretch at a time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shardctl.errors import ChangedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from hashlib import _Hash

_PATIENCE: Final = 60.0
"""Seconds that one thread waits for the stretch before its own; then the file's hash is given up."""
_GRACE: Final = 1.0
"""Seconds for the thread that has taken up the stretch before to begin fetching it."""
_NEAR: Final = 256 << 20
"""Bytes between a stretch and the one that is due, beyond which no thread is about to fetch that."""


@dataclass(slots=True)
class Promise:
    """What a file's hash should be, and how far it is computed."""

    size: int
    """Bytes of the file."""
    digest: str
    """In hexadecimal."""
    state: _Hash
    """The hash of no byte of the file yet."""
    position: int = 0
    """Bytes hashed so far, from the first."""
    flights: list[tuple[int, int]] = field(default_factory=list)
    """Stretches that are being fetched, or wait to be hashed."""
    busy: bool = False
    over: bool = False
    turn: threading.Condition = field(default_factory=threading.Condition)


class InOrder:
    """Compares files that are read whole with the hashes that they should have.

    Nothing is kept: a thread whose stretch comes too early waits for the one before, which another thread is fetching.
    Where nobody is for a while, the file is not being read in order, and there will be no hash of it.
    """

    def __init__(self, expected: Mapping[str, Promise]) -> None:
        """`expected` is what the hash of each file should be; of others none is computed."""
        self._files = expected
        self.begun: set[str] = set()
        """Files of which something was fetched."""
        self.proved: set[str] = set()
        """Files that were read whole and have the hash that they should have."""

    def begin(self, path: str, start: int, stop: int) -> None:
        """Say that a stretch is about to be fetched; `finish` or `fail` must follow."""
        file = self._files.get(path)
        if file is not None:
            with file.turn:
                file.flights.append((start, stop))
                self.begun.add(path)

    def fail(self, path: str, start: int, stop: int) -> None:
        """Say that it will not come."""
        file = self._files.get(path)
        if file is not None:
            with file.turn:
                file.flights.remove((start, stop))
                file.turn.notify_all()

    def finish(self, path: str, start: int, data: memoryview) -> None:
        """Hash a stretch when it is its turn; raises ChangedError with the last one if the file's hash is another."""
        file = self._files.get(path)
        if file is None:
            return
        stop = start + len(data)
        with file.turn:
            new = self._wait(file, start, stop)
            file.busy = new is not None
        if new is not None:
            file.state.update(data[new - start :])
        with file.turn:
            if new is not None:
                file.position, file.busy = stop, False
            file.flights.remove((start, stop))
            file.turn.notify_all()
            complete = new is not None and stop == file.size
        if complete:
            self._compare(path, file)

    def _wait(self, file: Promise, start: int, stop: int) -> int | None:
        """Where in the file to go on hashing, once it is the turn of this stretch; None if it brings nothing new."""
        now = time.monotonic()
        end, soon = now + _PATIENCE, now + (_GRACE if start - file.position < _NEAR else 0.0)
        while not file.over and file.position < stop:
            if start <= file.position and not file.busy:
                return file.position
            coming = any(begin <= file.position < until for begin, until in file.flights)
            if time.monotonic() > (end if coming else soon):
                file.over = True
                break
            file.turn.wait(_GRACE / 10)
        return None

    def _compare(self, path: str, file: Promise) -> None:
        found = file.state.hexdigest()
        if found != file.digest:
            raise ChangedError(
                f"{path} is not what it should be: its {file.state.name} is {found}, and {file.digest} was promised",
                hint="something on the way changed it; run again, and if that does not help, fetch it another way",
            )
        self.proved.add(path)
