"""Writes data to stdout and messages to stderr; no other module writes to either."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import sys
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

from shardctl.base.errors import AccessError, DestinationError
from shardctl.cli.run_log import RunLog
from shardctl.report.failure import format_warning
from shardctl.report.visible import escape_ci_commands, hide_passwords

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from shardctl.options.logging_options import LoggingOptions
    from shardctl.report.failure import FailureReport

_UNWRAPPED_WIDTH_COLUMNS: Final = 1 << 20
"""Columns of the page that views are laid out on: their lines are broken afterwards, and only for a terminal."""
_DISCONNECT_ERRNOS: Final = frozenset({errno.EPIPE, errno.EIO, errno.ENXIO, errno.ENOTCONN, errno.ECONNRESET})
"""How writing fails when the other end has left: a pipe, a terminal that was closed, a socket."""
_JSON_PIECES_PER_CHUNK: Final = 4_096
"""Pieces of JSON, mostly a name or a number each, that are joined at a time."""
_SURROGATE_ESCAPE_PATTERN: Final = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
"""How JSON of ASCII has the half of a character, of which two may be one."""
_MOST_COLUMNS: Final = 10_000
"""No terminal is wider: 4K in the smallest font has 1,280."""
_ASCII_TRANSLATION: Final = str.maketrans({"█": "#", "▓": "=", "▒": "%", "░": "~", "▚": "*", "━": "-", "·": "."})
"""For terminals and locales without the block characters."""


RUN: Final = RunLog()
"""What this run says; there is one at a time."""
_COMMAND_LINE_ARGS: Final[list[str]] = []


def begin_run(args: Sequence[str]) -> None:
    """Forget an earlier run of this process."""
    RUN.__init__()  # type: ignore[misc]  # one object, which others have imported
    _COMMAND_LINE_ARGS[:] = args


def begin_logging(talk: LoggingOptions) -> None:
    """Take how much is to be said, and begin to say it."""
    RUN.begin(talk, _COMMAND_LINE_ARGS)
    print_settings()


def print_settings() -> None:
    """Say which options were set elsewhere than on the command line, once."""
    for setting in () if RUN.told else RUN.settings:
        print_progress(f"setting: {setting}\n")
    RUN.told = True


def end_run(code: int) -> None:
    """Note how the run ended."""
    said = RUN.end(code)
    if RUN.talk.verbose:
        _write_text(sys.stderr, said)


def prepare_streams() -> None:
    """Escape names that are not valid text, and characters that a terminal lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    for name in ("COLUMNS", "LINES"):
        told = os.environ.get(name, "").strip()
        if told.isdecimal() and not 0 < int(told[:6]) <= _MOST_COLUMNS:
            del os.environ[name]  # rich would lay out, and fill with spaces, lines of any length


def print_view(view: RenderableType) -> None:
    """Print a view."""
    from rich.console import Console

    file = LastingStream(sys.stdout) if sys.stdout is not None else None  # capturing writes nothing, but does write
    console = Console(
        file=cast("TextIO | None", file), width=_UNWRAPPED_WIDTH_COLUMNS, highlight=False, markup=False, emoji=False
    )
    with console.capture() as captured:
        console.print(view)
    lines = captured.get().rstrip("\n").split("\n")
    _write_text(sys.stdout, _fit_terminal("".join(f"{line.rstrip()}\n" for line in lines), sys.stdout))


def print_document(content: dict[str, Any]) -> None:
    """Print the one document of a verb, with the settings that it was run with."""
    _write_text(sys.stdout, _encode_json(content | RUN.document(), indent=2))


def print_record(content: dict[str, Any]) -> None:
    """Print one of several records, on a line; the last one has the settings of the run."""
    _write_text(sys.stdout, _encode_json(content | RUN.document() if "exit_code" in content else content))


def _encode_json(content: dict[str, Any], indent: int | None = None) -> str:
    """Encode JSON that every reader accepts: a byte of a name that is not UTF-8 is the text of its escape."""
    written = _format_json(content, indent)
    if _SURROGATE_ESCAPE_PATTERN.search(written):
        written = _format_json(_as_unicode(content), indent)
    return written


def _format_json(content: dict[str, Any], indent: int | None) -> str:
    """Format JSON as a line or as lines; these come in pieces, all of which together take ten times their text."""
    if indent is None:
        return json.dumps(content) + "\n"
    pieces = chain(json.JSONEncoder(indent=indent).iterencode(content), "\n")
    return "".join(iter(lambda: "".join(islice(pieces, _JSON_PIECES_PER_CHUNK)), ""))


