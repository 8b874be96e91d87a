"""Reads what makes nearly all of a large `.metadata`, one object for each box and one for each item, many at a go.

A save of thousands of ranks has a million of both, each in the same 70 opcodes of protocol 4 (what Python has pickled
with since 3.8) but for a few numbers and names. After one of them was read opcode by opcode, the bytes of the next are
matched as a whole. Whatever differs is left to the machine that reads every pickle, and nothing is taken on trust: the
names that an object refers to are looked up as the opcodes would.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from shardctl.libraries.torch_save.pickle_state import FLAT, NODE, PASSED
from shardctl.libraries.torch_save.pickle_tree import FoldedCall, GlobalNode

if TYPE_CHECKING:
    from shardctl.libraries.torch_save.pickle_state import PickleState

_DCP_MODULE: Final = "torch.distributed.checkpoint"
CHUNK: Final = GlobalNode(f"{_DCP_MODULE}.metadata", "ChunkStorageMetadata")
"""A box; its values are origin and shape."""
INDEX: Final = GlobalNode(f"{_DCP_MODULE}.metadata", "MetadataIndex")
"""What an item is of; its values are the tensor's key and the origin of the box."""
INFO: Final = GlobalNode(f"{_DCP_MODULE}.filesystem", "_StorageInfo")
"""Where an item is; its values are file, offset and length."""
OLMO_INFO: Final = GlobalNode("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo")
"""OLMo-core's own, which has the same three fields (`olmo_core/distributed/checkpoint/filesystem.py`)."""
_TORCH_SIZE_NODE: Final = GlobalNode("torch", "Size")
_AT_ONCE: Final = 4096
"""Objects folded between two looks at what was spent."""
_MAX_CACHED_VALUES: Final = 1 << 17
"""Numbers and boxes that are remembered by how they are spelled."""

_MEMO_GET_OPCODES: Final = rb"(?:h.|j....)"
_INTEGER_OPCODES: Final = rb"(?:K.|M..|J....|\x8a\x05.....|\x8a\x06......)"
_SHAPE_TUPLE_OPCODES: Final = (
    b"(?:"
    + _INTEGER_OPCODES
    + rb"\x85|"
    + _INTEGER_OPCODES
    + rb"{2}\x86|"
    + _INTEGER_OPCODES
    + rb"{3}\x87|\("
    + _INTEGER_OPCODES
    + rb"{4,32}t)"
)
_NEW_OBJECT_OPCODES: Final = rb"\)\x81\x94\}\x94\("
"""A new object, and a dict for its state."""
_TORCH_SIZE_OPCODES: Final = rb"\x94\x85\x94R\x94"
"""A call of `torch.Size` with a tuple, which is on the stack."""
_CHUNK_FORM: Final = re.compile(
    b"(%(get)b)%(made)b(%(get)b)(%(get)b)%(dims)b%(sized)b(%(get)b)(%(get)b)%(dims)b%(sized)bub"
    % {
        b"get": _MEMO_GET_OPCODES,
        b"made": _NEW_OBJECT_OPCODES,
        b"dims": _SHAPE_TUPLE_OPCODES,
        b"sized": _TORCH_SIZE_OPCODES,
    },
    re.DOTALL,
)
_CHUNK_MEMO: Final = (PASSED,) * 8
_INTEGER_PATTERN: Final = re.compile(_INTEGER_OPCODES, re.DOTALL)


