"""Reads and writes the header of a safetensors file, under every rule of the format.

The rules are those of safetensors 0.8, `safetensors/src/tensor.rs` (`read_metadata`, `Metadata::validate`,
`prepare`). Stricter than the library on purpose, where what it accepts has no single meaning:

- a name, a key of `__metadata__` or a field that appears twice is refused (the library takes the last);
- an entry is an object of exactly `dtype`, `shape` and `data_offsets`, and its dtype a string (the library also
  takes unknown fields, and an array or ``{"F32": null}`` where its JSON reader happens to);
- at most 500,000 tensors in a file, 32 dims in a shape, 10,000 characters in a name and in an entry.
"""

from __future__ import annotations

import json
import re
from json.encoder import encode_basestring
from operator import attrgetter
from sys import intern
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.dtype import BY_NAME, DTYPES, DType
from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.files.impostors import refuse_impostor
from shardctl.libraries.files.json_members import (
    LONGEST_KEY,
    PLAIN_END,
    PLAIN_KEY,
    MalformedError,
    check_end_of_text,
    parse_flat_object,
    parse_string,
    skip_space,
    walk_object,
)
from shardctl.storage.entry_limit import charge_entries

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardctl.storage import Source

LARGEST_HEADER: Final = 100_000_000
"""Bytes of the JSON; the library's own limit."""
MOST_ARRAYS: Final = 500_000
"""Arrays per file: five times the largest model known; a manifest of more would take gigabytes."""
MOST_DIMS: Final = 32
"""NumPy's own limit before 2.0."""
_LONGEST_ENTRY: Final = 10_000
_STATE_MARK: Final = b'"optimizer.'
"""What the names of optimizer states begin with, which may be left behind."""
_ENTRY_MARK: Final = b'"data_offsets"'
"""Every entry of a header has it once."""
_LENGTH_BYTES: Final = 8
HEADER_ALIGNMENT: Final = 8
"""Spaces fill up the JSON to a multiple of it."""
_FIRST_READ: Final = 1 << 16
"""Bytes of a file that is far away in which most headers fit."""
_PER_ENTRY: Final = 160
"""Bytes of an entry without its name, generously: ``"":{"dtype":"F8_E4M3","shape":[...],"data_offsets":[...]},``."""
_HEADER_OVERHEAD_BYTES: Final = 512
"""Bytes of a header besides its entries: its length, its metadata, and what pads it."""
_UINT64_LIMIT: Final = 1 << 64
METADATA: Final = "__metadata__"
spell_text: Final = encode_basestring
"""Spells a string as JSON, characters beyond ASCII as they are."""
_TENSOR_ENTRY_FIELDS: Final = frozenset({"dtype", "shape", "data_offsets"})
_SIZE_PATTERN: Final = "(?:0|[1-9][0-9]{0,18}+)"
_PLAIN_MEMBER: Final = re.compile(
    rf'{PLAIN_KEY}\{{"dtype": ?"([A-Z0-9_]++)", ?"shape": ?\[((?:{_SIZE_PATTERN}(?:, ?{_SIZE_PATTERN}){{0,15}})?)\], ?'
    rf'"data_offsets": ?\[({_SIZE_PATTERN}), ?({_SIZE_PATTERN})\]\}}{PLAIN_END}'
)
"""A tensor as every known library spells it: not a rule of its own, only a fifth of the time of the general way."""
_TO_TYPE: Final = '":{"dtype":"'
_TO_OFFSETS: Final = '],"data_offsets":['
_TO_NEXT: Final = '},"'
_COMPACT_KIND: Final = re.compile(rf'([A-Z0-9_]+)","shape":\[((?:{_SIZE_PATTERN}(?:,{_SIZE_PATTERN}){{0,15}})?)')
"""What stands between the first two of these: type and shape as the library itself spells them."""


