"""Allows one run per destination, with a lock file that names its owner and ends with its process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import DestinationError
from shardctl.storage.durable import translate_os_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_LOCK_ATTEMPTS: Final = 10
"""How often a run that is just ending may take the file away from under us."""
_RETRY_DELAY_SECONDS: Final = (0.02, 0.2)
"""Seconds between two tries."""


class DestinationLock:
    """Held by at most one run.

    Between processes of one kernel `flock` decides, because it ends with its process. On network file systems it may
    succeed for everybody (`flock(2)`, section NFS), so the file also says whose it is, and a run on another machine is
    believed to live. A lock that was broken all the same may cost work, never bytes.
    """

    def __init__(self, path: Path, purpose: str, run: str = "") -> None:
        """`run` names what starts owners one after another: the dead predecessor of one is known to be dead."""
        self._path = path
        self._run = run
        self._purpose = purpose
        """What the owner is doing, for the message to everyone else."""
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds it."""
        return self._descriptor is not None

    def acquire(self, patience: float = 0) -> None:
        """Take the lock, also from an owner that is dead.

        Raises DestinationError if another run holds it, and still does after `patience` seconds.
        """
        deadline = time.monotonic() + patience
        with translate_os_errors(self._path, "making"):
            while True:
                try:
                    self._acquire()
                except DestinationError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(random.uniform(*_RETRY_DELAY_SECONDS))  # noqa: S311 - so that many do not try again at once
                else:
                    return

    def _acquire(self) -> None:
        for _ in range(_MAX_LOCK_ATTEMPTS):
            self._path.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # the owner just removed the directory
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
                try:
                    if self._take(descriptor):
                        self._descriptor, descriptor = descriptor, -1
                        return
                finally:
                    if descriptor >= 0:
                        os.close(descriptor)
        raise DestinationError(f"{self._path} cannot be taken: another run takes it again and again")

    def _take(self, descriptor: int) -> bool:
        """Return whether the file is ours now; False if it is no longer the one that others see."""
        alone = self._is_only_holder(descriptor)
        found = os.fstat(descriptor)
        try:
            named = self._path.lstat()
        except FileNotFoundError:
            return False
        if (named.st_dev, named.st_ino) != (found.st_dev, found.st_ino):
            return False
        owner = _parse_owner(os.pread(descriptor, 4096, 0))
        replaced = self._run and owner.get("run") == self._run
        if owner and not replaced and not (alone and _is_of_this_kernel(owner)) and not is_process_gone(owner):
            raise self._build_lock_error(owner)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({**describe_process(), "run": self._run}).encode(), 0)
        os.fsync(descriptor)
        return True

    def _is_only_holder(self, descriptor: int) -> bool:
        """Return whether the kernel assures that no other process holds the file; False if it does not know."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._build_lock_error(_parse_owner(os.pread(descriptor, 4096, 0))) from None
        except OSError:
            return False
        return True

    def _build_lock_error(self, owner: Mapping[str, Any]) -> DestinationError:
        who = f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'this host')}"
        return DestinationError(
            f"another run ({who}) is {self._purpose}", hint=f"wait for it; if it is gone, remove {self._path}"
        )

    def release(self) -> None:
        """Remove the file and let go; nothing happens if it is not held."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # whoever comes next sees that its owner is gone
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None


def describe_process() -> dict[str, Any]:
    """Describe this process so that others can find out whether it still runs."""
    return {
        "host": socket.gethostname(),
        "boot": _read_boot_id(),
        "pid": os.getpid(),
        "space": _read_process_space(),
        "start": _read_start_time(os.getpid()),
    }


def is_process_gone(owner: Mapping[str, Any]) -> bool:
    """Return whether a process that was described cannot be running any more.

    That can be known only of this machine, and of processes that this one can see: containers number their own.
    """
    if not _is_of_this_kernel(owner):
        return owner.get("host") == socket.gethostname()  # this machine, before it was started anew
    seen = owner.get("space", "") in {"", _read_process_space()}
    return seen and _read_start_time(owner["pid"]) != owner.get("start")


def _is_of_this_kernel(owner: Mapping[str, Any]) -> bool:
    return owner.get("boot") == _read_boot_id()


def _parse_owner(text: bytes) -> dict[str, Any]:
    """Parse who wrote the file; empty if its owner was killed before it had written its name."""
    try:
        owner = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) and isinstance(owner.get("pid"), int) else {}


def _read_boot_id() -> str:
    """Read what tells this running kernel from every other one, whatever its containers call themselves."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _read_process_space() -> str:
    """Read in which space process numbers are; empty where there is only one."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - its text is no path
    except OSError:
        return ""


def _read_start_time(pid: int) -> str:
    """Read what tells a process from a later one with the same number; empty if it does not run."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except PermissionError:
        pass
    try:
        found = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return (
            found[19] if found[0] not in {"Z", "X"} else ""
        )  # dead, though its parent has not asked what became of it
    except (OSError, IndexError):
        return "running"
