"""Reads sizes such as ``5GB`` (10^9) and ``1GiB`` (2^30) from the command line."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from shardctl.base.errors import UsageError

_UNITS: Final = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
_LARGEST: Final = 2**63 - 1
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(text: str) -> int:
    """Read a size and return bytes.

    >>> parse_size("1GiB"), parse_size("1.5 GB"), parse_size("256MiB")
    (1073741824, 1500000000, 268435456)

    Raises UsageError if the unit is missing or unknown: a number without a unit could mean MB as well as bytes, and
    ``Gb`` means bits.
    """
    found = _SIZE.fullmatch(text)
    if not found:
        raise UsageError(f"cannot read size {text!r}", hint="write a number and a unit, such as 5GB or 1GiB")
    number, unit = found.groups()
    if not unit:
        raise UsageError(f"size {text!r} has no unit", hint=f"write {number}GB, {number}GiB, {number}MB or {number}MiB")
    if unit not in _UNITS:
        meant = [
            known for known in _UNITS if known != "KB" and (unit == known.lower() or known[0].lower() == unit.lower())
        ]
        raise UsageError(
            f"size {text!r} has the unknown unit {unit!r}",
            hint=f"did you mean {' or '.join(f'{number}{each}' for each in meant)}?"
            if meant
            else "the units are kB, MB, GB, TB, KiB, MiB, GiB and TiB",
        )
    size = int(Decimal(number) * _UNITS[unit])
    if size < 1:
        raise UsageError(f"size {text!r} is less than a byte", hint="write a number and a unit, such as 5GB or 1GiB")
    if size > _LARGEST:
        raise UsageError(f"size {text[:40]!r} is more than any file or memory has", hint="8 EiB are the most")
    return size
