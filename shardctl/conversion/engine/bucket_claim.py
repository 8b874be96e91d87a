"""Decides which run has a place in a bucket, by writes that the store carries out only if nobody was quicker.

A bucket has no lock that ends with its owner, and what a run has sent may arrive after another one took its place. So:

1. The plan is the claim. It is created only where there is none, and replaced only if it is the one that was read. A
   run that takes a place over replaces the plan first, and removes what the earlier run wrote afterwards.
2. The plan is the commit, too. Before the record is written, it becomes part of the plan, and a plan with a record is
   never replaced: whoever comes next completes what it says.
3. A run notes that it is writing, and only then looks whether the place is still its own. A run that publishes waits
   for the others that noted this, unless they are known to be dead, so that nothing of theirs arrives later.
4. A run that lost the place removes the objects that it wrote, but for those whose names the new plan has.

>>> describe_terms({"files": ["a"], "run": "1f", "earlier": ["b"], "replaces": None})
{'files': ['a']}
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Literal, NotRequired, TypedDict

from shardctl.base.errors import DestinationError, ShardctlError
from shardctl.base.workers import start_thread
from shardctl.conversion.engine.lock import describe_process, is_process_gone
from shardctl.conversion.engine.replacement import (
    NEW,
    REPLACEMENT,
    STATE,
    BucketReplacement,
    ReplacedObjects,
    replaced_by,
)
from shardctl.storage.retries import sleep_unless_stopped
from shardctl.tensors.record import RECORD, parse_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardctl.storage.cloud.bucket import BucketObject, CloudBucket

PLAN: Final = f"{STATE}plan.json"
SCHEMA: Final = "shardctl.uploads/2"
GRACE_SECONDS: Final = 30.0
"""How long after its claim a run waits for one on another machine that noted that it was writing. By then that run has
looked at its own claim (`LOOK_SECONDS`) and what it had on its way has arrived; a longer time would make every rerun
wait that follows a kill elsewhere."""
LOOK_SECONDS: Final = 5.0
"""How often a run that sends a large object looks whether the place is still its own."""
_POLL_SECONDS: Final = 0.25
_RUN_NOTE_PREFIX: Final = f"{STATE}run-"
_NOT_TERMS: Final = frozenset({"replaces", "run", "earlier", "record"})
_writing: Final[set[str]] = set()
"""The runs of this process that are writing."""


class NotedPlan(TypedDict):
    """What every plan that is noted has, beside what its conversion says of itself."""

    schema: Literal["shardctl.uploads/2"]
    files: list[str]
    held: list[str]
    replaces: ReplacedObjects | None
    run: NotRequired[str]
    """The run that has the place; several workers share one, and have none."""
    earlier: NotRequired[list[str]]
    """Keys of objects that runs with other plans may have written there."""
    record: NotRequired[str]
    """The record, once the result is complete."""


class PlaceTakenError(DestinationError):
    """Another run has the place now."""


def describe_terms(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a plan is the same for every run of one command."""
    return {key: value for key, value in plan.items() if key not in _NOT_TERMS}


def locate_object(plan: Mapping[str, Any], path: str) -> str:
    """Return the key of a file of the result until it is published."""
    return f"{NEW}{path}" if plan["replaces"] or path in plan["held"] else path


def read_noted_plan(bucket: CloudBucket) -> tuple[dict[str, Any], BucketObject] | None:
    """Return the plan of the run that has the place, and its object; raises DestinationError if it is damaged."""
    import msgspec

    there = bucket.read_object(PLAN)
    if there is None:
        return None
    try:
        found: dict[str, Any] = json.loads(there[0])
        msgspec.convert(found, NotedPlan)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise DestinationError(
            f"{bucket.name}/{PLAN} is damaged: {error}", hint=f"remove everything in {bucket.name}"
        ) from error
    return found, there[1]


def noted_plan(bucket: CloudBucket) -> dict[str, Any] | None:
    """Return the plan of the run that has the place, if there is one; raises DestinationError if it is damaged."""
    found = read_noted_plan(bucket)
    return found[0] if found is not None else None


def published_record(bucket: CloudBucket, plan: Mapping[str, Any] | None) -> bytes | None:
    """Return the record of a plan's result, if that is complete.

    What an earlier run had begun to publish is published first.
    """
    replacement = replaced_by(bucket)
    if replacement is not None:
        replacement.carry_out(bucket)
    if plan is None:
        return None
    there = bucket.head(RECORD)
    if there is not None and there.etag != (plan["replaces"] or {}).get("etag"):
        return bucket.read(RECORD)
    if "record" not in plan:
        return None
    write_record(bucket, plan)
    return bucket.read(RECORD)


