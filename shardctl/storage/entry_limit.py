"""Limits how many tensors a scan may find, so that memory is refused while headers are counted and not after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from shardctl.base.value import state_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardctl.storage import Source


@state_class
class EntryLimit:
    """What a source's headers were found to list so far, and who says whether that is too much."""

    check: Callable[[int], None]
    """Is given the number of tensors so far, and raises if they are too many."""
    found: int = 0


_LIMITS_BY_SOURCE: Final[WeakKeyDictionary[Source, EntryLimit]] = WeakKeyDictionary()


def limit_entries(source: Source, check: Callable[[int], None]) -> None:
    """Have `check` called with the number of tensors that the headers of `source` list, header by header."""
    _LIMITS_BY_SOURCE[source] = EntryLimit(check)


def charge_entries(source: Source, number: int) -> None:
    """Count the tensors of one more header, before anything is built of them; raises what the source's check raises."""
    limit = _LIMITS_BY_SOURCE.get(source)
    if limit is not None:
        limit.found += number
        limit.check(limit.found)


def share_limit(source: Source, part: Source) -> None:
    """Count the tensors of a part of a source, which is read as a source by itself, among those of the source."""
    limit = _LIMITS_BY_SOURCE.get(source)
    if limit is not None:
        _LIMITS_BY_SOURCE[part] = limit
