"""Reads a pickle without running it: turns opcodes into a tree of plain containers and inert nodes.

Nothing is imported and nothing is called: a global is a name, a call is a note that a call was asked for. The opcodes
are those of protocols 0 to 5 (CPython `Lib/pickletools.py`).
"""

from __future__ import annotations

import codecs
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import UnsupportedError
from shardctl.base.garbage_collection import pause_garbage_collection
from shardctl.libraries.torch_save.pickle_state import FLAT, NODE, PassedError, PickleLimits, PickleState
from shardctl.libraries.torch_save.pickle_tree import CallNode, GlobalNode, ParsedPickle, PersistentNode

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardctl.libraries.torch_save.pickle_budget import PickleBudget
    from shardctl.libraries.torch_save.pickle_state import PickleShortcut

_HIGHEST_PROTOCOL: Final = 5
_MAX_INTEGER_BYTES: Final = 1 << 10
"""Longest integer, in bytes."""
_OPCODES_PER_CHECK: Final = 64
"""Opcodes run between two looks at what was spent."""
_BUILTIN_SET: Final = GlobalNode("builtins", "set")
_BUILTIN_FROZENSET: Final = GlobalNode("builtins", "frozenset")

_u4 = struct.Struct("<I").unpack_from
_i4 = struct.Struct("<i").unpack_from
_f8 = struct.Struct(">d").unpack_from


def parse_pickle(
    data: bytes,
    where: str,
    *,
    start: int = 0,
    limits: PickleLimits = PickleLimits(),  # noqa: B008 - frozen
    budget: PickleBudget | None = None,
    shortcut: PickleShortcut | None = None,
) -> ParsedPickle:
    """Read the pickle that begins at `start` of `data`; `where` names it in messages.

    `budget` is that of all pickles of a checkpoint, and is charged. `shortcut` may fold what it knows; a pickle that
    refers to a part of that is read again without it.

    Raises TruncatedError if `data` ends first, SourceError if it is malformed, HostileError if it mentions a name
    that runs code or exceeds `limits`, UnsupportedError if only its writer could resolve it.
    """
    if budget is not None:
        budget.collect_cycles()
        limits = replace(limits, opcodes=max(min(limits.opcodes, budget.opcodes), 0))
    machine = _PickleMachine(data, where, start, limits, shortcut)
    try:
        with pause_garbage_collection():
            try:
                return machine.run()
            except PassedError:
                machine = _PickleMachine(data, where, start, limits)
                return machine.run()
    finally:
        if budget is not None:
            budget.take_run(machine.ran, machine.spent)


