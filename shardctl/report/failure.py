"""Renders errors and warnings as lines for people, and as the last record for programs."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any, Final

from shardctl.base.errors import HostileError, MachineError, ShardctlError, SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.report.visible import escape_control_characters, hide_passwords

_REPORT_BUG_HINT: Final = "set SHARDCTL_DEBUG=1 for the traceback, and please report it"
_HINTS_BY_EXIT_CODE: Final = {
    2: "shardctl --help shows the commands, shardctl COMMAND --help their options",
    3: "--json lists everything that was found",
    4: "check the path, and that the download or copy is complete",
    5: "check who owns it, and its mode",
    6: "choose another destination",
    7: "run the same command again: it resumes",
    130: "run the same command again",
    143: "run the same command again",
}
"""What to do, by exit code, where the error itself does not say."""
_HINT_OF_MEMORY: Final = "end what else uses it, or use fewer --threads and a smaller --memory"
_HINT_OF_SYSTEM: Final = "check the system's log, ulimit -a and the mounts, then run the same command again"
_OF_SYSTEM: Final = frozenset(
    {
        *(errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR),
        *(errno.ENOSYS, errno.EOPNOTSUPP, errno.ELOOP, errno.ENAMETOOLONG, errno.EOVERFLOW, errno.EFBIG, errno.EBUSY),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ECONNREFUSED),
        *(errno.ECONNRESET, errno.ECONNABORTED, errno.EADDRNOTAVAIL),
    }
)
"""What a system refuses for reasons of its own. A file that is missing where the program needs one is a bug."""
_TOO_MANY_DIGITS: Final = "Exceeds the limit"
"""How Python begins to say that it converts no text of so many digits to a number (`sys.set_int_max_str_digits`)."""
_HINT_OF_DIGITS: Final = "names and settings of no model have such a number; the file may be damaged"
_NO_PLACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


@value_class
class FailureReport:
    """An error, ready to be shown."""

    message: str
    hint: str
    exit_code: int

    def lines(self) -> str:
        """Return two lines, whatever the message holds."""
        return f"error: {escape_control_characters(self.message)}\nhint:  {escape_control_characters(self.hint)}\n"

    def coloured_lines(self) -> str:
        """Return the same for a terminal that shows colours."""
        error, hint = self.lines().splitlines()
        return f"\x1b[31m{error[:6]}\x1b[0m{error[6:]}\n\x1b[36m{hint[:5]}\x1b[0m{hint[5:]}\n"

    def document(self, schema: str) -> dict[str, Any]:
        """Return the last record of a run that failed."""
        return {
            "schema": schema,
            "status": "error",
            "exit_code": self.exit_code,
            "error": self.message,
            "hint": self.hint,
        }


def describe_failure(error: BaseException) -> FailureReport:
    """Return what to say about an error; one of another kind is a bug, unless the system's message is enough."""
    described = _describe_failure(error)
    return replace(described, message=hide_passwords(described.message), hint=hide_passwords(described.hint))


def _describe_failure(error: BaseException) -> FailureReport:
    if isinstance(error, ShardctlError):
        hint = error.hint or _HINTS_BY_EXIT_CODE.get(error.exit_code, _REPORT_BUG_HINT)
        if isinstance(error, UnsupportedError) and not error.hint:
            hint = "docs/formats.md says what is read and written, and docs/models.md for which models"
        if isinstance(error, HostileError) and not error.hint:
            hint = "do not load this with anything; ask where it came from"
        return FailureReport(error.message, hint, error.exit_code)
    outside = _describe_outside_failure(error)
    return outside or FailureReport(f"this is a bug in shardctl: {type(error).__name__}: {error}", _REPORT_BUG_HINT, 1)


def _describe_outside_failure(error: BaseException) -> FailureReport | None:
    """Describe what the machine or an input is at fault for, though no error of ours says so; None for a bug."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return FailureReport("this machine has too little free memory", _HINT_OF_MEMORY, MachineError.exit_code)
    if isinstance(error, ValueError) and str(error).startswith(_TOO_MANY_DIGITS):
        return FailureReport("a number in the input has thousands of digits", _HINT_OF_DIGITS, SourceError.exit_code)
    if not isinstance(error, OSError) or error.errno is None:
        return None
    message = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    if isinstance(error, PermissionError):
        return FailureReport(message, _HINTS_BY_EXIT_CODE[5], 5)
    if error.errno in _NO_PLACE:
        return FailureReport(message, "free some space, or choose another place to write to", 6)
    return FailureReport(message, _HINT_OF_SYSTEM, MachineError.exit_code) if error.errno in _OF_SYSTEM else None


def format_warning(message: str) -> str:
    """Format a warning's line."""
    return f"warning: {escape_control_characters(hide_passwords(message))}\n"
