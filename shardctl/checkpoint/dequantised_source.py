"""Reads quantised weights as floating-point numbers, through files that do not exist and are decoded when read."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from shardctl.bands import BandBuffer
from shardctl.models.dequantisation.weight import DECODING_BYTES
from shardctl.storage.crc_tracker import CrcReader

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from shardctl.models.dequantisation.weight import QuantisedWeight
    from shardctl.storage import FileProofs, FileStat, Source, Span
    from shardctl.storage.crc_tracker import CrcTracker
    from shardctl.workers import StopRequest

_SCRATCH: Final = 1 << 20
"""Bytes that gapped reads of a weight's arrays are gathered in."""


class DequantisedSource:
    """A source with one more file for each weight that is quantised in it, which holds its values."""

    def __init__(self, source: Source, weights: Mapping[str, QuantisedWeight], threads: int, note: str) -> None:
        """`weights` are the weights by the path of their file; as many `threads` read at once."""
        self._source, self._weights, self._threads, self._note = source, weights, threads, note
        self._local = threading.local()
        self._lock = threading.Lock()
        self._overflowed: dict[str, int] = {}
        self._tracker: CrcTracker | None = None

    @property
    def name(self) -> str:
        """The location as a person writes it."""
        return self._source.name

    @property
    def location(self) -> str:
        """The same for a later run."""
        return self._source.location

    @property
    def folder(self) -> Path | None:
        """The local directory of the files."""
        return self._source.folder

    @property
    def held_bytes(self) -> int:
        """What the source itself holds, and what its threads decode in."""
        return self._source.held_bytes + self._threads * (DECODING_BYTES + _SCRATCH)

    def files(self) -> Mapping[str, FileStat]:
        """Return the files that exist."""
        return self._source.files()

    def notes(self) -> tuple[str, ...]:
        """Return what came out about the files, and which weights have values that the wanted type does not hold."""
        overflowed = tuple(
            f"{name}: {count:,} finite values became infinite" for name, count in sorted(self._overflowed.items())
        )
        return (*self._source.notes(), self._note, *overflowed)

    @property
    def promised(self) -> Collection[str]:
        """The files that are compared with a hash while they are read."""
        return self._source.promised

    def proofs(self) -> FileProofs:
        """Return which files were compared with their hashes."""
        return self._source.proofs()

    def prove(
        self, whole: Collection[str] = (), *, earlier: Collection[str] = (), allow_unverified: bool = False
    ) -> None:
        """Compare files with their hashes, as the source itself does."""
        self._source.prove(whole, earlier=earlier, allow_unverified=allow_unverified)

    def cautions(self) -> tuple[str, ...]:
        """Return what may go wrong with reading these files."""
        return self._source.cautions()

    def restat(self, path: str) -> FileStat | None:
        """Return the file's state now."""
        return self._source.restat(path)

    def beside(self, name: str) -> bytes | None:
        """Return the content of a small file beside a source that is one file."""
        return self._source.beside(name)

    def expect(self, spans: Iterable[Span]) -> None:
        """Pass on what will be read next of files that exist."""
        self._source.expect([span for span in spans if span[0] not in self._weights])

    def heed(self, stop: StopRequest) -> None:
        """Raise Interrupted instead of waiting once `stop` is set."""
        self._source.heed(stop)

    def track(self, tracker: CrcTracker) -> None:
        """Tell `tracker` of all that is read of the arrays from now on."""
        self._tracker = tracker

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from a file that exists, or with values of a weight."""
        weight = self._weights.get(path)
        if weight is None:
            self._source.read_at(path, offset, into)
            return
        if not hasattr(self._local, "buffer"):
            self._local.buffer = BandBuffer(_SCRATCH)
            self._local.reader = CrcReader(self._source.read_at, self._tracker) if self._tracker else self._source
        overflowed = weight.read_values(self._local.reader, self._local.buffer, offset, into)
        if overflowed:
            with self._lock:
                self._overflowed[weight.name] = self._overflowed.get(weight.name, 0) + overflowed

    def close(self) -> None:
        """Release what the source holds."""
        self._source.close()
