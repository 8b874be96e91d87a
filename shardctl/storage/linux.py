"""Makes system calls of Linux that Python lacks; each returns False if the system does not support it."""

from __future__ import annotations

import errno
import mmap
import os
import struct
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

_AT_FDCWD: Final = -100
_CACHESTAT_SYSCALL_NUMBER: Final = 451
"""The same number on every processor, because it is newer than their differences; libc has no function for it."""
_FICLONERANGE_IOCTL: Final = 0x4020940D
_NOT_SHARED: Final = frozenset({errno.EXDEV, errno.ENOTTY, errno.EBADF, errno.EPERM, errno.ETXTBSY})
"""How a file system says that two files share nothing, besides `NOT_SUPPORTED`."""
_RENAME_NOREPLACE: Final = 1
_RENAME_EXCHANGE: Final = 2
NOT_SUPPORTED: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
"""How a file system says that it cannot do something, rather than that it failed."""


def reserve_space(descriptor: int, size: int) -> bool:
    """Give a file `size` bytes of reserved space (`fallocate(2)`).

    Not `posix_fallocate`: where a file system cannot reserve, glibc's writes a byte to every block instead, which on
    NFS takes as long as the conversion. Raises OSError, such as ENOSPC, if the space is not there.
    """
    call = _find_libc_function("fallocate64") or _find_libc_function("fallocate")
    if call is None:
        return False
    import ctypes  # which a command that only reads has no use for

    while True:
        code = _get_error_code(call(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)))
        if code != errno.EINTR:  # Python repeats its own calls, but not this one
            return _check_error_code(code)


def measure_cached_share(descriptor: int, offset: int, size: int) -> float | None:
    """Measure how much of a stretch of a file the page cache has (`cachestat(2)`, Linux 6.5); None if nobody says."""
    call = _find_libc_function("syscall")
    if call is None or not size:
        return None
    import ctypes

    wanted, found = (ctypes.c_uint64 * 2)(offset, size), (ctypes.c_uint64 * 5)()
    if call(_CACHESTAT_SYSCALL_NUMBER, descriptor, wanted, found, 0):
        return None
    pages = (offset + size - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
    return float(found[0] / pages)


def share_blocks(source: int, start: int, size: int, target: int, offset: int) -> bool:
    """Let `size` bytes of a file from `offset` be the same blocks as those of another from `start` (FICLONERANGE).

    All three are multiples of the file system's blocks. Who writes to one of the files changes no other
    (`ioctl_ficlonerange(2)`). Returns False, too, if the two files are on different file systems. Raises OSError.
    """
    if sys.platform != "linux":
        return False
    import fcntl  # of this request alone

    try:
        fcntl.ioctl(target, _FICLONERANGE_IOCTL, struct.pack("=qQQQ", source, start, size, offset))
    except OSError as error:
        if error.errno in NOT_SUPPORTED | _NOT_SHARED:
            return False
        raise
    return True


def exchange_names(first: Path, second: Path) -> bool:
    """Swap two names in one step (`renameat2(2)`, RENAME_EXCHANGE); raises OSError if that fails."""
    return _call_renameat2(first, second, _RENAME_EXCHANGE)


def rename_without_replacing(old: Path, new: Path) -> bool:
    """Rename in one step unless `new` exists (RENAME_NOREPLACE); raises FileExistsError if it does."""
    return _call_renameat2(old, new, _RENAME_NOREPLACE)


def _call_renameat2(first: Path, second: Path, flag: int) -> bool:
    call = _find_libc_function("renameat2")
    if call is None:
        return False
    return _check_error_code(
        _get_error_code(call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), flag)), second
    )


@cache
def _find_libc_function(name: str) -> Any:  # noqa: ANN401 - ctypes makes its types as it goes
    import ctypes

    return getattr(ctypes.CDLL(None, use_errno=True), name, None) if sys.platform == "linux" else None


def _get_error_code(result: int) -> int:
    import ctypes

    return ctypes.get_errno() if result else 0


def _check_error_code(code: int, path: Path | None = None) -> bool:
    if code in NOT_SUPPORTED:
        return False
    if code:
        raise OSError(code, os.strerror(code), *([str(path)] if path else []))
    return True
