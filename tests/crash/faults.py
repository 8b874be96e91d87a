"""Sees every call that changes the file system, in order, and makes chosen ones go wrong."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from shardctl.storage import linux

DATA = {"write", "pwrite"}
"""Calls that carry bytes, and can be torn."""
FILLING = {*DATA, "reserve", "mkdir", "open"}
"""Calls that need room on the disk."""
PYTHONS = (*DATA, "fsync", "open", "mkdir", "rename", "replace", "unlink", "remove", "rmdir", "ftruncate", "link")
OURS = {"reserve": "reserve_space", "exchange": "exchange_names", "rename_new": "rename_without_replacing"}
"""Our own system calls, by the names that they have in `calls`."""


@dataclass
class Faults:
    """What is to go wrong at which call; the calls are numbered from 0."""

    kill_at: int | None = None
    torn: bool = False
    """The killed write has written half."""
    errors: dict[int, str] = field(default_factory=dict)
    """The errno name that a call fails with, without doing anything."""
    full_from: int | None = None
    """From this call on the disk is full."""
    short: bool = False
    """Every write writes only a part."""
    actions: dict[int, list] = field(default_factory=dict)
    """`[what, path]` that another program does before a call."""
    delay: float = 0
    """Seconds that every pwrite but those at the start of a file takes longer."""
    gate: str = ""
    """Such a pwrite makes the file ``<gate>.shut``, and waits until there is one of this name."""
    journalled: int = 2
    """Lines that the journal must have before the gate is shut; the first says what the run is."""
    no_exchange: bool = False
    """The file system cannot swap two names."""
    calls: list = field(default_factory=list)
    """`[name, path]` of every call so far."""

    def install(self):
        """Put wrappers around everything that changes files; there is no way back."""
        self._lock = threading.RLock()
        self._names = {}
        self._pwrite = os.pwrite
        for name in PYTHONS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        for name, function in OURS.items():
            setattr(linux, function, self._wrapped(name, getattr(linux, function)))

    def _wrapped(self, name, call):
        def wrapper(*args, **options):
            if name == "open" and not args[1] & os.O_CREAT:
                return self._remember(call(*args, **options), args[0])
            with self._lock:
                number = len(self.calls)
                self.calls.append([name, self._path(args[0])])
                self._strike(number, name, call, args)
                if name in DATA and self.short and len(args[1]) > 1:
                    args = (args[0], memoryview(args[1])[: max(len(args[1]) // 3, 1)], *args[2:])
                if name == "exchange" and self.no_exchange:
                    return False
            if name == "pwrite" and args[2]:
                time.sleep(self.delay)
                self._wait()
            result = call(*args, **options)
            return self._remember(result, args[0]) if name == "open" else result

        return wrapper

    def _wait(self):
        with self._lock:
            lines = sum(name == "write" and "journal" in Path(path).name for name, path in self.calls)
        if self.gate and lines >= self.journalled:
            open(f"{self.gate}.shut", "w").close()  # noqa: PTH123 - Path's own would be among the calls
            while not os.path.exists(self.gate):  # noqa: PTH110
                time.sleep(0.005)

    def _remember(self, descriptor, path):
        self._names[descriptor] = os.fspath(path)
        return descriptor

    def _path(self, what):
        return self._names.get(what, "?") if isinstance(what, int) else os.fspath(what)

    def _strike(self, number, name, call, args):
        if number in self.actions:
            happen(*self.actions[number])
        if number == self.kill_at:
            if self.torn and name in DATA:
                call(args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:])
            os.kill(os.getpid(), signal.SIGKILL)
        full = self.full_from is not None and number >= self.full_from and name in FILLING
        if full or number in self.errors:
            code = getattr(errno, "ENOSPC" if full else self.errors[number])
            raise OSError(code, os.strerror(code))


def happen(what, path):
    """Do something to a file or directory, as another program would; the wrappers do not see it."""
    path = Path(path)
    if what == "truncate":
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
    elif what == "modify":
        with path.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x5a")
    elif what == "edit":
        edit_in_place(path)
    elif what == "chmod":
        path.chmod(0o600)
    elif what == "replace":
        other = path.with_name("other")
        other.write_bytes(bytes(reversed(path.read_bytes())))
        _rename(other, path)
    elif what == "delete":
        _unlink(path)
    elif what == "arrive":
        _rename(path, path.with_name("out"))
    else:
        raise AssertionError(what)


def edit_in_place(path):
    """Change one byte in the middle of a file; its size, modification time and inode stay as they are."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        (byte,) = file.read(1)
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 0x10]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


_rename, _unlink = os.rename, os.unlink
