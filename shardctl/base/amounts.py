"""Formats numbers for people: files in decimal units, memory in binary ones, counts, rates and times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_DECIMAL_BYTE_UNITS: Final = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_COUNT_UNITS: Final = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3))
_BYTES_PER_GIB: Final = 1 << 30
_BYTES_PER_MIB: Final = 1 << 20
_SECONDS_PER_HOUR: Final = 3600
_HUNDRED_PERCENT: Final = 100


def format_file_size(nbytes: float) -> str:
    """Format bytes on disk or on the wire.

    >>> format_file_size(90_868_376), format_file_size(512), format_file_size(141_100_000_000)
    ('90.9 MB', '512 bytes', '141.1 GB')
    """
    for unit, scale in _DECIMAL_BYTE_UNITS:
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} bytes"


def format_memory_size(nbytes: int) -> str:
    """Format bytes of memory, in GiB from a tenth of one on.

    >>> (format_memory_size(118_111_600), format_memory_size(5 << 20), format_memory_size(700),
    ...  format_memory_size(141 << 30))
    ('0.11 GiB', '5.0 MiB', '0.7 KiB', '141.0 GiB')
    """
    if nbytes >= _BYTES_PER_GIB // 10:
        return f"{nbytes / _BYTES_PER_GIB:.{1 if nbytes >= _BYTES_PER_GIB * 10 else 2}f} GiB"
    if nbytes >= _BYTES_PER_MIB // 10:
        return f"{nbytes / _BYTES_PER_MIB:.1f} MiB"
    return f"{nbytes / 1024:.1f} KiB"


def format_count(number: int) -> str:
    """Format parameters, in words of three digits.

    >>> format_count(22_713_216), format_count(70_553_706_496), format_count(999)
    ('22.71 M', '70.55 B', '999')
    """
    for unit, scale in _COUNT_UNITS:
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)


def format_plural(number: int, noun: str) -> str:
    """Format a number and its noun.

    >>> format_plural(1, "file"), format_plural(1200, "file")
    ('1 file', '1,200 files')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def format_rate(nbytes: int, seconds: float) -> str:
    """Format bytes a second; empty if there is nothing to say.

    >>> format_rate(10**9, 2.0), format_rate(0, 1.0)
    ('500.0 MB/s', '')
    """
    return f"{format_file_size(nbytes / seconds)}/s" if nbytes and seconds > 0 else ""


def format_duration(seconds: float) -> str:
    """Format a time span.

    >>> format_duration(0.034), format_duration(75), format_duration(7384)
    ('0.03 s', '1:15', '2:03:04')
    """
    if seconds < 10:  # noqa: PLR2004 - below this, fractions tell something
        return f"{seconds:.2f} s"
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if seconds >= _SECONDS_PER_HOUR else f"{minutes}:{rest:02d}"


def format_stages(stages: Sequence[int]) -> str:
    """Format which layers each pipeline stage has, from how many it has.

    >>> format_stages((1, 5)), format_stages((2, 1, 0))
    ('2 stages: layers 0 | 1-5', '3 stages: layers 0-1 | 2 | none')
    """
    first, found = 0, []
    for layers in stages:
        last = first + layers - 1
        found.append("none" if not layers else str(first) if layers == 1 else f"{first}-{last}")
        first += layers
    return f"{format_plural(len(stages), 'stage')}: layers {' | '.join(found)}"


def format_percent(part: int, whole: int) -> str:
    """Format a share, never 100 before all is done.

    >>> format_percent(999, 1000), format_percent(1000, 1000), format_percent(0, 0)
    ('99 %', '100 %', '100 %')
    """
    return f"{_HUNDRED_PERCENT * part // whole if whole else _HUNDRED_PERCENT} %"
