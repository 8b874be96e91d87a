"""One tensor or one object as torch.save writes it: what stands before its bytes in the zip archive, and what after.

Layout: torch `serialization.py` and `caffe2/serialize/inline_container.h`. The small records come first, so that what
is between head and tail is the tensor alone, 64 bytes from the item's start or a multiple. Its CRC-32 is 0, as after
`torch.serialization.set_crc32_options(False)`: it is not known before the bytes are.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from shardctl.errors import UnsupportedError
from shardctl.layouts.pickle_writer import Made, Name, Outside, Value, dump

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.dtype import DType

_STORAGES: Final = {
    "BF16": "BFloat16Storage",
    "BOOL": "BoolStorage",
    "C64": "ComplexFloatStorage",
    "F16": "HalfStorage",
    "F32": "FloatStorage",
    "F64": "DoubleStorage",
    "I16": "ShortStorage",
    "I32": "IntStorage",
    "I64": "LongStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
}
"""Types that have a storage of their own; later ones are in untyped storages, which torch reads since 2.3."""
_ROOT: Final = "archive/"
_ALIGNMENT: Final = 64
_FULL: Final = 0xFFFFFFFF
_NO_TIME: Final = (0, 0x21)
"""Midnight of 1 January 1980, the first day that zip knows."""


def object_item(value: Value) -> bytes:
    """A value of plain Python."""
    head, tail = _archive([("data.pkl", dump(value, 2)), ("byteorder", b"little"), ("version", b"3\n")], None)
    return head + tail


@lru_cache(maxsize=4096)
def tensor_item(dtype: DType, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What stands before and after the bytes of a row-major tensor.

    Raises UnsupportedError for a type that torch has not, or that keeps several elements in a byte.
    """
    if not dtype.torch or dtype.unit_elements > 1:
        raise UnsupportedError(f"torch does not save tensors of {dtype} whose elements can be told apart")
    numel = dtype.nbytes(shape) // dtype.unit_bytes
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    kind = _STORAGES.get(dtype.name)
    hooks = Made(Name("collections", "OrderedDict"))
    if kind is not None:
        storage = Outside(("storage", Name("torch", kind), "0", "cpu", numel))
        args: tuple[Value, ...] = (storage, 0, shape, tuple(reversed(strides)), False, hooks)
        tree = Made(Name("torch._utils", "_rebuild_tensor_v2"), args)
    else:
        storage = Outside(("storage", Name("torch.storage", "UntypedStorage"), "0", "cpu", dtype.nbytes(shape)))
        args = (storage, 0, shape, tuple(reversed(strides)), False, hooks, Name("torch", dtype.torch))
        tree = Made(Name("torch._utils", "_rebuild_tensor_v3"), args)
    records = [("data.pkl", dump(tree, 2)), ("byteorder", b"little"), ("version", b"3\n")]
    return _archive(records, dtype.nbytes(shape))


def _archive(records: Sequence[tuple[str, bytes]], data: int | None) -> tuple[bytes, bytes]:
    """Head and tail of an archive of `records` and, if `data` is not None, of a storage of so many bytes."""
    head, directory = b"", b""
    for name, content in records:
        directory += _central(name, zlib.crc32(content), len(content), len(head))
        head += _local(name, zlib.crc32(content), len(content)) + content
    if data is not None:
        name = "data/0"
        directory += _central(name, 0, data, len(head))
        bare = len(head) + len(_local(name, 0, data))
        padding = -(bare + 4) % _ALIGNMENT
        head += _local(name, 0, data, padding)
    return head, directory + _end(len(records) + (data is not None), len(directory), len(head) + (data or 0))


def _local(name: str, crc: int, size: int, padding: int | None = None) -> bytes:
    full = (_ROOT + name).encode()
    extra = _wide(size)
    if padding is not None:
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    narrow = min(size, _FULL)
    return (
        struct.pack("<4s5H3I2H", b"PK\x03\x04", 45, 0, 0, *_NO_TIME, crc, narrow, narrow, len(full), len(extra))
        + full
        + extra
    )


def _central(name: str, crc: int, size: int, header: int) -> bytes:
    full = (_ROOT + name).encode()
    extra, narrow = _wide(size), min(size, _FULL)
    return (
        struct.pack(
            "<4s6H3I5H2I",
            b"PK\x01\x02",
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
            header,
        )
        + full
        + extra
    )


def _wide(size: int) -> bytes:
    """The zip64 field, if the size needs one."""
    return struct.pack("<2H2Q", 1, 16, size, size) if size >= _FULL else b""


def _end(count: int, length: int, first: int) -> bytes:
    """What follows the directory of `count` records, `length` bytes from byte `first`."""
    wide = b""
    if first >= _FULL:
        wide = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, first)
        wide += struct.pack("<4sIQI", b"PK\x06\x07", 0, first + length, 1)
    return wide + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, length, min(first, _FULL), 0)
