"""Reads one folder of a source as if it were a source by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.storage import UnpromisedSource
from shardctl.storage.entry_limit import share_limit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from shardctl.base.workers import StopRequest
    from shardctl.storage import FileStat, Source, Span


class FolderView(UnpromisedSource):
    """A folder of a source, for as long as headers are scanned; hashes and closing are left to the source itself."""

    def __init__(self, source: Source, folder: str, *, without: Collection[str] = ()) -> None:
        """`without` are files of the folder that are not to be seen, by their paths in it."""
        self._source, self._prefix = source, f"{folder}/"
        self.name, self.location = f"{source.name}/{folder}", f"{source.location}/{folder}"
        self.folder: Path | None = source.folder / folder if source.folder is not None else None
        self._files = {
            path.removeprefix(self._prefix): stat
            for path, stat in source.files().items()
            if path.startswith(self._prefix) and path.removeprefix(self._prefix) not in without
        }
        share_limit(source, self)

    @property
    def held_bytes(self) -> int:
        """What the source holds."""
        return self._source.held_bytes

    def files(self) -> Mapping[str, FileStat]:
        """Return the files of the folder, by their paths in it."""
        return self._files

    def notes(self) -> tuple[str, ...]:
        """Return nothing: the source itself says it."""
        return ()

    def stat_file(self, path: str) -> FileStat | None:
        """Return the file's state now."""
        return self._source.stat_file(self._prefix + path)

    def beside(self, name: str) -> bytes | None:
        """Return nothing: a folder is not one file."""
        del name
        return None

    def expect(self, spans: Iterable[Span]) -> None:
        """Pass on what will be read next."""
        self._source.expect((self._prefix + path, start, size) for path, start, size in spans)

    def set_stop_request(self, stop: StopRequest) -> None:
        """Raise Interrupted instead of waiting once `stop` is set."""
        self._source.set_stop_request(stop)

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from a file of the folder."""
        self._source.read_at(self._prefix + path, offset, into)

    def close(self) -> None:
        """Do nothing: the source is closed by whoever opened it."""
