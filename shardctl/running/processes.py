"""Runs one process per rank, and ends them all as soon as one of them dies, raises or hangs, saying which and why.

A peer that dies wakes the others of a gloo or NCCL group at once; one that raises, or waits for what never comes,
leaves them waiting for as long as the group's own time limit, half an hour by default. So a worker that raises exits at
once, and the parent watches: it sees an exit within a tenth of a second, and within `idle` seconds that nobody works.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal

from shardctl.base.errors import MachineError, ShardctlError
from shardctl.base.value import state_class
from shardctl.running.worker_process import RankProcess, build_environment, run_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from ctypes import Array, c_int64
    from multiprocessing.process import BaseProcess

Start = Literal["forkserver", "spawn"]
"""How a rank's process begins: as a copy of a small one that has imported `PRELOAD`, or all afresh.

Copies take a tenth of a second each, where a fresh process takes seconds to import torch. They are not copies of this
process, whose threads, and torch's, a copy would not have; but CUDA works in fresh processes only."""
PRELOAD: Final = ("torch", "transformers", "transformers.modeling_utils")
"""What is imported once, if it is installed; the first run of a process decides for all that follow.

Most of the seconds go to the last, which `import transformers` leaves out. None of them starts a thread of Python."""
_POLL_INTERVAL_SECONDS: Final = 0.1
"""Seconds between looks at all ranks."""
_GRACE_PERIOD_SECONDS: Final = 0.3
"""Seconds in which others may fail of the same cause, and in which stacks are written."""
_VIRTUAL_RANKS_HINT: Final = "--virtual runs all ranks in one process, which needs less memory"
"""What to do about ranks that die or hang."""
_MAX_IDLE_CPU_SECONDS: Final = 0.05
"""Seconds of processor time, of all ranks together, that count as none: background threads wake now and then."""

_MAX_LINES_SHOWN: Final = 4
"""Lines of a failed rank's output, or ranks that hang, that a message has."""


class RankError(ShardctlError):
    """A rank's process died, raised or hung, and all were ended."""

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int],
        output: str = "",
        raised: str = "",
        hint: str | None = None,
        exit_code: int = MachineError.exit_code,
    ) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code
        """That of what was raised; one that died or hung says nothing of the checkpoint."""
        self.ranks = tuple(ranks)
        """Who failed first, as far as can be told."""
        self.output = output
        """What the first of them printed, with its traceback or stack."""
        self.raised = raised
        """The name of the exception, if it raised one."""


class NotStartedError(ShardctlError):
    """The system would not start a process for each rank, or they could not meet: it says nothing of the checkpoint."""


def run_ranks(
    work: Callable[[RankProcess], object],
    world: int,
    *,
    start: Start = "forkserver",
    preload: Sequence[str] = PRELOAD,
    environment: Mapping[str, str] | None = None,
    deadline: float | None = None,
    idle: float = 8.0,
    silence: float | None = None,
) -> list[Any]:
    """Call `work` in a process for each of `world` ranks; returns what each returned, which must be JSON.

    `work` is pickled: a function of a module, or a `functools.partial` of one. `deadline` is in seconds, for all of it;
    `idle` are seconds without processor time, disk or `Rank.report_heartbeat` of any rank, after which they are taken
    to hang (Linux only). `silence` are seconds without `Rank.report_heartbeat` of any rank, once one of them has, after
    which they are taken to hang however busy they are: NCCL waits for others by spinning. Output of the processes is
    kept from the terminal and told when they fail.

    Raises RankError, naming the rank; NotStartedError. No process outlives the call, however it ends.
    """
    context: Any = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload([*preload])
    pickled = pickle.dumps(work)
    variables = build_environment(world) if environment is None else dict(environment)
    beats = context.RawArray("q", world)
    with TemporaryDirectory(prefix="shardctl-ranks-", ignore_cleanup_errors=True) as folder:
        processes = [
            context.Process(
                target=run_worker,
                args=(pickled, RankProcess(number, world, beats), folder, variables),
                name=f"rank {number}",
                daemon=True,
            )
            for number in range(world)
        ]
        run = _ProcessRun(processes, Path(folder), beats)
        try:
            with _hide_main_script(pickled):
                for process in processes:
                    _start_process(process)
            run.watch(deadline, idle, silence)
            return [json.loads(run.result(number).read_bytes())["result"] for number in range(world)]
        finally:
            run.kill()


@contextmanager
def _hide_main_script(pickled: bytes) -> Iterator[None]:
    """Keep new processes from running the caller's script again, which they do to find what is defined there.

    A script without `if __name__ == "__main__"` would there start processes of its own; nothing of ours is in it.
    """
    script = sys.modules["__main__"]
    if b"__main__" not in pickled:
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _start_process(process: BaseProcess) -> None:
    try:
        process.start()
    except (OSError, EOFError, RuntimeError) as error:
        said = str(error) or type(error).__name__
        raise NotStartedError(f"the process of {process.name} could not be started: {said}") from error


