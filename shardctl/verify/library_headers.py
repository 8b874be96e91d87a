"""Has the library of safetensors read the headers, too, so that two readers agree on what each file holds."""

from __future__ import annotations

import re
from contextlib import closing, contextmanager
from dataclasses import field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_plural
from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import format_first_few
from shardctl.base.value import state_class
from shardctl.libraries.files.file_names import SAFETENSORS
from shardctl.libraries.safetensors.header import encode_header, read_header
from shardctl.storage import read_bytes
from shardctl.storage.local import LocalSource
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.base.dtype import DType
    from shardctl.libraries.safetensors.header import SafetensorsHeader
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest

CHECK: Final = "library"
_LENGTH_BYTES: Final = 8
_OPTIMIZER_FILE_PATTERN: Final = re.compile(r"(\.distcp|(^|/)\.metadata)$")
"""Files of an optimizer that lie beside weights as safetensors."""
_Array = tuple[str, tuple[int, ...], int]
"""Type, shape, and byte offset in the file; -1 where an array has no bytes, which lie nowhere."""


@state_class
class LibraryHeaders:
    """What the library was asked to read, and which files it could not judge."""

    version: str
    """Of safetensors; empty if it was not asked, because no file is one of its own."""
    files: int = 0
    """Files that it read as shardctl does."""
    arrays: int = 0
    """Arrays in them, of the same names, types, shapes and offsets."""
    unread: dict[str, str] = field(default_factory=dict)
    """Other files, each with the reason, which is no fault of the file: a type that this version does not know."""
    refused: list[str] = field(default_factory=list)
    """Files that it refuses, or reads otherwise; each is a finding."""
    unasked: list[str] = field(default_factory=list)
    """Files of weights in other containers."""

    def describe(self) -> Iterator[str]:
        """Say in words which files two readers agree on, and which were read by shardctl alone."""
        if self.files:
            yield (
                f"read by safetensors {self.version}, too: {format_plural(self.files, 'header')}, "
                f"{format_plural(self.arrays, 'array')} of the same names, types, shapes and offsets"
            )
        if self.unasked:
            yield f"read by shardctl alone, because safetensors reads no such files: {format_first_few(self.unasked)}"


def compare_headers(source: Source, stored: Manifest) -> tuple[LibraryHeaders, list[CheckFinding]]:
    """Have the library read the header of each safetensors file, and compare it with what shardctl reads.

    No byte of a tensor is read: the library maps the file and looks at its header, and of a file that is far away it
    is given a copy of the header, followed by a hole. The offsets follow from the order of the arrays, because the
    library accepts only files without gaps.
    """
    safe = stored.format == "safetensors"
    own = {
        path: path.endswith(SAFETENSORS) or (safe and not _OPTIMIZER_FILE_PATTERN.search(path)) for path in stored.files
    }
    asked = LibraryHeaders("", unasked=[path for path, is_own in own.items() if not is_own])
    findings: list[CheckFinding] = []
    for path in (path for path, is_own in own.items() if is_own):
        with _hold_locally(source, path) as file:
            findings += _compare_file(file, path, asked)
    return asked, findings


def _compare_file(file: Path, path: str, asked: LibraryHeaders) -> Iterator[CheckFinding]:
    import safetensors

    asked.version = safetensors.__version__
    with closing(LocalSource(file)) as alone:  # charges no entries: those of the checkpoint are counted already
        header = read_header(alone, file.name)
    try:
        theirs = _read_with_library(file)
    except safetensors.SafetensorError as error:
        strange = _list_unknown_types({array.dtype for array in header.arrays})
        if strange:
            reason = f"safetensors {asked.version} does not know {format_first_few(strange)}"
            asked.unread[path] = reason
            yield CheckFinding("warning", CHECK, f"only shardctl read {path}: {reason}", file=path)
            return
        message = f"shardctl reads {path}, and safetensors {asked.version} refuses it: {error}"
    else:
        differing = list(_list_differences(_list_arrays(header), theirs))
        if not differing:
            asked.files += 1
            asked.arrays += len(theirs)
            return
        message = f"shardctl and safetensors {asked.version} read {path} differently: {format_first_few(differing)}"
    asked.refused.append(path)
    yield CheckFinding("error", CHECK, message, file=path)


@contextmanager
def _hold_locally(source: Source, path: str) -> Iterator[Path]:
    """Give the file itself, or a file of the same size with its header and no data."""
    if source.folder is not None and (source.folder / path).is_file():
        yield source.folder / path
        return
    size = source.files()[path].size
    length = int.from_bytes(read_bytes(source, path, 0, _LENGTH_BYTES), "little")
    with TemporaryDirectory(prefix="shardctl-") as folder:
        file = Path(folder, f"header{SAFETENSORS}")
        file.write_bytes(read_bytes(source, path, 0, _LENGTH_BYTES + length))
        with file.open("r+b") as whole:
            whole.truncate(size)
        yield file


def _read_with_library(file: Path) -> dict[str, _Array]:
    """Read what the library says of each array; raises SafetensorError for a file that it refuses."""
    from safetensors import safe_open

    start = _LENGTH_BYTES + int.from_bytes(file.open("rb").read(_LENGTH_BYTES), "little")
    found: dict[str, _Array] = {}
    with safe_open(file, "numpy") as opened:
        for name in opened.offset_keys():
            part = opened.get_slice(name)
            dtype, shape = part.get_dtype(), tuple(part.get_shape())
            nbytes = BY_NAME[dtype].nbytes(shape) if dtype in BY_NAME else 0
            found[name] = dtype, shape, start if nbytes else -1
            start += nbytes
    return found


def _list_arrays(header: SafetensorsHeader) -> dict[str, _Array]:
    return {a.name: (a.dtype.name, a.shape, a.offset if a.nbytes else -1) for a in header.arrays}


def _list_differences(mine: Mapping[str, _Array], theirs: Mapping[str, _Array]) -> Iterator[str]:
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        own, other = mine.get(name), theirs.get(name)
        if own != other:
            yield f"{name} is {_describe_array(own)} to shardctl and {_describe_array(other)} to it"


def _describe_array(array: _Array | None) -> str:
    if array is None:
        return "unknown"
    dtype, shape, offset = array
    return f"{dtype} {list(shape)}" + (f" at byte {offset:,}" if offset >= 0 else "")


def _list_unknown_types(dtypes: set[DType]) -> list[str]:
    """List the types that this version of the library does not know: it refuses the smallest file that has one."""
    from safetensors import SafetensorError, deserialize

    unknown = []
    for dtype in sorted(dtypes, key=str):
        smallest = encode_header([("a", dtype, (dtype.unit_elements,))], {})
        try:
            deserialize(smallest.header + bytes(dtype.unit_bytes))  # type: ignore[no-untyped-call]
        except SafetensorError:
            unknown.append(dtype.name)
    return unknown
