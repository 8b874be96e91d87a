"""SIGINT and SIGTERM: the first asks the engine to stop and keep its state, the second ends the process at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from shardctl.workers import Stop


@contextlib.contextmanager
def stopping(stop: Stop) -> Iterator[None]:
    """While active, the first SIGINT or SIGTERM sets `stop`; outside the main thread signals are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(number: int, _frame: FrameType | None) -> None:
        stop.signal = number
        for each, handler in before.items():
            signal.signal(each, signal.SIG_DFL if callable(handler) else handler)

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    for each in before:
        signal.signal(each, first)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
