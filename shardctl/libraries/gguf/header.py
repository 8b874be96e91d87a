"""Reads the header of a GGUF file: its settings, and the name, type, shape and place of every tensor.

The layout is that of ggml's `docs/gguf.md`, versions 2 and 3, little-endian. Whatever a header asks for is bounded
before anything is made of it: lists are passed over, and of settings only numbers and short texts are kept.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME, DType
from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.storage import read_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.storage import Source

MAGIC: Final = b"GGUF"
_SUPPORTED_VERSIONS: Final = (2, 3)
_NUMBER_FORMATS_BY_TYPE: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"
}  # fmt: skip
"""By its number in a header, the type of a setting, as `struct` calls it."""
_TEXT, _LIST = 8, 9
_READ_WINDOW_BYTES: Final = 1 << 20
"""Bytes that are read at once."""
_MOST_HEADER: Final = 256 << 20
"""Bytes of a header; a vocabulary of 256,000 words with its merges takes some 15 MB."""
_MOST_SETTINGS: Final = 1 << 16
_MOST_TENSORS: Final = 1 << 17
_MOST_TEXTS: Final = 1 << 24
"""Texts in all lists together."""
_LONGEST_NAME: Final = 1 << 10
_LONGEST_KEPT: Final = 1 << 12
"""Bytes of a text that is kept."""
_MOST_DIMS: Final = 4
_DEFAULT_ALIGNMENT_BYTES: Final = 32
_MAX_ELEMENTS_OR_OFFSET: Final = 1 << 62


@value_class
class GgufTensor:
    """A tensor, as a header has it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    """Outermost dim first, where the header has the innermost first."""
    offset: int
    """Of its first byte in the file."""


@value_class
class GgufHeader:
    """What a GGUF file says before its tensors."""

    settings: dict[str, int | float | str]
    """Numbers and short texts; lists are left out."""
    tensors: tuple[GgufTensor, ...]


