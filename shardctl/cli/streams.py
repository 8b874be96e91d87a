"""stdout for data, stderr for talk: the only place that writes to either."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, Final, TextIO

from shardctl.errors import AccessError, DestinationError
from shardctl.report.failure import warning

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rich.console import RenderableType

_WIDE: Final = 1 << 20
"""Columns of the page that views are laid out on: a terminal wraps long lines itself, a pipe must not."""
_PLAIN: Final = str.maketrans({"█": "#", "▓": "=", "▒": "%", "░": "~", "▚": "*", "·": "."})
"""For terminals and locales without the block characters."""


def prepare() -> None:
    """Names that are not valid text, and characters that a terminal lacks, are escaped rather than fatal."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def show(view: RenderableType) -> None:
    """Print a view."""
    from rich.console import Console

    console = Console(width=_WIDE, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(view)
    lines = captured.get().rstrip("\n").split("\n")
    _write(sys.stdout, "".join(f"{line.rstrip()}\n" for line in lines))


def document(content: dict[str, Any]) -> None:
    """Print the one document of a verb."""
    _write(sys.stdout, json.dumps(content, indent=2) + "\n")


def record(content: dict[str, Any]) -> None:
    """Print one of several records, on a line."""
    _write(sys.stdout, json.dumps(content) + "\n")


def text(content: str) -> None:
    """Print plain data."""
    _write(sys.stdout, content)


def talk(content: str) -> None:
    """Say something that is not data."""
    _write(sys.stderr, content)


def save(path: Path, content: bytes) -> None:
    """Write a report where it was asked for."""
    try:
        path.write_bytes(content)
    except PermissionError as error:
        raise AccessError(f"{path} cannot be written: {error.strerror}") from error
    except OSError as error:
        raise DestinationError(f"{path} cannot be written: {error.strerror}") from error


def warn(messages: Iterable[str]) -> None:
    """Say what is odd but not wrong."""
    talk("".join(map(warning, messages)))


def abandoned() -> bool:
    """Whether the reader of stdout has left, such as `head`, while something that writes by itself was writing (help).

    What is left to write goes nowhere, or the interpreter would complain of it at its end.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        return True
    return False


def flush() -> None:
    """Empty the buffers, so that a closed pipe shows here and not when the interpreter ends."""
    for stream in (sys.stdout, sys.stderr):
        _write(stream, "")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person watches the stream, on something that can move its cursor."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def columns() -> int | None:
    """Those of the terminal that shows what is written; None where it goes elsewhere."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def _write(stream: TextIO | None, content: str) -> None:
    """Write and flush; a reader who has left is not an error, and the work goes on."""
    if stream is None:  # the descriptor was closed when the program began
        return
    try:
        stream.write(_encodable(content, stream))
        stream.flush()
    except BrokenPipeError:
        _discard(stream)


def _discard(stream: TextIO) -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


def _encodable(content: str, stream: TextIO) -> str:
    try:
        "█".encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return content.translate(_PLAIN)
    return content
