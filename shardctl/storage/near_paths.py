"""Finds the path that somebody may have meant who mistyped one."""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Final

_MIN_NAME_SIMILARITY: Final = 0.7
"""How alike two names must be, from 0 to 1: one wrong letter in four is."""


def find_near_path(path: Path) -> Path | None:
    """Find the path here whose parts are most like those of a path that does not exist; None if none is much alike."""
    found = Path(path.anchor)
    for part in path.parts[len(found.parts) :]:
        if (found / part).exists():
            found /= part
            continue
        names: list[str] = []
        with suppress(OSError):
            names = [entry.name for entry in found.iterdir()]
        near = get_close_matches(part, names, n=1, cutoff=_MIN_NAME_SIMILARITY)
        if not near:
            return None
        found /= near[0]
    return found
