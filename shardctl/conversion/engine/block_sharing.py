"""Shares blocks of the source's files with those of the result, where a file system can (XFS, btrfs; `cp --reflink`).

What is shared takes no space and is not written; it is read and digested as all else.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from shardctl.base.errors import DestinationError
from shardctl.storage.local import LocalSource, LocalTarget
from shardctl.tensors.bands import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest

_PROBE_FILE_NAME: Final = ".shardctl-probe"


def prepare_sharing(source: Source, have: Manifest, target: LocalTarget) -> Callable[[], BlockSharer]:
    """Return what makes the writer of a thread; raises DestinationError if `target` shares no blocks with the source.

    That is tried with a block of one file. Files that are smaller than a block are all written.
    """
    path = next((path for path, file in have.files.items() if file.size >= PAGE), None)
    if isinstance(source, LocalSource) and (path is None or _share_probe(target, source.folder / path)):
        return partial(BlockSharer, target, source.folder)
    raise DestinationError(
        f"the destination cannot share blocks with the files of {source.name}",
        hint="XFS and btrfs can, within one file system and for weights that are not computed; else leave "
        "--reflink out",
    )


def _share_probe(target: LocalTarget, file: Path) -> bool:
    """Return whether a new file can share the first block of another; the new one is removed, and all are closed."""
    try:
        target.create(_PROBE_FILE_NAME, PAGE)
        return target.share_at(_PROBE_FILE_NAME, 0, PAGE, file, 0)
    finally:
        target.close()
        (target.root / _PROBE_FILE_NAME).unlink(missing_ok=True)


class BlockSharer:
    """Writes like its target, but shares whole blocks that lie in a file of the source as they will in the result.

    One thread has it, and tells it what its memory was read from.
    """

    def __init__(self, target: LocalTarget, folder: Path) -> None:
        self._target, self._folder = target, folder
        self._origin: tuple[Path, int] | None = None
        self._begin = self._end = 0
        self._shared = 0

    def note_source_data(self, data: NDArray[np.uint8], file: str, offset: int) -> None:
        """Note that `data` holds what a file of the source has at `offset`."""
        self._origin = self._folder / file, offset
        self._begin = data.__array_interface__["data"][0]
        self._end = self._begin + data.nbytes

    def forget(self) -> None:
        """Note that memory no longer holds what was read as it is in a file."""
        self._origin = None

    def take_shared(self) -> int:
        """Return how many bytes were shared since this was last asked."""
        shared, self._shared = self._shared, 0
        return shared

    def write_at(self, path: str, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data` at byte `offset`, or share what can be."""
        head, middle = self._share(path, offset, data)
        if not middle:
            self._target.write_at(path, offset, data)
            return
        self._shared += middle
        view = memoryview(data).cast("B")
        for begin, end in ((0, head), (head + middle, len(view))):
            if begin < end:
                self._target.write_at(path, offset + begin, view[begin:end])

    def _share(self, path: str, offset: int, data: memoryview | bytes) -> tuple[int, int]:
        """Share the whole blocks of `data`; returns how many bytes come before them, and how many they are."""
        if self._origin is None:
            return 0, 0
        flat = np.frombuffer(data, np.uint8)
        begin = flat.__array_interface__["data"][0]
        if not self._begin <= begin <= begin + flat.nbytes <= self._end:
            return 0, 0
        file, start = self._origin[0], self._origin[1] + begin - self._begin
        head = -offset % PAGE
        middle = (flat.nbytes - head) // PAGE * PAGE
        if middle <= 0 or (start - offset) % PAGE:
            return 0, 0
        return head, middle * self._target.share_at(path, offset + head, middle, file, start + head)
