"""Tracks which files of the source a copy's bands come from, and so which earlier bands can be trusted.

Where a place promises hashes, bytes are right once all of a file was hashed, in one run: a hash cannot be interrupted.
So a band that an earlier run wrote is kept if that run saw the whole of each file that the band came from, and is read
again otherwise. Of a file that a copy needs in part only, no hash can be had, and what was written is kept.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from shardctl.storage.file_hashes import is_almost_all
from shardctl.tensors.manifest import ConstantFill

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardctl.conversion.engine.journal import BandJournal
    from shardctl.storage import Source
    from shardctl.tensors.bands import ChunkIndex
    from shardctl.tensors.box import Box
    from shardctl.tensors.copyplan import TensorCopy


def list_whole_files(copies: Iterable[TensorCopy], source: Source) -> frozenset[str]:
    """List the files of promised hash that copies read all of, or almost: those whose hashes can be had."""
    read: Counter[str] = Counter()
    for copy in copies if source.promised else ():
        for chunk in copy.reads:
            if not isinstance(chunk.where, ConstantFill) and chunk.where.file in source.promised:
                read[chunk.where.file] += chunk.dtype.nbytes(chunk.box.shape)
    files = source.files()
    return frozenset(path for path, size in read.items() if is_almost_all(size, files[path].size))


class Provenance:
    """Counts, by file of the source, what is still to be moved; the caller's lock guards it."""

    def __init__(self, source: Source, journal: BandJournal | None, *, allow_unverified: bool) -> None:
        """With `allow_unverified` every band that is as it was written is kept."""
        self._source, self._journal, self._allow = source, journal, allow_unverified
        self._missing: Counter[str] = Counter()
        self._whole: frozenset[str] = frozenset()
        self._closed: set[str] = set()
        self._noted: set[str] = set()
        self.moved: set[str] = set()
        """Files that this run reads all of, or almost, and of which it moved a band."""

    def expect(self, wanted: Iterable[tuple[ChunkIndex, Box]]) -> None:
        """Be told of all bands before the first, together: the boxes to move and the chunks they are read from."""
        if not self._source.promised:
            return
        for reads, box in wanted:
            self._missing.update(self._count_read_bytes(reads, box))
        files = self._source.files()
        self._whole = frozenset(path for path, size in self._missing.items() if is_almost_all(size, files[path].size))

    def _count_read_bytes(self, reads: ChunkIndex, box: Box) -> Counter[str]:
        found: Counter[str] = Counter()
        for chunk in reads.within(box):
            if not isinstance(chunk.where, ConstantFill) and chunk.where.file in self._source.promised:
                found[chunk.where.file] += chunk.dtype.nbytes(chunk.box.shape)
        return found

    def trusts_band(self, reads: ChunkIndex, box: Box) -> bool:
        """Return whether a band that an earlier run wrote came from files that it proved, or could not have."""
        if not self._whole or self._allow:
            return True
        proved = self._journal.proved if self._journal is not None else frozenset()
        return proved >= self._count_read_bytes(reads, box).keys() & self._whole

    def take(self, reads: ChunkIndex, box: Box, *, kept: bool) -> None:
        """Count a band that is done."""
        if self._whole:
            found = self._count_read_bytes(reads, box)
            self._missing.subtract(found)
            if not kept:
                self.moved |= found.keys() & self._whole

    def close(self) -> None:
        """Take note of the files of which every band is done; the caller is about to record the bands."""
        self._closed |= {path for path in self._whole - self._noted if not self._missing[path]}

    def list_hashed_files(self) -> list[str]:
        """Return the closed files of which every byte was hashed, each said once.

        Their bands have all been recorded.
        """
        found = self._closed & set(self._source.proofs().verified) if self._closed else set()
        self._closed -= found
        self._noted |= found
        return sorted(found)