@value_class
class HeaderArray:
    """One entry of a header: an array that the file stores whole and row-major."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    """In elements."""
    offset: int
    """Byte offset of the array *in the file*."""
    nbytes: int


@value_class
class SafetensorsHeader:
    """What the header of one file says; the arrays cover the rest of the file exactly."""

    path: str
    size: int
    """Bytes of the whole file."""
    arrays: tuple[HeaderArray, ...]
    """In the order in which the header lists them."""
    metadata: Mapping[str, str]
    """`__metadata__`; empty where the header has none."""


def read_header(source: Source, path: str) -> SafetensorsHeader:
    """Read and check the header of one file; the tensors' data is not touched.

    Raises:
        SourceError: the file breaks a rule of the format, or is not a safetensors file at all.
        UnsupportedError: it has a dtype, or more arrays or dims, than shardctl handles.
        MemoryBudgetError: the source has more tensors than the run's memory can hold (`storage.entry_limit`).
    """
    size = source.files()[path].size
    first = bytearray(min(size, _LENGTH_BYTES))
    source.read_at(path, 0, memoryview(first))
    length = int.from_bytes(first, "little")
    if size < _LENGTH_BYTES or length > min(LARGEST_HEADER, size - _LENGTH_BYTES):
        refuse_impostor(source, path, "a safetensors file")
        raise SourceError(*_describe_bad_length(path, size, length))
    start = _LENGTH_BYTES + length
    text = bytearray(length)
    source.read_at(path, _LENGTH_BYTES, memoryview(text))
    charge_entries(source, text.count(_ENTRY_MARK) - text.count(_STATE_MARK))
    parsed = _ParsedHeader(start)
    try:
        parsed.read(str(text, "utf-8"))
        del text
        end = _check_covered(parsed.entries, start)
    except UnicodeDecodeError as error:
        refuse_impostor(source, path, "a safetensors file")
        raise SourceError(f"the header of {path} is not UTF-8 text at byte {error.start}") from None
    except MalformedError as error:
        refuse_impostor(source, path, "a safetensors file")
        raise SourceError(f"the header of {path} is malformed: {error}") from error
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error.message}", hint=error.hint) from error
    if end != size:
        raise _build_size_error(path, size, end)
    return SafetensorsHeader(path, size, tuple(parsed.entries), parsed.metadata)


def estimate_header_size(names: Iterable[str] | None) -> int:
    """Estimate how many bytes of a file its header probably has; `names` are those of its arrays, if they are known."""
    return (
        _FIRST_READ
        if names is None
        else sum(len(name.encode()) + _PER_ENTRY for name in names) + _HEADER_OVERHEAD_BYTES
    )


def looks_like_header(source: Source, path: str) -> bool:
    """Return whether the first bytes could begin a safetensors file: a length that fits, then an opening brace."""
    size = source.files()[path].size
    if size < _LENGTH_BYTES + 2:
        return False
    head = bytearray(min(size, _LENGTH_BYTES + 64))
    source.read_at(path, 0, memoryview(head))
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    text = head[_LENGTH_BYTES:].lstrip(b" \t\n\r")
    return length <= min(LARGEST_HEADER, size - _LENGTH_BYTES) and (not text or text.startswith(b"{"))


def _describe_bad_length(path: str, size: int, length: int) -> tuple[str]:
    if size < _LENGTH_BYTES:
        return (f"{path} has {size} bytes; a safetensors file begins with the 8 bytes of its header's length",)
    if length > LARGEST_HEADER:
        return (f"{path} declares a header of {length:,} bytes; the format allows {LARGEST_HEADER:,}",)
    return (f"{path} ends inside its header: {length:,} bytes are declared, {size - _LENGTH_BYTES:,} follow",)


def _build_size_error(path: str, size: int, end: int) -> SourceError:
    if size < end:
        return SourceError(
            f"{path} is truncated: it has {size:,} bytes, and its header describes {end:,}",
            hint="the download or the copy is incomplete; fetch the file again",
        )
    return SourceError(f"{path} has {size - end:,} bytes after its last tensor; the format allows none")


class _ParsedHeader:
    """The state of one pass over a header's text."""

    def __init__(self, start: int) -> None:
        self.entries: list[HeaderArray] = []
        self.metadata: dict[str, str] = {}
        self._names: set[str] = set()
        self._kinds: dict[tuple[str, str], tuple[DType, tuple[int, ...], int]] = {}
        self._start = start
        self._text = ""

    def read(self, text: str) -> None:
        self._text = text
        check_end_of_text(
            text, walk_object(text, skip_space(text, 0), self._parse_member, plain=self._parse_plain_members)
        )

    def _parse_plain_members(self, at: int) -> int:
        """Take the plain members from `at` on; what is wrong with one is for `_parse_member` to say."""
        text, start, kinds, names, entries = self._text, self._start, self._kinds, self._names, self.entries
        if not entries and _PLAIN_MEMBER.match(text, at):
            at = self._take_compact(at)
        while (member := _PLAIN_MEMBER.match(text, at)) is not None:
            name, dtype, extents, first, last = member.groups()
            kind = kinds.get((dtype, extents))
            if kind is None:
                shape = [int(extent) for extent in extents.split(",")] if extents else []
                known = _build_array(name, dtype, shape, 0, int(last) - int(first))
                kind = kinds[dtype, extents] = known.dtype, known.shape, known.nbytes
            begin, nbytes = int(first), kind[2]
            if int(last) - begin != nbytes or name in names or name == METADATA or len(entries) == MOST_ARRAYS:
                break
            name = intern(name)  # models have it, too
            names.add(name)
            entries.append(HeaderArray(name, kind[0], kind[1], start + begin, nbytes))
            at = member.end()
        return at

    def _take_compact(self, at: int) -> int:
        """Take all members but the last at one go, if each is spelled as the library does, in the order of the data.

        Returns the position of the last; `at` if any is spelled in another way, and none is taken.
        """
        text = self._text
        end = len(text.rstrip(" "))
        if not text.endswith("]}}", at, end) or text.count(_TO_NEXT, at, end) >= MOST_ARRAYS:
            return at
        *pieces, last = text[at + 1 : end - len("}}")].split(_TO_NEXT)
        kinds: dict[str, tuple[DType, tuple[int, ...], int]] = {}
        arrays: list[HeaderArray] = []
        start, begin = self._start, 0
        for piece in pieces:
            name, _, rest = piece.partition(_TO_TYPE)
            spelled, _, offsets = rest.partition(_TO_OFFSETS)
            kind = kinds.get(spelled)
            if kind is None:
                kind = _parse_compact_kind(name, spelled)
                if kind is None:
                    return at
                kinds[spelled] = kind
            dtype, shape, nbytes = kind
            stop = begin + nbytes
            if offsets != f"{begin},{stop}]":
                return at
            arrays.append(HeaderArray(intern(name), dtype, shape, start + begin, nbytes))  # models have the name, too
            begin = stop
        names = {array.name for array in arrays}
        together = "".join(names)
        if len(names) < len(arrays) or not names.isdisjoint((METADATA, *self._names)) or not together.isprintable():
            return at
        if '"' in together or "\\" in together or max(map(len, names), default=0) > LONGEST_KEY:
            return at
        self._names |= names
        self.entries += arrays
        return end - len("}}") - len(last) - 1

    def _parse_member(self, name: str, at: int) -> int:
        if name in self._names:
            raise MalformedError(f"the name {name!r} appears twice")
        self._names.add(name)
        if name == METADATA:
            if self._text.startswith("null", at):
                return at + len("null")
            return walk_object(self._text, at, self._metadata_member)
        if len(self.entries) == MOST_ARRAYS:
            raise UnsupportedError(f"the header lists more than {MOST_ARRAYS:,} tensors")
        try:
            entry, at = parse_flat_object(self._text, at, _LONGEST_ENTRY)
        except MalformedError as error:
            raise MalformedError(f"tensor {name!r}: {error}") from error
        dtype, shape, begin, end = _parse_fields(name, entry)
        self.entries.append(_build_array(name, dtype, shape, self._start + begin, end - begin))
        return at

    def _metadata_member(self, key: str, at: int) -> int:
        if key in self.metadata:
            raise MalformedError(f"the key {key!r} of {METADATA} appears twice")
        try:
            self.metadata[key], at = parse_string(self._text, at)
        except MalformedError as error:
            raise MalformedError(f"{METADATA} maps strings to strings, but at {key!r}: {error}") from error
        return at


