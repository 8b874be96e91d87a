"""Remembers which tensors of a source nobody wants, so that a reader may pass over one that it cannot read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import re

    from shardctl.storage import Source

_EXCLUDED: Final[WeakKeyDictionary[Source, re.Pattern[str]]] = WeakKeyDictionary()


def exclude_names(source: Source, pattern: re.Pattern[str]) -> None:
    """Have readers pass over tensors that they cannot read, if the pattern is found in their stored names."""
    _EXCLUDED[source] = pattern


def is_excluded(source: Source, name: str) -> bool:
    """Return whether nobody wants the tensor of this stored name."""
    pattern = _EXCLUDED.get(source)
    return pattern is not None and pattern.search(name) is not None
