"""Reads JSON and TOML whose size, nesting and number of values are bounded before a parser builds anything of them.

A parser makes a list of 64 bytes out of the three characters ``[],``, and a table out of every part of a dotted key:
90 MB of brackets become over 2 GB, and one TOML key of 100,000 parts 6 GB. Every configuration, record, plan and rule
file is read here; `formats.json_members` reads headers and indexes, which may be larger, one member at a time.

    >>> parse_json(b'{"layers": 2}', "config.json", CONFIG_TEXT)
    {'layers': 2}
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn

from shardctl.base.amounts import format_memory_size
from shardctl.base.errors import ShardctlError, SourceError
from shardctl.base.value import value_class
from shardctl.storage import read_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from shardctl.storage import Source

_CONTAINER_BYTES: Final = 72
"""Bytes of an empty list or dict, with the reference to it."""
_ITEM_BYTES: Final = 64
"""Bytes of a value and its place in a list or dict, on average; small integers and repeated keys take fewer."""
_JSON_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
"""A string, or from its quote all that is left: where the closing quote is missing, the parser gives up, too."""
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_TOML_TEXT: Final = re.compile(
    r'"""[^"\\]*(?:(?:\\.|""?(?!"))[^"\\]*)*(?:"""|\Z)'
    r"|'''[^']*(?:''?(?!')[^']*)*(?:'''|\Z)"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"?'
    r"|'[^'\n]*'?"
    r"|\#[^\n]*",
    re.DOTALL,
)
"""A string or a comment: what is in it is no key and no bracket."""
_TOML_NUMBER: Final = re.compile(r"[0-9_]{4301,}")
"""Digits beyond what Python turns into an integer."""
_KEY_PARTS: Final = 32
"""Parts of a dotted key; the longest that means something to shardctl has two."""
_LONG_KEY: Final = re.compile(rf"(?<![A-Za-z0-9_\-])(?:[A-Za-z0-9_\-]++[ \t]*+\.[ \t]*+){{{_KEY_PARTS}}}")


@value_class
class TextLimits:
    """What a text may ask for; more is refused before it is parsed."""

    size: int
    """Bytes of the text."""
    memory: int
    """Estimated bytes of what it says, once parsed: containers and values, beside the text itself."""
    depth: int
    """Brackets within brackets."""


CONFIG_TEXT: Final = TextLimits(size=16 << 20, memory=256 << 20, depth=64)
"""A `config.json` and the like. The largest in use have 1 MB: lists of the modules that are not quantized."""
RECORD_TEXT: Final = TextLimits(size=256 << 20, memory=640 << 20, depth=16)
"""A `shardctl.json`. That of 94,000 tensors takes 40 MB of text and 130 MB of values."""
PLAN_TEXT: Final = TextLimits(size=16 << 20, memory=256 << 20, depth=32)
"""A plan that a person gave. It lists files, not tensors: a thousand files take 200 KB."""
RULE_TEXT: Final = TextLimits(size=4 << 20, memory=256 << 20, depth=16)
"""A rule file that a person gave; 4 MB are 40,000 names spelled out, and TOML takes 5 s to read them."""


def read_text(source: Source, path: str, limits: TextLimits) -> bytes:
    """Read the bytes of a small file of a source; raises SourceError if they are too many, before it reads any."""
    check_size(source.files()[path].size, path, limits)
    return read_bytes(source, path)


def read_file(path: Path, limits: TextLimits, error: type[ShardctlError] = SourceError) -> bytes:
    """Read the bytes of a file that a person named; raises `error` if they are too many, and OSError as `open` does."""
    with path.open("rb") as file:  # a pipe has no size until it is read
        data = file.read(limits.size + 1)
    check_size(len(data), str(path), limits, error)
    return data


def read_json(source: Source, path: str, limits: TextLimits) -> Any:  # noqa: ANN401 - any JSON
    """Read what a JSON file of a source says; raises SourceError if it is none or exceeds `limits`."""
    return parse_json(read_text(source, path, limits), path, limits)


