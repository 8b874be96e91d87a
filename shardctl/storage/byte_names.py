r"""Keeps file names that are not UTF-8 in JSON, which only has text, and reads them back.

Linux takes any bytes for a name, and Python gives those that are not UTF-8 as lone surrogates (PEP 383), which no
other JSON reader accepts. Such a name is kept as U+0000, which no name holds, and its bytes percent-encoded.

    >>> name_to_text("caf\udce9.md")
    '\x00caf%E9.md'
    >>> name_from_text(name_to_text("caf\udce9.md")) == "caf\udce9.md"
    True
    >>> name_to_text("100%.md")
    '100%.md'
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

from shardctl.base.settings import is_text

_ENCODED_NAME_MARK: Final = "\0"


def is_name(text: str) -> bool:
    """Return whether the operating system can be asked for this: it has no NUL, and no surrogate but for a byte."""
    try:
        return b"\0" not in name_to_bytes(text)
    except UnicodeEncodeError:
        return False


def name_to_bytes(name: str) -> bytes:
    """Return the bytes that the file system has for a name."""
    return name.encode("utf-8", "surrogateescape")


def name_from_bytes(name: bytes) -> str:
    """Return the name that Python has for these bytes."""
    return name.decode("utf-8", "surrogateescape")


def name_to_text(name: str) -> str:
    """Return the name as valid text: as it is, unless it is not UTF-8."""
    return name if is_text(name) else _ENCODED_NAME_MARK + quote_from_bytes(name_to_bytes(name), safe="/ ")


def name_from_text(text: str) -> str:
    """Return the name that `name_to_text` kept."""
    return name_from_bytes(unquote_to_bytes(text[1:])) if text.startswith(_ENCODED_NAME_MARK) else text
