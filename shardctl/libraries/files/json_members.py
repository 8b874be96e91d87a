"""Reads JSON objects of up to 100 MB one member at a time, so that hostile input cannot exhaust memory or the stack.

`json.loads` builds the whole tree first: 100 MB of ``[],[],...`` become over 2 GB of lists. Headers and indexes are
flat, so their outermost object is walked here and only its values, each of bounded length, are given to `json`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.settings import is_text

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN_KEY: Final = r'"([^"\\\x00-\x1f]{0,10000}+)"[ \t\n\r]*+:[ \t\n\r]*+'
"""A key without escapes and its colon, as every known library spells it; the key itself is a group."""
PLAIN_END: Final = r"[ \t\n\r]*+,[ \t\n\r]*+"
"""What stands between a value and the next key."""
_WHITESPACE_PATTERN: Final = re.compile(r"[ \t\n\r]*")
_WHITESPACE_CHARACTERS: Final = (" ", "\t", "\n", "\r")
_AFTER_KEY: Final = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
LONGEST_KEY: Final = 10_000
"""Characters of a key, such as a tensor's name; what is longer would only flood messages and manifests."""
_EXCERPT_LENGTH: Final = 40
"""Characters of the input that a message repeats."""


class MalformedError(ValueError):
    """The text is not the JSON it should be; the message says where or which member, without naming the file."""


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        keys = [key for key, _ in pairs]
        raise MalformedError(
            f"the key {quote_excerpt(next(k for k in keys if keys.count(k) > 1), 0)} appears twice in one object"
        )
    return members


def _parse_integer(digits: str) -> int | float:
    """Parse an int only if it can be a size: a negative number (`-0` too) or one beyond 64 bits becomes a float."""
    return float(digits) if digits[0] == "-" or len(digits) > 20 else int(digits)  # noqa: PLR2004 - 2**64 has 20 digits


def _refuse_constant(name: str) -> float:
    raise MalformedError(f"{name} is not JSON")


_JSON_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_build_object, parse_int=_parse_integer, parse_constant=_refuse_constant
)


def walk_object(
    text: str, at: int, member: Callable[[str, int], int], *, plain: Callable[[int], int] | None = None
) -> int:
    """Call `member(key, position of the value)` for each member of the object that starts at `at`.

    `member` returns the position after the value. Returns the position after the closing brace. `plain`, called with
    the position of a key, may take members at one go, each with the comma and the space that follow it, and returns
    the position of the next key; what it leaves goes the general way.

    Raises:
        MalformedError: no such object starts there, or a key holds a lone surrogate.
    """
    if text[at : at + 1] != "{":
        raise MalformedError(f"expected a JSON object, found {quote_excerpt(text, at)}")
    at = skip_space(text, at + 1)
    if text[at : at + 1] == "}":
        return at + 1
    while True:
        if plain is not None:
            at = plain(at)
        key, at = parse_string(text, at)
        if len(key) > LONGEST_KEY:
            raise MalformedError(f"the key {quote_excerpt(key, 0)} has more than {LONGEST_KEY:,} characters")
        colon = _AFTER_KEY.match(text, at)
        if colon is None:
            raise MalformedError(f"expected ':' after the key {key!r}, found {quote_excerpt(text, at)}")
        at = skip_space(text, member(key, colon.end()))
        separator = text[at : at + 1]
        if separator == "}":
            return at + 1
        if separator != ",":
            raise MalformedError(f"expected ',' or '}}' after the value of {key!r}, found {quote_excerpt(text, at)}")
        at = skip_space(text, at + 1)


def parse_string(text: str, at: int) -> tuple[str, int]:
    """Parse the string that starts at `at`, and the position after it; a lone surrogate is refused."""
    if text[at : at + 1] != '"':
        raise MalformedError(f"expected a string, found {quote_excerpt(text, at)}")
    try:
        value, end = _JSON_DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise MalformedError(f"{error.msg} in the string {quote_excerpt(text, at)}") from error
    if not is_text(value):
        raise MalformedError(f"the string {quote_excerpt(value, 0)} holds a lone surrogate, which is not Unicode text")
    return value, end


def parse_value(text: str, at: int, longest: int) -> tuple[Any, int]:
    """Parse whatever value starts at `at`, and the position after it.

    One longer than `longest` characters is refused.
    """
    return _decode_value(text[at : at + longest], at, f"is malformed, or longer than {longest:,} characters")


def parse_flat_object(text: str, at: int, longest: int) -> tuple[dict[str, Any], int]:
    """Parse the object that starts at `at`, and the position after it; it holds no object and no brace.

    Such an object ends at the first closing brace, so reading many costs time linear in the text. Integers that can
    be sizes arrive as `int`, all other numbers as `float`.
    """
    if text[at : at + 1] != "{":
        raise MalformedError(f"expected a JSON object, found {quote_excerpt(text, at)}")
    end = text.find("}", at, at + longest) + 1
    if not end:
        raise MalformedError(f"{quote_excerpt(text, at)} is not closed within {longest:,} characters")
    value, end = _decode_value(text[at:end], at, "is malformed")
    assert isinstance(value, dict)  # noqa: S101 - it began with a brace
    return value, end


def _decode_value(piece: str, at: int, complaint: str) -> tuple[Any, int]:
    try:
        value, length = _JSON_DECODER.raw_decode(piece)
    except json.JSONDecodeError as error:
        raise MalformedError(f"{quote_excerpt(piece, 0)} {complaint}") from error
    except RecursionError:
        raise MalformedError(f"{quote_excerpt(piece, 0)} is nested too deep") from None
    return value, at + length


def skip_space(text: str, at: int) -> int:
    """Return the position of the first character from `at` that is not JSON white space."""
    if text[at : at + 1] not in _WHITESPACE_CHARACTERS:
        return at
    space = _WHITESPACE_PATTERN.match(text, at)
    assert space is not None  # noqa: S101 - it may match nothing at all
    return space.end()


def check_end_of_text(text: str, at: int) -> None:
    """Raise MalformedError if anything but white space follows `at`."""
    at = skip_space(text, at)
    if at < len(text):
        raise MalformedError(f"expected the end, found {quote_excerpt(text, at)}")


def quote_excerpt(text: str, at: int) -> str:
    """Return a few characters from `at`, quoted, for a message."""
    if at >= len(text):
        return "the end"
    return repr(text[at : at + _EXCERPT_LENGTH] + ("..." if at + _EXCERPT_LENGTH < len(text) else ""))
