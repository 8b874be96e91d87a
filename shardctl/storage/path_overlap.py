"""Finds out whether two paths meet, whatever leads to them: links, `..`, bind mounts, or letters of another case."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def is_same_or_inside(path: Path, folder: Path) -> bool:
    """Return whether a path is the folder, or lies in it; neither needs to exist.

    >>> is_same_or_inside(Path("out/part/../report.xml"), Path("out")), is_same_or_inside(Path("outer"), Path("out"))
    (True, False)
    """
    spelled, real = Path(os.path.abspath(path)), Path(os.path.realpath(path))  # noqa: PTH100 - resolve() follows links
    wanted = Path(os.path.realpath(folder))
    return any(_list_parts_below(each, wanted) is not None for each in dict.fromkeys((spelled, real)))


def are_same_file(one: Path, other: Path) -> bool:
    """Return whether two paths name one file; neither needs to exist."""
    found = _stat_path(one), _stat_path(other)
    if found[0] is not None and found[1] is not None:
        return os.path.samestat(found[0], found[1])
    return _fold_case(os.path.realpath(one)) == _fold_case(os.path.realpath(other))


def find_same_file(path: Path, folder: Path) -> Path | None:
    """Find the name in a folder, or below it, of the file at `path`: links to it and hard links count."""
    wanted = _stat_path(path)
    if wanted is None:
        return None
    return next(
        (each for each in _list_files(folder) if (there := _stat_path(each)) and os.path.samestat(there, wanted)), None
    )


def _list_files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def _list_parts_below(path: Path, folder: Path) -> tuple[str, ...] | None:
    """List the parts of an absolute path below a folder; None if it does not lead there."""
    known = _stat_path(folder)
    if known is None:  # then only its name can be compared, below the nearest folder that exists
        above = _list_parts_below(path, folder.parent) if folder != folder.parent else None
        return above[1:] if above and _fold_case(above[0]) == _fold_case(folder.name) else None
    for number, each in enumerate((path, *path.parents)):
        there = _stat_path(each)
        if there is not None and os.path.samestat(there, known):
            return path.parts[len(path.parts) - number :]
    return None


def _stat_path(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _fold_case(name: str) -> str:
    """Return what two names share that a file system may take for one (APFS, NTFS, ext4's casefold)."""
    return unicodedata.normalize("NFC", name).casefold()
