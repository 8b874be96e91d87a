"""Reads what a process leaves of itself: its processor time, its exit code, its last words and its stack."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import Final

SHOWN: Final = 4
"""Lines of a failed rank's output, or ranks that hang, that a message has."""


def read_process_usage(pid: int) -> tuple[float, int] | None:
    """Read processor seconds of a process, and whether one of its threads waits for a disk; None if unknown.

    `proc(5)`: state is the third field of `stat`, after a name in parentheses; utime and stime are the 14th and 15th.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        reads = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return (0.0, 0) if Path("/proc/self/stat").exists() else None
    ticks = int(fields[11]) + int(fields[12])
    counted = re.findall(r"^(?:read_bytes|write_bytes): (\d+)$", reads, re.MULTILINE)
    waiting = int(fields[0] == "D")
    return ticks / os.sysconf("SC_CLK_TCK"), sum(map(int, counted)) + waiting


def describe_exit(code: int | None) -> str:
    """Describe an exit code in words that follow the name of the process."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    return f"exited with code {code} before it had a result"


def quote_last_lines(output: str) -> str:
    """Quote the last lines of what a process printed, to follow a message; empty if it printed nothing."""
    lines = [line.strip() for line in output.splitlines() if line.strip()][-SHOWN:]
    return f"; the last it said: {' | '.join(lines)}" if lines else ""


def find_innermost_frame(output: str) -> str:
    """Find where the main thread is, in the last stack that faulthandler wrote: its innermost frame."""
    frames = _list_main_stack(output)
    found = re.search(r'File "([^"]*)", line (\d+) in (.+)', frames[0]) if frames else None
    return f"{found[3]} ({Path(found[1]).name}:{found[2]})" if found else ""


def is_in_collective(output: str) -> bool:
    """Return whether the main thread waits in torch's communication."""
    return any("torch/distributed" in frame for frame in _list_main_stack(output))


def _list_main_stack(output: str) -> list[str]:
    """List the frames of the main thread, innermost first: faulthandler writes it last, and each thread from within."""
    dump = output.rpartition("(most recent call first):")[2]
    return [line for line in dump.splitlines() if line.lstrip().startswith("File ")]
