"""Samples the files of a source, so that workers on several machines know that they read the same bytes.

Size and modification time, which is all that a file system says of a file, are the same for two copies of which one was
damaged. To compare copies whole would be a pass over all data for every worker.
"""

from __future__ import annotations

from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Final

from shardctl.base.workers import run_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardctl.base.workers import ExecutionOptions
    from shardctl.conversion.share_transfer import Versions
    from shardctl.storage import Source

WHOLE: Final = 1 << 20
"""Bytes of a file that is sampled whole."""
_ENDS: Final = 64 << 10
"""Bytes at either end of a larger one: headers, and the directories of archives."""
_STRETCH: Final = 16 << 10
"""Bytes of each stretch between."""
_STRETCHES: Final = 16


def sample_source(source: Source, versions: Versions, effort: ExecutionOptions) -> dict[str, str]:
    """Return a hash of a sample of each file whose content its version does not tell; empty if all versions do.

    Everybody samples the same bytes of a file of one name and size: all of it up to 1 MiB, of a larger one 64 KiB at
    either end and 16 stretches of 16 KiB between.
    """
    folder = source.folder
    if folder is None:  # ETags and commits are of the content
        return {}
    paths = [path for path in versions if (folder / path).is_file()]
    if len(paths) < len(versions):  # arrays of a library's own format: of them its files are sampled
        paths = [path for path in source.files() if (folder / path).is_file()]
    found: dict[str, str] = {}

    def worker() -> Callable[[str], None]:
        buffer = memoryview(bytearray(WHOLE))

        def handle(path: str) -> None:
            found[path] = _read_sample(source, path, source.files()[path].size, buffer)

        return handle

    run_in_threads(iter(paths), worker, effort.threads, effort.stop)
    return dict(sorted(found.items()))


def _read_sample(source: Source, path: str, size: int, buffer: memoryview) -> str:
    state = blake2b(digest_size=16)
    for start, length in _list_stretches(path, size):
        source.read_at(path, start, buffer[:length])
        state.update(buffer[:length])
    return state.hexdigest()


def _list_stretches(path: str, size: int) -> Iterator[tuple[int, int]]:
    if size <= WHOLE:
        yield 0, size
        return
    yield 0, _ENDS
    random = Random(f"{path} {size}")  # noqa: S311 - the same everywhere is what is wanted
    for start in sorted(random.sample(range(_ENDS, size - _ENDS - _STRETCH), _STRETCHES)):
        yield start, _STRETCH
    yield size - _ENDS, _ENDS