def read_header(source: Source, path: str) -> GgufHeader:
    """Read the header of a file; raises SourceError for one that cannot be so, UnsupportedError for other versions."""
    reader = _HeaderReader(source, path)
    if reader.take(4) != MAGIC:
        raise SourceError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    version = reader.number("<I")
    if version not in _SUPPORTED_VERSIONS:
        raise UnsupportedError(
            f"{path} is GGUF version {version}; shardctl reads versions {' and '.join(map(str, _SUPPORTED_VERSIONS))}",
            hint="big-endian files have huge versions; older files are converted by llama.cpp",
        )
    tensors = reader.count("tensors", "<Q", _MOST_TENSORS)
    settings: dict[str, int | float | str] = {}
    for _ in range(reader.count("settings", "<Q", _MOST_SETTINGS)):
        key = reader.text("a key", _LONGEST_NAME)
        value = reader.value(reader.number("<I"))
        if value is not None:
            settings[key] = value
    alignment = settings.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or not 0 < alignment <= _READ_WINDOW_BYTES:
        raise SourceError(f"{path} states {alignment!r} as the alignment of its tensors")
    rows = [reader.tensor() for _ in range(tensors)]
    start = -(-reader.place // alignment) * alignment
    found = {}
    for name, dtype, shape, offset in rows:
        if name in found:
            raise SourceError(f"{path} has two tensors called {name!r}")
        end = start + offset + dtype.nbytes(shape)
        if offset % alignment or end > reader.size:
            raise SourceError(
                f"{path} has {reader.size:,} bytes, and {name} would be at {start + offset:,} to {end:,}",
                hint="the file is damaged or not complete; fetch it again",
            )
        found[name] = GgufTensor(name, dtype, shape, start + offset)
    return GgufHeader(settings, tuple(found.values()))


class _HeaderReader:
    """Takes a header apart from its start, a window at a time."""

    def __init__(self, source: Source, path: str) -> None:
        self._source, self._path = source, path
        self.size = source.files()[path].size
        self.place = 0
        self._start, self._window = 0, b""
        self._texts = 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes, of which a window has room."""
        at = self.place - self._start
        if not 0 <= at <= len(self._window) - count:
            self._pass(count)
            self.place -= count
            self._start, at = self.place, 0
            self._window = read_bytes(
                self._source, self._path, self.place, min(_READ_WINDOW_BYTES, self.size - self.place)
            )
        self.place += count
        return self._window[at : at + count]

    def number(self, kind: str) -> int:
        """Return the next number, of a kind that `struct` knows."""
        return struct.unpack(kind, self.take(struct.calcsize(kind)))[0]  # type: ignore[no-any-return]

    def count(self, what: str, kind: str, most: int) -> int:
        """Return the next number, which counts something; raises SourceError for more than can be."""
        found = self.number(kind)
        if found > min(most, self.size):
            raise SourceError(f"{self._path} says that it has {found:,} {what}", hint="the file is damaged")
        return found

    def text(self, what: str, longest: int) -> str:
        """Return the next text."""
        return self._decode(self.take(self.count(f"bytes of {what}", "<Q", longest)))

    def value(self, kind: int) -> int | float | str | None:
        """Return the next setting, or None for a list or a long text, which are passed over."""
        if kind in _NUMBER_FORMATS_BY_TYPE:
            return self.number(_NUMBER_FORMATS_BY_TYPE[kind])
        if kind == _TEXT:
            length = self.count("bytes of a text", "<Q", _MOST_HEADER)
            if length <= _LONGEST_KEPT:
                return self._decode(self.take(length))
            self._pass(length)
            return None
        if kind != _LIST:
            raise SourceError(f"{self._path} has a setting of the unknown type {kind}", hint="the file is damaged")
        kind, length = self.number("<I"), self.count("values of a list", "<Q", _MOST_HEADER)
        if kind in _NUMBER_FORMATS_BY_TYPE:
            self._pass(length * struct.calcsize(_NUMBER_FORMATS_BY_TYPE[kind]))
            return None
        self._texts += length
        if kind != _TEXT or self._texts > _MOST_TEXTS:
            raise SourceError(f"{self._path} has a list of {length:,} values of the type {kind}")
        for _ in range(length):
            self._pass(self.count("bytes of a text", "<Q", _MOST_HEADER))
        return None

    def tensor(self) -> tuple[str, DType, tuple[int, ...], int]:
        """Return the name, the type, the shape and the offset of the next tensor."""
        name = self.text("a name", _LONGEST_NAME)
        dims = self.count("dims of a tensor", "<I", _MOST_DIMS)
        shape = tuple(self.number("<Q") for _ in range(dims))[::-1]
        kind, offset = self.number("<I"), self.number("<Q")
        if kind not in BLOCK_TYPES:
            raise UnsupportedError(f"{self._path} stores {name!r} as type {kind}, which shardctl does not know")
        elements = 1
        for extent in shape:
            elements *= extent
        if elements > _MAX_ELEMENTS_OR_OFFSET or offset > _MAX_ELEMENTS_OR_OFFSET:
            raise SourceError(
                f"{self._path} says that {name!r} has the shape {list(shape)}", hint="the file is damaged"
            )
        return name, BLOCK_TYPES[kind], shape, offset

    def _decode(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise SourceError(f"{self._path} holds a string that is not UTF-8", hint="the file is damaged") from error

    def _pass(self, count: int) -> None:
        """Go on by `count` bytes; raises SourceError where the file or the largest header ends before."""
        if self.place + count > self.size:
            raise SourceError(f"{self._path} ends inside its header", hint="the file is not complete; fetch it again")
        if self.place + count > _MOST_HEADER:
            raise SourceError(f"{self._path} has a header of more than {_MOST_HEADER >> 20} MiB")
        self.place += count


@dataclass(frozen=True, eq=False)
class _BlockType(DType):
    """An element type whose elements are stored in blocks, each with scales of its own."""

    elements: int = 1
    """Elements of a block, along the last dim: a unit."""
    block_bytes: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit_elements", self.elements)
        object.__setattr__(self, "unit_bytes", self.block_bytes)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return bytes of a tensor of `shape` elements, whose rows are whole blocks."""
        if shape and shape[-1] % self.elements:
            raise UnsupportedError(
                f"rows of {shape[-1]} elements are not a whole number of {self.name} blocks, "
                f"which have {self.elements} elements"
            )
        size = self.block_bytes
        for extent in self.unit_shape(shape):
            size *= extent
        return size


def _build_block_type(name: str, elements: int, nbytes: int) -> _BlockType:
    return _BlockType(name, -(-nbytes * 8 // elements), "", elements, nbytes)


BLOCK_TYPES: Final = {
    0: BY_NAME["F32"],
    1: BY_NAME["F16"],
    2: _build_block_type("Q4_0", 32, 18),
    3: _build_block_type("Q4_1", 32, 20),
    6: _build_block_type("Q5_0", 32, 22),
    7: _build_block_type("Q5_1", 32, 24),
    8: _build_block_type("Q8_0", 32, 34),
    9: _build_block_type("Q8_1", 32, 40),
    10: _build_block_type("Q2_K", 256, 84),
    11: _build_block_type("Q3_K", 256, 110),
    12: _build_block_type("Q4_K", 256, 144),
    13: _build_block_type("Q5_K", 256, 176),
    14: _build_block_type("Q6_K", 256, 210),
    15: _build_block_type("Q8_K", 256, 292),
    16: _build_block_type("IQ2_XXS", 256, 66),
    17: _build_block_type("IQ2_XS", 256, 74),
    18: _build_block_type("IQ3_XXS", 256, 98),
    19: _build_block_type("IQ1_S", 256, 50),
    20: _build_block_type("IQ4_NL", 32, 18),
    21: _build_block_type("IQ3_S", 256, 110),
    22: _build_block_type("IQ2_S", 256, 82),
    23: _build_block_type("IQ4_XS", 256, 136),
    24: BY_NAME["I8"],
    25: BY_NAME["I16"],
    26: BY_NAME["I32"],
    27: BY_NAME["I64"],
    28: BY_NAME["F64"],
    29: _build_block_type("IQ1_M", 256, 56),
    30: BY_NAME["BF16"],
    34: _build_block_type("TQ1_0", 256, 54),
    35: _build_block_type("TQ2_0", 256, 66),
    39: _build_block_type("MXFP4", 32, 17),
    40: _build_block_type("NVFP4", 64, 36),
    41: _build_block_type("Q1_0", 128, 18),
}
"""By the number that a header has."""
