"""Writes a pickle of plain values, names and calls, opcode by opcode, and imports nothing that it names.

The opcodes are those of CPython's `Lib/pickletools.py`; equal texts, names and marked calls are written once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Value = object
"""None, bool, int, float, str, tuple, list, dict of such, or one of the classes below."""

_ONE_BYTE_LIMIT: Final = 256
_INT32_LIMIT: Final = 1 << 31


@value_class
class PickleName:
    """A global."""

    module: str
    name: str


@value_class
class PickleCall:
    """What calling a global returns; equal ones are one object."""

    function: PickleName
    args: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PickleObject:
    """An instance of a class, with its state."""

    kind: PickleName
    state: Mapping[str, Value] | tuple[Value, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PickleReference:
    """What lies outside of the pickle, such as a storage."""

    id: Value


def encode_pickle(value: Value, protocol: int) -> bytes:
    """Encode the pickle of `value`, by protocol 2 (what torch.save writes) or 4 (Python's own).

    >>> import pickle
    >>> pickle.loads(encode_pickle({"a": [1, -2.5, None], "b": ("x" * 300, 1 << 40)}, 4))["b"][1]
    1099511627776
    """
    writer = _PickleWriter(memoizes=protocol > 2)  # noqa: PLR2004 - MEMOIZE is of protocol 4
    writer.put(value)
    return b"\x80" + bytes([protocol]) + bytes(writer.out) + b"."


class _PickleWriter:
    def __init__(self, *, memoizes: bool) -> None:
        self.out = bytearray()
        self.memo: dict[Value, int] = {}
        self.memoizes = memoizes

    def put(self, value: Value) -> None:
        """Write a value; it is on top of the stack then."""
        match value:
            case None | bool() | int() | float():
                self.out += _encode_scalar(value)
            case str():
                self.once(value, _encode_text(value))
            case PickleName():
                self.once(value, f"c{value.module}\n{value.name}\n".encode())
            case tuple():
                self.tuple(value)
            case list():
                self.items(b"](", value, b"e")
            case dict():
                self.mapping(value)
            case PickleCall():
                self.write_call(value)
            case PickleObject() | PickleReference():
                self.object(value)
            case _:
                raise AssertionError(f"{type(value).__name__} is not written")

    def once(self, value: Value, encoded: bytes) -> None:
        if not self.write_memo_reference(value):
            self.out += encoded
            self.remember(value)

    def write_memo_reference(self, value: Value) -> bool:
        index = self.memo.get(value)
        if index is None:
            return False
        self.out += b"h" + bytes([index]) if index < _ONE_BYTE_LIMIT else b"j" + struct.pack("<I", index)
        return True

    def remember(self, value: Value) -> None:
        if self.memoizes:
            self.memo[value] = len(self.memo)
            self.out += b"\x94"

    def write_call(self, value: PickleCall) -> None:
        if not self.write_memo_reference(value):
            self.put(value.function)
            self.tuple(value.args)
            self.out += b"R"
            self.remember(value)

    def object(self, value: PickleObject | PickleReference) -> None:
        if isinstance(value, PickleReference):
            self.put(value.id)
            self.out += b"Q"
            return
        self.put(value.kind)
        self.out += b")\x81"
        self.put(value.state)
        self.out += b"b"

    def tuple(self, value: tuple[Value, ...]) -> None:
        if not value:
            self.out += b")"
        else:
            self.items(b"(", value, b"t")

    def mapping(self, value: Mapping[Value, Value]) -> None:
        self.out += b"}("
        for key, each in value.items():
            self.put(key)
            self.put(each)
        self.out += b"u"

    def items(self, before: bytes, values: Iterable[Value], after: bytes) -> None:
        self.out += before
        for value in values:
            self.put(value)
        self.out += after


def _encode_text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _encode_scalar(value: float | None) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    return _encode_integer(value)


def _encode_integer(value: int) -> bytes:
    if 0 <= value < _ONE_BYTE_LIMIT:
        return b"K" + bytes([value])
    if -_INT32_LIMIT <= value < _INT32_LIMIT:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