class _PickleMachine(PickleState):
    """One handler for each opcode."""

    __slots__ = ()

    def run(self) -> ParsedPickle:
        """Return every opcode up to STOP."""
        try:
            self._run_opcodes()
            value = self.stack.pop()
        except struct.error:
            self.raise_truncated()
        except IndexError:
            if self.pos >= len(self.data):
                self.raise_truncated()
            self.raise_malformed("takes more from the stack than is on it")
        except KeyError as error:  # only the table of handlers raises it
            self.raise_malformed(f"has the unknown opcode {error.args[0]:#04x}")
        except (ValueError, OverflowError) as error:  # of int(), float() and decode()
            self.raise_malformed(f"has an argument that does not parse ({error})")
        if self.stack or self.marked:
            self.raise_malformed("stops with values left on its stack")
        return ParsedPickle(value, tuple(self.persistents), tuple(self.globals.values()), self.pos)

    def _run_opcodes(self) -> None:
        data, handlers, limits = self.data, _OPCODE_HANDLERS, self.limits
        for before in range(0, limits.opcodes, _OPCODES_PER_CHECK):
            self.ran = before
            for _ in range(_OPCODES_PER_CHECK):
                code = data[self.pos]
                self.pos += 1
                if code == _STOP_OPCODE:
                    return
                handlers[code](self)
            if self.spent > limits.memory:
                self.raise_hostile(f"asks for more than {limits.memory >> 20} MiB of objects")
        self.ran = limits.opcodes
        self.raise_hostile(f"has more than {limits.opcodes:,} opcodes, or those of the checkpoint's files do together")

    # Stack and memo

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.close_mark()

    def pop_mark(self) -> None:
        self.close_mark()

    def dup(self) -> None:
        self.stack.append(self.stack[-1])

    def get(self) -> None:
        self.recall(int(self.line()))

    def binget(self) -> None:
        self.recall(self.read_uint8())

    def long_binget(self) -> None:
        self.recall(self.read_uint32())

    def put(self) -> None:
        self.remember(int(self.line()))

    def binput(self) -> None:
        self.remember(self.read_uint8())

    def long_binput(self) -> None:  # a quarter of all opcodes, so spelled out
        index = _u4(self.data, self.pos)[0]
        self.pos += 4
        if index == len(self.memo):
            self.memo.append(self.stack[-1])
        else:
            self.remember(index)

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])

    # Scalars

    def none(self) -> None:
        self.stack.append(None)

    def true(self) -> None:
        self.stack.append(True)

    def false(self) -> None:
        self.stack.append(False)

    def int_line(self) -> None:
        line = self.line()
        self.stack.append({b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line))

    def long_line(self) -> None:
        self.stack.append(int(self.line().removesuffix(b"L")))

    def binint(self) -> None:
        self.stack.append(_i4(self.data, self.pos)[0])
        self.pos += 4
        self.spent += 32

    def binint1(self) -> None:
        self.stack.append(self.data[self.pos])
        self.pos += 1

    def binint2(self) -> None:
        self.stack.append(self.read_uint16())
        self.spent += 32

    def _push_long(self, size: int) -> None:
        if size > _MAX_INTEGER_BYTES:
            self.raise_hostile(f"has an integer of {size:,} bytes")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def long1(self) -> None:
        self._push_long(self.read_uint8())

    def long4(self) -> None:
        self._push_long(self.read_uint32())

    def float_line(self) -> None:
        self.stack.append(float(self.line()))

    def binfloat(self) -> None:
        self.stack.append(_f8(self.data, self.pos)[0])
        self.pos += 8
        self.spent += 32

    # Text and bytes

    def string_line(self) -> None:
        line = self.line().strip()
        if len(line) < 2 or line[0] != line[-1] or line[0] not in b"'\"":  # noqa: PLR2004 - two quotes
            self.raise_malformed("has a string without quotes")
        self.stack.append(_decode_text(codecs.escape_decode(line[1:-1])[0]))

    def binstring(self) -> None:
        self.stack.append(_decode_text(self.take(self.read_uint32())))

    def short_binstring(self) -> None:
        self.stack.append(_decode_text(self.take(self.read_uint8())))

    def unicode_line(self) -> None:
        self.stack.append(self.line().decode("raw-unicode-escape"))

    def binunicode(self) -> None:
        self.stack.append(self.text(self.read_uint32()))

    def short_binunicode(self) -> None:
        self.stack.append(self.text(self.read_uint8()))

    def binunicode8(self) -> None:
        self.stack.append(self.text(self.read_uint64()))

    def binbytes(self) -> None:
        self.stack.append(self.take(self.read_uint32()))

    def short_binbytes(self) -> None:
        self.stack.append(self.take(self.read_uint8()))

    def binbytes8(self) -> None:
        self.stack.append(self.take(self.read_uint64()))

    # Containers

    def empty_list(self) -> None:
        self.stack.append([])
        self.spent += NODE

    def empty_dict(self) -> None:
        self.stack.append({})
        self.spent += NODE

    def empty_tuple(self) -> None:
        self.stack.append(())

    def empty_set(self) -> None:
        self.push_call(_BUILTIN_SET, ())

    def make_frozenset(self) -> None:
        self.push_call(_BUILTIN_FROZENSET, (self.close_mark(),))

    def make_list(self) -> None:
        items = self.close_mark()
        self.spent += NODE + 8 * len(items)
        self.stack.append(items)

    def make_tuple(self) -> None:
        items = tuple(self.close_mark())
        self.spent += FLAT + 8 * len(items)
        self.stack.append(items)

    def tuple1(self) -> None:
        self.stack[-1] = (self.stack[-1],)
        self.spent += FLAT + 8

    def tuple2(self) -> None:
        second = self.stack.pop()
        self.stack[-1] = (self.stack[-1], second)
        self.spent += FLAT + 16

    def tuple3(self) -> None:
        third, second = self.stack.pop(), self.stack.pop()
        self.stack[-1] = (self.stack[-1], second, third)
        self.spent += FLAT + 24

    def make_dict(self) -> None:
        items = self.close_mark()
        self.spent += NODE
        target: dict[Any, Any] = {}
        self.store(target, items)
        self.stack.append(target)

    def append(self) -> None:
        value = self.stack.pop()
        self.extend(self.stack[-1], [value])

    def appends(self) -> None:
        values = self.close_mark()
        self.extend(self.stack[-1], values)

    def setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.store(self.stack[-1], [key, value])

    def setitems(self) -> None:
        items = self.close_mark()
        self.store(self.stack[-1], items)

    # Names and calls

    def global_line(self) -> None:
        module = self.line().decode()
        self.stack.append(self.named(module, self.line().decode()))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(self.named(module, name))

    def reduce(self) -> None:
        args = self.stack.pop()
        self.push_call(self.stack.pop(), args)

    def newobj(self) -> None:
        args = self.stack.pop()
        self.push_call(self.stack.pop(), args, new=True)

    def newobj_ex(self) -> None:
        kwargs, args = self.stack.pop(), self.stack.pop()
        if not isinstance(kwargs, dict):
            self.raise_malformed("calls with keyword arguments that are no dict")
        self.push_call(self.stack.pop(), args, kwargs, new=True)

    def inst(self) -> None:
        module = self.line().decode()
        function = self.named(module, self.line().decode())
        self.push_call(function, tuple(self.close_mark()))

    def obj(self) -> None:
        items = self.close_mark()
        if not items:
            self.raise_malformed("makes an object of nothing")
        self.push_call(items[0], tuple(items[1:]))

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, CallNode):
            self.raise_malformed(f"sets the state of a {type(target).__name__}")
        if target.state is not None:
            self.raise_malformed("sets the state of an object twice")
        target.state = state
        if self.shortcut is not None and not self.attributes:
            self.shortcut.fold_objects(self)

    def persid(self) -> None:
        self.stack.append(self.line().decode())
        self.binpersid()

    def binpersid(self) -> None:
        node = PersistentNode(self.stack.pop())
        self.persistents.append(node)
        self.stack.append(node)
        self.spent += NODE

    # The frame of it all

    def proto(self) -> None:
        protocol = self.read_uint8()
        if protocol > _HIGHEST_PROTOCOL:
            raise UnsupportedError(f"{self.where}: pickle protocol {protocol} is newer than {_HIGHEST_PROTOCOL}")

    def frame(self) -> None:
        size = self.read_uint64()
        if size > len(self.data) - self.pos:
            self.raise_truncated()

    def extension(self) -> None:
        raise UnsupportedError(f"{self.where}: the pickle uses a copyreg extension code, which only its writer knows")

    def buffer(self) -> None:
        raise UnsupportedError(f"{self.where}: the pickle keeps data in out-of-band buffers, which are not in the file")


