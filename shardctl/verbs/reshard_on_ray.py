"""Runs a conversion as Ray tasks: a cluster starts the workers of `contribute`, and restarts them.

Each task writes the files of one worker; Ray runs it elsewhere if its process or machine dies, and it goes on from the
journal that it left. The driver publishes the result, as `finish` does.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
import uuid
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardctl.base import errors
from shardctl.base.errors import Interrupted, ShardctlError, TransientError, UsageError
from shardctl.base.extras import format_install_command
from shardctl.base.value import value_class
from shardctl.base.workers import NullWatcher, ProgressWatcher, StopRequest, choose_thread_count, raise_if_stopped
from shardctl.conversion.engine.interrupt import stop_on_signals
from shardctl.conversion.engine.staging import StagingArea
from shardctl.conversion.engine.worker import WorkerId
from shardctl.conversion.engine.worker_group import WorkerGroup
from shardctl.conversion.preparing import open_conversion
from shardctl.conversion.worker_part import contribute, require_no_proof
from shardctl.options import DestinationOptions, ReshardOptions, SourceOptions
from shardctl.storage.addresses import is_hub_name
from shardctl.storage.cloud import is_bucket
from shardctl.storage.hub import refuse_shared_hub
from shardctl.verbs.finish import FinishResult, finish

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.conversion.conversion_plan import PlannedConversion
    from shardctl.conversion.plan_file import PlanFile

_TASKS_PER_SLOT: Final = 4
"""Tasks for each place where one can run: what a lost one costs is smaller, and the last ones end closer together."""
_MAX_TASK_RETRIES: Final = 5
"""How often a task whose process or machine died is started again."""
_POLL_INTERVAL_SECONDS: Final = 0.5
"""Seconds between two looks at the tasks."""
_REPORT_INTERVAL_SECONDS: Final = 0.5
"""Seconds between two reports of a task."""


@value_class
class _TaskOrder:
    """What every task is told."""

    source: str
    destination: str
    reshard_options: ReshardOptions
    source_options: SourceOptions
    destination_options: DestinationOptions
    plan: PlanFile | None
    run: str
    """Names this run, so that a task that is started again takes the lock of its dead predecessor."""


def reshard_on_ray(
    path: str | Path,
    destination: str | Path,
    reshard_options: ReshardOptions | None = None,
    *,
    source_options: SourceOptions | None = None,
    destination_options: DestinationOptions | None = None,
    progress: ProgressWatcher | None = None,
    plan: PlanFile | None = None,
) -> FinishResult:
    """Convert on the cluster of `RAY_ADDRESS`, or on this machine's processors; every node sees the destination.

    That may be a bucket. The same bytes as `reshard`, and the same promises. Each task keeps to
    `reshard_options.host_memory` by itself.
    Raises UsageError if Ray is not installed, TransientError if tasks died again and again.
    """
    destination_options = destination_options or DestinationOptions()
    require_no_proof(destination_options)
    refuse_shared_hub(destination)
    ray = _import_ray()
    progress = progress or NullWatcher()
    reshard_options = reshard_options or (plan.reshard_options if plan else ReshardOptions())
    with open_conversion(path, destination, reshard_options, source_options, plan) as work:
        location = work.checkpoint.source.location
        files, size, warnings = _count_data_files(work), work.plan.write_bytes, work.have.warnings
    reshard_options = replace(reshard_options, threads=reshard_options.threads or min(choose_thread_count(), 4))
    order = _TaskOrder(
        source=location,
        destination=destination if is_bucket(destination) else str(Path(destination).absolute()),
        reshard_options=reshard_options,
        source_options=_make_paths_absolute(source_options or (plan.source_options if plan else SourceOptions())),
        destination_options=destination_options,
        plan=plan,
        run=uuid.uuid4().hex,
    )
    with _join_cluster(ray):
        count = _count_begun_workers(destination) or _choose_task_count(ray, files, reshard_options)
        progress.warn(warnings)
        progress.begin(size, files)
        _run_tasks(ray, order, count, progress)
    return finish(destination)


def _count_data_files(work: PlannedConversion) -> int:
    return len({path for copy in work.plan.copies for path in copy.target.files})


def _make_paths_absolute(source_options: SourceOptions) -> SourceOptions:
    """Return the same from any working directory."""
    config = source_options.config
    return replace(
        source_options,
        config=config if config is None or is_hub_name(config) else config.absolute(),
        rules=source_options.rules.absolute() if source_options.rules else None,
    )


def _count_begun_workers(destination: str | Path) -> int:
    """Count the workers of an interrupted run; 0 if there is none."""
    if is_bucket(destination):
        from shardctl.conversion.bucket_worker_group import workers_begun

        return workers_begun(destination)
    plan = WorkerGroup(StagingArea(Path(destination), overwrite=True)).plan
    return plan["workers"] if plan else 0


def _choose_task_count(ray: Any, files: int, reshard_options: ReshardOptions) -> int:  # noqa: ANN401 - a module
    """Choose how many tasks: no more than there are files."""
    processors = float(ray.cluster_resources().get("CPU", 1))
    places = max(int(processors // (reshard_options.threads or 1)), 1)
    return max(min(files, _TASKS_PER_SLOT * places), 1)


def _run_tasks(ray: Any, order: _TaskOrder, count: int, progress: ProgressWatcher) -> None:  # noqa: ANN401 - a module
    """Run every worker; on an error or a signal the others are asked to stop, and keep what they have."""
    board = ray.remote(num_cpus=0)(_ProgressBoard).remote()
    processors = min(order.reshard_options.threads or 1, int(ray.cluster_resources().get("CPU", 1)))
    task = ray.remote(num_cpus=processors, max_retries=_MAX_TASK_RETRIES)(_run_task)
    stop, shown = StopRequest(kept=True), 0
    with stop_on_signals(stop):
        left = [task.remote(order, number, count, board) for number in range(count)]
        try:
            while left:
                done, left = ray.wait(left, num_returns=len(left), timeout=_POLL_INTERVAL_SECONDS)
                for said in _collect_answers(ray, done):
                    _raise_reported(said)
                shown = _report_progress(ray, board, progress, shown)
                raise_if_stopped(stop)
        except BaseException:
            for task_left in left:
                ray.cancel(task_left)
            ray.wait(left, num_returns=len(left), timeout=10) if left else None
            raise


def _collect_answers(ray: Any, done: Sequence[Any]) -> Iterator[tuple[str, ...] | None]:  # noqa: ANN401 - a module
    for each in done:
        try:
            yield ray.get(each)
        except ray.exceptions.RayError as error:
            words = str(error).strip().splitlines()
            raise TransientError(
                f"a Ray task died {_MAX_TASK_RETRIES + 1} times: {words[0] if words else type(error).__name__}",
                hint="run the same command again: it resumes where this one stopped",
            ) from error


def _raise_reported(said: tuple[str, ...] | None) -> None:
    """Raise the error that a task reported."""
    if said is not None:
        kind, message, hint = said
        error: type[ShardctlError] = getattr(errors, kind, TransientError)
        raise (TransientError if error is Interrupted else error)(message, hint=hint or None)


def _report_progress(ray: Any, board: Any, progress: ProgressWatcher, shown: int) -> int:  # noqa: ANN401 - a module, an actor
    """Tell what all tasks have done since the last time; what one does again is not counted twice."""
    answer: tuple[int, list[str]] = ray.get(board.total.remote())
    done, files = answer
    if done > shown:
        progress.advance(done - shown)
    for path in files:
        progress.file_done(path)
    return max(done, shown)


class _ProgressBoard:
    """Where tasks write how far they are; an actor."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._files: dict[str, bool] = {}

    def write(self, number: int, nbytes: int, files: Sequence[str]) -> None:
        self._bytes[number] = max(self._bytes.get(number, 0), nbytes)
        for path in files:
            self._files.setdefault(path, False)

    def total(self) -> tuple[int, list[str]]:
        """Return all bytes so far, and the files that were not told of before."""
        fresh = [path for path, told in self._files.items() if not told]
        self._files.update(dict.fromkeys(fresh, True))
        return sum(self._bytes.values()), fresh


