"""Reads and writes local files with `pread` and `pwrite`, so that a truncated file is an error, not a signal."""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import AccessError, DestinationError, HostileError, SourceError
from shardctl.storage import HIDDEN, FileStat, UnpromisedSource, linux
from shardctl.storage.bounded_text import CONFIG_TEXT, read_file
from shardctl.storage.durable import sync_descriptor, translate_os_errors
from shardctl.storage.near_paths import find_near_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from shardctl.base.workers import StopRequest
    from shardctl.storage import Span

_MIN_DIRECT_IO_BYTES: Final = 256 << 10
"""From here on direct I/O is worth its alignment; below, the page cache is faster."""
_WHOLE_CALL: Final = 1 << 30
"""Linux moves at most 2 GiB in one call; a smaller call also answers signals sooner."""

_DESCRIPTOR_LIMIT_DIVISOR: Final = 6
"""A run has up to five sets of descriptors (source and target, ordinary and direct, and files whose blocks are shared);
the rest is everybody else's."""
_MIN_DESCRIPTORS: Final = 32
_MAX_DESCRIPTORS: Final = 4096


class DescriptorPool:
    """Open descriptors by path, the least recently used closed first; a descriptor in use is never closed."""

    def __init__(self, flags: int, *, before_closing: Callable[[Path, int], None] | None = None) -> None:
        """`before_closing` is called with each descriptor that is closed to make room; what it raises is raised."""
        self._flags = flags
        self._before_closing = before_closing
        self._most = choose_descriptor_count()
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, list[int]] = OrderedDict()

    def use(self, path: Path) -> _UsedDescriptor:
        """Give the descriptor of `path`, opened if it is not; it stays open for the length of the `with` block."""
        return _UsedDescriptor(self, path)

    def take(self, path: Path) -> list[int]:
        """Return the descriptor of `path` and how many use it, this one included; `give_back` is to follow."""
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                self._make_room()
                entry = [os.open(path, self._flags | getattr(os, "O_CLOEXEC", 0)), 0]
                self._open[path] = entry
            self._open.move_to_end(path)
            entry[1] += 1
        return entry

    def give_back(self, entry: list[int]) -> None:
        """Note that one use is over."""
        with self._lock:
            entry[1] -= 1

    def _make_room(self) -> None:
        while len(self._open) >= self._most:
            path = next((p for p, (_, users) in self._open.items() if not users), None)
            if path is None:
                return
            descriptor = self._open.pop(path)[0]
            try:
                if self._before_closing is not None:
                    self._before_closing(path, descriptor)
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            for descriptor, _ in self._open.values():
                os.close(descriptor)
            self._open.clear()


class _UsedDescriptor:
    """The `with` block of one use; a generator would take three times as long, and small tensors are many."""

    __slots__ = ("_entry", "_path", "_pool")

    def __init__(self, pool: DescriptorPool, path: Path) -> None:
        self._pool, self._path = pool, path
        self._entry: list[int] | None = None

    def __enter__(self) -> int:
        self._entry = self._pool.take(self._path)
        return self._entry[0]

    def __exit__(self, *_: object) -> None:
        if self._entry is not None:
            self._pool.give_back(self._entry)