def write_record(bucket: CloudBucket, plan: Mapping[str, Any]) -> None:
    """Make a checkpoint of what is complete by the plan's record; raises DestinationError if something was removed."""
    content = str(plan["record"]).encode()
    objects, files = bucket.objects(), parse_record(content).files
    staged = {path: size for path, size in files.items() if locate_object(plan, path) != path}
    for path, size in files.items():
        there = objects.get(path) if path not in staged else None
        if path not in staged and (there is None or there.size != size):
            raise changed_by_another(bucket, path)
    if staged or plan["replaces"]:
        replacement = BucketReplacement(content.decode(), staged, plan["replaces"] or ReplacedObjects())
        replacement.note(bucket)
        replacement.carry_out(bucket)
    else:
        bucket.write(RECORD, content)


def changed_by_another(bucket: CloudBucket, path: str) -> DestinationError:
    """Return the error for an object that is not what this run wrote."""
    return DestinationError(
        f"{bucket.name}/{path} was changed by another program",
        hint="run the same command again; only one run may write to a destination",
    )


def taken_by_another(bucket: CloudBucket) -> PlaceTakenError:
    """Return the error for a run that lost its place."""
    return PlaceTakenError(
        f"{bucket.name} was taken by another run, which has finished or is still running",
        hint="only one run may write to a destination: choose another prefix for this one",
    )