@state_class
class _ProcessRun:
    """The processes of one run, seen from outside."""

    processes: list[BaseProcess]
    folder: Path
    beats: Array[c_int64]

    def result(self, number: int) -> Path:
        return self.folder / f"{number}.json"

    def watch(self, deadline: float | None, idle: float, silence: float | None) -> None:
        """Return when every rank has given its result; raise RankError as soon as one cannot."""
        began = mark = heard = time.monotonic()
        seen, beats = self._measure_activity(), 0
        while alive := [process for process in self.processes if process.exitcode is None]:
            connection.wait([process.sentinel for process in alive], _POLL_INTERVAL_SECONDS)
            self._check()
            now, activity = time.monotonic(), self._measure_activity()
            if deadline is not None and now - began > deadline:
                raise self._build_hang_error(f"did not end within {deadline:g} s")
            if sum(self.beats) != beats:
                heard, beats = now, sum(self.beats)
            elif silence is not None and beats and now - heard > silence:
                raise self._build_hang_error(f"hung: no rank has got any further for {silence:g} s")
            if (
                activity is None
                or seen is None
                or activity[0] - seen[0] > _MAX_IDLE_CPU_SECONDS
                or activity[1:] != seen[1:]
            ):
                mark, seen = now, activity
            elif now - mark > idle:
                raise self._build_hang_error(f"hung: no rank has done anything for {idle:g} s")
        self._check()

    def _check(self) -> None:
        if any(self._has_failed(number) for number in range(len(self.processes))):
            time.sleep(_GRACE_PERIOD_SECONDS)
            raise self._find_first_failure()

    def _has_failed(self, number: int) -> bool:
        code = self.processes[number].exitcode
        return code is not None and (code != 0 or not self.result(number).exists())

    def _find_first_failure(self) -> RankError:
        """Return the error of the rank that failed first: others fail because it is gone."""
        failed = [number for number in range(len(self.processes)) if self._has_failed(number)]
        gone = [number for number in failed if not self.result(number).exists()]
        if gone:
            number, output = gone[0], self._read_output(gone[0])
            message = f"rank {number} {_describe_exit(self.processes[number].exitcode)}"
            return RankError(
                message + _quote_last_lines(output), ranks=gone, output=output, hint=_find_death_hint(self, number)
            )
        raised = {number: json.loads(self.result(number).read_bytes()) for number in failed}
        number = min(raised, key=lambda n: raised[n]["time"])
        error = raised[number]
        message = f"rank {number} raised {error['error']}: {error['message']}"
        return RankError(
            message,
            ranks=[number],
            output=self._read_output(number),
            raised=error["error"],
            hint=error["hint"],
            exit_code=error["exit_code"],
        )

    def _build_hang_error(self, what: str) -> RankError:
        """Return the error where nothing happens any more; who waits in a collective waits for another."""
        alive = [number for number, process in enumerate(self.processes) if process.exitcode is None]
        for number in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[number].pid or 0, signal.SIGUSR1)  # the workers have faulthandler write stacks
        time.sleep(_GRACE_PERIOD_SECONDS)
        stacks = {number: _find_innermost_frame(self._read_output(number)) for number in alive}
        waiting = [number for number in alive if _is_in_collective(self._read_output(number))]
        guilty = [number for number in alive if number not in waiting] or alive
        fewest = min(self.beats[number] for number in guilty)
        guilty = [number for number in guilty if self.beats[number] == fewest]
        where = "; ".join(
            f"rank {number} is in {stacks[number]}" for number in guilty[:_MAX_LINES_SHOWN] if stacks[number]
        )
        names = ", ".join(map(str, guilty))
        message = f"rank{'s' * (len(guilty) > 1)} {names} {what}" + (f"; {where}" if where else "")
        return RankError(message, ranks=guilty, output=self._read_output(guilty[0]), hint=_VIRTUAL_RANKS_HINT)

    def _read_output(self, number: int) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / f"{number}.log").read_text(errors="replace")
        return ""

    def _measure_activity(self) -> tuple[float, int, int, int] | None:
        """Return processor seconds of all ranks, and what else shows that work goes on.

        None where the system does not say.
        """
        seconds, waits, beats = 0.0, 0, sum(list(self.beats))
        for process in self.processes:
            if process.pid is None or process.exitcode is not None:
                continue
            found = _read_process_usage(process.pid)
            if found is None:
                return None
            seconds, waits = seconds + found[0], waits + found[1]
        ended = sum(process.exitcode is not None for process in self.processes)
        return seconds, waits, beats, ended

    def kill(self) -> None:
        """End every process and all that it started."""
        for process in self.processes:
            if process.pid is None:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                if process.exitcode is None:
                    process.kill()
        for process in self.processes:
            if process.pid is not None:
                process.join()
                process.close()


def _find_death_hint(run: _ProcessRun, number: int) -> str:
    if run.processes[number].exitcode != -signal.SIGKILL:
        return _VIRTUAL_RANKS_HINT
    return f"the system may have run out of memory; {_VIRTUAL_RANKS_HINT}"


def _read_process_usage(pid: int) -> tuple[float, int] | None:
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


def _describe_exit(code: int | None) -> str:
    """Describe an exit code in words that follow the name of the process."""
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    return f"exited with code {code} before it had a result"


def _quote_last_lines(output: str) -> str:
    """Quote the last lines of what a process printed, to follow a message; empty if it printed nothing."""
    lines = [line.strip() for line in output.splitlines() if line.strip()][-_MAX_LINES_SHOWN:]
    return f"; the last it said: {' | '.join(lines)}" if lines else ""


def _find_innermost_frame(output: str) -> str:
    """Find where the main thread is, in the last stack that faulthandler wrote: its innermost frame."""
    frames = _list_main_stack(output)
    found = re.search(r'File "([^"]*)", line (\d+) in (.+)', frames[0]) if frames else None
    return f"{found[3]} ({Path(found[1]).name}:{found[2]})" if found else ""


def _is_in_collective(output: str) -> bool:
    """Return whether the main thread waits in torch's communication."""
    return any("torch/distributed" in frame for frame in _list_main_stack(output))


def _list_main_stack(output: str) -> list[str]:
    """List the frames of the main thread, innermost first: faulthandler writes it last, and each thread from within."""
    dump = output.rpartition("(most recent call first):")[2]
    return [line for line in dump.splitlines() if line.lstrip().startswith("File ")]
