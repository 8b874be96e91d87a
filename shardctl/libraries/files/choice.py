"""Chooses the files that make up a checkpoint: one file, numbered files, or those that an index names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardctl.base.errors import SourceError
from shardctl.base.value import value_class
from shardctl.libraries.files.file_names import LOADED_SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shardctl.libraries.files.index import WeightIndex
    from shardctl.storage import Source


@value_class
class FileChoice:
    """The files that make up the checkpoint."""

    files: tuple[str, ...]
    index: WeightIndex | None = None
    warnings: tuple[str, ...] = ()


def parse_numbered_name(name: str, suffix: str) -> tuple[str, str, str] | None:
    """Parse prefix, number (usually from 1) and count of one file of several, as written; None for any other name.

    >>> # DeepSeek writes numbers of two widths
    >>> parse_numbered_name("model-00001-of-000163.safetensors", ".safetensors")
    ('model', '00001', '000163')
    >>> parse_numbered_name("model.safetensors", ".safetensors")
    """
    found = re.fullmatch(r"(.*)-([0-9]{1,9})-of-([0-9]{1,9})" + re.escape(suffix), name)
    return (found[1], found[2], found[3]) if found is not None else None


def list_unread_shards(source: Source, read: Collection[str]) -> list[str]:
    """List files of the same numbering as those that are read, which are there and are not read: an index left them."""

    def find_group(path: str) -> tuple[str, str, str] | None:
        suffix = next((suffix for suffix in LOADED_SUFFIXES if path.endswith(suffix)), "")
        numbered = parse_numbered_name(path, suffix) if suffix else None
        return (numbered[0], numbered[2], suffix) if numbered is not None else None

    groups = {group for path in read if (group := find_group(path)) is not None}
    return sorted(path for path in source.files() if path not in read and find_group(path) in groups)


def describe_missing(names: Sequence[str], noun: str = "files") -> str:
    """Return what to say of files, or of what `noun` says, that are not there.

    >>> describe_missing(["a.pt"]), describe_missing(["a.pt", "b.pt", "c.pt"])
    ('a.pt is missing', 'a.pt and 2 more files are missing')
    """
    more = f" and {len(names) - 1:,} more {noun} are" if len(names) > 1 else " is"
    return f"{names[0]}{more} missing"


def choose_given_file(path: str, suffix: str) -> FileChoice:
    """Choose where one file was given; raises SourceError for an index, which has no weights."""
    if path.endswith(f"{suffix}.index.json"):
        raise SourceError(f"{path} is an index, not the weights", hint="give the directory that holds it")
    parts = parse_numbered_name(path, suffix)
    if parts is None or int(parts[2]) == 1:
        return FileChoice((path,))
    return FileChoice((path,), warnings=(f"{path} is one of {int(parts[2])} files; only its own tensors are read",))


def choose_index(indexes: Sequence[str], standard: str) -> str:
    """Choose the index that counts: the one called `standard`, or the only one.

    Raises SourceError if that cannot be said.
    """
    if standard in indexes or len(indexes) == 1:
        return standard if standard in indexes else indexes[0]
    raise SourceError(
        f"the directory holds {len(indexes)} variants of the model: {', '.join(indexes)}",
        hint="leave only one of them in the directory, with its shards",
    )