class _TaskReporter:
    """Progress of one task; called from several threads."""

    def __init__(self, number: int, board: Any) -> None:  # noqa: ANN401 - an actor
        self._number, self._board = number, board
        self._bytes, self._last, self._phase = 0, 0.0, ""
        self._files: list[str] = []
        self._lock = threading.Lock()

    def warn(self, messages: Sequence[str]) -> None:
        """Do nothing: the driver says it."""

    def begin(self, total_bytes: int, files: int = 0, phase: str = "") -> None:  # noqa: ARG002 - the driver has them
        """Note the phase: the driver knows the size of the one without a name."""
        self._phase = phase

    def work_on(self, place: str) -> None:
        """Do nothing: tasks work on many files at once."""

    def advance(self, nbytes: int, *, kept: bool = False) -> None:  # noqa: ARG002 - both are in place
        with self._lock:
            self._bytes += 0 if self._phase else nbytes
            due = time.monotonic() - self._last > _REPORT_INTERVAL_SECONDS
        if due:
            self.tell()

    def file_done(self, path: str) -> None:
        self._files.append(path)

    def tell(self) -> Any:  # noqa: ANN401 - Ray's promise that it was heard
        self._last = time.monotonic()
        return self._board.write.remote(self._number, self._bytes, list(self._files))


def _run_task(order: _TaskOrder, number: int, count: int, board: Any) -> tuple[str, ...] | None:  # noqa: ANN401 - an actor
    """Run one task; returns what went wrong, in words that cross processes."""
    reporter = _TaskReporter(number, board)
    try:
        contribute(
            order.source,
            order.destination,
            order.reshard_options,
            worker=WorkerId(number, count),
            source_options=order.source_options,
            destination_options=order.destination_options,
            progress=reporter,
            plan=order.plan,
            run=order.run,
        )
    except ShardctlError as error:
        return type(error).__name__, error.message, error.hint or ""
    finally:
        _import_ray().get(reporter.tell())  # so that the driver sees all of it
    return None


@contextmanager
def _join_cluster(ray: Any) -> Iterator[None]:  # noqa: ANN401 - a module
    """Join the cluster, or make one of this machine; one that was joined before is left as it is."""
    if ray.is_initialized():
        yield
        return
    ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False, configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()


def _import_ray() -> Any:  # noqa: ANN401 - a module
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # says what Ray would warn of
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UsageError(
            "--engine ray needs Ray, which is not installed", hint=format_install_command("ray")
        ) from error
