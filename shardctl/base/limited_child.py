"""Runs a module of shardctl in a process of its own, with limits on its time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from shardctl.base.amounts import format_file_size

_POLL_SECONDS: Final = 0.1
"""Seconds between looks at the child's memory."""
REQUEST_FILE: Final = "request.json"
_RESULT_FILE: Final = "result.json"


def run_limited_child(
    module: str, request: str, *, memory: int, seconds: int, task: str, limit: str = ""
) -> dict[str, Any] | str:
    """Run ``python -m MODULE FOLDER`` with a request in the folder; returns its result, or why it has none.

    The child's memory and threads do not stay, and it reads nothing of the Hub. `task` begins the reason, and `limit`
    says which option `memory` is, if it is one.
    """
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    with TemporaryDirectory(prefix="shardctl-child-") as folder:
        Path(folder, REQUEST_FILE).write_text(request, encoding="utf-8")
        child = subprocess.Popen(  # noqa: S603 - a module of ours, with Python itself
            [sys.executable, "-m", module, folder],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            reason = _watch_child(child, memory, seconds, limit)
        finally:
            child.kill()
            child.wait()
        if reason:
            return f"{task} {reason}"
        result = Path(folder, _RESULT_FILE)
        if not result.exists():
            return f"{task} ended with exit code {child.returncode}"
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def write_child_result(folder: Path, result: dict[str, Any]) -> None:
    """Write what a child found, whole or not at all."""
    (folder / "partial.json").write_text(json.dumps(result), encoding="utf-8")
    (folder / "partial.json").rename(folder / _RESULT_FILE)


def _watch_child(child: subprocess.Popen[bytes], memory: int, seconds: int, limit: str) -> str:
    """Wait until the child ends; returns why it must be ended, or an empty string."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            child.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if _measure_memory(child.pid) > memory:
                return f"takes more than {limit or format_file_size(memory)}"
        else:
            return ""
    return f"takes more than {seconds} s"


def _measure_memory(pid: int) -> int:
    """Measure the anonymous memory of a process in bytes; 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)
