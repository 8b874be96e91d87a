"""Coordinates several workers in one staging area: their plan, what each has finished, and who is running.

Invariants, besides those of the staging area:

1. The plan is noted durably before any worker writes, and the note never changes: whoever has another plan is refused.
2. A part is noted only after all of its bytes are on stable storage, by one rename.
3. Nobody joins while the result is published, and nothing is published while anybody is at work.
4. Each worker has a lock and a journal of its own, so whichever is killed, the same command goes on from there.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import DestinationError, format_first_few
from shardctl.conversion.engine.lock import DestinationLock
from shardctl.conversion.engine.part import parse_part
from shardctl.conversion.engine.worker import WorkerId
from shardctl.conversion.engine.worker_group_files import CREW_NOTE, WORKER_PREFIX
from shardctl.storage.bounded_text import RECORD_TEXT, read_file
from shardctl.storage.durable import sync_directory, translate_os_errors, write_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardctl.conversion.engine.part import WorkerPart
    from shardctl.conversion.engine.staging import StagingArea

SCHEMA: Final = "shardctl.workers/1"


class WorkerGroup:
    """The workers of one destination. Everything is done while the staging area's own lock is held, but the work."""

    def __init__(self, staging: StagingArea) -> None:
        self._staging = staging
        self._note = staging.root / CREW_NOTE

    @property
    def plan(self) -> dict[str, Any] | None:
        """What the workers share; None if there are none. Raises DestinationError if the note of it is damaged."""
        with translate_os_errors(self._note, "reading"):
            content = read_file(self._note, RECORD_TEXT, DestinationError) if self._note.exists() else None
        if content is None:
            return None
        try:
            found = json.loads(content)
            if found["schema"] == SCHEMA and isinstance(found["tree"], str) and isinstance(found["workers"], int):
                return dict(found)
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        raise DestinationError(
            f"{self._note} is damaged, so it is not known what the workers were writing",
            hint=f"remove {self._staging.root}, and run them all again",
        )

    def join(self, tree: str, header: Mapping[str, Any]) -> None:
        """Make the staging area that of a plan, or find it so; `tree` names the result.

        Raises DestinationError if it is that of another plan, or if the result is there already.
        """
        staging, wanted = self._staging, {"schema": SCHEMA, **header, "tree": tree}
        found = self.plan
        if staging.published:
            raise DestinationError(
                f"{staging.destination} already holds the finished checkpoint of these workers",
                hint=f"shardctl finish {staging.destination} removes what they left",
            )
        if found is None:
            staging.begin(tree, keep=False)
            with translate_os_errors(self._note, "writing"):
                sync_directory(staging.root)
                _replace_file(self._note, json.dumps(wanted).encode())
        elif found != wanted:
            raise other_plan(found, wanted, str(staging.destination), f"remove {staging.root}")
        else:
            staging.resume_tree(tree)

    def lock(self, worker: WorkerId, run: str = "") -> DestinationLock:
        """Return the lock of a worker, held for as long as it works."""
        return DestinationLock(self._path(worker, "lock"), f"writing part {worker} of {self._staging.destination}", run)

    def locate_journal(self, worker: WorkerId) -> Path:
        """Return where a worker notes what it has done so far."""
        return self._path(worker, "journal")

    def part(self, worker: WorkerId, header: Mapping[str, Any]) -> tuple[WorkerPart, Mapping[str, Any] | None] | None:
        """Return what a worker has finished, if all of it is still there.

        And the frame of the record, if it has that.
        """
        path = self._path(worker, "part")
        with translate_os_errors(path, "reading"):
            found = parse_part(read_file(path, RECORD_TEXT, DestinationError), header) if path.exists() else None
            if found is None:
                return None
            data = self._staging.root / str(header["tree"])
            there = all(_find_file_size(data / path) == size for path, size in found[0].files.items())
        return found if there else None

    def part_exists(self, worker: WorkerId) -> bool:
        """Return whether a worker says that it is done."""
        return self._path(worker, "part").exists()

    def note_part(self, worker: WorkerId, content: bytes) -> None:
        """Note durably that a worker is done."""
        path = self._path(worker, "part")
        with translate_os_errors(path, "writing"):
            _replace_file(path, content)

    def forget_part(self, worker: WorkerId) -> None:
        """Let a worker start anew."""
        with translate_os_errors(self._staging.root, "emptying"):
            self._path(worker, "part").unlink(missing_ok=True)
            self.locate_journal(worker).unlink(missing_ok=True)

    def require_rest(self, count: int) -> None:
        """Raise DestinationError if any worker is at work."""
        for number in range(count):
            worker = WorkerId(number, count)
            if self._path(worker, "lock").exists():
                lock = self.lock(worker)
                lock.acquire()  # that of a dead worker is taken, and gone with this
                lock.release()

    def _path(self, worker: WorkerId, what: str) -> Path:
        return self._staging.root / f"{WORKER_PREFIX}{worker.number:05d}.{what}"


_DIFFERENCE_LABELS: Final = {
    "plan": "plan",
    "source": "state of the source",
    "sample": "content of the source, of the same size and time",
    "sha256": "choice of --hash",
    "workers": "number of workers",
    "overwrite": "choice of --overwrite",
    "version": "version of shardctl",
}
"""What differs, in a sentence."""
_PRINTABLE_FIELDS: Final = frozenset({"workers", "version"})
"""What can be shown."""
_BY_FILE: Final = frozenset({"source", "sample"})


def other_plan(found: Mapping[str, Any], wanted: Mapping[str, Any], destination: str, give_up: str) -> DestinationError:
    """Return the error for a worker that is not one of those who write to a destination.

    `give_up` says how to end theirs.

    It names what differs: an option, or the files that this worker reads otherwise than the one that came first.
    """
    differing = next((key for key in wanted if found.get(key) != wanted[key]), "schema")
    before, now = found.get(differing), wanted.get(differing)
    more = f": {before}, not {now}" if differing in _PRINTABLE_FIELDS else ""
    if differing in _BY_FILE and isinstance(before, dict) and isinstance(now, dict):
        more = f": {format_first_few(sorted(path for path in before | now if before.get(path) != now.get(path)))}"
    return DestinationError(
        f"{destination} is being written by {found.get('workers')} workers with another "
        f"{_DIFFERENCE_LABELS.get(differing, differing)}{more}",
        hint=f"give all workers one command over one source; to give up what they have, {give_up}",
    )


def _replace_file(path: Path, content: bytes) -> None:
    """Replace all of a file or nothing, durably."""
    draft = path.with_name(f"{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    write_file(draft, content)
    draft.rename(path)
    sync_directory(path.parent)


def _find_file_size(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return None