class BucketClaim:
    """One run's claim on a place in a bucket."""

    def __init__(self, bucket: CloudBucket, plan: Mapping[str, Any], run: str | None = None) -> None:
        """`plan` is as it is noted; `run` names this run, also where its plan is shared."""
        self._bucket, self.plan = bucket, dict(plan)
        self._run = run or secrets.token_hex(8)
        self._since = time.monotonic()
        self._ended = False
        """Whether the run has no more notes here: it has published, or the place is another's."""
        self._noted: BucketObject | None = None

    @classmethod
    def take(
        cls, bucket: CloudBucket, terms: Mapping[str, Any], replaces: ReplacedObjects | None, *, anew: bool
    ) -> BucketClaim:
        """Claim a place for a plan, and remove what a run with another plan wrote, or any run if it begins `anew`.

        Raises DestinationError if another run claimed it, or finished, since this one looked.
        """
        run = secrets.token_hex(8)
        own = {} if "workers" in terms else {"run": run}
        earlier = read_noted_plan(bucket)
        if earlier is None:
            claim = cls(bucket, {**terms, "replaces": replaces, **own}, run)
            claim._create_plan_note()
            return claim
        before, there = earlier
        if "record" in before:
            raise taken_by_another(bucket)
        goes_on = describe_terms(before) == terms and not anew
        if goes_on and not own:
            return cls(bucket, before, run)
        claim = cls(bucket, {**before, **own} if goes_on else _replace_plan(before, terms, replaces, own), run)
        objects = bucket.objects()
        claim._replace(there)
        if not goes_on:
            with claim.hold_claim({}):
                claim._remove_earlier(objects)
        return claim

    def _create_plan_note(self) -> None:
        """Note the plan where there is none; raises DestinationError if somebody was quicker."""
        bucket = self._bucket
        if not bucket.create(PLAN, json.dumps(self.plan).encode()):
            found = read_noted_plan(bucket)
            if found is None or describe_terms(found[0]) != describe_terms(self.plan) or "record" in found[0]:
                raise taken_by_another(bucket)
            if found[0] == self.plan:
                return
            own = {"run": self.plan["run"]} if "run" in self.plan else {}
            self.plan = {**found[0], **own}
            if own:  # the same command, of which the one that comes later has the place
                self._replace(found[1])
            return
        known = (self.plan["replaces"] or {}).get("files", {})
        objects = bucket.objects()
        beside = [path for path in objects if not path.startswith(STATE) and path not in self.plan["files"]]
        if any(known.get(path) != objects[path].etag for path in beside):
            bucket.delete([PLAN])
            raise taken_by_another(bucket)

    def _replace(self, there: BucketObject) -> None:
        """Put the plan in the place of another; raises DestinationError if that has gone or changed."""
        content = json.dumps(self.plan).encode()
        self._bucket.replace(PLAN, content, there)
        if self._bucket.read(PLAN) != content:  # a store without conditional writes took both
            raise taken_by_another(self._bucket)

    def _remove_earlier(self, objects: Mapping[str, BucketObject]) -> None:
        """Remove what an earlier run wrote before this one had its place, and nothing else."""
        now = self._bucket.objects()
        names = frozenset(self.plan["earlier"])
        gone = [
            path for path in now if path in names or (path.startswith(STATE) and not path.startswith(_RUN_NOTE_PREFIX))
        ]
        same = [path for path in gone if path != PLAN and path in objects and objects[path].etag == now[path].etag]
        self._bucket.delete([*same, *self._list_idle_runs(now)])

    @property
    def note(self) -> str:
        """The key under which this run notes whether it is writing."""
        return f"{_RUN_NOTE_PREFIX}{self._run}"

    @contextlib.contextmanager
    def hold_claim(self, sent: Mapping[str, str]) -> Iterator[None]:
        """Hold the place for a `with` block that writes; if it is lost, remove what this run `sent`, by ETag.

        Raises DestinationError if the place is lost before, or at the end.
        """
        try:
            self._require_claim()
            with self.writing():
                self._require_claim()
                yield
                if not self._ended:
                    self._require_claim()
        except PlaceTakenError:
            self._remove_sent_objects(sent)
            raise

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Note for the length of a `with` block that this run writes."""
        _writing.add(self._run)
        try:
            if not self._note_run(writing=True):
                raise taken_by_another(self._bucket)
            yield
        finally:
            _writing.discard(self._run)
            if not self._ended:
                with contextlib.suppress(ShardctlError):  # whoever waits finds out that this process is gone
                    self._note_run(writing=False)

    def _note_run(self, *, writing: bool) -> bool:
        """Note whether this run writes; returns False, and writes nothing, if another run removed the note."""
        content = json.dumps({**describe_process(), "writing": writing}).encode()
        if self._noted is None:
            self._noted = self._bucket.write(self.note, content)
            return True
        noted = self._bucket.replace(self.note, content, self._noted)
        self._noted = noted or self._noted
        return noted is not None

    @contextlib.contextmanager
    def watch_claim(self) -> Iterator[None]:
        """Stop what the bucket sends, for the length of a `with` block, as soon as the place is lost."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(LOOK_SECONDS):
                with contextlib.suppress(ShardctlError):
                    if noted_plan(self._bucket) != self.plan:
                        self._ended, self._bucket.lost = True, taken_by_another(self._bucket)
                        return

        watcher = threading.Thread(target=watch, daemon=True)
        start_thread(watcher)
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _require_claim(self) -> None:
        """Raise DestinationError if the place is another run's by now."""
        if noted_plan(self._bucket) != self.plan:
            self._ended = True
            raise taken_by_another(self._bucket)

    def wait_for_others(self) -> None:
        """Return once no other run writes here, or those that noted it must have given up."""
        while self._list_writing_runs(self._bucket.objects()) and time.monotonic() < self._since + GRACE_SECONDS:
            sleep_unless_stopped(_POLL_SECONDS, self._bucket.stop)

    def _list_writing_runs(self, objects: Iterable[str]) -> list[str]:
        """List the notes of other runs that write, as far as they are not known to be dead."""
        notes = [path for path in objects if path.startswith(_RUN_NOTE_PREFIX) and path != self.note]
        return [path for path in notes if _is_writing(path.removeprefix(_RUN_NOTE_PREFIX), self._bucket.read(path))]

    def _list_idle_runs(self, objects: Iterable[str]) -> list[str]:
        """List the notes of other runs that write nothing now."""
        found = list(objects)
        writing = self._list_writing_runs(found)
        return [path for path in found if path.startswith(_RUN_NOTE_PREFIX) and path not in {self.note, *writing}]

    def commit(self, record: bytes) -> None:
        """Note the record, after which no other run takes the place; raises DestinationError if one has."""
        found = read_noted_plan(self._bucket)
        committed = {**self.plan, "record": record.decode()}
        if found is not None and found[0] != committed:
            if found[0] != self.plan:
                raise taken_by_another(self._bucket)
            self.plan = committed
            self._replace(found[1])
        elif found is None and self._bucket.read(RECORD) != record:
            raise taken_by_another(self._bucket)
        self.plan = committed

    def _remove_sent_objects(self, sent: Mapping[str, str]) -> None:
        """Remove the objects that this run sent, with their ETags, but for those whose names belong to others now."""
        self._ended = True
        with contextlib.suppress(ShardctlError):  # that the place is lost is what the user must know
            objects, plan, record = self._bucket.objects(), noted_plan(self._bucket), self._bucket.read(RECORD)
            others = {locate_object(plan, path) for path in plan["files"]} if plan is not None else set()
            others |= parse_record(record).files.keys() if record is not None else set()
            mine = [key for key, etag in sent.items() if key in objects and objects[key].etag == etag]
            self._bucket.delete([*(key for key in mine if key not in others), self.note])

    def end(self, objects: Iterable[str]) -> None:
        """Remove all notes below `.shardctl/`; the plan goes last: without it nobody knows whose the rest is."""
        self._ended = True
        notes = [path for path in objects if path.startswith(STATE)]
        self._bucket.delete([path for path in notes if path == REPLACEMENT])
        self._bucket.delete([path for path in [*notes, self.note] if path not in {PLAN, REPLACEMENT}])
        if noted_plan(self._bucket) == self.plan:
            self._bucket.delete([PLAN])


def _replace_plan(
    before: Mapping[str, Any], terms: Mapping[str, Any], replaces: ReplacedObjects | None, own: Mapping[str, str]
) -> dict[str, Any]:
    """Return the plan that takes the place of another; it remembers what runs before may have written."""
    written = set(before.get("earlier", ())) | {locate_object(before, path) for path in before["files"]}
    return {**terms, "replaces": replaces, "earlier": sorted(written), **own}


def _is_writing(run: str, content: bytes | None) -> bool:
    """Return whether a run that left this note may be writing."""
    try:
        found = json.loads(content or b"{}")
        if not found.get("writing"):
            return False
        if describe_process().items() <= found.items():
            return run in _writing
        return not is_process_gone(found)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return False
