"""Keeps output in a staging area until it is complete, and then gives it its final name in one step.

Invariants, in the order in which they are made true:

1. Nothing at the destination is touched before everything of its replacement is complete and synced.
2. Staged files lie on the destination's file system, under a name that no loader matches.
3. `shardctl.json` is the last file written, so a directory that has it is complete.
4. A new destination appears by one rename; an overwritten one is exchanged, and the old one is removed afterwards. What
   is about to happen is noted before, so that the next run knows how far it came.
5. Whatever a kill leaves, the same command finishes the job: either the journal is still there, or the result is.

>>> with tempfile.TemporaryDirectory() as folder:
...     with StagingArea(Path(folder, "llama-tp4")) as staging:
...         staging.begin("a name of the result", keep=False)
...         _ = (staging.data / "shardctl.json").write_text("{}")  # files are written and synced, the record last
...         _ = staging.publish({"shardctl.json": 2})
...     print([path.name for path in Path(folder, "llama-tp4").iterdir()])
['shardctl.json']
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Self

from shardctl.base.errors import AccessError, DestinationError, OccupiedDestinationError, format_first_few
from shardctl.base.value import value_class
from shardctl.conversion.engine.destination_state import (
    INSIDE,
    examine_destination,
    list_foreign_files,
    read_destination_record,
)
from shardctl.conversion.engine.lock import DestinationLock
from shardctl.conversion.engine.worker_group_files import CREW_NOTE, remove_crew_files
from shardctl.storage import linux
from shardctl.storage.bounded_text import PLAN_TEXT, read_file
from shardctl.storage.byte_names import name_to_bytes
from shardctl.storage.durable import make_directories, sync_directory, translate_os_errors, write_file
from shardctl.storage.free_space import find_existing_parent, measure_free_space
from shardctl.tensors.record import RECORD

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TREE_DIGITS: Final = 16
"""Hexadecimal digits in the name of a staged tree."""
_MAX_NAME_BYTES: Final = 255
"""Bytes of a name (`NAME_MAX` of Linux's file systems)."""
_REPLACED_CHECKPOINT_NAME: Final = "old"
"""The name of the checkpoint that is replaced, while no step exchanges the two."""
_STAGING_DIRECTORY_PATTERN: Final = re.compile(rf"[0-9a-f]{{{TREE_DIGITS}}}|{_REPLACED_CHECKPOINT_NAME}")
"""The names of directories that runs make in a staging area; any other may hold files of somebody else."""

_Way = Literal["rename", "exchange", "move"]


@value_class
class PublicationNote:
    """One publication."""

    way: _Way
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

    def is_staged_tree(self, data: Path) -> bool:
        """Return whether `data` is the tree of this note."""
        return data.exists() and data.stat().st_ino == self.inode


class StagingArea:
    """The staging area of one destination; use as a context manager, which holds the lock."""

    def __init__(self, destination: Path, *, overwrite: bool = False, patience: float = 0) -> None:
        """`patience` is for how many seconds another run is waited for."""
        with translate_os_errors(destination, "looking at"):
            self.destination = _resolve_link(destination)
            self._inside = _must_stage_inside(self.destination)
            """Whether the tree must be moved in file by file, because no rename can replace the directory."""
        self._overwrite = overwrite
        self._patience = patience
        beside = self.destination.parent / _name_beside(self.destination.name)
        self.root = self.destination / INSIDE if self._inside else beside
        self.data = self.root / "data"
        """The tree that becomes the destination, once `begin` has said which."""
        self.journal = self.root / "journal.jsonl"
        self.published = False
        """Whether an earlier run was killed after its result had taken its final name."""
        self._old = self.root / _REPLACED_CHECKPOINT_NAME
        self._note = self.root / "publishing.json"
        self._lock = DestinationLock(self.root / "lock", f"writing {self.destination}")
        with translate_os_errors(destination, "looking at"):
            if not self.root.exists():
                self._require_replaceable()

    def __enter__(self) -> Self:
        with translate_os_errors(self.root, "making"):
            make_directories(self.root)
            self._require_own_directory()
        self._lock.acquire(self._patience)
        try:
            with translate_os_errors(self.root, "recovering what an earlier run left in"):
                self._recover_publication()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock.held:
            if not self.journal.exists() and not self._note.exists() and not self.shared:
                with contextlib.suppress(OSError):
                    self._remove(*self._list_staged_trees())  # nothing goes on from a tree without a journal
            self._release_lock()

    def _release_lock(self) -> None:
        """Let go of the lock; the directory stays while there is anything in it."""
        self._lock.release()
        with contextlib.suppress(OSError):
            self.root.rmdir()

    @property
    def shared(self) -> bool:
        """Whether this is where several workers write one result."""
        return (self.root / CREW_NOTE).exists()

    def begin(self, tree: str, *, keep: bool) -> None:
        """Make the staging area ready to be filled; `keep` keeps what an earlier run left, else it is thrown away.

        `tree` names the result: runs that write different bytes never share files, even if they broke each other's
        lock. Raises DestinationError if a finished checkpoint stands at the destination and nobody said it may be
        replaced, or if several workers write to it.
        """
        if self.published:
            keep = False
            self._forget()
        self._require_replaceable()
        if self.shared:
            raise DestinationError(
                f"{self.destination} is being written by several workers",
                hint=f"shardctl finish {self.destination} completes it; to give it up, remove {self.root}",
            )
        if not keep:
            self.discard()
        self.resume_tree(tree)

    def resume_tree(self, tree: str) -> None:
        """Go on with a tree as it is."""
        self._require_replaceable()
        self.data = self.root / tree
        with translate_os_errors(self.data, "making"):
            self.data.mkdir(exist_ok=True)

    def discard(self) -> None:
        """Throw away what was staged; whatever cannot be removed is an error, or it would be published."""
        with translate_os_errors(self.root, "emptying"):
            self.journal.unlink(missing_ok=True)
            remove_crew_files(self.root)
            self._remove(*self._list_staged_trees())

    def require_space(self, nbytes: int) -> None:
        """Raise DestinationError if the file system cannot hold what is still to be written."""
        have = sum(
            f.stat().st_blocks * 512 for tree in self._list_staged_trees() for f in tree.rglob("*") if f.is_file()
        )
        free = measure_free_space(find_existing_parent(self.root))
        if free is not None and free + have < nbytes:
            raise DestinationError(
                f"{self.destination} needs {nbytes:,} bytes, but its file system has {free + have:,} free",
                hint="free some space or choose another destination; nothing was written",
            )

    def write(self, path: str, content: bytes) -> None:
        """Write and sync a small file of the result."""
        full = self.data / path
        with translate_os_errors(path, "writing"):
            full.parent.mkdir(parents=True, exist_ok=True)
            write_file(full, content)

    def publish(self, files: Mapping[str, int]) -> tuple[str, ...]:
        """Give the complete tree its final name, durably; `files` are the sizes of all that belongs to it.

        Returns warnings. Raises DestinationError if the tree is not complete or the destination cannot be taken.
        """
        with translate_os_errors(self.destination, "publishing"):
            self._require_complete(files)
            for folder in sorted((f for f in self.data.rglob("*") if f.is_dir()), reverse=True):
                sync_directory(folder)
            sync_directory(self.data)
            if self._inside:
                self._move_in(sorted(files))
            elif examine_destination(self.destination) == "ours":
                self._require_replaceable()
                self._exchange()
            else:
                self._take_name()
        return self.forget()

    def forget(self) -> tuple[str, ...]:
        """Remove the staging area of a published result; returns a warning if something of it cannot be removed."""
        try:
            self._forget()
        except OSError as error:
            return (f"the result is complete, but {self.root} cannot be removed: {error.strerror}",)
        self._release_lock()
        return ()

    def _forget(self) -> None:
        """Remove an earlier run; what tells a finished one from none goes last."""
        self._remove(self._old, *self._list_staged_trees())
        self.journal.unlink(missing_ok=True)
        remove_crew_files(self.root)
        self._note.unlink(missing_ok=True)
        self.published = False

    def _list_staged_trees(self) -> list[Path]:
        """Return what was staged, by whatever command.

        The old checkpoint is not ours to throw away before it is replaced.
        """
        found = self.root.iterdir() if self.root.exists() else ()
        return [entry for entry in found if entry != self._old and entry.is_dir() and not entry.is_symlink()]

    @staticmethod
    def _remove(*trees: Path) -> None:
        for tree in trees:
            if tree.exists():
                shutil.rmtree(tree)

    def _require_replaceable(self) -> None:
        if examine_destination(self.destination, moving=self._note.exists()) != "ours" or self.published:
            return
        listed = read_destination_record(self.destination).files
        if not self._overwrite:
            raise OccupiedDestinationError(
                f"{self.destination} already holds a finished checkpoint",
                hint="add --overwrite to replace it once the new one is complete, or choose another destination",
            )
        foreign = list_foreign_files(self.destination, listed)
        if foreign:
            raise DestinationError(
                f"{self.destination} cannot be replaced: it also holds {format_first_few(foreign)}, which {RECORD} "
                "does not list, and which would be removed",
                hint="move away what you want to keep, or choose another destination",
            )
        if self._inside:
            raise DestinationError(
                f"{self.destination} cannot be replaced in one step, because it is a mount point "
                "or its parent directory cannot be written",
                hint="write to a new directory inside it, or empty it yourself",
            )
        if not os.access(self.destination, os.W_OK | os.X_OK):
            raise AccessError(f"{self.destination} cannot be replaced: it cannot be written")

    def _require_own_directory(self) -> None:
        """Refuse a directory that somebody else laid here: its journal could lie, its links lead our writes away."""
        if self.root.is_symlink() or not _is_our_directory(self.root):
            raise DestinationError(
                f"{self.root} was not made by this user", hint="remove it, or choose another destination"
            )
        foreign = [
            entry.name
            for entry in self._list_staged_trees()
            if _STAGING_DIRECTORY_PATTERN.fullmatch(entry.name) is None
        ]
        if foreign:
            raise DestinationError(
                f"{self.root} holds directories that shardctl did not make, and which would be removed: "
                f"{format_first_few(sorted(foreign))}",
                hint="move away what you want to keep, or choose another destination",
            )

    def _require_complete(self, files: Mapping[str, int]) -> None:
        """Look at the tree again, so that another run that broke the lock can cost work but never bytes."""
        there = {f.relative_to(self.data).as_posix(): f for f in self.data.rglob("*") if not f.is_dir()}
        for path in there.keys() - files.keys():
            there[path].unlink()
        for path, size in files.items():
            if path not in there or there[path].lstat().st_size != size:
                raise DestinationError(
                    f"{path} was changed in {self.data} by another program",
                    hint="run the same command again; only one run may write to a destination",
                )

    def _take_name(self) -> None:
        PublicationNote("rename", self.data.name).write(self._note)
        try:
            self.data.rename(self.destination)
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                raise
            raise DestinationError(
                f"{self.destination} appeared while it was being written",
                hint=f"the finished result is kept in {self.data}",
            ) from error
        sync_directory(self.destination.parent)

    def _exchange(self) -> None:
        PublicationNote("exchange", self.data.name, inode=self.data.stat().st_ino).write(self._note)
        if not linux.exchange_names(self.data, self.destination):
            self.destination.rename(self._old)
            try:
                self.data.rename(self.destination)
            except OSError:
                self._old.rename(self.destination)
                raise
        sync_directory(self.root)
        sync_directory(self.destination.parent)

    def _move_in(self, files: list[str]) -> None:
        """Move the files in: weights first, `config.json` and the record last."""
        PublicationNote("move", self.data.name, files=tuple(files)).write(self._note)
        last = [path for path in ("config.json", RECORD) if path in files]
        for path in [*(f for f in files if f not in last), *last]:
            target = self.destination / path
            make_directories(target.parent)
            if not linux.rename_without_replacing(self.data / path, target):
                if os.path.lexists(target):
                    raise FileExistsError(errno.EEXIST, f"{target} appeared while it was being written")
                (self.data / path).rename(target)
            sync_directory(target.parent)

    def _recover_publication(self) -> None:
        """Find out how far the publication by an earlier run came, and undo half of one."""
        note = PublicationNote.read(self._note)
        if note is None:
            return
        self.data = self.root / note.tree
        if note.way == "exchange" and self._old.exists() and not self.destination.exists():
            self._old.rename(self.destination)  # between the two renames that stand for an exchange
            sync_directory(self.destination.parent)
        self.published = note.done(self.data, self.destination)
        if not self.published:
            if note.way == "move":
                _undo_partial_move(note.files, self.destination, self.data)
            elif note.way == "exchange" and not note.is_staged_tree(self.data):
                self.discard()  # a file system without lasting inode numbers: this may be the old tree
            self._note.unlink()


def _resolve_link(destination: Path) -> Path:
    """Return the directory itself, where the destination is a link to one."""
    path = Path(os.path.abspath(destination))  # noqa: PTH100 - resolve() would lose the name of what is not there yet
    if path.is_symlink():
        if not path.exists():
            raise DestinationError(f"{destination} is a link whose target does not exist")
        return path.resolve()
    return path


def find_staging_roots(destination: Path) -> tuple[Path, Path]:
    """Find where a destination may be staged: beside it, or within it."""
    real = Path(os.path.realpath(destination))
    return real.parent / _name_beside(real.name), real / INSIDE


def _name_beside(name: str) -> str:
    """Return what the staging area beside a destination is called; long names have no room for more."""
    beside = f".{name}.shardctl"
    if len(name_to_bytes(beside)) > _MAX_NAME_BYTES:
        beside = f".{hashlib.sha256(name_to_bytes(name)).hexdigest()}.shardctl"
    return beside


def _must_stage_inside(destination: Path) -> bool:
    """Return whether a directory must be staged within itself: a mount point, or one whose parent we may not write."""
    if not destination.is_dir():
        return False
    return (
        os.path.ismount(destination)
        or (destination / INSIDE).is_dir()
        or not os.access(destination.parent, os.W_OK | os.X_OK)
    )


def _is_our_directory(directory: Path) -> bool:
    """Return whether this user made a directory.

    Network file systems may call us by another number, but always the same.
    """
    owner = directory.stat().st_uid
    if owner == os.geteuid():
        return True
    with tempfile.TemporaryFile(dir=directory) as probe:
        return os.fstat(probe.fileno()).st_uid == owner


def _undo_partial_move(files: Iterable[str], destination: Path, data: Path) -> None:
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
