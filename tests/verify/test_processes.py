"""Whatever becomes of a rank's process, the run ends soon, and says which rank it was and why."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from shardctl.base.errors import UnsupportedError
from shardctl.running.processes import NotStartedError, RankError, run_ranks
from shardctl.running.worker_process import RankProcess, build_environment

LONG = 600
"""Seconds that a rank waits that is to be ended."""
SOON = 60
"""Seconds within which that must have happened, on a machine that has much else to do."""


def square(rank: RankProcess) -> dict[str, int]:
    print("hello from", rank.number)
    return {"rank": rank.number, "square": rank.number**2, "world": rank.world}


def seen(rank: RankProcess, name: str) -> object:
    assert rank.world == 1
    return os.environ.get(name), os.getpgrp() == os.getpid(), sys.stdin.read()


def fail(rank: RankProcess, who: int, how: str) -> None:
    """What one rank does while the others wait for it."""
    print(f"rank {rank.number} is about to {how}")
    if rank.number != who:
        time.sleep(LONG)
    if how == "exit":
        os._exit(7)
    elif how == "exit quietly":
        os._exit(0)
    elif how == "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "raise":
        raise ValueError("the weights are upside down")
    elif how == "refuse":
        raise UnsupportedError("no kernel for this", hint="use another")
    elif how == "leave":
        sys.exit("gone")
    elif how == "return what is no JSON":
        return object()
    return None


@pytest.fixture(scope="module", autouse=True)
def _begun():
    """The process that others are copies of, which takes seconds to import torch, is there before anything is timed."""
    run_ranks(square, 1)


def run(work, world=3, **options):
    """The error, and how long it took."""
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(work, world, **options)
    return caught.value, time.monotonic() - began


def test_each_rank_gives_its_result_and_prints_nothing_here(capfd):
    assert run_ranks(square, 3) == [{"rank": n, "square": n * n, "world": 3} for n in range(3)]
    assert capfd.readouterr() == ("", "")


def test_afresh_as_well_as_copied():
    assert run_ranks(square, 2, start="spawn") == [{"rank": n, "square": n * n, "world": 2} for n in range(2)]


def test_the_environment_is_that_of_a_rank():
    (found,) = run_ranks(functools.partial(seen, name="HF_HUB_OFFLINE"), 1)
    assert found == ["1", True, ""]
    (found,) = run_ranks(functools.partial(seen, name="HOME"), 1, environment={"HOME": "/nowhere"})
    assert found[0] == "/nowhere"
    assert int(build_environment(1000)["OMP_NUM_THREADS"]) == 1


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", "rank 1 exited with code 7 before it had a result; the last it said: rank 1 is about to exit"),
        ("exit quietly", "rank 1 exited with code 0 before it had a result"),
        ("be killed", "rank 1 was killed by SIGKILL"),
        ("crash", "rank 1 was killed by SIGSEGV"),
        ("raise", "rank 1 raised ValueError: the weights are upside down"),
        ("refuse", "rank 1 raised UnsupportedError: no kernel for this"),
        ("leave", "rank 1 raised SystemExit: gone"),
        ("return what is no JSON", "rank 1 raised TypeError: Object of type object is not JSON serializable"),
    ],
)
def test_a_rank_that_fails_ends_all_at_once_and_is_named(how, said):
    error, seconds = run(functools.partial(fail, who=1, how=how))
    assert error.message.startswith(said)
    assert error.ranks == (1,)
    assert f"about to {how}" in error.output
    assert seconds < SOON
    if how == "refuse":
        assert error.hint == "use another"
    if how == "be killed":
        assert "memory" in error.hint


def cascade(rank: RankProcess) -> None:
    """A rank fails, and then the others because of it."""
    rank.report_heartbeat()
    while not all(rank.beats):
        time.sleep(0.001)
    time.sleep(0.05 * rank.number)
    raise ValueError(f"number {rank.number}")


def test_of_several_that_raise_the_first_is_named():
    error, _ = run(cascade)
    assert error.message == "rank 0 raised ValueError: number 0"


def hang(rank: RankProcess, who: int) -> None:
    rank.report_heartbeat()
    if rank.number == who:
        threading.Event().wait()
    rank.report_heartbeat()
    time.sleep(LONG)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what processes do")
def test_ranks_that_do_nothing_hang_and_the_one_that_came_least_far_is_named():
    error, seconds = run(functools.partial(hang, who=2), idle=2.0)
    assert error.message.startswith("rank 2 hung: no rank has done anything for 2 s; rank 2 is in wait (threading.py:")
    assert "in hang" in error.output
    assert seconds < SOON


def spin(rank: RankProcess) -> None:
    while rank.number == 0:
        pass


def test_a_rank_that_is_busy_forever_is_ended_by_the_deadline():
    error, seconds = run(spin, 2, deadline=2.0)
    assert error.message.startswith("rank 0 did not end within 2 s; rank 0 is in spin (test_processes.py:")
    assert seconds < SOON


def spin_after_a_beat(rank: RankProcess) -> None:
    rank.report_heartbeat()
    spin(rank)


def test_a_rank_that_is_busy_and_gets_no_further_is_ended():
    error, seconds = run(spin_after_a_beat, 2, silence=1.0)
    # On a busy machine rank 1 may not have got far enough either.
    assert re.match("ranks? 0(, 1)? hung: no rank has got any further for 1 s; rank 0 is in spin", error.message)
    assert seconds < SOON


def slow(rank: RankProcess, steps: int, beat: bool) -> str:  # noqa: FBT001 - pickled as it is
    for _ in range(steps):
        time.sleep(0.1)
        if beat:
            rank.report_heartbeat()
    return "done"


def test_a_beat_shows_that_work_goes_on():
    assert run_ranks(functools.partial(slow, steps=40, beat=True), 1, idle=3.0) == ["done"]


def test_silence_is_counted_from_the_first_beat():
    assert run_ranks(functools.partial(slow, steps=10, beat=False), 1, silence=0.3) == ["done"]
    assert run_ranks(functools.partial(slow, steps=40, beat=True), 1, silence=3.0) == ["done"]


def test_processes_that_the_system_does_not_start_are_no_fault_of_a_rank(monkeypatch):
    def refuse(_):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", refuse)
    with pytest.raises(NotStartedError, match=r"of rank 0 could not be started: .*temporarily unavailable"):
        run_ranks(square, 2)


def test_a_script_without_a_guard_is_not_run_again(tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
            import operator
            from shardctl.running.processes import run_ranks
            print("once")
            print(run_ranks(operator.attrgetter("number"), 2, preload=()))
        """)
    )
    said = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True)
    assert said.stdout == "once\n[0, 1]\n"


