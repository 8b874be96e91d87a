"""Reads sizes such as ``5GB`` (10^9) and ``1GiB`` (2^30), and numbers of tokens, from the command line."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from shardctl.base.errors import UsageError

_BYTES_BY_UNIT: Final = {
    "B": 1,
    **{f"{letter}{end}": 1000**power for power, letter in enumerate("KMGT", 1) for end in ("", "B")},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
"""By the unit in capital letters: `G` and `GB` are 10^9 bytes, `GiB` is 2^30."""
_MAX_SIZE_BYTES: Final = 2**63 - 1
_SIZE_PATTERN: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(text: str) -> int:
    """Read a size and return bytes.

    >>> parse_size("1GiB"), parse_size("1.5 GB"), parse_size("256MiB")
    (1073741824, 1500000000, 268435456)
    >>> parse_size("80gb"), parse_size("5G"), parse_size("1gib")
    (80000000000, 5000000000, 1073741824)

    Raises UsageError if the unit is missing or unknown: a number without a unit could mean MB as well as bytes.
    """
    found = _SIZE_PATTERN.fullmatch(text)
    if not found:
        raise UsageError(f"cannot read size {text!r}", hint="write a number and a unit, such as 5GB or 1GiB")
    number, unit = found.groups()
    if not unit:
        raise UsageError(f"size {text!r} has no unit", hint=f"write {number}GB, {number}GiB, {number}MB or {number}MiB")
    if unit.upper() not in _BYTES_BY_UNIT:
        raise UsageError(
            f"size {text!r} has the unknown unit {unit!r}", hint="the units are kB, MB, GB, TB, KiB, MiB, GiB and TiB"
        )
    size = int(Decimal(number) * _BYTES_BY_UNIT[unit.upper()])
    if size < 1:
        raise UsageError(f"size {text!r} is less than a byte", hint="write a number and a unit, such as 5GB or 1GiB")
    if size > _MAX_SIZE_BYTES:
        raise UsageError(f"size {text[:40]!r} is more than any file or memory has", hint="8 EiB are the most")
    return size


def parse_rate(text: str) -> int:
    """Read a rate and return bytes per second; the unit of time may be left out.

    >>> parse_rate("2GB/s"), parse_rate("500MB")
    (2000000000, 500000000)
    """
    return parse_size(text.strip().removesuffix("/s"))


_TOKEN_COUNT_PATTERN: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", re.ASCII)
_MAX_TOKENS: Final = 10**15
"""Above any count that a model or a run has; more would only overflow."""


_MAX_PRICE: Final = 1e6
"""Above the price of any device for an hour."""


def parse_token_count(text: str) -> int:
    """Read a number of tokens as vLLM reads it: small letters are powers of 1,000, capital ones of 1,024.

    >>> parse_token_count("8192"), parse_token_count("32k"), parse_token_count("32K"), parse_token_count("25.6k")
    (8192, 32000, 32768, 25600)
    """
    found = _TOKEN_COUNT_PATTERN.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if found is None:
        raise UsageError(
            f"{text!r} is not a number of tokens", hint="write it such as 32768, 32k (32,000) or 32K (32,768)"
        )
    number, letter = Decimal(found[1]), found[2]
    power = "kmgt".index(letter.lower()) + 1 if letter else 0
    tokens = number * (1000 if letter.islower() else 1024) ** power
    if tokens != int(tokens) or not 1 <= tokens <= _MAX_TOKENS:
        raise UsageError(f"{text!r} is not a number of tokens", hint="write a whole number of at least 1")
    return int(tokens)


def parse_run_tokens(text: str) -> int:
    """Read the tokens of a training run, whose letters are powers of 1,000 whatever their case.

    >>> parse_run_tokens("1T"), parse_run_tokens("500B"), parse_run_tokens("15.6t")
    (1000000000000, 500000000000, 15600000000000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbtKMBT]?)", text.strip().replace(",", "").replace("_", ""), re.ASCII)
    tokens = (
        Decimal(found[1]) * 1000 ** ("kmbt".index(found[2].lower()) + 1 if found[2] else 0) if found else Decimal(0)
    )
    if tokens != int(tokens) or not 1 <= tokens <= _MAX_TOKENS:
        raise UsageError(f"{text!r} is not a number of tokens", hint="write it such as 1T, 500B or 300000000000")
    return int(tokens)


def parse_price(text: str) -> float:
    """Read a price; the currency is the caller's.

    >>> parse_price("2.50")
    2.5
    """
    if not re.fullmatch(r"\d+(?:\.\d+)?", text.strip(), re.ASCII) or not 0 < float(text) <= _MAX_PRICE:
        raise UsageError(f"{text!r} is not a price", hint="write the price of one device for one hour, such as 2.50")
    return float(text)
