"""Finds the free space of a place where something will be written, which need not exist yet."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def find_existing_parent(path: Path) -> Path:
    """Find the path itself, or the nearest directory above it that exists."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place


def measure_free_space(place: Path) -> int | None:
    """Free bytes of the file system of an existing path; None if it does not know its own size, or cannot be asked."""
    try:
        disk = shutil.disk_usage(place)
    except OSError:  # some FUSE file systems implement no statvfs: a full disk then shows when space is reserved
        return None
    return disk.free if disk.total else None
