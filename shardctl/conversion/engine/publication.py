"""Notes how a result is about to get its final name, so that a later run knows whether it did."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from shardctl.base.errors import DestinationError
from shardctl.base.value import value_class
from shardctl.storage.bounded_text import PLAN_TEXT, read_file
from shardctl.storage.durable import make_directories, sync_directory, write_file
from shardctl.tensors.record import RECORD

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Way = Literal["rename", "exchange", "move"]


@value_class
class PublicationNote:
    """One publication."""

    way: Way
    """`rename`: the tree to a free name; `exchange`: the tree with an old one; `move`: file by file."""
    tree: str
    """The name of the tree in the staging area."""
    inode: int = 0
    """Of the tree, for an exchange, after which both trees are still there."""
    files: tuple[str, ...] = ()
    """What is moved, for a move."""

    def write(self, path: Path) -> None:
        """Make the note durable."""
        write_file(path, json.dumps(asdict(self)).encode())
        sync_directory(path.parent)

    @classmethod
    def read(cls, path: Path) -> PublicationNote | None:
        """Return the note of an earlier run.

        None if there is none, or if it was not finished, when nothing had begun.
        """
        import msgspec

        try:
            return msgspec.convert(json.loads(read_file(path, PLAN_TEXT, DestinationError)), cls)
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError, msgspec.ValidationError):
            path.unlink()
            return None

    def done(self, data: Path, destination: Path) -> bool:
        """Return whether the destination is the tree of this note."""
        if self.way == "exchange":
            return destination.exists() and destination.stat().st_ino == self.inode
        if self.way == "move":
            return (destination / RECORD).exists() and not (data / RECORD).exists()
        return (destination / RECORD).exists() and not data.exists()

    def staged(self, data: Path) -> bool:
        """Return whether `data` is the tree of this note."""
        return data.exists() and data.stat().st_ino == self.inode


def undo_partial_move(files: Iterable[str], destination: Path, data: Path) -> None:
    """Take back the files of a tree that was moved in only in part, so that they can be checked again.

    A file is one that was moved if it is at the destination and no longer where it was staged.
    """
    folders = set()
    for path in files:
        moved, staged = destination / path, data / path
        folders |= {destination / folder for folder in moved.relative_to(destination).parents[:-1]}
        if moved.exists() and not staged.exists():
            make_directories(staged.parent)
            moved.rename(staged)
            sync_directory(staged.parent)
    for folder in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
