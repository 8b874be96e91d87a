"""Makes names and bytes survive a power failure, and reports errors of a destination."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import TYPE_CHECKING

from shardctl.base.errors import AccessError, DestinationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def sync_descriptor(descriptor: int) -> None:
    """Return once a file's bytes are on stable storage; a failure is final, because a second call would report success.

    On macOS `fsync` stops at the drive's cache (`fsync(2)`); F_FULLFSYNC goes through.
    """
    if sys.platform == "darwin":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # a directory that may be written and not listed
        os.sync()
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # how some network file systems say that they need no such thing
            raise
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Make a directory and what it lies in, durably; those that exist are left alone."""
    if path.is_dir():
        return
    make_directories(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    sync_directory(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write and sync a small file; its name becomes durable with its directory."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def translate_os_errors(path: object, doing: str) -> Iterator[None]:
    """Turn the operating system's refusals into an error that a user can act on."""
    try:
        yield
    except OSError as error:
        kind = AccessError if isinstance(error, PermissionError) else DestinationError
        raise kind(
            f"{doing} {path} failed: {error.strerror}",
            hint="what was written is kept; remove the cause and run the same command again",
        ) from error
