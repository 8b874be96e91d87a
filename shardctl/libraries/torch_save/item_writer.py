"""Writes tensors and objects as torch.save does: the parts of the zip archive before and after their bytes.

Layout: torch `serialization.py` and `caffe2/serialize/inline_container.h`. The small records come first, so that what
is between head and tail is the tensor alone, 64 bytes from the item's start or a multiple. Its CRC-32 is 0, as after
`torch.serialization.set_crc32_options(False)`: it is not known before the bytes are.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import STORAGES
from shardctl.base.errors import UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.torch_save.pickle_writer import PickleCall, PickleName, PickleReference, Value, encode_pickle
from shardctl.libraries.torch_save.zip_signatures import (
    CENTRAL,
    CENTRAL_MAGIC,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    FULL2,
    FULL4,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR,
    LOCATOR_MAGIC,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.base.dtype import DType

_ARCHIVE_ROOT_FOLDER: Final = "archive/"
_STORAGE_ALIGNMENT_BYTES: Final = 64
_NO_TIME: Final = (0, 0x21)
"""Midnight of 1 January 1980, the first day that zip knows."""


@value_class
class ArchiveOutline:
    """An archive without the bytes of its tensors."""

    size: int
    """Bytes, those of the tensors included."""
    literals: tuple[tuple[int, bytes], ...]
    """`(offset, bytes)` of everything else."""
    starts: tuple[int, ...]
    """Offset of the bytes of each storage."""


def encode_object(value: Value) -> bytes:
    """Encode a value of plain Python."""
    return build_archive(value).literals[0][1]


@lru_cache(maxsize=4096)
def encode_tensor(dtype: DType, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Encode what stands before and after the bytes of a row-major tensor.

    Raises UnsupportedError for a type that torch has not, or that keeps several elements in a byte.
    """
    (_, head), (_, tail) = build_archive(build_tensor_value(dtype, shape), (dtype.nbytes(shape),)).literals
    return head, tail


def build_tensor_value(dtype: DType, shape: tuple[int, ...], storage: int = 0) -> PickleCall:
    """Build what stands in a pickle for a row-major tensor that is all of the storage of a number; raises as above."""
    if not dtype.torch or dtype.unit_elements > 1:
        raise UnsupportedError(f"torch does not save tensors of {dtype} whose elements can be told apart")
    numel = dtype.nbytes(shape) // dtype.unit_bytes
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    kind = STORAGES.get(dtype.name)
    hooks = PickleCall(PickleName("collections", "OrderedDict"))
    if kind is not None:
        place = PickleReference(("storage", PickleName("torch", kind), str(storage), "cpu", numel))
        args: tuple[Value, ...] = (place, 0, shape, tuple(reversed(strides)), False, hooks)
        return PickleCall(PickleName("torch._utils", "_rebuild_tensor_v2"), args)
    place = PickleReference(
        ("storage", PickleName("torch.storage", "UntypedStorage"), str(storage), "cpu", dtype.nbytes(shape))
    )
    args = (place, 0, shape, tuple(reversed(strides)), False, hooks, PickleName("torch", dtype.torch))
    return PickleCall(PickleName("torch._utils", "_rebuild_tensor_v3"), args)


def build_archive(value: Value, storages: Sequence[int] = ()) -> ArchiveOutline:
    """Build an archive of `value`, whose tensors have storages of so many bytes, in the order of their numbers."""
    records = (("data.pkl", encode_pickle(value, 2)), ("byteorder", b"little"), ("version", b"3\n"))
    literal, directory = b"", bytearray()
    for name, content in records:
        directory += _encode_central_header(name, zlib.crc32(content), len(content), len(literal))
        literal += _encode_local_header(name, zlib.crc32(content), len(content)) + content
    at, literals, starts = 0, [], []
    for number, nbytes in enumerate(storages):
        name, header = f"data/{number}", at + len(literal)
        directory += _encode_central_header(name, 0, nbytes, header)
        bare = header + len(_encode_local_header(name, 0, nbytes))
        literal += _encode_local_header(name, 0, nbytes, -(bare + 4) % _STORAGE_ALIGNMENT_BYTES)
        literals.append((at, literal))
        starts.append(at + len(literal))
        at, literal = starts[-1] + nbytes, b""
    end = _encode_directory_end(len(records) + len(storages), len(directory), at + len(literal))
    literals.append((at, literal + bytes(directory) + end))
    return ArchiveOutline(at + len(literals[-1][1]), tuple(literals), tuple(starts))


def _encode_local_header(name: str, crc: int, size: int, padding: int | None = None) -> bytes:
    full = (_ARCHIVE_ROOT_FOLDER + name).encode()
    extra = _encode_zip64_field(size)
    if padding is not None:
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    narrow = min(size, FULL4)
    return LOCAL.pack(LOCAL_MAGIC, 45, 0, 0, *_NO_TIME, crc, narrow, narrow, len(full), len(extra)) + full + extra


def _encode_central_header(name: str, crc: int, size: int, header: int) -> bytes:
    full = (_ARCHIVE_ROOT_FOLDER + name).encode()
    extra, narrow = _encode_zip64_field(size, header), min(size, FULL4)
    return (
        CENTRAL.pack(
            CENTRAL_MAGIC,
            45,
            45,
            0,
            0,
            *_NO_TIME,
            crc,
            narrow,
            narrow,
            len(full),
            len(extra),
            0,
            0,
            0,
            0,
            min(header, FULL4),
        )
        + full
        + extra
    )


def _encode_zip64_field(size: int, header: int = 0) -> bytes:
    """Encode the zip64 field, with what does not fit elsewhere: the size, twice, and where the header is."""
    values = (*((size, size) if size >= FULL4 else ()), *((header,) if header >= FULL4 else ()))
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def _encode_directory_end(count: int, length: int, first: int) -> bytes:
    """Encode what follows the directory of `count` records, `length` bytes from byte `first`."""
    wide = b""
    if first >= FULL4 or count >= FULL2:
        wide = END64.pack(END64_MAGIC, END64.size - 12, 45, 45, 0, 0, count, count, length, first)
        wide += LOCATOR.pack(LOCATOR_MAGIC, 0, first + length, 1)
    many = min(count, FULL2)
    return wide + END.pack(END_MAGIC, 0, 0, many, many, length, min(first, FULL4), 0)
