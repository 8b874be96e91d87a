"""Transfers large blocks between memory and disk with direct I/O, without filling the page cache.

A conversion touches every byte once, so caching it costs memory traffic, evicts what others cached and ends in
writeback storms. Bytes that are cached already are read from there. Linux only; where a file system refuses, the
callers use ordinary reads and writes (`open(2)`, section O_DIRECT; `preadv2(2)`, RWF_NOWAIT).
"""

from __future__ import annotations

import os
import threading
from typing import Final

import numpy as np

from shardctl.base.huge_pages import allocate_pages
from shardctl.storage import linux

_BLOCK_ALIGNMENT_BYTES: Final = 4096
"""Offsets and lengths must be multiples of the device's logical block, which is 512 or 4096."""
_BOUNCE_BUFFER_BYTES: Final = 4 << 20
"""Larger transfers were not faster."""
_MIN_CACHED_FRACTION: Final = 3 / 4
"""Share of a stretch that is read from the cache if so much of it is there: the kernel fetches what is missing in parts
of 128 KiB, and systems that reclaim cold pages (DAMON) take some of every stretch."""
_AT_ONCE: Final = 16 << 20
"""Bytes of a call that needs no bounce buffer; a smaller call answers signals sooner."""


class _BounceBuffer(threading.local):
    """A page-aligned buffer per thread, for callers whose memory is not aligned as the file is."""

    def __init__(self) -> None:
        self.memory = allocate_pages(_BOUNCE_BUFFER_BYTES + _BLOCK_ALIGNMENT_BYTES)


_bounce = _BounceBuffer()


def write_direct(direct: int, buffered: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`: whole blocks through `direct`, ragged ends through `buffered`.

    Blocks that begin with a page of memory are not copied.

    Raises OSError(EINVAL) before anything is written directly if the file system cannot.
    """
    head = min(-offset % _BLOCK_ALIGNMENT_BYTES, len(data))
    middle = (len(data) - head) // _BLOCK_ALIGNMENT_BYTES * _BLOCK_ALIGNMENT_BYTES
    flat, memory = np.frombuffer(data, np.uint8), _bounce.memory
    aligned = (flat.__array_interface__["data"][0] + head) % _BLOCK_ALIGNMENT_BYTES == 0
    done = head
    while done < head + middle:
        size = min(_AT_ONCE if aligned else _BOUNCE_BUFFER_BYTES, head + middle - done)
        if not aligned:
            memory[:size] = flat[done : done + size]
        written = os.pwrite(direct, data[done : done + size] if aligned else memory[:size].data, offset + done)
        done += written // _BLOCK_ALIGNMENT_BYTES * _BLOCK_ALIGNMENT_BYTES or _write_all_buffered(
            buffered, data[done : done + size], offset + done
        )
    _write_all_buffered(buffered, data[:head], offset)
    _write_all_buffered(buffered, data[done:], offset + done)


def _write_all_buffered(descriptor: int, data: memoryview, offset: int) -> int:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
    return done


def read_direct(direct: int, buffered: int, into: memoryview, offset: int) -> int:
    """Fill a part of `into` from `offset`: from the cache what it has most of, the rest from the disk; 0 at the end.

    Blocks that begin with a page of memory are not copied. Raises OSError(EINVAL or EOPNOTSUPP) if the file system can
    do neither without ordinary reads.
    """
    cached = linux.measure_cached_share(buffered, offset, min(len(into), _AT_ONCE))
    if cached is None:  # to ask the cache for what it has not makes the kernel read ahead, too
        try:
            return os.preadv(buffered, [into[:_AT_ONCE]], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
    elif cached >= _MIN_CACHED_FRACTION:
        return os.preadv(buffered, [into[:_AT_ONCE]], offset)
    flat, memory, skip = np.frombuffer(into, np.uint8), _bounce.memory, offset % _BLOCK_ALIGNMENT_BYTES
    if flat.__array_interface__["data"][0] % _BLOCK_ALIGNMENT_BYTES == skip:
        return _read_in_place(direct, into, offset)
    wanted = min(-(-(skip + len(into)) // _BLOCK_ALIGNMENT_BYTES) * _BLOCK_ALIGNMENT_BYTES, len(memory))
    got = min(os.preadv(direct, [memory[:wanted].data], offset - skip) - skip, len(into))
    if got <= 0:
        return 0
    flat[:got] = memory[skip : skip + got]
    return got


def _read_in_place(direct: int, into: memoryview, offset: int) -> int:
    """Fill a part of `into`, whose blocks lie in pages as those of the file do: only ragged ends are copied."""
    head = min(-offset % _BLOCK_ALIGNMENT_BYTES, len(into))
    middle = min(len(into) - head, _AT_ONCE) // _BLOCK_ALIGNMENT_BYTES * _BLOCK_ALIGNMENT_BYTES
    tail = min(len(into) - head - middle, _BLOCK_ALIGNMENT_BYTES) if middle < _AT_ONCE else 0
    first, last = (_bounce.memory[at : at + _BLOCK_ALIGNMENT_BYTES].data for at in (0, _BLOCK_ALIGNMENT_BYTES))
    before = _BLOCK_ALIGNMENT_BYTES - head if head else 0
    vectors = [*([first] if head else []), into[head : head + middle], *([last] if tail else [])]
    got = max(os.preadv(direct, vectors, offset - before) - before, 0)
    done = min(got, head + middle + tail)
    into[: min(head, done)] = first[before:][: min(head, done)]
    rest = max(done - head - middle, 0)
    into[head + middle :][:rest] = last[:rest]
    return done
