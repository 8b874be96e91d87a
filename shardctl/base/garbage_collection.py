"""Pauses Python's cyclic garbage collector while many objects are made."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_MANY_NEW_OBJECTS: Final = 50_000
"""To look through fewer takes some milliseconds; to count what a host program froze takes as long as it froze much."""


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Collect no cycles meanwhile, because none are made: as a `with` block, or as the decorator of a function.

    Manifests and plans of 100,000 tensors are millions of objects that only refer to older ones, and so is the tree of
    a pickle. The collector, which starts whenever many are made, finds nothing among them, and looks at all of them
    again and again: a third of the time of reading headers. What is no longer referred to is freed as always.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY_NEW_OBJECTS and not gc.get_freeze_count():
            gc.freeze()  # puts all that was made among what is old, which nobody looks at for a while
            gc.unfreeze()
        gc.enable()
