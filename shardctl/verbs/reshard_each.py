"""Converts every checkpoint that a pattern matches, each into a directory of its own name."""

from __future__ import annotations

import glob
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import Interrupted, ShardctlError, SourceError, UsageError
from shardctl.base.value import value_class
from shardctl.conversion.engine.destination_state import read_destination_record
from shardctl.conversion.preparing import open_conversion
from shardctl.conversion.share_transfer import list_source_versions
from shardctl.options import DestinationOptions
from shardctl.storage.addresses import check_written_file
from shardctl.tensors.record import RECORD
from shardctl.verbs.reshard import reshard

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from shardctl.base.workers import ProgressWatcher
    from shardctl.options import ReshardOptions, SourceOptions
    from shardctl.verbs.reshard import ReshardResult

_NUMBER_PATTERN: Final = re.compile(r"(\d+)")


@value_class
class EachOutcome:
    """What became of one of several checkpoints."""

    source: Path
    destination: Path
    result: ReshardResult | None = None
    """None if an earlier run had converted it, or it failed."""
    error: ShardctlError | None = None

    @property
    def status(self) -> str:
        """One of `converted`, `kept` (an earlier run had converted it) and `failed`."""
        return "failed" if self.error is not None else "converted" if self.result is not None else "kept"


@value_class
class ReshardEachResult:
    """What became of all of them, in order."""

    outcomes: tuple[EachOutcome, ...]
    untried: tuple[Path, ...] = ()
    """Those that were left after the first failure, if that was to end the run."""

    @property
    def exit_code(self) -> int:
        """0, or that of the first failure."""
        return next((each.error.exit_code for each in self.outcomes if each.error is not None), 0)


def reshard_each(
    pattern: str,
    destination: str | Path,
    reshard_options: ReshardOptions | None = None,
    *,
    source_options: SourceOptions | None = None,
    destination_options: DestinationOptions | None = None,
    fail_fast: bool = False,
    watch: Callable[[], AbstractContextManager[ProgressWatcher]] | None = None,
    tell: Callable[[EachOutcome], None] | None = None,
) -> ReshardEachResult:
    """Convert each checkpoint that `pattern` matches into the directory of its name inside `destination`.

    One that an earlier run converted in the same way is kept, unless its files are younger than that. A failure does
    not stop the others, unless `fail_fast`. `watch` shows the progress of one, and `tell` is told what became of it.
    Raises UsageError for a pattern that matches nothing or two directories of one name, Interrupted.
    """
    check_written_file(destination)
    sources = list_matches(pattern)
    outcomes: list[EachOutcome] = []
    for number, source in enumerate(sources):
        place = Path(destination) / source.name
        try:
            result = None
            options = destination_options or DestinationOptions()
            if options.overwrite or not _is_converted(source, place, reshard_options, source_options):
                with watch() if watch is not None else nullcontext() as progress:
                    result = reshard(
                        source,
                        place,
                        reshard_options,
                        source_options=source_options,
                        destination_options=options,
                        progress=progress,
                    )
            outcomes.append(EachOutcome(source, place, result))
        except Interrupted:
            raise
        except ShardctlError as error:
            outcomes.append(EachOutcome(source, place, error=error))
        if tell is not None:
            tell(outcomes[-1])
        if fail_fast and outcomes[-1].error is not None:
            return ReshardEachResult(tuple(outcomes), tuple(sources[number + 1 :]))
    return ReshardEachResult(tuple(outcomes))


def list_matches(pattern: str) -> list[Path]:
    """List the paths here that a pattern matches, numbers in their names in order of size.

    Raises UsageError for none, for an address, and for two of one name.
    """
    if "://" in pattern:
        raise UsageError(f"--each is for paths here, and {pattern} is an address", hint="convert one after another")
    found = [Path(each) for each in glob.glob(pattern)]  # noqa: PTH207 - of a whole path
    if not found:
        raise SourceError(f"{pattern} matches nothing", hint="quote the pattern, and check the path")
    names: dict[str, Path] = {}
    for path in sorted(found, key=split_numbers):
        other = names.setdefault(path.name, path)
        if other is not path:
            raise UsageError(
                f"{other} and {path} would both become {path.name}", hint="convert them in two runs, into two places"
            )
    return list(names.values())


def split_numbers(path: Path) -> tuple[tuple[str, int], ...]:
    """Split a path into words and numbers, by which `iter_9` comes before `iter_10`.

    >>> split_numbers(Path("run/iter_10"))
    (('run/iter_', 10), ('', 0))
    """
    parts = _NUMBER_PATTERN.split(str(path))
    return tuple((word, int(number or 0)) for word, number in zip(parts[::2], [*parts[1::2], ""], strict=True))


def _is_converted(
    source: Path, place: Path, reshard_options: ReshardOptions | None, source_options: SourceOptions | None
) -> bool:
    """Return whether a record says that the same was made of files that nobody has written or touched since."""
    record = place / RECORD
    if not record.is_file():
        return False
    with open_conversion(source, place, reshard_options, source_options, None) as work:
        if read_destination_record(place).plan != work.identity():
            return False
        opened = work.checkpoint.source
        made, files = record.stat().st_mtime_ns, opened.files()
        return opened.folder is not None and all(files[path].changed <= made for path in list_source_versions(work))
