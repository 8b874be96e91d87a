"""Remembers which tensors of a source nobody wants, so that a reader may pass over one that it cannot read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary, WeakSet

if TYPE_CHECKING:
    import re

    from shardctl.storage import Source

_EXCLUDED_PATTERNS_BY_SOURCE: Final[WeakKeyDictionary[Source, re.Pattern[str]]] = WeakKeyDictionary()
_PASSED_OVER: Final[WeakSet[Source]] = WeakSet()


def exclude_names(source: Source, pattern: re.Pattern[str]) -> None:
    """Have readers pass over tensors that they cannot read, if the pattern is found in their stored names."""
    _EXCLUDED_PATTERNS_BY_SOURCE[source] = pattern


def is_excluded(source: Source, name: str) -> bool:
    """Return whether nobody wants the tensor of this stored name, which cannot be read."""
    pattern = _EXCLUDED_PATTERNS_BY_SOURCE.get(source)
    if pattern is None or pattern.search(name) is None:
        return False
    _PASSED_OVER.add(source)
    return True


def has_passed_over(source: Source) -> bool:
    """Return whether a tensor of a source could not be read, and nobody wanted it."""
    return source in _PASSED_OVER
