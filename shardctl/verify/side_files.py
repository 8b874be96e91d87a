"""Compares the files beside the weights of two checkpoints: tokenizers, generation settings, code."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from shardctl.errors import SourceError
from shardctl.storage.bounded_text import RECORD_TEXT, parse_json, read_text

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardctl.storage import Source

_BLOCK: Final = 1 << 20
_WRITER_KEYS: Final = ("transformers_version", "_from_model_config", "_commit_hash")
_DOCUMENTS: Final = frozenset({".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf", ".ipynb"})


def is_document(path: str) -> bool:
    """Return whether a file is for people alone, so that no program reads it.

    >>> [is_document(path) for path in ("README.md", "LICENSE.txt", ".gitattributes", "merges.txt")]
    [True, True, True, False]
    """
    name = PurePosixPath(path)
    return (
        name.suffix.lower() in _DOCUMENTS
        or name.name == ".gitattributes"
        or name.stem.upper().startswith(("README", "LICENSE", "NOTICE", "COPYING", "USE_POLICY"))
    )


def has_same_content(path: str, a: Source, b: Source, *, but: Collection[str] = ()) -> bool:
    """Return whether a file says the same in two sources: every byte, or in JSON every value.

    Who wrote a JSON file does not count, nor do the keys `but`. Raises SourceError for a file that cannot be read.
    """
    if _has_same_bytes(path, a, b):
        return True
    if not path.endswith(".json"):
        return False
    try:
        ours, theirs = (parse_json(read_text(each, path, RECORD_TEXT), path, RECORD_TEXT) for each in (a, b))
    except SourceError:
        return False
    for each in (ours, theirs):
        if isinstance(each, dict):
            for key in (*_WRITER_KEYS, *but):
                each.pop(key, None)
    return bool(ours == theirs)


def _has_same_bytes(path: str, a: Source, b: Source) -> bool:
    size = a.files()[path].size
    if b.files()[path].size != size:
        return False
    for offset in range(0, size, _BLOCK):
        length = min(_BLOCK, size - offset)
        ours, theirs = bytearray(length), bytearray(length)
        a.read_at(path, offset, memoryview(ours))
        b.read_at(path, offset, memoryview(theirs))
        if ours != theirs:
            return False
    return True