class _LocalFile:
    """Files that are read or written at offsets, large transfers by direct I/O where the file system can."""

    def __init__(self, root: Path, flags: int) -> None:
        self._root = root
        self._paths: dict[str, Path] = {}
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        self._ordinary = DescriptorPool(flags, before_closing=self._flush if writes else None)
        self._direct = DescriptorPool(flags | getattr(os, "O_DIRECT", 0))
        self._can_direct = sys.platform == "linux"
        self._failed: set[Path] = set()

    def _find_path(self, path: str) -> Path:
        """Return the path of a file; each is built once, because small tensors are many."""
        full = self._paths.get(path)
        if full is None:
            full = self._paths[path] = self._root / path
        return full

    def read(self, path: str, offset: int, into: memoryview) -> None:
        done = 0
        with self._ordinary.use(self._find_path(path)) as descriptor:
            while done < len(into):
                rest = into[done : done + _WHOLE_CALL]
                got = self._read_direct(path, descriptor, rest, offset + done)
                if got is None:
                    got = _read_part(descriptor, rest, offset + done)
                if not got:
                    raise SourceError(
                        f"{path} ends at byte {offset + done}, but bytes up to {offset + len(into)} are needed",
                        hint="the file was truncated or its copy is incomplete; fetch it again",
                    )
                done += got

    def _read_direct(self, path: str, ordinary: int, into: memoryview, offset: int) -> int | None:
        if (
            not self._can_direct or len(into) < _MIN_DIRECT_IO_BYTES or "numpy" not in sys.modules
        ):  # which all need that move tensors
            return None
        from shardctl.storage import direct

        with self._fall_back_to_buffered(), self._direct.use(self._find_path(path)) as descriptor:
            return direct.read_direct(descriptor, ordinary, into, offset)
        return None

    def write(self, path: str, offset: int, data: memoryview) -> None:
        with self._ordinary.use(self._find_path(path)) as ordinary:
            if self._can_direct and len(data) >= _MIN_DIRECT_IO_BYTES:
                from shardctl.storage import direct

                with self._fall_back_to_buffered(), self._direct.use(self._find_path(path)) as descriptor:
                    direct.write_direct(descriptor, ordinary, data, offset)
                    return
            done = 0
            while done < len(data):
                done += os.pwrite(ordinary, data[done : done + _WHOLE_CALL], offset + done)

    @contextlib.contextmanager
    def _fall_back_to_buffered(self) -> Iterator[None]:
        """Go on with ordinary calls if the file system does not do direct I/O."""
        try:
            yield
        except OSError as error:
            if error.errno not in linux.NOT_SUPPORTED:
                raise
            self._can_direct = False

    def open(self, path: str) -> AbstractContextManager[int]:
        """Give the ordinary descriptor of a file for the length of a `with` block."""
        return self._ordinary.use(self._find_path(path))

    def sync(self, path: str) -> None:
        full = self._root / path
        with self._ordinary.use(full) as descriptor:
            self._flush(full, descriptor)

    def _flush(self, path: Path, descriptor: int) -> None:
        """Flush; also before a descriptor is closed to make room, because what went wrong may be told only to it."""
        if path in self._failed:
            raise DestinationError(f"syncing {path} failed before, so its bytes cannot be trusted")
        try:
            sync_descriptor(descriptor)
        except OSError:
            self._failed.add(path)
            raise

    def close(self) -> None:
        self._ordinary.close()
        self._direct.close()


def _read_part(descriptor: int, into: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [into], offset)
    data = os.pread(descriptor, len(into), offset)  # macOS before 11
    into[: len(data)] = data
    return len(data)


