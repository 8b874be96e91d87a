"""Ends a command cleanly on SIGTERM and SIGHUP, and ignores signals once its work is done."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_TERMINATION_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)
"""What asks a command to end, beside Ctrl-C: somebody, and the terminal that goes away."""


class TerminatedError(BaseException):
    """SIGTERM or SIGHUP arrived while no verb was listening for it."""


class FinishedError(BaseException):
    """A signal arrived when all was done but the telling of it."""


@contextmanager
def raise_on_termination() -> Iterator[None]:
    """Raise TerminatedError for a signal, so that the stack unwinds as for Ctrl-C, and locks and staging are tidied.

    A signal that is ignored stays so, as `nohup` has it.
    """
    with _raise_on_signals(
        TerminatedError, [each for each in _TERMINATION_SIGNALS if _get_handler(each) == signal.SIG_DFL]
    ):
        yield


@contextmanager
def raise_when_finished() -> Iterator[None]:
    """Raise FinishedError for a signal while a result is told that is complete: the exit code must not deny it."""
    wanted = (*_TERMINATION_SIGNALS, signal.SIGINT)
    with _raise_on_signals(
        FinishedError, [each for each in wanted if _get_handler(each) not in (signal.SIG_IGN, None)]
    ):
        yield


def _get_handler(number: signal.Signals) -> object:
    return signal.getsignal(number)


@contextmanager
def _raise_on_signals(error: type[BaseException], numbers: list[signal.Signals]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        raise error

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
