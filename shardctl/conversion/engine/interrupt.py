"""Handles SIGINT, SIGTERM and SIGHUP: the first stops the engine and keeps its state, the second exits."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from shardctl.base.workers import StopRequest


@contextlib.contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """Let the first SIGINT, SIGTERM or SIGHUP set `stop`; outside the main thread signals are left alone.

    A terminal that goes away (SIGHUP) is reported as SIGTERM is: nobody is left to tell them apart.

    A signal that was ignored stays ignored: `nohup` and shells that start jobs in the background rely on it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = {each: handler for each, handler in found.items() if handler not in {signal.SIG_IGN, None}}

    def first(number: int, _frame: FrameType | None) -> None:
        stop.signal = signal.SIGTERM if number == signal.SIGHUP else number
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    for each in before:
        signal.signal(each, first)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
