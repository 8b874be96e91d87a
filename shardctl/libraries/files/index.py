"""Reads the index of a sharded Hugging Face checkpoint (`*.index.json`): which file holds which tensor."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass, field
from sys import intern
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import HostileError, SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.files.impostors import refuse_impostor, refuse_unfinished
from shardctl.libraries.files.json_members import (
    PLAIN_END,
    PLAIN_KEY,
    MalformedError,
    check_end_of_text,
    parse_string,
    parse_value,
    skip_space,
    walk_object,
)
from shardctl.libraries.files.links import check_link
from shardctl.storage import read_bytes
from shardctl.storage.local import LocalSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.storage import Source

_MAX_INDEX_BYTES: Final = 100_000_000
"""Bytes of an index that are still read; one of a million tensors has about 80 MB."""
_MAX_INDEX_MEMBERS: Final = 64
"""Members of the outermost object; real indexes have two or three."""
_LONGEST_VALUE: Final = 1_000_000
"""Characters of a member that is not the weight map."""
_LONGEST_NAME: Final = 255
"""Characters of a file's name; no common file system allows more."""
_PLAIN_ENTRY: Final = re.compile(rf'{PLAIN_KEY}"([^"\\\x00-\x1f]{{0,10000}}+)"{PLAIN_END}')
"""An entry of the weight map as every known library spells it: not a rule of its own, only quicker to read."""
_DRIVE_LETTER_PATTERN: Final = re.compile(r"[A-Za-z]:")
DELTA_ENCODING: Final = "delta_encoding"
"""The key of an index's metadata by which SGLang's weight deltas are known."""


