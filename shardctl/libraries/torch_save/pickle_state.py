"""Holds the state of the pickle machine, and limits what each opcode can do to it."""

from __future__ import annotations

import struct
from typing import Any, Final, NoReturn, Protocol

from shardctl.base.errors import HostileError, SourceError
from shardctl.base.value import value_class
from shardctl.libraries.torch_save.pickle_names import can_execute_code, can_reach_code, is_getattr
from shardctl.libraries.torch_save.pickle_tree import MAPPINGS, CallNode, FoldedCall, GlobalNode, PersistentNode

NODE: Final = 96
"""Bytes charged for an object: its slots and the garbage collector's header, or a dict's entry."""
FLAT: Final = 56
"""Bytes charged for a text or a tuple, beside what it holds."""
_MAX_LINE_BYTES: Final = 1 << 16
"""Longest argument of a protocol 0 opcode, in bytes; real ones are names and numbers."""
_MAX_GLOBAL_NAME_CHARACTERS: Final = 1_000
"""Longest name of a global, in characters."""
_EMPTY_MEMO_SLOT: Final = object()
"""Stands in the memo where nothing was stored."""
PASSED: Final = object()
"""Stands in the memo for a part of what a shortcut folded."""
_KEY_ELEMENT_TYPES: Final = frozenset(
    {str, bytes, int, bool, float, type(None), GlobalNode, CallNode, FoldedCall, PersistentNode}
)
_SAFE_KEYS: Final = frozenset({str, bytes, bool, type(None), GlobalNode, CallNode, FoldedCall, PersistentNode})
"""Types whose hash is secret, an address or one of a few, so that collisions cannot be arranged."""
_KEY_PARTS: Final = 64
"""Parts of a tuple that is a key: a tuple is hashed anew wherever it is one."""
_MAX_SNAPSHOT_ITEMS: Final = 64
"""Entries of a list that a call takes as it is then; torch takes its sizes so, and has no more dims."""
_TORCH_REBUILD_MODULES: Final = frozenset({"torch", "torch._utils", "torch._tensor"})
_DICT_BATCH_ITEMS: Final = 1_000
"""`pickle` stores the items of a dict in batches of this many."""

_u2 = struct.Struct("<H").unpack_from
_u4 = struct.Struct("<I").unpack_from
_u8 = struct.Struct("<Q").unpack_from


class PassedError(Exception):
    """The pickle refers to a part of what a shortcut folded; it must be read without the shortcut."""


class TruncatedError(SourceError):
    """The pickle goes on beyond the bytes at hand."""


@value_class
class PickleLimits:
    """What a pickle may ask for; more makes it hostile. The defaults keep any verdict below 20 s and 1 GiB."""

    opcodes: int = 24_000_000
    """A state dict takes about 32 per tensor."""
    memory: int = 512 << 20
    """Estimated bytes of the tree; the estimate is up to half above the truth, and 16 times the pickle is not rare."""
    depth: int = 4_096
    """Marks open at once; `pickle.dump` itself gives up at about a thousand levels."""
    memo: int = 16_000_000
    """Largest memo index."""
    odd_keys: int = 10_000
    """Keys with a hash that the writer can choose, so that a dict would take quadratic time."""


class PickleShortcut(Protocol):
    """Runs the opcodes of many objects that are alike at one go, for as many as have the one form that it knows."""

    def fold_objects(self, state: PickleState) -> None:
        """Go on from `state.pos`, after the state of an object was set, as far as objects of that form follow.

        Each becomes a `FoldedCall`, and each part of it that the pickle stores in the memo `PASSED`.
        """


