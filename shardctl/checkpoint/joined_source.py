"""Reads files of two sources as if they were one's: those of the second have a prefix before their paths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.storage import FileProofs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from shardctl.base.workers import StopRequest
    from shardctl.storage import FileStat, Source, Span

BASE: Final = "complete-from/"
"""What the paths of the second source's files begin with."""


class JoinedSource:
    """A source with the files of another beside its own; it is called, and found, as the first is."""

    def __init__(self, first: Source, second: Source) -> None:
        self.parts = (first, second)
        self.name, self.location, self.folder = first.name, first.location, first.folder

    name: str
    """The first location as a person writes it."""
    location: str
    """The same for a later run."""
    folder: Path | None
    """The local directory of the first's files."""

    @property
    def held_bytes(self) -> int:
        """What both hold."""
        return sum(part.held_bytes for part in self.parts)

    def files(self) -> Mapping[str, FileStat]:
        """Return the files of both."""
        first, second = self.parts
        return {**first.files(), **{f"{BASE}{path}": stat for path, stat in second.files().items()}}

    def notes(self) -> tuple[str, ...]:
        """Return what came out about the files of both."""
        return tuple(note for part in self.parts for note in part.notes())

    @property
    def promised(self) -> Collection[str]:
        """The files that are compared with a hash while they are read."""
        first, second = self.parts
        return {*first.promised, *(f"{BASE}{path}" for path in second.promised)}

    def proofs(self) -> FileProofs:
        """Return which files were compared with their hashes."""
        first, second = (part.proofs() for part in self.parts)
        return FileProofs(
            (*first.verified, *(f"{BASE}{path}" for path in second.verified)),
            {**first.unverified, **{f"{BASE}{path}": why for path, why in second.unverified.items()}},
        )

    def prove(
        self, whole: Collection[str] = (), *, earlier: Collection[str] = (), allow_unverified: bool = False
    ) -> None:
        """Compare files with their hashes, each where it is."""
        first, second = self.parts
        for part, own in ((first, False), (second, True)):
            mine, before = ([_strip(path) for path in each if _is_second(path) == own] for each in (whole, earlier))
            part.prove(mine, earlier=before, allow_unverified=allow_unverified)

    def cautions(self) -> tuple[str, ...]:
        """Return what may go wrong with reading the files of either."""
        return tuple(caution for part in self.parts for caution in part.cautions())

    def stat_file(self, path: str) -> FileStat | None:
        """Return the file's state now."""
        return self._part(path).stat_file(_strip(path))

    def beside(self, name: str) -> bytes | None:
        """Return the content of a small file beside the first source, if that is one file."""
        return self.parts[0].beside(name)

    def expect(self, spans: Iterable[Span]) -> None:
        """Pass on what will be read next."""
        listed = list(spans)
        for part, own in zip(self.parts, (False, True), strict=True):
            part.expect([(_strip(path), start, size) for path, start, size in listed if _is_second(path) == own])

    def set_headers_only(self) -> None:
        """Tell every part that only headers will be read."""
        for part in self.parts:
            part.set_headers_only()

    def set_stop_request(self, stop: StopRequest) -> None:
        """Raise Interrupted instead of waiting once `stop` is set."""
        for part in self.parts:
            part.set_stop_request(stop)

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from a file of either."""
        self._part(path).read_at(_strip(path), offset, into)

    def close(self) -> None:
        """Release what both hold."""
        for part in self.parts:
            part.close()

    def _part(self, path: str) -> Source:
        return self.parts[_is_second(path)]


def _is_second(path: str) -> bool:
    return path.startswith(BASE)


def _strip(path: str) -> str:
    return path.removeprefix(BASE)