def parent(rank: RankProcess, note: str) -> None:
    """Start a process of its own, and wait."""
    child = subprocess.Popen(["sleep", str(LONG)])
    Path(note).write_text(str(child.pid))
    if rank.number == 0:
        raise ValueError("enough")


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pid, seconds=60.0):
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_what_a_rank_started_ends_with_it(tmp_path):
    run(functools.partial(parent, note=str(tmp_path / "pid")), 1)
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_no_rank_outlives_a_parent_that_is_killed(tmp_path, start):
    (tmp_path / "ranks.py").write_text(
        textwrap.dedent("""
            import functools, os, sys, time
            from shardctl.running.processes import run_ranks
            def wait(rank, folder):
                with open(f"{folder}/{rank.number}.pid", "w") as note:
                    note.write(str(os.getpid()))
                while True:
                    time.sleep(0.05); rank.report_heartbeat()
            if __name__ == "__main__":
                run_ranks(functools.partial(wait, folder=sys.argv[1]), 2, start=sys.argv[2], preload=())
        """)
    )
    with subprocess.Popen([sys.executable, tmp_path / "ranks.py", tmp_path, start]) as process:
        notes = [tmp_path / f"{n}.pid" for n in range(2)]
        end = time.monotonic() + 120
        while not all(note.exists() and note.read_text() for note in notes) and time.monotonic() < end:
            time.sleep(0.05)
        process.kill()
    assert all(gone(int(note.read_text())) for note in notes)


def collective(rank: RankProcess, place: str, how: str) -> float:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank.number, world_size=rank.world)
    import torch

    total = torch.ones(4)
    dist.all_reduce(total)
    if rank.number == 1 and how == "die":
        os._exit(3)
    if rank.number == 1 and how == "hang":
        time.sleep(LONG)
    if rank.number == 1 and how == "raise":
        raise ValueError("rank 1 has had enough")
    dist.all_reduce(total)
    return float(total[0])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("die", "rank 1 exited with code 3 before it had a result"),
        ("raise", "rank 1 raised ValueError: rank 1 has had enough"),
        ("hang", "rank 1 hung: no rank has done anything for 3 s; rank 1 is in collective (test_processes.py:"),
    ],
)
def test_ranks_of_a_gloo_group(tmp_path, how, said):
    work = functools.partial(collective, place=str(tmp_path / "store"), how=how)
    error, seconds = run(work, 3, idle=3.0)
    assert error.message.startswith(said)
    assert seconds < SOON


def test_ranks_of_a_gloo_group_that_all_goes_well_with(tmp_path):
    work = functools.partial(collective, place=str(tmp_path / "store"), how="work")
    assert run_ranks(work, 2) == [4.0, 4.0]