class MetadataShortcut:
    """Folds boxes, and pairs of an item's key and its place."""

    def __init__(self) -> None:
        self._dims: dict[bytes, tuple[int, ...] | None] = {}
        self._texts: dict[bytes, str] = {}
        self._integers: dict[bytes, int] = {}
        self._boxes: dict[tuple[bytes, bytes], FoldedCall] = {}
        """Boxes by how they are spelled: those of layers that are alike are one object, which nobody changes."""

    def fold_objects(self, state: PickleState) -> None:
        """Fold what follows the object on top of the stack, if it is one of a kind that is known."""
        function = state.stack[-1].function
        if function == CHUNK:
            self._fold_chunks(state)
        elif function in (INFO, OLMO_INFO):
            self._fold_items(state)

    def _fold_chunks(self, state: PickleState) -> None:
        form = _CHUNK_FORM.match(state.data, state.pos)
        if form is None or _recall(state, form) != (CHUNK, "offsets", _TORCH_SIZE_NODE, "sizes", _TORCH_SIZE_NODE):
            return
        matched, data = _compile_chunks(form.groups()).match, state.data
        stack, boxes, pos, count = state.stack, self._boxes, state.pos, 0
        while count < _AT_ONCE and (match := matched(data, pos)) is not None:
            first, second = match.groups()
            spelled = first, second
            box = boxes.get(spelled) or self._parse_box(spelled)
            if box is None:
                break
            stack.append(box)
            pos, count = match.end(), count + 1
        state.pos = pos
        state.memo += _CHUNK_MEMO * count
        state.spent += 2 * NODE * count

    def _fold_items(self, state: PickleState) -> None:
        form = _compile_item_form().match(state.data, state.pos)
        head = (INDEX, "fqn", "index", "offset", _TORCH_SIZE_NODE)
        fields = ("relative_path", "offset", "length")
        if form is None or _recall(state, form) not in ((*head, INFO, *fields), (*head, OLMO_INFO, *fields)):
            return
        matched, data = _compile_items(form.groups()).match, state.data
        stack, memo, dims, texts, pos, count = state.stack, state.memo, self._dims, self._texts, state.pos, 0
        integers, parse = self._integers, self._parse_integer
        recalled: dict[bytes, Any] = {}  # what the memo holds does not change here; it only grows
        while count < _AT_ONCE and (match := matched(data, pos)) is not None:
            new_key, known_key, place, new_file, known_file, offset, length = match.groups()
            origin = dims[place] if place in dims else self._parse_dims(place)
            if new_key is not None:
                key = texts.get(new_key) or self._parse_text(new_key)
            elif known_key in recalled:
                key = recalled[known_key]
            else:
                key = recalled[known_key] = _recall_one(state, known_key)
            begin = integers[offset] if offset in integers else parse(offset)
            nbytes = integers[length] if length in integers else parse(length)
            if origin is None or type(key) is not str:
                break
            before = len(memo)
            memo += (PASSED,) * 7 if new_key is None else (PASSED, PASSED, key, *(PASSED,) * 5)
            if new_file is not None:
                file = texts.get(new_file) or self._parse_text(new_file)
                memo.append(file)
            elif known_file in recalled:
                file = recalled[known_file]
            else:
                file = recalled[known_file] = _recall_one(state, known_file)
            if type(file) is not str:
                del memo[before:]
                break
            stack += (FoldedCall(INDEX, (key, origin)), FoldedCall(INFO, (file, begin, nbytes)))
            pos, count = match.end(), count + 1
        state.pos = pos
        state.spent += (4 * NODE + FLAT) * count

    def _parse_integer(self, code: bytes) -> int:
        number = _parse_integer(code)
        if len(self._integers) < _MAX_CACHED_VALUES:
            self._integers[code] = number
        return number

    def _parse_box(self, spelled: tuple[bytes, bytes]) -> FoldedCall | None:
        """Parse origin and shape of a box; None if a number is negative."""
        origin, shape = (self._dims[code] if code in self._dims else self._parse_dims(code) for code in spelled)
        if origin is None or shape is None:
            return None
        box = FoldedCall(CHUNK, (origin, shape))
        if len(self._boxes) < _MAX_CACHED_VALUES:
            self._boxes[spelled] = box
        return box

    def _parse_dims(self, code: bytes) -> tuple[int, ...] | None:
        """Parse the numbers of a tuple; None if one is negative, which is for others to refuse."""
        numbers = tuple(map(_parse_integer, _INTEGER_PATTERN.findall(code.removeprefix(b"("))))
        self._dims[code] = found = numbers if min(numbers) >= 0 else None
        return found

    def _parse_text(self, code: bytes) -> str:
        text = self._texts[code] = code[2:].decode("utf-8", "surrogatepass")
        return text


