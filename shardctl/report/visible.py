"""Makes what is printed safe: names from files steer no terminal and no CI, and addresses show no password."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_UNSAFE_UNICODE_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories that steer rather than show; `Cf` has the marks that reverse a line."""

_CI_COMMAND: Final = re.compile(r"##(?=\w*\[)|^([^\S\n]*)::", re.MULTILINE)
"""What a runner takes for a command in the output of a step: `##[...]` (GitHub), `##vso[...]` (Azure Pipelines) and
`##teamcity[...]` anywhere in a line, and `::...` at its beginning (GitHub; `actions/runner`, `ActionCommand.cs`)."""
_USER_PART: Final = re.compile(
    r"://(?:(?<!\bhf://)[^\s/]*@|[^\s/@:]+:(?!\s|\d{1,5}(?:[/\s]|$))[^\n@]{0,256}@(?:[^\s@]{0,256}@)*)"
)
"""The user and the password of an address; a password may hold anything, and `user:` tells it from a path. What follows
the `@` of the Hub's addresses is a revision."""
_SECRET_PART: Final = re.compile(
    r"""([?&](?:sig|signature|x-(?:amz|goog)-(?:signature|credential|security-token)|(?:access_)?token|api_?key|password)=)"""
    r"""[^&\s#'"]+""",
    re.IGNORECASE,
)
"""A part of an address's query that is a credential, as signed addresses of stores have it."""


def escape_control_characters(text: str) -> str:
    r"""Return the text with every character that steers a terminal, line ends included, written as an escape.

    >>> print(escape_control_characters("weight\x1b[2J\nüçé"))
    weight\x1b[2J\nüçé
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _UNSAFE_UNICODE_CATEGORIES else char
        for char in text
    )


def escape_ci_commands(text: str) -> str:
    r"""Return lines in which no name is a command to the runner of a CI job that prints them.

    The escape is that of JSON and TOML, so that a document says the same as before.

    >>> print(escape_ci_commands("  ::set-output name=a::b\n##vso[x]y\n### a::b"))
      \u003a\u003aset-output name=a::b
    \u0023\u0023vso[x]y
    ### a::b
    """
    if "##" not in text and "::" not in text:
        return text
    return _CI_COMMAND.sub(lambda found: r"\u0023\u0023" if found[1] is None else rf"{found[1]}\u003a\u003a", text)


def hide_passwords(text: str) -> str:
    """Return the text without the passwords and signatures of addresses in it.

    >>> print(hide_passwords("s3://user:pa/ss@bucket/x, hf://owner/name@main, az://c/m?sv=1&sig=abc"))
    s3://***@bucket/x, hf://owner/name@main, az://c/m?sv=1&sig=***
    """
    if "://" not in text:
        return text
    return _SECRET_PART.sub(r"\1***", _USER_PART.sub("://***@", text))
