"""Decides which symbolic links a checkpoint may hold: those inside it, and those of the Hugging Face cache."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import HostileError
from shardctl.storage.local import LocalSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.storage import Source

_BLOB_NAME_PATTERN: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""A blob is named by its git SHA-1, its SHA-256 or its Xet hash."""


def check_link(source: Source, path: str) -> None:
    """Refuse a file that is a link to somewhere else, since what it leads to would be published as the model's.

    Every download of the Hub is links: `snapshots/<revision>/<file> -> ../../blobs/<hash>`, or older ones from a
    plain directory into the cache (huggingface_hub, `file_download.py`); `blobs/<hash>` may itself be a link to the
    store that all repositories share, `blobs/<2 digits>/<hash>` (`utils/_shared_blobs.py`). Those name their target
    by its content's hash, so a checkpoint can reach only what its author already has.

    Raises:
        HostileError: the link leaves the checkpoint's directory, and does not lead into such a store.
    """
    source = getattr(source, "base", source)  # of a source with deltas: its base has the files
    if not isinstance(source, LocalSource):
        return
    link = source.root / path
    if not (link.is_symlink() or any(folder.is_symlink() for folder in _list_folders(source.root, path))):
        return
    target = Path(os.path.realpath(link))  # Path.resolve raises RuntimeError for links in a circle
    if target.is_relative_to(os.path.realpath(source.root)) or _is_blob(target):
        return
    raise HostileError(
        f"{path} is a link that leaves the checkpoint's directory, to {target}",
        hint="put the file itself there, or give the directory that holds the files",
    )


def list_broken_links(source: Source) -> list[str]:
    """List the links in a directory that lead to nothing, or in a circle; a source does not list them as files."""
    source = getattr(source, "base", source)
    if not isinstance(source, LocalSource) or not source.path.is_dir():
        return []
    with os.scandir(source.root) as entries:
        return sorted(entry.name for entry in entries if entry.is_symlink() and not os.path.exists(entry.path))  # noqa: PTH110 - which is False for links in a circle


def _list_folders(root: Path, path: str) -> Iterator[Path]:
    """List the folders between the root and a file."""
    return (root / folder for folder in PurePosixPath(path).parents if folder.name)


def _is_blob(target: Path) -> bool:
    if not _BLOB_NAME_PATTERN.fullmatch(target.name):
        return False
    folder = target.parent
    return folder.name == "blobs" or (folder.name == target.name[:2] and folder.parent.name == "blobs")