def _parse_fields(name: str, entry: dict[str, Any]) -> tuple[str, list[int], int, int]:
    """Parse the dtype's name, the shape and the two offsets of an entry, each of the right JSON type."""
    if entry.keys() != _TENSOR_ENTRY_FIELDS:
        odd = min(entry.keys() ^ _TENSOR_ENTRY_FIELDS)
        raise MalformedError(f"tensor {name!r} has {'an unknown' if odd in entry else 'no'} field {odd!r}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str:
        raise MalformedError(f"tensor {name!r} has a dtype that is not a string")
    if not _are_sizes(shape):
        raise MalformedError(f"tensor {name!r} has a shape that is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:  # noqa: PLR2004 - begin and end
        raise MalformedError(f"tensor {name!r} has data_offsets that are not a pair of sizes")
    return dtype, shape, *offsets


def _build_array(name: str, dtype_name: str, shape: list[int], offset: int, span: int) -> HeaderArray:
    """Build the array of an entry: its `data_offsets` give the file's byte `offset` and `span` bytes from there."""
    dtype = BY_NAME.get(dtype_name)
    if dtype is None:
        raise UnsupportedError(
            f"tensor {name!r} has the dtype {dtype_name!r}, which is not one of the {len(DTYPES)} that are known"
        )
    if len(shape) > MOST_DIMS:
        raise UnsupportedError(f"tensor {name!r} has {len(shape)} dims; at most {MOST_DIMS} are handled")
    nbytes = _compute_nbytes(name, dtype, shape)
    if span != nbytes:
        raise MalformedError(
            f"tensor {name!r} is {dtype} {shape}, which takes {nbytes:,} bytes, but its data_offsets span {span:,}"
        )
    return HeaderArray(name, dtype, tuple(shape), offset, nbytes)


def _parse_compact_kind(name: str, spelled: str) -> tuple[DType, tuple[int, ...], int] | None:
    """Parse type, shape and bytes of a tensor, spelled as the library does; None for another spelling or a new type."""
    found = _COMPACT_KIND.fullmatch(spelled)
    dtype = BY_NAME.get(found[1]) if found is not None else None
    if found is None or dtype is None:
        return None
    shape = [int(extent) for extent in found[2].split(",")] if found[2] else []
    return dtype, tuple(shape), _compute_nbytes(name, dtype, shape)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and v < _UINT64_LIMIT for v in values)


def _compute_nbytes(name: str, dtype: DType, shape: list[int]) -> int:
    """Compute bytes of the array.

    Like the library, refuses a product that overflows 64 bits even if a later factor is 0.
    """
    bits = 1
    for extent in shape:
        bits *= extent
        if bits >= _UINT64_LIMIT:
            raise MalformedError(f"tensor {name!r} has the shape {shape}, whose size overflows 64 bits")
    bits *= dtype.bits
    if bits >= _UINT64_LIMIT:
        raise MalformedError(f"tensor {name!r} is {dtype} {shape}, whose size overflows 64 bits")
    if bits % 8:
        raise MalformedError(f"tensor {name!r} is {dtype} {shape}, which does not end on a byte")
    return bits // 8


def _check_covered(arrays: list[HeaderArray], start: int) -> int:
    """Check that the arrays follow each other from `start` without hole or overlap; returns the end of the last.

    An array of no bytes lies at the running offset too.
    """
    end = start
    for array in sorted(arrays, key=attrgetter("offset", "nbytes")):
        if array.offset != end:
            what = "overlaps the one before it" if array.offset < end else "leaves a hole before it"
            raise MalformedError(
                f"tensor {array.name!r} begins at data byte {array.offset - start:,} and {what}; "
                f"{end - start:,} is the next free one"
            )
        end += array.nbytes
    return end


@value_class
class EncodedHeader:
    """A header ready to be written, and where the data must go."""

    header: bytes
    """The first bytes of the file: the length, the JSON, and spaces up to a multiple of 8."""
    offsets: dict[str, int]
    """Byte offset in the file of each array, by name and in the order of the file."""
    size: int
    """Bytes of the whole file."""


def encode_header(arrays: Iterable[tuple[str, DType, Sequence[int]]], metadata: Mapping[str, str]) -> EncodedHeader:
    """Lay out a file that holds `arrays`, as the library would: by dtype, the widest alignment first, then by name.

    The result depends on the set of arrays alone, not on their order. Keys of `metadata` are sorted, where the
    library's order is random; an empty `metadata` is left out.

    >>> from shardctl.base.dtype import BY_NAME
    >>> encoded = encode_header([("w", BY_NAME["BF16"], (2, 3))], {"format": "pt"})
    >>> encoded.offsets["w"] == len(encoded.header), encoded.size - len(encoded.header)
    (True, 12)

    Raises:
        UnsupportedError: a name cannot be a tensor's, an array does not end on a byte, or the header is too large.
    """
    entries = [spell_metadata(metadata)] if metadata else []
    relative: dict[str, int] = {}
    sizes: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
    end = 0
    for name, dtype, shape in sorted(arrays, key=_get_file_order):
        if name == METADATA:
            raise UnsupportedError(f"a safetensors file cannot hold a tensor named {METADATA!r}")
        assert name not in relative, f"two arrays named {name!r} in one file"  # noqa: S101 - a layout's bug
        kind = (dtype.name, tuple(shape))
        if kind not in sizes:
            sizes[kind] = dtype.nbytes(shape), spell_kind(dtype, shape)
        nbytes, said = sizes[kind]
        entries.append(spell_entry(name, said, end, end + nbytes))
        relative[name] = end
        end += nbytes
    try:
        text = join_members(entries).encode()
    except UnicodeEncodeError as error:
        odd = error.object[error.start : error.end]
        raise UnsupportedError(f"a name with the lone surrogate {odd!r} cannot be written as Unicode text") from error
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    if len(text) > LARGEST_HEADER:
        raise UnsupportedError(
            f"a header for {len(relative):,} tensors takes {len(text):,} bytes; safetensors allows {LARGEST_HEADER:,}"
        )
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return EncodedHeader(header, {name: len(header) + at for name, at in relative.items()}, len(header) + end)


def pad_header(header: bytes, more: int) -> bytes:
    r"""Return a header with `more` spaces at its end, a multiple of 8.

    >>> pad_header(encode_header([], {}).header, 8)
    b'\x10\x00\x00\x00\x00\x00\x00\x00{}              '

    Raises UnsupportedError for one that is then larger than the library reads.
    """
    size = len(header) - _LENGTH_BYTES + more
    if size > LARGEST_HEADER:
        raise UnsupportedError(f"a padded header takes {size:,} bytes; safetensors allows {LARGEST_HEADER:,}")
    return size.to_bytes(_LENGTH_BYTES, "little") + header[_LENGTH_BYTES:] + b" " * more


def measure_file(spelled: int, nbytes: int) -> int:
    """Measure the file whose header takes `spelled` bytes of JSON, and whose arrays take `nbytes`."""
    return _LENGTH_BYTES + spelled + -spelled % HEADER_ALIGNMENT + nbytes


def join_members(members: Iterable[str]) -> str:
    """Join the members of a header, each spelled already."""
    return f"{{{','.join(members)}}}"


def spell_metadata(metadata: Mapping[str, str]) -> str:
    """Spell the member of a header that is no array."""
    return f'"{METADATA}":{_encode_compact_json(dict(sorted(metadata.items())))}'


def spell_kind(dtype: DType, shape: Sequence[int]) -> str:
    """Spell what the entries of all arrays of a type and a shape have in common."""
    return f'{{"dtype":"{dtype.name}","shape":{_encode_compact_json(list(shape))}'


def spell_entry(name: str, kind: str, begin: int, end: int) -> str:
    """Spell the entry of an array, whose `kind` is spelled already, between two bytes of the data."""
    return f'{spell_text(name)}:{kind},"data_offsets":[{begin},{end}]}}'


def _encode_compact_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


ALIGNMENT: Final = {dtype.name: -position for position, dtype in enumerate(DTYPES)}
"""The library sorts by the position in its enum `Dtype`, whose order `DTYPES` repeats."""


def _get_file_order(array: tuple[str, DType, Sequence[int]]) -> tuple[int, str]:
    return ALIGNMENT[array[1].name], array[0]
