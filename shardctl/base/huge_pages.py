"""Allocates memory for large transfers and for numbers, in huge pages where Linux grants them.

A direct write of 8 MiB pins 2,048 small pages and goes to the disk in many parts, but four huge ones, and the system
zeroes these in a sixth of the time (measured in `docs/benchmarks/speed.md`).
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HUGE_PAGE_BYTES: Final = 2 << 20
"""Bytes, on x86 and on ARM with small pages of 4 KiB; where huge pages are larger, none is used."""


def allocate_pages(nbytes: int) -> NDArray[np.uint8]:
    """Allocate zeroed memory that begins with a page, and with a huge one if it has room for one.

    Only whole huge pages are asked for, so that no more than `nbytes` are taken from the system, rounded up to a page.

    >>> len(allocate_pages(5 << 20)) >> 20
    5
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if nbytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, nbytes, flags), np.uint8)
    pages = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags)  # what is not touched takes no memory
    memory = np.frombuffer(pages, np.uint8)
    begin = -memory.__array_interface__["data"][0] % _HUGE_PAGE_BYTES
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE, begin, nbytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)
    return memory[begin : begin + nbytes]
