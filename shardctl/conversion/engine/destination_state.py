"""Finds out what stands at a destination, and which files there shardctl did not write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.errors import AccessError, DestinationError, OccupiedDestinationError, SourceError, format_first_few
from shardctl.storage.bounded_text import RECORD_TEXT, read_file
from shardctl.storage.durable import translate_os_errors
from shardctl.tensors.record import ATTESTATION, RECORD, CheckpointRecord, parse_record

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

INSIDE: Final = ".shardctl"
"""Where a destination that has no beside, such as a mount point, is staged."""
_NOT_OURS: Final = frozenset({INSIDE, "lost+found"})
"""Names in a directory that is empty all the same."""

Found = Literal["nothing", "empty", "ours"]


def examine_destination(destination: Path, *, moving: bool = False) -> Found:
    """Return what is at the destination; `moving` says that files half moved in are our own.

    Raises DestinationError if it is something that must not be replaced.
    """
    try:
        content = {entry.name for entry in destination.iterdir()} - _NOT_OURS
    except FileNotFoundError:
        return "nothing"
    except NotADirectoryError as error:
        file = next(path for path in (destination, *destination.parents) if path.exists())
        raise DestinationError(f"{file} exists and is not a directory") from error
    except PermissionError as error:
        raise AccessError(f"{destination} cannot be listed: {error.strerror}") from error
    if RECORD in content:
        return "ours"
    if content and not moving:
        raise DestinationError(
            f"{destination} is not empty and was not written by shardctl: it holds {format_first_few(sorted(content))}",
            hint="choose another destination, or remove it yourself",
        )
    return "empty"


def read_destination_record(destination: Path) -> CheckpointRecord:
    """Read the record of a finished directory.

    Raises OccupiedDestinationError for a file of that name that is not a record which this version reads: another
    program may have written the directory, so nothing in it may be removed.
    """
    path, reason = destination / RECORD, "it is not a regular file"
    if path.is_file() and not path.is_symlink():
        try:
            with translate_os_errors(path, "reading"):
                return parse_record(read_file(path, RECORD_TEXT))
        except SourceError as error:
            reason = error.message
    raise OccupiedDestinationError(
        f"{destination} is not empty, and its {RECORD} does not show that shardctl wrote it: {reason}",
        hint="choose another destination, or remove it yourself",
    )


def list_foreign_files(destination: Path, listed: Mapping[str, int]) -> list[str]:
    """List the files in a finished directory that neither its record lists nor `attest` writes."""
    there = (path for path in destination.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted({path.relative_to(destination).as_posix() for path in there} - listed.keys() - {RECORD, *ATTESTATION})
