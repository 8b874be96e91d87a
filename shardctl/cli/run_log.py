"""Keeps what one run says besides its result: how much of it is wanted, and a file that has all of it."""

from __future__ import annotations

import shlex
import time
from dataclasses import field
from typing import TYPE_CHECKING, Any, TextIO

from shardctl.base.amounts import format_duration
from shardctl.base.errors import AccessError, DestinationError
from shardctl.base.value import state_class
from shardctl.base.version import __version__
from shardctl.options.logging_options import LoggingOptions
from shardctl.report.visible import escape_ci_commands, hide_passwords

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.cli.chosen_settings import OptionSetting


@state_class
class RunLog:
    """What is to be said of a run, and the file to which it is written as well."""

    talk: LoggingOptions = field(default_factory=LoggingOptions)
    settings: tuple[OptionSetting, ...] = ()
    """Options that files and variables have set, and the command line has not."""
    told: bool = False
    """Whether they were said."""
    file: TextIO | None = None
    began: float = field(default_factory=time.monotonic)

    def begin(self, talk: LoggingOptions, args: Sequence[str]) -> None:
        """Take the options, and open the file; raises AccessError or DestinationError if it cannot be written."""
        self.talk = talk
        if talk.log is None:
            return
        try:
            self.file = talk.log.open("a", encoding="utf-8", errors="backslashreplace")
        except PermissionError as error:
            raise AccessError(f"{talk.log} cannot be written: {error.strerror}") from error
        except OSError as error:
            raise DestinationError(f"{talk.log} cannot be written: {error.strerror}") from error
        self.write(f"shardctl {__version__}: {shlex.join(['shardctl', *args])}\n")

    def write(self, content: str) -> None:
        """Write lines to the file, if there is one, each with the time; a disk that is full does not end the run."""
        if self.file is None:
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        try:
            lines = hide_passwords(content).splitlines()
            self.file.writelines(escape_ci_commands(f"{now} {line}\n") for line in lines)
            self.file.flush()
        except OSError:
            self.file = None

    def end(self, code: int) -> str:
        """Close the file, and return how the run ended."""
        said = f"exit code {code} after {format_duration(time.monotonic() - self.began)}\n"
        self.write(said)
        if self.file is not None:
            self.file.close()
            self.file = None
        return said

    def document(self) -> dict[str, Any]:
        """Build what a document says of settings; nothing where there are none."""
        return {"settings": [setting.document() for setting in self.settings]} if self.settings else {}
