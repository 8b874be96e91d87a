"""Keeps files open by path, for threads that share many more files than there are descriptors."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SHARE: Final = 6
"""A run has up to five sets of descriptors (source and target, ordinary and direct, and files whose blocks are shared);
the rest is everybody else's."""
_FEWEST: Final = 32
_MOST: Final = 4096


class DescriptorPool:
    """Open descriptors by path, the least recently used closed first; a descriptor in use is never closed."""

    def __init__(self, flags: int, *, before_closing: Callable[[Path, int], None] | None = None) -> None:
        """`before_closing` is called with each descriptor that is closed to make room; what it raises is raised."""
        self._flags = flags
        self._before_closing = before_closing
        self._most = choose_descriptor_count()
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, list[int]] = OrderedDict()

    def use(self, path: Path) -> _UsedDescriptor:
        """Give the descriptor of `path`, opened if it is not; it stays open for the length of the `with` block."""
        return _UsedDescriptor(self, path)

    def take(self, path: Path) -> list[int]:
        """Return the descriptor of `path` and how many use it, this one included; `give_back` is to follow."""
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                self._make_room()
                entry = [os.open(path, self._flags | getattr(os, "O_CLOEXEC", 0)), 0]
                self._open[path] = entry
            self._open.move_to_end(path)
            entry[1] += 1
        return entry

    def give_back(self, entry: list[int]) -> None:
        """Note that one use is over."""
        with self._lock:
            entry[1] -= 1

    def _make_room(self) -> None:
        while len(self._open) >= self._most:
            path = next((p for p, (_, users) in self._open.items() if not users), None)
            if path is None:
                return
            descriptor = self._open.pop(path)[0]
            try:
                if self._before_closing is not None:
                    self._before_closing(path, descriptor)
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            for descriptor, _ in self._open.values():
                os.close(descriptor)
            self._open.clear()


class _UsedDescriptor:
    """The `with` block of one use; a generator would take three times as long, and small tensors are many."""

    __slots__ = ("_entry", "_path", "_pool")

    def __init__(self, pool: DescriptorPool, path: Path) -> None:
        self._pool, self._path = pool, path
        self._entry: list[int] | None = None

    def __enter__(self) -> int:
        self._entry = self._pool.take(self._path)
        return self._entry[0]

    def __exit__(self, *_: object) -> None:
        if self._entry is not None:
            self._pool.give_back(self._entry)


def choose_descriptor_count() -> int:
    """Choose how many files each set may hold open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(max(soft // _SHARE, _FEWEST), _MOST)
