"""Limits each request: the time of its answer, the rate of its body, and how much of it is read.

A server may keep a client for ever without ever being silent: a byte a second, one interim answer after another, an
error whose body has no end. Whatever exceeds a limit here is a temporary failure, and is retried as often as other
trouble is.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.workers import start_thread
from shardctl.storage.retries import TroubleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    Response = Any
    """A response of httpx, under whichever name huggingface_hub ships it, or a `Body` of `sockets`."""

ANSWER_TIMEOUTS: Final = 6
"""An answer's head, and a short body, may take this many of the library's timeouts: a minute, usually. The Hub answers
within a second or two; more time helps an overloaded proxy, and lets one that never answers keep us longer.
"""
EXPLAINED: Final = 1_000_000
"""Bytes of an error's or a redirect's body that are read, for its explanation: those of the Hub have a few hundred."""
FLOOR: Final = 1024
"""Bytes a second that a body must bring, on average over `PACE_TIMEOUTS`: eight requests share a line, so that is
64 kbit/s, on which a model of 1 GB would take a day and a half."""
PACE_TIMEOUTS: Final = 3
"""Timeouts of the library, usually 10 s each, over which the floor is an average: a shorter stall is forgiven."""


@contextmanager
def answer_within(seconds: float, ask: Callable[[], AbstractContextManager[Response]]) -> Iterator[Response]:
    """Give the response of `ask` if its headers come within so many seconds; raises TroubleError otherwise.

    The library's client starts its timeout anew with each byte, and cannot be interrupted: it waits in a thread, which
    is left alone after that time.
    """
    asked, lock = _PendingAnswer(), threading.Lock()

    def wait() -> None:
        try:
            manager = ask()
            response = manager.__enter__()
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits
            asked.error = error
        else:
            with lock:
                asked.manager, asked.response = manager, response
                late = asked.late
            if late:
                manager.__exit__(None, None, None)
        asked.done.set()

    start_thread(threading.Thread(target=wait, daemon=True, name="shardctl-answer"))
    asked.done.wait(seconds)
    with lock:
        asked.late = asked.manager is None and asked.error is None
    if asked.error is not None:
        raise asked.error
    if asked.manager is None:
        raise TroubleError(f"no answer was complete after {seconds:g} s")
    try:
        yield asked.response
    finally:
        asked.manager.__exit__(None, None, None)


class _PendingAnswer:
    """What a thread that waits for an answer has to say."""

    def __init__(self) -> None:
        self.manager: AbstractContextManager[Response] | None = None
        self.response: Response = None
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.late = False


@contextmanager
def ended_after(seconds: float, end: Callable[[], object]) -> Iterator[None]:
    """Call `end`, which must make what is waited for fail, unless the block ends within so many seconds."""

    def give_up() -> None:
        with suppress(OSError):
            end()

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    start_thread(timer)
    try:
        yield
    finally:
        timer.cancel()


def read_bounded(response: Response, most: int, seconds: float) -> Response:
    """Read a response with all of its body in memory, or with none if that has more than `most` bytes.

    Raises TroubleError for a body that takes longer than `seconds`, and what the library's client raises.
    """
    content, end = bytearray(), time.monotonic() + seconds
    for piece in response.iter_bytes():
        content += piece
        if len(content) > most:
            content.clear()
            break
        if time.monotonic() > end:
            raise TroubleError(f"the answer was not complete after {seconds:g} s")
    headers = [
        (name, value)
        for name, value in response.headers.multi_items()
        if name.lower() not in {"content-encoding", "content-length", "transfer-encoding"}
    ]
    return type(response)(response.status_code, headers=headers, content=bytes(content), request=response.request)


def body_is_short(response: Response) -> bool:
    """Return whether an answer announces so short a body that reading it is quicker than a new connection."""
    length = response.headers.get("content-length", "")
    return length.isascii() and length.isdecimal() and int(length) <= EXPLAINED


class PaceMeter:
    """Watches that a body comes with at least `FLOOR` bytes a second."""

    def __init__(self, timeout: float) -> None:
        """`timeout` is the library's, in seconds."""
        self._span = PACE_TIMEOUTS * timeout
        self._began = time.monotonic()
        self._bytes = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that came; raises TroubleError if too few did for too long."""
        self._bytes += nbytes
        seconds = time.monotonic() - self._began
        if seconds >= self._span:
            if self._bytes < FLOOR * seconds:
                raise TroubleError(f"only {self._bytes:,} bytes came in {seconds:.0f} s")
            self._began, self._bytes = time.monotonic(), 0
