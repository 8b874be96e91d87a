"""Lets the ranks of one computation meet: each shows what it has, and sees what all others show.

In one process, ranks are threads that take turns, so that only one computes at a time. A rank that fails or has
finished shows a report, by which the others learn that nothing more comes of it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import MachineError
from shardctl.base.value import value_class
from shardctl.base.workers import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Torch = Any
FAILURES: Final = (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError, IndexError, AssertionError)
"""What code raises that finds a tensor without memory, or a stand-in, where it wants values, or lacks an input."""


class PartitionConflictError(ValueError):
    """Ranks have weights that cannot be cut as they are."""


@value_class
class RankReport:
    """What a rank says when it is done."""

    failure: BaseException | None = None
    idle: tuple[str, ...] = ()
    """Names of the weights that no module asked for."""
    unreal: bool = False
    """Whether some of what it computed is not a number."""


class _MeetingOverError(Exception):
    """Another rank has shown a report."""

    def __init__(self, reports: list[RankReport]) -> None:
        super().__init__()
        self.reports = reports


class RankMeeting:
    """Ranks of this process, each a thread; `count` of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.here: Sequence[int] = range(count)
        """The ranks that run in this process."""
        self._barrier = threading.Barrier(count)
        self._turn = threading.Lock()
        self._shown: list[object] = [None] * count
        self._thread = threading.local()

    @property
    def number(self) -> int:
        """The rank that asks."""
        return int(self._thread.number)

    def exchange(self, mine: Torch) -> list[Torch]:
        """Return what every rank shows, by number; ends this rank's computation if another has ended."""
        shown = self._gather_values(mine)
        reports = [each for each in shown if isinstance(each, RankReport)]
        if reports:
            raise _MeetingOverError(reports)
        return shown

    def run(self, compute: Callable[[int], tuple[Torch, RankReport]]) -> tuple[dict[int, Torch], list[RankReport]]:
        """Return what each rank of this process computes, by number, and the reports that were shown last.

        Raises what says nothing of a rank's weights, such as a file that cannot be read.
        """
        outputs: dict[int, Torch] = {}
        reports: list[RankReport] = []
        raised: list[BaseException] = []

        def work(number: int) -> None:
            self._thread.number = number
            with self._turn:
                try:
                    outputs[number], told = self._run_rank(number, compute)
                    reports[:] = told
                except threading.BrokenBarrierError:
                    pass  # another rank has said why
                except BaseException as error:  # noqa: BLE001 - raised again where all are waited for
                    raised.append(error)
                    self._barrier.abort()

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in self.here]
        started: list[threading.Thread] = []
        try:
            for thread in threads:
                start_thread(thread)
                started.append(thread)
        except MachineError as error:
            raised.append(error)
            self._barrier.abort()
        for thread in started:
            thread.join()
        if raised:
            self._barrier.reset()
            raise raised[0]
        return outputs, reports

    def _run_rank(
        self, number: int, compute: Callable[[int], tuple[Torch, RankReport]]
    ) -> tuple[Torch, list[RankReport]]:
        output: Torch = None
        try:
            output, report = compute(number)
        except _MeetingOverError as over:
            return None, over.reports
        except FAILURES as error:
            report = RankReport(failure=error)
        return output, [each for each in self._gather_values(report) if isinstance(each, RankReport)]

    def _gather_values(self, mine: object) -> list[Torch]:
        self._shown[self.number] = mine
        self._turn.release()
        try:
            self._barrier.wait()
            shown = list(self._shown)
            self._barrier.wait()
        finally:
            self._turn.acquire()
        return shown


class ProcessMeeting(RankMeeting):
    """Ranks in processes of their own, of which this one is number `mine`."""

    def __init__(self, count: int, mine: int, exchange: Callable[[object], list[Torch]]) -> None:
        super().__init__(count)
        self.here = (mine,)
        self._exchange = exchange

    @property
    def number(self) -> int:
        """The rank that asks."""
        return self.here[0]

    def run(self, compute: Callable[[int], tuple[Torch, RankReport]]) -> tuple[dict[int, Torch], list[RankReport]]:
        """Return what the rank of this process computes, by number, and the reports that were shown last."""
        output, reports = self._run_rank(self.number, compute)
        return {self.number: output}, reports

    def _gather_values(self, mine: object) -> list[Torch]:
        return self._exchange(mine)