def parse_json(
    data: bytes, where: str, limits: TextLimits, error: type[ShardctlError] = SourceError, *, hint: str | None = None
) -> Any:  # noqa: ANN401 - any JSON
    """Parse what a JSON text says; `where` names it in messages.

    Raises `error`, with `hint` if it is malformed, if it is no JSON or exceeds `limits`.
    """
    check_json(data, where, limits, error)
    try:
        value = json.loads(data)
        if b"\\u" in data or not data.isascii():
            json.dumps(value, ensure_ascii=False).encode()  # halves of characters cannot be written again
    except UnicodeEncodeError as cause:
        odd = cause.object[max(cause.start - 20, 0) : cause.end]
        raise error(f"{where} holds half of a surrogate pair, which is not Unicode text: {odd!a}", hint=hint) from cause
    except (ValueError, RecursionError) as cause:
        raise error(f"{where} is not JSON: {cause}", hint=hint) from cause
    return value


def check_json(data: bytes, where: str, limits: TextLimits, error: type[ShardctlError] = SourceError) -> None:
    """Raise `error` if a JSON text exceeds `limits`; whether it is JSON at all is for the parser to say."""
    check_size(len(data), where, limits, error)
    containers = data.count(b"[") + data.count(b"{")
    _check_memory(_CONTAINER_BYTES * containers + _ITEM_BYTES * data.count(b","), where, limits, error)
    if containers > limits.depth:
        brackets = _JSON_STRING.sub(b"", data).translate(None, _NOT_BRACKETS)
        _check_depth(brackets.decode("ascii"), where, limits, error)


def parse_toml(data: bytes, where: str, limits: TextLimits, error: type[ShardctlError]) -> dict[str, Any]:
    """Parse what a TOML text says; `where` names it in messages. Raises `error` if it is none or exceeds `limits`."""
    check_size(len(data), where, limits, error)
    import tomllib  # few runs read such a file

    try:
        text = data.decode("utf-8")
        bare = _TOML_TEXT.sub("a", text)
        containers = bare.count("[") + bare.count("{") + bare.count(".")
        _check_memory(
            (_CONTAINER_BYTES + 4 * _ITEM_BYTES) * containers + _ITEM_BYTES * bare.count(","), where, limits, error
        )
        _check_depth("".join(re.findall(r"[\[\]{}]", bare)), where, limits, error)
        if _LONG_KEY.search(bare):
            raise error(f"{where} has a key of more than {_KEY_PARTS} parts, each of which becomes a table")
        if _TOML_NUMBER.search(bare):
            raise error(f"{where} has a number of more than 4,300 digits")
        return tomllib.loads(text)
    except (ValueError, RecursionError) as cause:  # of decoding and of TOML
        raise error(f"{where} is not TOML: {cause}") from cause


def check_size(size: int, where: str, limits: TextLimits, error: type[ShardctlError] = SourceError) -> None:
    """Raise `error` if a text of `size` bytes is larger than `limits` allow; `where` names it."""
    if size > limits.size:
        raise error(f"{where} has {size:,} bytes or more, but at most {limits.size:,} are read")


def _check_memory(needed: int, where: str, limits: TextLimits, error: type[ShardctlError]) -> None:
    if needed > limits.memory:
        raise error(
            f"{where} has so many brackets and commas that it would take {format_memory_size(needed)} "
            f"of memory, more than the {format_memory_size(limits.memory)} that are allowed"
        )


def _check_depth(brackets: str, where: str, limits: TextLimits, error: type[ShardctlError]) -> None:
    depth = 0
    for bracket in brackets:
        if bracket in "[{":
            depth += 1
            if depth > limits.depth:
                _refuse_depth(where, limits, error)
        else:
            depth -= 1


def _refuse_depth(where: str, limits: TextLimits, error: type[ShardctlError]) -> NoReturn:
    raise error(f"{where} nests brackets deeper than {limits.depth} levels")