@value_class
class WeightIndex:
    """What an index file says."""

    path: str
    """The index file itself."""
    weight_map: dict[str, str]
    """The file of each tensor, by the tensor's name and in the order of the index; every file exists."""
    total_size: int | None
    """`metadata.total_size`, the bytes of all tensors, where the index has it."""
    warnings: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shards(self) -> tuple[str, ...]:
        """The files that the index names, sorted."""
        return tuple(sorted(set(self.weight_map.values())))

    def check(self, found: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
        """Compare the index with what its shards hold, given as ``{file: {tensor: bytes}}``.

        Returns warnings: tensors that a shard holds without the index naming them there, and a wrong `total_size`.

        Raises:
            SourceError: a shard does not hold a tensor that the index places in it.
        """
        get = self.weight_map.get
        unplaced = {file: [name for name in held if get(name) != file] for file, held in found.items()}
        placed = sum(len(held) - len(unplaced[file]) for file, held in found.items())
        for name, file in self.weight_map.items() if placed < len(self.weight_map) else ():
            if name not in found[file]:
                elsewhere = [other for other, held in found.items() if name in held]
                where = f"; {elsewhere[0]} does" if elsewhere else ""
                raise SourceError(
                    f"{self.path} places tensor {name!r} in {file}, which does not hold it{where}",
                    hint="the index and the shards come from different saves; fetch them all again",
                )
        warnings = []
        for file, extra in unplaced.items():
            if extra:
                warnings.append(
                    f"{file} holds {_format_some_tensors(extra)}, which {self.path} "
                    + ("places in another file" if extra[0] in self.weight_map else "does not name")
                )
        total = sum(sum(held.values()) - sum(held[name] for name in unplaced[file]) for file, held in found.items())
        if self.total_size is not None and self.total_size != total:
            warnings.append(
                f"{self.path} says {self.total_size:,} bytes of tensors; those that it names have {total:,}"
            )
        return tuple(warnings)


def read_index(source: Source, path: str, *, delta: bool = False) -> WeightIndex:
    """Read the index file `path`; its shards are looked for beside it, but not opened.

    Raises:
        UnsupportedError: it is the index of a weight delta, and no `delta` is expected.
        SourceError: the index is malformed, or a shard is missing, not a regular file or not completely downloaded.
        HostileError: a shard's name, or the link behind it, leaves the directory.
    """
    size = source.files()[path].size
    if size > _MAX_INDEX_BYTES:
        raise SourceError(f"{path} has {size:,} bytes; an index of more than {_MAX_INDEX_BYTES:,} is not read")
    check_link(source, path)
    parsed = _ParsedIndex(path)
    try:
        parsed.read(str(read_bytes(source, path), "utf-8"))
    except UnicodeDecodeError as error:
        refuse_impostor(source, path, "an index")
        raise SourceError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None
    except MalformedError as error:
        refuse_impostor(source, path, "an index")
        raise SourceError(f"{path} is malformed: {error}") from error
    if DELTA_ENCODING in parsed.metadata and not delta:
        version = f"version {parsed.metadata.get('version')} on {parsed.metadata.get('base_version')}"
        raise UnsupportedError(
            f"{source.name} is a weight delta ({version:.100}), as SGLang and slime publish them, and no checkpoint",
            hint=f"apply it to its base: shardctl reshard BASE DST --apply {source.name}",
        )
    if parsed.weight_map is None:
        raise SourceError(f"{path} has no `weight_map`, so it does not say which file holds which tensor")
    paths = {file: shard_path(source, path, file) for file in dict.fromkeys(parsed.weight_map.values())}
    weight_map = parsed.weight_map
    if any(file != inside for file, inside in paths.items()):
        weight_map = {name: paths[file] for name, file in weight_map.items()}
    return WeightIndex(path, weight_map, parsed.total_size, tuple(parsed.warnings), parsed.metadata)


def read_shard_index(source: Source, path: str) -> WeightIndex:
    """Read an index by which the files of a checkpoint are chosen; raises as `read_index`, also if it names no file."""
    index = read_index(source, path)
    if not index.weight_map:
        raise SourceError(
            f"{path} has an empty `weight_map`, so it names no file",
            hint="the save did not finish; if the files are whole, move the index away",
        )
    return index


def shard_path(source: Source, index: str, file: str) -> str:
    """Return the path of a shard that the index calls `file`, such as ``./x`` for ``x``, a regular, complete file.

    Raises:
        SourceError: there is no such file.
        HostileError: it is outside of the index's directory.
    """
    check_shard_name(index, file)
    inside = posixpath.normpath(file)
    _check_shard(source, index, inside)
    return inside


def check_shard_name(index: str, file: str) -> None:
    """Raise HostileError for a name that leaves the index's directory, or would on another system."""
    parts = file.split("/")
    foreign = "\\" in file or "://" in file or any(map(_DRIVE_LETTER_PATTERN.match, parts))
    leaves = ".." in parts or file.startswith("/") or foreign
    if leaves or "\0" in file or parts[-1] in {"", "."} or any(len(part) > _LONGEST_NAME for part in parts):
        raise HostileError(
            f"{index} names the file {file[:_LONGEST_NAME]!r}, which "
            + ("may lie outside of its directory" if leaves else "cannot be the name of a file"),
            hint="no library writes such an index; do not trust this checkpoint",
        )


def _check_shard(source: Source, index: str, file: str) -> None:
    refuse_unfinished(source, file)
    if file not in source.files():
        check_link(source, file)
        if isinstance(source, LocalSource) and os.path.lexists(source.root / file):
            raise SourceError(f"{file}, which {index} names, is neither a regular file nor a link to one")
        raise SourceError(f"{file} is missing, though {index} names it", hint="fetch the missing file")
    check_link(source, file)


@dataclass
class _ParsedIndex:
    """The state of one pass over an index's text."""

    path: str
    weight_map: dict[str, str] | None = None
    total_size: int | None = None
    warnings: list[str] = field(default_factory=list)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    _keys: set[str] = field(default_factory=set)
    _files: dict[str, str] = field(default_factory=dict)
    _text: str = ""

    def read(self, text: str) -> None:
        self._text = text
        check_end_of_text(text, walk_object(text, skip_space(text, 0), self._parse_member))

    def _parse_member(self, key: str, at: int) -> int:
        if key in self._keys:
            raise MalformedError(f"the key {key!r} appears twice")
        self._keys.add(key)
        if len(self._keys) > _MAX_INDEX_MEMBERS:
            raise MalformedError(
                f"it has more than {_MAX_INDEX_MEMBERS} members; an index has `metadata` and `weight_map`"
            )
        if key == "weight_map":
            self.weight_map = {}
            return walk_object(self._text, at, self._parse_entry, plain=self._parse_plain_members)
        value, at = parse_value(self._text, at, _LONGEST_VALUE)
        if key == "metadata":
            self._read_metadata(value)
        return at

    def _parse_plain_members(self, at: int) -> int:
        """Take the plain entries from `at` on; what is wrong with one is for `_parse_entry` to say."""
        assert self.weight_map is not None  # noqa: S101 - set by the only caller
        text, weight_map, files = self._text, self.weight_map, self._files
        while (entry := _PLAIN_ENTRY.match(text, at)) is not None:
            name, file = entry.groups()
            name = intern(name)  # headers have it, too
            file = files.setdefault(file, file)  # a few names, each many times
            if weight_map.setdefault(name, file) != file:
                break
            at = entry.end()
        return at

    def _parse_entry(self, name: str, at: int) -> int:
        assert self.weight_map is not None  # noqa: S101 - set by the only caller
        try:
            file, at = parse_string(self._text, at)
        except MalformedError as error:
            raise MalformedError(f"the file of tensor {name!r}: {error}") from error
        other = self.weight_map.setdefault(name, file)
        if other != file:
            raise MalformedError(f"tensor {name!r} is placed in both {other} and {file}")
        return at

    def _read_metadata(self, value: Any) -> None:  # noqa: ANN401 - any JSON
        self.metadata = value if isinstance(value, dict) else {}
        total = self.metadata.get("total_size")
        if isinstance(total, float) and total.is_integer() and total >= 0:
            total = int(total)  # some writers divide and multiply
        if type(total) is int:
            self.total_size = total
        elif total is not None or not isinstance(value, dict):
            self.warnings.append(f"{self.path} has a `metadata` without a usable `total_size`")


def _format_some_tensors(names: list[str]) -> str:
    return f"tensor {names[0]!r}" + (f" and {len(names) - 1:,} others" if len(names) > 1 else "")
