"""Makes names from files safe for terminals: a checkpoint must not move the cursor or reorder a line."""

from __future__ import annotations

import unicodedata
from typing import Final

_UNSAFE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories that steer rather than show; `Cf` has the marks that reverse a line."""


def escape_control_characters(text: str) -> str:
    r"""Return the text with every character that steers a terminal, line ends included, written as an escape.

    >>> print(escape_control_characters("weight\x1b[2J\nüçé"))
    weight\x1b[2J\nüçé
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _UNSAFE else char for char in text
    )
