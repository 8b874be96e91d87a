"""Writes a conversion into a model's repository on the Hub: files are filled group by group, sent, and committed once.

What was sent is noted on this machine, in huggingface_hub's own folder, until the commit is there: the same command
sends only the rest.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import DestinationError, OccupiedDestinationError, SourceError, format_first_few
from shardctl.base.version import __version__
from shardctl.base.workers import StopRequest
from shardctl.conversion.bucket_output import (
    ShareGroups,
    ShareSender,
    publish_parts,
    require_object_names,
    scratch_directory,
)
from shardctl.conversion.engine.budget import divide_host_memory
from shardctl.conversion.engine.interrupt import stop_on_signals
from shardctl.conversion.engine.part import encode_part, parse_part
from shardctl.conversion.pending_record import draft_record, list_overflow_warnings
from shardctl.conversion.share_transfer import list_source_versions
from shardctl.storage.bounded_text import RECORD_TEXT, read_text
from shardctl.storage.durable import translate_os_errors
from shardctl.storage.hub import open_hub
from shardctl.storage.hub.address import HubAddress
from shardctl.storage.hub.publishing import HELD, HubRepository
from shardctl.tensors.record import ATTESTATION, RECORD, parse_record

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardctl.base.workers import ProgressWatcher
    from shardctl.conversion.conversion_plan import PlannedConversion
    from shardctl.conversion.engine.part import WorkerPart
    from shardctl.options import DestinationOptions
    from shardctl.tensors.record import CheckpointRecord

_INITIAL_REPOSITORY_FILES: Final = frozenset({".gitattributes", ".gitignore", "README.md", "LICENSE"})
"""What a repository has before there is a model in it; a conversion leaves it or replaces it."""


def convert_into_hub(
    work: PlannedConversion, destination: str, options: DestinationOptions, progress: ProgressWatcher
) -> tuple[CheckpointRecord, Sequence[WorkerPart], tuple[str, ...]]:
    """Write the result of a conversion into a branch; returns its record, what was done, and notes.

    On return the commit is there, with all files and no others of an earlier conversion. On an error the branch is as
    it was. Raises DestinationError for a branch that holds anything else than what shardctl wrote.
    """
    require_object_names(work)
    address, stop = HubAddress.parse(destination), StopRequest(kept=True)
    repository = HubRepository(address, create=options.create, private=options.private)
    replaced = require_free_branch(repository, overwrite=options.overwrite)
    identity, versions = work.identity(), list_source_versions(work)
    header = {"plan": identity, "source": versions, "sha256": options.sha256, "version": __version__}
    frame = draft_record(work, identity)
    with scratch_directory() as scratch, stop_on_signals(stop):
        groups = ShareGroups.of(work, scratch, None)
        uploads = HubUploads(repository, header, replaced, resume=not options.no_resume)
        progress.warn(work.have.warnings)
        sender = ShareSender(work, versions, scratch, uploads, progress, stop, options.sha256)
        parts = sender.send(groups, work.carried)
        work.checkpoint.prove()
        record = publish_parts(frame, parts, uploads, stop, sha256=options.sha256)
    return record, parts, tuple(list_overflow_warnings(frame, parts))


def reserve_publishing_memory(work: PlannedConversion) -> PlannedConversion:
    """Return the same with room for sending in its budget; raises MemoryBudgetError if there is none."""
    beside = work.checkpoint.source.held_bytes + HELD
    budget = divide_host_memory(work.plan, work.reshard_options.host_memory, work.budget.threads, beside=beside)
    return replace(work, budget=budget)


def check_branch(work: PlannedConversion, destination: str, options: DestinationOptions) -> Path:
    """Raise what `convert_into_hub` would raise before its first byte, unless it is for --create to make.

    Returns where files would be filled.
    """
    require_object_names(work)
    scratch = Path(tempfile.gettempdir())
    if not options.create:
        require_free_branch(HubRepository(HubAddress.parse(destination)), overwrite=options.overwrite)
    ShareGroups.of(work, scratch, None)
    return scratch


def require_free_branch(repository: HubRepository, *, overwrite: bool) -> Collection[str]:
    """Return the files of a finished checkpoint that will be replaced; none if there is none.

    Raises DestinationError if there is one and it may not be replaced, or anything that shardctl did not write.
    """
    others = set(repository.files) - _INITIAL_REPOSITORY_FILES
    if RECORD not in others:
        if others:
            raise DestinationError(
                f"{repository.name} is not empty and was not written by shardctl: it holds "
                f"{format_first_few(sorted(others))}",
                hint="write to another branch, such as "
                f"hf://{repository.address.repository}@converted with --create, or to another repository",
            )
        return ()
    if not overwrite:
        raise OccupiedDestinationError(
            f"{repository.name} already holds a finished checkpoint",
            hint="add --overwrite to replace it in one commit, or write to another branch",
        )
    recorded = _read_recorded_files(repository)
    beside = sorted(others - recorded)
    if beside:
        raise DestinationError(
            f"{repository.name} holds more than the checkpoint that would be replaced: {format_first_few(beside)}",
            hint="remove that first, or write to another branch",
        )
    return recorded & set(repository.files)


def _read_recorded_files(repository: HubRepository) -> set[str]:
    source = open_hub(repository.address.at(repository.commit))
    try:
        return {*parse_record(read_text(source, RECORD, RECORD_TEXT)).files, RECORD, *ATTESTATION}
    except SourceError as error:
        raise DestinationError(
            f"{RECORD} of {repository.name} cannot be read: {error.message}", hint=error.hint
        ) from error
    finally:
        source.close()


class HubUploads:
    """What a conversion has sent to a branch: in memory for the commit, and noted here for a run that resumes."""

    def __init__(
        self, repository: HubRepository, header: Mapping[str, Any], replaced: Collection[str], *, resume: bool
    ) -> None:
        """`header` says which conversion it is; notes of any other are not found."""
        from huggingface_hub import constants

        self._repository, self._replaced = repository, set(replaced)
        self._header = json.loads(json.dumps(header))
        said = json.dumps([constants.ENDPOINT, repository.address.repository, self._header], sort_keys=True)
        name = hashlib.sha256(said.encode()).hexdigest()[:32]
        self._notes = Path(constants.HF_HOME) / "shardctl" / "uploads" / name
        self._sent: dict[str, Sequence[int | str]] = {}
        """What the repository says of each file that was sent."""
        if not resume:
            self.discard()

    def group(self, number: int) -> WorkerPart | None:
        """Return a group that an earlier run sent, if it is noted; small files are filled and held again."""
        note = self._note(number)
        if not note.is_file():
            return None
        with translate_os_errors(note, "reading"):
            part, sent = parse_part(note.read_bytes(), self._header) or (None, None)
        if part is None or sent is None or sent.keys() != part.files.keys():
            return None
        for path, info in sent.items():
            self._repository.recall(path, tuple(info))
        self._sent |= sent
        return part

    def upload(self, number: int, part: WorkerPart, tree: Path) -> WorkerPart:
        """Send the files of a group, and note it."""
        self._sent |= self._repository.send({path: tree / path for path in part.files})
        self.note_group(number, part)
        return part

    def note_group(self, number: int, part: WorkerPart) -> None:
        """Note that the files of a group have been sent."""
        note, sent = self._note(number), {path: self._sent[path] for path in part.files if path in self._sent}
        with translate_os_errors(note, "writing"):
            note.parent.mkdir(parents=True, exist_ok=True)
            fresh = note.with_suffix(".new")
            fresh.write_bytes(encode_part(part, self._header, sent))
            fresh.replace(note)

    def write(self, path: str, content: bytes) -> None:
        """Hold a small file of the result for the commit."""
        self._repository.hold(path, content)

    def publish(self, record: bytes, sizes: Mapping[str, int]) -> None:
        """Commit everything with the record, without the files of an earlier result, and forget the notes."""
        self._repository.hold(RECORD, record)
        self._repository.publish(f"Written by shardctl {__version__}", self._replaced - {*sizes, RECORD})
        self.discard()

    def discard(self) -> None:
        """Forget what was noted; the Hub removes what no commit names by itself."""
        shutil.rmtree(self._notes, ignore_errors=True)

    def _note(self, number: int) -> Path:
        return self._notes / f"group-{number:05d}.json"