class LocalSource(UnpromisedSource):
    """A directory, or one file of it."""

    held_bytes = 0
    """Direct I/O's aligned memory is counted with the threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """As it was given."""
        self._files: dict[str, FileStat] | None = None
        try:
            mode = path.stat().st_mode
        except FileNotFoundError as error:
            near = find_near_path(path)
            raise SourceError(
                f"{path} does not exist", hint=f"did you mean {near}?" if near is not None else None
            ) from error
        except PermissionError as error:
            raise AccessError(f"{path} cannot be read: {error.strerror}") from error
        except OSError as error:  # a name too long, links in a circle
            raise SourceError(f"{path} cannot be read: {error.strerror}") from error
        self._single = not stat.S_ISDIR(mode)
        if self._single and not stat.S_ISREG(mode):
            raise SourceError(f"{path} is neither a regular file nor a directory")
        self.root = path.parent if self._single else path
        self._file = _LocalFile(self.root, os.O_RDONLY)

    @property
    def name(self) -> str:
        """The path as it was given."""
        return str(self.path)

    @property
    def location(self) -> str:
        """The absolute path."""
        return str(self.path.absolute())

    @property
    def folder(self) -> Path:
        """The directory that holds the files."""
        return self.root

    def files(self) -> Mapping[str, FileStat]:
        """Return every regular file, by path relative to the root, but for those in folders that programs keep."""
        if self._files is None:
            self._files = {self.path.name: _stat_file(self.path)} if self._single else dict(self._walk_files())
        return self._files

    def _walk_files(self) -> Iterator[tuple[str, FileStat]]:
        found = []
        for folder, folders, names in os.walk(self.root, onerror=_raise_unlistable):
            folders[:] = sorted(f for f in folders if f not in HIDDEN)
            found += [Path(folder, name) for name in names]
        for path in sorted(found):
            with contextlib.suppress(FileNotFoundError):  # a link to nothing
                if path.is_file():
                    yield path.relative_to(self.root).as_posix(), _stat_file(path)

    def notes(self) -> tuple[str, ...]:
        """Return nothing: the files are what they are."""
        return ()

    def stat_file(self, path: str) -> FileStat | None:
        """Return the file's state now, to see whether it changed under the reader; None if it is gone."""
        try:
            return _stat_file(self.root / path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def beside(self, name: str) -> bytes | None:
        """Return the content of a file beside the one that was given; raises SourceError if it is large."""
        file = self.root / name
        return read_file(file, CONFIG_TEXT) if self._single and file.is_file() else None

    def expect(self, spans: Iterable[Span]) -> None:
        """Do nothing: the kernel reads ahead."""

    def set_stop_request(self, stop: StopRequest) -> None:
        """Do nothing: reads do not wait for longer than the disk does."""

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from byte `offset` of `path`."""
        try:
            self._file.read(path, offset, into)
        except FileNotFoundError as error:
            raise SourceError(f"{path} is missing in {self.root}") from error
        except PermissionError as error:
            raise AccessError(f"{path} cannot be read: {error.strerror}") from error
        except OSError as error:
            raise SourceError(f"reading {path} at byte {offset} failed: {error.strerror}") from error

    def close(self) -> None:
        """Close every descriptor."""
        self._file.close()


class LocalTarget:
    """A directory under which files are written in place; publishing it is the stage's business.

    With `sharing`, files are to share blocks with others, so no space is reserved for them.
    """

    def __init__(self, root: Path, *, sharing: bool = False) -> None:
        self.root = root
        self._sharing = sharing
        self._origins = DescriptorPool(os.O_RDONLY)
        self._file = _LocalFile(root, os.O_RDWR | os.O_NOFOLLOW)
        self._turns: dict[str, threading.Lock] = {}
        self._syncs: dict[str, threading.Lock] = {}

    def create(self, path: str, size: int) -> None:
        """Make a file of `size` bytes with its space reserved, unless blocks are shared; one of that size is kept.

        Raises HostileError for a path that does not stay below the directory.
        """
        if not {"", ".", ".."}.isdisjoint(path.split("/")):
            raise HostileError(f"{path!r} would be written outside of {self.root}")
        full = self.root / path
        with translate_os_errors(path, "creating"):
            full.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | getattr(os, "O_CLOEXEC", 0)
            descriptor = os.open(full, flags, 0o666)
            try:
                if os.fstat(descriptor).st_size != size:
                    os.ftruncate(descriptor, 0)
                    _set_file_size(descriptor, size, reserve=not self._sharing)
            finally:
                os.close(descriptor)

    def write_at(self, path: str, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data` at byte `offset`.

        One thread at a time writes to a file: the kernel would make the others spin on the inode's lock instead.
        """
        turn = self._turns.setdefault(path, threading.Lock())
        with translate_os_errors(path, "writing"), turn:
            self._file.write(path, offset, memoryview(data).cast("B"))

    def share_at(self, path: str, offset: int, size: int, origin: Path, start: int) -> bool:
        """Let `size` bytes at `offset` share the blocks that the file `origin` has at `start`, instead of writing them.

        All three are multiples of a block. Returns False, and changes nothing, where files cannot share these.
        """
        turn = self._turns.setdefault(path, threading.Lock())
        with (
            translate_os_errors(path, "sharing blocks of"),
            turn,
            self._origins.use(origin) as source,
            self._file.open(path) as target,
        ):
            return linux.share_blocks(source, start, size, target, offset)

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Read back what was written."""
        with translate_os_errors(path, "reading back"):
            self._file.read(path, offset, into)

    def sync(self, path: str) -> None:
        """Flush the file; after a failure every later call fails too.

        The kernel tells each descriptor of a failed writeback once: without one call at a time and a memory of what
        failed, a second thread would be told that the bytes the first one lost are on disk.
        """
        with translate_os_errors(path, "syncing"), self._syncs.setdefault(path, threading.Lock()):
            self._file.sync(path)

    def close(self) -> None:
        """Close every descriptor."""
        self._file.close()
        self._origins.close()


def _set_file_size(descriptor: int, size: int, *, reserve: bool) -> None:
    """Reserve the space now, so that a full disk is found early; where that is unsupported, only set the size."""
    if not (size and reserve and linux.reserve_space(descriptor, size)):
        os.ftruncate(descriptor, size)


def _raise_unlistable(error: OSError) -> None:
    raise AccessError(f"{error.filename} cannot be listed: {error.strerror}")


def _stat_file(path: Path) -> FileStat:
    found = path.stat()
    return FileStat(found.st_size, f"{found.st_ino}:{found.st_mtime_ns}", found.st_ctime_ns)


def choose_descriptor_count() -> int:
    """Choose how many files each set may hold open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        _MAX_DESCRIPTORS
        if soft == resource.RLIM_INFINITY
        else min(max(soft // _DESCRIPTOR_LIMIT_DIVISOR, _MIN_DESCRIPTORS), _MAX_DESCRIPTORS)
    )