class PickleState:
    """A stack of stacks (one for each open mark), the memo, and what was spent of the limits.

    Reading beyond the data raises IndexError or struct.error, and so does an empty stack: the loop that runs the
    opcodes turns both into an error that tells them apart.
    """

    __slots__ = (
        "attributes",
        "data",
        "globals",
        "limits",
        "marked",
        "memo",
        "odd",
        "persistents",
        "pos",
        "ran",
        "shortcut",
        "spent",
        "stack",
        "where",
    )

    def __init__(
        self, data: bytes, where: str, start: int, limits: PickleLimits, shortcut: PickleShortcut | None = None
    ) -> None:
        self.data = data
        self.where = where
        self.pos = start
        self.limits = limits
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: list[Any] = []
        self.globals: dict[tuple[str, str], GlobalNode] = {}
        self.persistents: list[PersistentNode] = []
        self.attributes: set[GlobalNode] = set()
        """`getattr`, in each spelling that was mentioned."""
        self.spent = 0
        """Bytes, and as many for work that takes as long as making them."""
        self.ran = 0
        """Opcodes, up to the last few."""
        self.odd = 0
        self.shortcut = shortcut

    def raise_malformed(self, what: str) -> NoReturn:
        """Raise SourceError: no pickler writes this."""
        raise SourceError(f"{self.where}: the pickle {what}, at byte {self.pos}")

    def raise_hostile(self, what: str) -> NoReturn:
        """Raise HostileError."""
        raise HostileError(
            f"{self.where}: the pickle {what}, at byte {self.pos}",
            hint="do not load this file with anything that unpickles; get the weights from another place",
        )

    def raise_truncated(self) -> NoReturn:
        """Raise TruncatedError."""
        raise TruncatedError(f"{self.where}: the pickle is cut off at byte {len(self.data)}")

    # Arguments of opcodes

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        start = self.pos
        self.pos = end = start + size
        if end > len(self.data):
            raise TruncatedError(
                f"{self.where}: the pickle declares {size:,} bytes at byte {start}, but only "
                f"{max(len(self.data) - start, 0):,} remain"
            )
        self.spent += FLAT + size
        return self.data[start:end]

    def text(self, size: int) -> str:
        """Return the next `size` bytes as text."""
        text = self.take(size).decode("utf-8", "surrogatepass")
        if not text.isascii():
            self.spent += 4 * size  # a character may take four bytes
        return text

    def line(self) -> bytes:
        """Return the bytes up to the next newline, which is skipped."""
        end = self.data.find(b"\n", self.pos, self.pos + _MAX_LINE_BYTES)
        if end < 0:
            if self.pos + _MAX_LINE_BYTES > len(self.data):
                self.raise_truncated()
            self.raise_malformed(f"has a line of more than {_MAX_LINE_BYTES:,} bytes")
        line = self.data[self.pos : end]
        self.pos = end + 1
        self.spent += FLAT + len(line)
        return line

    def read_uint8(self) -> int:
        """Return the next byte."""
        value = self.data[self.pos]
        self.pos += 1
        return value

    def read_uint16(self) -> int:
        """Return the next two bytes, little-endian like the others."""
        value: int = _u2(self.data, self.pos)[0]
        self.pos += 2
        return value

    def read_uint32(self) -> int:
        """Return the next four bytes."""
        value: int = _u4(self.data, self.pos)[0]
        self.pos += 4
        return value

    def read_uint64(self) -> int:
        """Return the next eight bytes."""
        value: int = _u8(self.data, self.pos)[0]
        self.pos += 8
        return value

    # Stack and memo

    def open_mark(self) -> None:
        """Begin a new stack above the present one."""
        if len(self.marked) >= self.limits.depth:
            self.raise_hostile(f"nests deeper than {self.limits.depth:,} levels")
        self.marked.append(self.stack)
        self.stack = []

    def close_mark(self) -> list[Any]:
        """Return everything since the last mark."""
        items = self.stack
        if not self.marked:
            self.raise_malformed("closes a mark that was never opened")
        self.stack = self.marked.pop()
        return items

    def recall(self, index: int) -> None:
        """Push what the memo holds."""
        value = self.memo[index] if 0 <= index < len(self.memo) else _EMPTY_MEMO_SLOT
        if value is _EMPTY_MEMO_SLOT:
            self.raise_malformed(f"recalls memo {index}, which was never stored")
        if value is PASSED:
            raise PassedError
        self.stack.append(value)

    def remember(self, index: int) -> None:
        """Store the top of the stack in the memo."""
        memo = self.memo
        value = self.stack[-1]
        if index == len(memo):
            memo.append(value)
            return
        if not 0 <= index < self.limits.memo:
            self.raise_hostile(f"stores to memo {index:,}")
        if index > len(memo):  # Python 2 counts from 1
            memo.extend([_EMPTY_MEMO_SLOT] * (index + 1 - len(memo)))
        memo[index] = value

    # Containers

    def extend(self, target: object, values: list[Any]) -> None:
        """Append to a list or to whatever a call would have returned."""
        self.spent += 16 * len(values)
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, CallNode) and target.function not in MAPPINGS:
            if target.elements is None:
                target.elements = []
                self.spent += NODE
            target.elements.extend(values)
        else:
            self.raise_malformed(f"appends to a {target if isinstance(target, CallNode) else type(target).__name__}")

    def store(self, target: object, items: list[Any]) -> None:
        """Store alternating keys and values in a dict or in whatever a call would have returned."""
        if len(items) % 2:
            self.raise_malformed("stores a key without a value")
        if isinstance(target, CallNode):
            if target.items is None:
                target.items = {}
                self.spent += NODE
            target = target.items
        if not isinstance(target, dict):
            self.raise_malformed(f"stores by key into a {type(target).__name__}")
        before, keys = len(target), items[::2]
        self.spent += NODE * len(keys)
        for key in keys:
            if type(key) not in _SAFE_KEYS:
                self._count_hashed_key(key, before)
        target.update(zip(keys, items[1::2], strict=True))
        if len(target) != before + len(keys):
            self.raise_malformed("stores the same key twice")

    def _count_hashed_key(self, key: object, before: int) -> None:
        """Count a key whose collisions can be arranged; integers in sequence cannot collide."""
        if type(key) is tuple:
            if len(key) > _KEY_PARTS:
                self.raise_malformed(f"has a tuple of {len(key):,} parts as a key; real ones have a few")
            if any(type(part) not in _KEY_ELEMENT_TYPES for part in key):  # its hash would recurse
                self.raise_malformed("has a nested tuple as a key")
        elif type(key) is int:
            if before <= key < before + _DICT_BATCH_ITEMS:
                return
        elif type(key) is not float:
            self.raise_malformed(f"has a {type(key).__name__} as a key")
        self.odd += 1
        if self.odd > self.limits.odd_keys:
            self.raise_hostile(f"has more than {self.limits.odd_keys:,} numbers or tuples as keys")

    # Names and calls

    def named(self, module: object, name: object) -> GlobalNode:
        """Return the reference to a global, one object for each; hostile if it runs code."""
        if not isinstance(module, str) or not isinstance(name, str):
            self.raise_malformed("names a global by something other than text")
        if len(module) + len(name) > _MAX_GLOBAL_NAME_CHARACTERS:
            self.raise_malformed(f"names a global in more than {_MAX_GLOBAL_NAME_CHARACTERS:,} characters")
        known = self.globals.get((module, name))
        if known is None:
            if can_execute_code(module, name):
                self.raise_hostile(f"mentions {module}.{name}, which runs code")
            known = self.globals[module, name] = GlobalNode(module, name)
            self.spent += 2 * NODE
            if is_getattr(module, name):
                self.attributes.add(known)
        return known

    def push_call(
        self, function: object, args: object, kwargs: dict[Any, Any] | None = None, *, new: bool = False
    ) -> None:
        """Push the note that `function` was to be called, or its `__new__` if it is `new`.

        `getattr` of a name is a longer name and is judged as one: pickled enums need it, and so do attacks that
        reach a module through another. As an argument of another function nobody needs it.
        """
        if not isinstance(function, GlobalNode | CallNode):
            self.raise_malformed(f"calls a {type(function).__name__}")
        if not isinstance(args, tuple):
            self.raise_malformed(f"calls with a {type(args).__name__} for arguments")
        self.spent += NODE
        if self.attributes:
            self.spent += 32 * len(args)  # the same tuple may be looked through again and again
        if self.attributes and any(type(argument) is GlobalNode and argument in self.attributes for argument in args):
            self.raise_hostile("hands getattr to another function")
        if isinstance(function, GlobalNode) and function in self.attributes:
            self.stack.append(self._resolve_attribute(function, args))
        elif function in MAPPINGS:
            self.stack.append(self._build_mapping(function, args if not kwargs else (None,), new=new))
        else:
            if (
                isinstance(function, GlobalNode)
                and function.module in _TORCH_REBUILD_MODULES
                and len(args) <= _MAX_SNAPSHOT_ITEMS
            ):
                args = tuple(tuple(a) if type(a) is list and len(a) <= _MAX_SNAPSHOT_ITEMS else a for a in args)
            self.stack.append(CallNode(function, args, kwargs))

    def _build_mapping(self, function: Any, args: tuple[Any, ...], *, new: bool) -> CallNode:  # noqa: ANN401 - of a tree
        """Return a mapping with the items that it was made of: they are those that were there then.

        Python 2 wrote an ordered dict as a call with a list of pairs. `__new__` would ignore them.
        """
        given = args[1:] if function.name == "defaultdict" and args else args
        made = CallNode(function, args[: len(args) - len(given)])
        if not given:
            return made
        (items,) = given if len(given) == 1 else (None,)
        if new or not isinstance(items, list | dict):
            self.raise_malformed(f"makes a {function} of something else than pairs or a dict")
        self.spent += NODE * len(items)
        if self.spent > self.limits.memory:
            self.raise_hostile(f"asks for more than {self.limits.memory >> 20} MiB of objects")
        pairs = items.items() if isinstance(items, dict) else items
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):  # noqa: PLR2004 - a pair
            self.raise_malformed(f"makes a {function} of something else than pairs")
        self.store(made, [part for pair in pairs for part in pair])
        return made

    def _resolve_attribute(self, function: GlobalNode, args: tuple[Any, ...]) -> GlobalNode | CallNode:
        if len(args) < 2 or not isinstance(args[1], str) or len(args[1]) > _MAX_GLOBAL_NAME_CHARACTERS:  # noqa: PLR2004 - object and name
            self.raise_malformed("calls getattr with strange arguments")
        target, attribute = args[:2]
        if isinstance(target, GlobalNode):
            return self.named(target.module, f"{target.name}.{attribute}")
        if can_reach_code(attribute):
            self.raise_hostile(f"reaches for the attribute {attribute}")
        return CallNode(function, args)
