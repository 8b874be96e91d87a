"""Where output grows until it is complete, and how it then takes its final name in one step.

Invariants, in the order in which they are made true:

1. Nothing at the destination is touched before everything of its replacement is complete and synced.
2. Staged files lie on the destination's file system, under a name that no loader matches.
3. `shardctl.json` is the last file written, so a directory that has it is complete.
4. A new destination appears by one rename; an overwritten one is exchanged, and the old one is removed afterwards.
5. Whatever a kill leaves, the same command finishes the job: either the journal is still there, or the result is.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from shardctl.errors import AccessError, DestinationError
from shardctl.record import RECORD, load
from shardctl.storage.local import sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

_JOURNAL: Final = "journal.jsonl"
_INSIDE: Final = ".shardctl"
"""Where a mount point, which has no beside, is staged."""
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class Staging:
    """The staging area of one destination; use as a context manager, which holds the lock."""

    def __init__(self, destination: Path, *, overwrite: bool = False) -> None:
        self.destination = Path(os.path.abspath(destination))  # noqa: PTH100 - resolve() would follow the last link
        self._overwrite = overwrite
        self._found = _examine(self.destination)
        beside = self.destination.parent / f".{self.destination.name}.shardctl"
        self.root = self.destination / _INSIDE if self._found == "mount" else beside
        self.data = self.root / "data"
        """The tree that becomes the destination."""
        self.journal = self.root / _JOURNAL
        self._lock = self.root / "lock"
        if not self.journal.exists():
            self.require_replaceable()

    def __enter__(self) -> Self:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._acquire()
            self.data.mkdir(exist_ok=True)
        except PermissionError as error:
            raise AccessError(f"{self.root.parent} cannot be written: {error.strerror}") from error
        except OSError as error:
            raise DestinationError(f"{self.root} cannot be made: {error.strerror}") from error
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if not self.journal.exists():
                self.data.rmdir()  # nothing was begun
                self.root.rmdir()

    def require_replaceable(self) -> None:
        """Raise DestinationError if a finished checkpoint stands there and nobody said it may be replaced."""
        if self._found == "ours" and not self._overwrite:
            raise DestinationError(
                f"{self.destination} already holds a finished checkpoint",
                hint="add --overwrite to replace it once the new one is complete, or choose another destination",
            )

    def published(self, plan: str) -> bool:
        """Whether an earlier run with this journal was killed after its result had taken its final name."""
        record = self.destination / RECORD
        return self._found in {"ours", "mount"} and record.exists() and load(record.read_bytes()).plan == plan

    def forget(self) -> None:
        """Remove the staging area; the journal goes last, because it is what tells a finished run from none."""
        for leftover in (self.data, self.root / "old"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._lock.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)
        self.root.rmdir()

    def discard(self) -> None:
        """Throw away what an earlier run left."""
        shutil.rmtree(self.data, ignore_errors=True)
        self.journal.unlink(missing_ok=True)
        self.data.mkdir(exist_ok=True)

    def require_space(self, nbytes: int) -> None:
        """Raise DestinationError if the file system cannot hold what is still to be written."""
        have = sum(f.stat().st_blocks * 512 for f in self.data.rglob("*") if f.is_file())
        free = shutil.disk_usage(self.root).free
        if free + have < nbytes:
            raise DestinationError(
                f"{self.destination} needs {nbytes:,} bytes, but its file system has {free + have:,} free",
                hint="free some space or choose another destination; nothing was written",
            )

    def write(self, path: str, content: bytes) -> None:
        """Write and sync a small file of the result."""
        full = self.data / path
        full.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            with contextlib.closing(os.fdopen(descriptor, "wb", closefd=False)) as file:
                file.write(content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def publish(self) -> None:
        """Give the complete tree its final name, durably."""
        for folder in sorted((f for f in self.data.rglob("*") if f.is_dir()), reverse=True):
            sync_directory(folder)
        sync_directory(self.data)
        if self._found == "mount":
            self._move_in()
        elif self._found == "ours":
            self._exchange()
        else:
            try:
                self.data.rename(self.destination)
            except OSError as error:
                raise DestinationError(
                    f"{self.destination} appeared while it was being written",
                    hint=f"the finished result is kept in {self.data}",
                ) from error
        sync_directory(self.destination.parent)
        self.forget()

    def _move_in(self) -> None:
        """Into a mount point, which no rename can replace: weights first, `config.json` and the record last."""
        files = sorted(f.relative_to(self.data) for f in self.data.rglob("*") if f.is_file())
        last = [Path("config.json"), Path(RECORD)]
        for path in [*(f for f in files if f not in last), *(f for f in last if f in files)]:
            target = self.destination / path
            target.parent.mkdir(parents=True, exist_ok=True)
            (self.data / path).rename(target)
            sync_directory(target.parent)

    def _exchange(self) -> None:
        if not _exchange_directories(self.data, self.destination):
            old = self.root / "old"
            self.destination.rename(old)
            self.data.rename(self.destination)

    def _acquire(self) -> None:
        mine = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "start": _started(os.getpid())})
        for _ in range(2):
            try:
                descriptor = os.open(self._lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                self._break_if_dead()
                continue
            os.write(descriptor, mine.encode())
            os.fsync(descriptor)
            os.close(descriptor)
            return
        raise DestinationError(f"{self._lock} cannot be taken: another run takes it again and again")

    def _break_if_dead(self) -> None:
        try:
            owner: dict[str, Any] = json.loads(self._lock.read_text())
        except (OSError, ValueError):
            owner = {}
        host, pid = owner.get("host", "an unknown host"), owner.get("pid", 0)
        if host == socket.gethostname() and _started(pid) != owner.get("start"):
            self._lock.unlink(missing_ok=True)
            return
        raise DestinationError(
            f"another run (process {pid} on {host}) is writing {self.destination}",
            hint=f"wait for it; if it is gone, remove {self._lock}",
        )


def _examine(destination: Path) -> str:
    """What is at the destination: `nothing`, `empty`, `mount` (empty, and cannot be renamed over) or `ours`."""
    if destination.is_symlink() and not destination.exists():
        raise DestinationError(f"{destination} is a link to nothing")
    if not destination.exists():
        return "nothing"
    if not destination.is_dir():
        raise DestinationError(f"{destination} exists and is not a directory")
    content = [entry.name for entry in _entries(destination)]
    if (destination / _INSIDE / _JOURNAL).exists():
        return "mount"  # and its files may be half moved in
    if RECORD in content:
        return "ours"
    if content:
        raise DestinationError(
            f"{destination} is not empty and was not written by shardctl: it holds {', '.join(sorted(content)[:3])}",
            hint="choose another destination, or remove it yourself",
        )
    movable = os.access(destination.parent, os.W_OK) and not destination.is_symlink()
    return "mount" if os.path.ismount(destination) or not movable else "empty"


def _entries(destination: Path) -> Iterator[Path]:
    try:
        yield from (entry for entry in destination.iterdir() if entry.name not in {_INSIDE, "lost+found"})
    except PermissionError as error:
        raise AccessError(f"{destination} cannot be listed: {error.strerror}") from error


def _exchange_directories(first: Path, second: Path) -> bool:
    """Swap two directories in one step (Linux 3.15); False where that is unsupported."""
    if sys.platform != "linux":
        return False
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    done: int = call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
        return False
    raise DestinationError(f"{second} cannot be replaced: {os.strerror(code)}")


def _started(pid: int) -> str:
    """What tells a process from a later one with the same number; empty if it does not run."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "running"