def _as_unicode(value: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, dict):
        return {_as_unicode(key): _as_unicode(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_unicode(each) for each in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def print_text(content: str) -> None:
    """Print plain data."""
    _write_text(sys.stdout, content)


def print_message(content: str) -> None:
    """Say something that is not data."""
    RUN.write(content)
    _write_text(sys.stderr, _fit_terminal(hide_passwords(content), sys.stderr))


def print_failure(failed: FailureReport) -> None:
    """Print an error and its hint, in colour where stderr is a terminal that shows it, or FORCE_COLOR is set."""
    RUN.write(failed.lines())
    forced = os.environ.get("FORCE_COLOR", "0") not in {"", "0"}
    plain = bool(os.environ.get("NO_COLOR")) or not (forced or is_terminal(sys.stderr))
    content = failed.lines() if plain else failed.coloured_lines()
    _write_text(sys.stderr, _fit_terminal(hide_passwords(content), sys.stderr))


def print_annotations(content: str) -> None:
    """Print lines that are commands to the runner of a CI job, as `report.annotations` makes them."""
    RUN.write(content)
    _write_text(sys.stderr, content, commands=True)


def print_progress(content: str) -> None:
    """Say how a run goes on, which who wants quiet does not want to know."""
    RUN.write(content)
    if not RUN.talk.quiet:
        _write_text(sys.stderr, _fit_terminal(hide_passwords(content), sys.stderr))


def print_detail(content: str) -> None:
    """Say what only who asked for more wants to know."""
    RUN.write(content)
    if RUN.talk.verbose:
        _write_text(sys.stderr, _fit_terminal(hide_passwords(content), sys.stderr))


def write_report(path: Path, content: str | bytes) -> None:
    """Write a report where it was asked for; in text, a byte of a name that is not UTF-8 is escaped."""
    try:
        path.write_bytes(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
    except PermissionError as error:
        raise AccessError(f"{path} cannot be written: {error.strerror}") from error
    except OSError as error:
        raise DestinationError(f"{path} cannot be written: {error.strerror}") from error


def print_warnings(messages: Iterable[str]) -> None:
    """Say what is odd but not wrong."""
    print_message("".join(map(format_warning, messages)))


def is_abandoned_pipe(error: OSError) -> bool:
    """Return whether an error of what writes to stdout by itself (help) says that its reader has left, such as `head`.

    What is left to write goes nowhere, or the interpreter would complain of it at its end.
    """
    if sys.stdout is None or not _is_gone(sys.stdout, error):
        return False
    _discard_stream(sys.stdout)
    return True


def flush_streams() -> None:
    """Empty the buffers, so that a closed pipe shows here and not when the interpreter ends."""
    for stream in (sys.stdout, sys.stderr):
        _write_text(stream, "")


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a person watches the stream, on something that can move its cursor."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def count_columns() -> int | None:
    """Count the columns of the terminal that shows what is written; None where it goes elsewhere."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def _fit_terminal(content: str, stream: TextIO | None) -> str:
    """Break lines between words where a terminal shows them; what goes elsewhere stays as it is."""
    if not is_terminal(stream):
        return content
    from shardctl.report.terminal_lines import wrap_terminal_lines

    return wrap_terminal_lines(content, shutil.get_terminal_size().columns)


def _write_text(stream: TextIO | None, content: str, *, commands: bool = False) -> None:
    """Write and flush; a reader or a terminal that has left is not an error, and the work goes on.

    Only `commands` are commands to a CI job; nothing else may be, whatever the names in a checkpoint are.
    Data that is lost otherwise, as on a full disk, is one; talk that is lost must not fail what it is about.
    """
    if stream is None:  # the descriptor was closed when the program began
        return
    try:
        stream.write(_escape_unencodable(content if commands else escape_ci_commands(content), stream))
        stream.flush()
    except OSError as error:
        if stream is not sys.stderr and not _is_gone(stream, error):
            raise
        _discard_stream(stream)


def _is_gone(stream: TextIO, error: OSError) -> bool:
    """Return whether there is nobody left to write to; of a file, EIO says that the disk is broken."""
    return error.errno in _DISCONNECT_ERRNOS and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)


class LastingStream:
    """A stream for what writes by itself, such as a bar: a reader or a terminal that leaves does not make it fail."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, content: str) -> int:
        """Write and flush."""
        _write_text(self._stream, content)
        return len(content)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a stream has
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Empty the buffer."""
        _write_text(self._stream, "")


def _discard_stream(stream: TextIO) -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


def _escape_unencodable(content: str, stream: TextIO) -> str:
    try:
        "█".encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return content.translate(_ASCII_TRANSLATION)
    return content
