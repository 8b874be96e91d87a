"""Runs the process of one rank: with a group and a share of the cores of its own, until its parent is gone."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import ShardctlError
from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Mapping
    from ctypes import Array, c_int64


_KILL_WITH_PARENT: Final = 1
"""PR_SET_PDEATHSIG of `prctl(2)`."""


@value_class
class RankProcess:
    """What a worker is told of itself."""

    number: int
    world: int
    beats: Array[c_int64]
    """One count a rank."""

    def report_heartbeat(self) -> None:
        """Say that work goes on; without `silence` not needed by work that uses the processor or the disk."""
        self.beats[self.number] += 1


def build_environment(world: int) -> dict[str, str]:
    """Build the environment of ranks that share this machine: a share of the cores, and no network."""
    threads = str(max((os.cpu_count() or 1) // world, 1))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "HF_DEACTIVATE_ASYNC_LOAD": "1",  # a loader's threads must not enter collectives in an order of their own
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_worker(pickled: bytes, rank: RankProcess, folder: str, environment: Mapping[str, str]) -> None:
    """Run a rank's process; it never returns."""
    _isolate_process(Path(folder, f"{rank.number}.log"))
    os.environ.update(environment)
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" in environment:  # imported before it could be told
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    said: dict[str, object]
    code = 0
    try:
        said = {"result": pickle.loads(pickled)(rank)}  # noqa: S301 - what the parent made a moment ago
        text = json.dumps(said)
    except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it
        traceback.print_exc()
        message = error.message if isinstance(error, ShardctlError) else str(error)
        hint = error.hint if isinstance(error, ShardctlError) else None
        code = error.exit_code if isinstance(error, ShardctlError) else ShardctlError.exit_code
        said = {"error": type(error).__name__, "message": message, "hint": hint, "exit_code": code, "time": time.time()}
        text, code = json.dumps(said), 1
    partial = Path(folder, f"{rank.number}.partial")
    partial.write_text(text)
    partial.rename(Path(folder, f"{rank.number}.json"))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # not to wait for threads of a communication library that wait for others


def _isolate_process(log: Path) -> None:
    """Give the process a group of its own, output to a file, stacks on demand, and death with the parent."""
    import ctypes
    import faulthandler

    try:
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except FileNotFoundError:  # the run was interrupted before this process was known
        os._exit(1)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    threading.Thread(target=_end_with_parent, name="shardctl-parent", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((nothing, 0), (sink, 1), (sink, 2)):
        os.dup2(descriptor, place)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)


def _end_with_parent() -> None:
    """End this process and all that it started when the one that asked for it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)
