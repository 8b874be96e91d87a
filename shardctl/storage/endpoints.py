"""Checks addresses of servers that environment variables name, before a library is given them that would crash."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from shardctl.base.errors import UsageError

_MAX_SHOWN: Final = 80
"""Characters of an address that a message repeats."""
_INVALID_URL_CHARACTERS: Final = frozenset(' "<>\\^`{|}')
"""Characters that no address has (RFC 3986, appendix A)."""


def check_endpoint(origin: str, address: str) -> None:
    """Raise UsageError for an address that is not `http://HOST[:PORT]` or https, perhaps with a path.

    `origin` names the variable, or whatever else the address comes from.
    """
    try:
        parts = urlsplit(address)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bad port, brackets without an address
        usable = False
    if not (usable and address.isascii() and address.isprintable() and _INVALID_URL_CHARACTERS.isdisjoint(address)):
        raise UsageError(
            f"{origin} is {address[:_MAX_SHOWN]!r}, which is not the address of a server",
            hint="write https://HOST[:PORT], or unset it",
        )
