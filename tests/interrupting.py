"""Interrupts a conversion from inside, as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import threading
import time

from shardctl.base.workers import NullWatcher


class InterruptingProgress(NullWatcher):
    """Presses Ctrl-C when the first bytes are in place, and goes on when it was heard."""

    def __init__(self):
        self.done = False

    def advance(self, nbytes, *, kept=False):
        """Interrupt once; headers are written by the thread that started everything, tensors by others."""
        del nbytes, kept
        if self.done or threading.current_thread() is threading.main_thread():
            return
        self.done = True
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 60
        while signal.getsignal(signal.SIGINT) is not signal.SIG_DFL and time.monotonic() < deadline:
            time.sleep(0.001)