_STOP_OPCODE: Final = ord(".")
_OPCODE_HANDLERS: Final[dict[int, Callable[[_PickleMachine], None]]] = {
    ord("("): _PickleMachine.open_mark,
    ord("0"): _PickleMachine.pop,
    ord("1"): _PickleMachine.pop_mark,
    ord("2"): _PickleMachine.dup,
    ord("F"): _PickleMachine.float_line,
    ord("I"): _PickleMachine.int_line,
    ord("J"): _PickleMachine.binint,
    ord("K"): _PickleMachine.binint1,
    ord("L"): _PickleMachine.long_line,
    ord("M"): _PickleMachine.binint2,
    ord("N"): _PickleMachine.none,
    ord("P"): _PickleMachine.persid,
    ord("Q"): _PickleMachine.binpersid,
    ord("R"): _PickleMachine.reduce,
    ord("S"): _PickleMachine.string_line,
    ord("T"): _PickleMachine.binstring,
    ord("U"): _PickleMachine.short_binstring,
    ord("V"): _PickleMachine.unicode_line,
    ord("X"): _PickleMachine.binunicode,
    ord("a"): _PickleMachine.append,
    ord("b"): _PickleMachine.build,
    ord("c"): _PickleMachine.global_line,
    ord("d"): _PickleMachine.make_dict,
    ord("}"): _PickleMachine.empty_dict,
    ord("e"): _PickleMachine.appends,
    ord("g"): _PickleMachine.get,
    ord("h"): _PickleMachine.binget,
    ord("i"): _PickleMachine.inst,
    ord("j"): _PickleMachine.long_binget,
    ord("l"): _PickleMachine.make_list,
    ord("]"): _PickleMachine.empty_list,
    ord("o"): _PickleMachine.obj,
    ord("p"): _PickleMachine.put,
    ord("q"): _PickleMachine.binput,
    ord("r"): _PickleMachine.long_binput,
    ord("s"): _PickleMachine.setitem,
    ord("t"): _PickleMachine.make_tuple,
    ord(")"): _PickleMachine.empty_tuple,
    ord("u"): _PickleMachine.setitems,
    ord("G"): _PickleMachine.binfloat,
    ord("B"): _PickleMachine.binbytes,
    ord("C"): _PickleMachine.short_binbytes,
    0x80: _PickleMachine.proto,
    0x81: _PickleMachine.newobj,
    0x82: _PickleMachine.extension,
    0x83: _PickleMachine.extension,
    0x84: _PickleMachine.extension,
    0x85: _PickleMachine.tuple1,
    0x86: _PickleMachine.tuple2,
    0x87: _PickleMachine.tuple3,
    0x88: _PickleMachine.true,
    0x89: _PickleMachine.false,
    0x8A: _PickleMachine.long1,
    0x8B: _PickleMachine.long4,
    0x8C: _PickleMachine.short_binunicode,
    0x8D: _PickleMachine.binunicode8,
    0x8E: _PickleMachine.binbytes8,
    0x8F: _PickleMachine.empty_set,
    0x90: _PickleMachine.appends,  # ADDITEMS
    0x91: _PickleMachine.make_frozenset,
    0x92: _PickleMachine.newobj_ex,
    0x93: _PickleMachine.stack_global,
    0x94: _PickleMachine.memoize,
    0x95: _PickleMachine.frame,
    0x96: _PickleMachine.binbytes8,  # BYTEARRAY8
    0x97: _PickleMachine.buffer,
    0x98: _PickleMachine.buffer,
}


def _decode_text(data: bytes) -> str | bytes:
    """Return a Python 2 string: text if it is UTF-8, as torch.load reads it, else bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