def _parse_integer(code: bytes) -> int:
    if code[0] in b"KM":
        return int.from_bytes(code[1:], "little")
    return int.from_bytes(code[1 if code[0] == ord("J") else 2 :], "little", signed=True)


def _recall_one(state: PickleState, code: bytes) -> Any:  # noqa: ANN401 - of a tree
    """Return what an opcode takes from the memo."""
    state.recall(int.from_bytes(code[1:], "little"))
    return state.stack.pop()


def _recall(state: PickleState, form: re.Match[bytes]) -> tuple[Any, ...]:
    """Return what all groups of a match take from the memo."""
    return tuple(_recall_one(state, code) for code in form.groups())


@cache
def _compile_text() -> bytes:
    """Return the expression of a text of up to 255 bytes, which is compiled only where there is a large file."""
    lengths = b"|".join(re.escape(bytes([size])) + b".{%d}" % size for size in range(256))
    return rb"\x8c(?:" + lengths + b")"


@cache
def _compile_item_form() -> re.Pattern[bytes]:
    word = {
        b"get": b"(" + _MEMO_GET_OPCODES + b")",
        b"text": b"(?:" + _compile_text() + rb"\x94|" + _MEMO_GET_OPCODES + b")",
    }
    words = word | {
        b"made": _NEW_OBJECT_OPCODES,
        b"dims": _SHAPE_TUPLE_OPCODES,
        b"sized": _TORCH_SIZE_OPCODES,
        b"integer": _INTEGER_OPCODES,
    }
    return re.compile(
        b"%(get)b%(made)b%(get)b%(text)b%(get)b(?:%(integer)b|N)%(get)b%(get)b%(dims)b%(sized)bub"
        b"%(get)b%(made)b%(get)b%(text)b%(get)b%(integer)b%(get)b%(integer)bub" % words,
        re.DOTALL,
    )


@cache
def _compile_chunks(gets: tuple[bytes, ...]) -> re.Pattern[bytes]:
    """Compile the form of boxes that refer to the memo by `gets`; its groups are two tuples."""
    made, first, size, second, again = map(re.escape, gets)
    dims = b"(" + _SHAPE_TUPLE_OPCODES + b")" + _TORCH_SIZE_OPCODES
    return re.compile(made + _NEW_OBJECT_OPCODES + first + size + dims + second + again + dims + b"ub", re.DOTALL)


@cache
def _compile_items(gets: tuple[bytes, ...]) -> re.Pattern[bytes]:
    """Compile the form of an item's key and place that refer to the memo by `gets`.

    Its groups are the key, new or known, a tuple, the file, new or known, and two numbers.
    """
    index, key, number, offset, size, info, file, begin, length = map(re.escape, gets)
    text = b"(?:(" + _compile_text() + rb")\x94|(" + _MEMO_GET_OPCODES + b"))"
    integer = b"(" + _INTEGER_OPCODES + b")"
    return re.compile(
        index + _NEW_OBJECT_OPCODES + key + text
        + number + b"(?:" + _INTEGER_OPCODES + b"|N)"
        + offset + size + b"(" + _SHAPE_TUPLE_OPCODES + b")" + _TORCH_SIZE_OPCODES + b"ub"
        + info + _NEW_OBJECT_OPCODES + file + text
        + begin + integer + length + integer + b"ub",
        re.DOTALL,
    )  # fmt: skip


def is_folded(node: object, function: GlobalNode) -> TypeGuard[FoldedCall]:
    """Return whether it is an object of this kind that was folded."""
    return type(node) is FoldedCall and node.function is function
