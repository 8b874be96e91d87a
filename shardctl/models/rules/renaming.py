"""Reads the `[names]` of a rule file, which say in which stored arrays a model's tensors are, and how.

JAX's libraries name arrays by a path in a tree, keep kernels as `[in, out]` or `[in, heads, head]`, and stack the
layers of a scan. So a name may come with a stacked dim, a shape to see the rest in, and a transposition, in this order.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from shardctl.base.errors import UsageError, format_first_few
from shardctl.base.value import value_class
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Region, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.tensors.manifest import Manifest

_FIELDS: Final = ("to", "stacked", "shape", "transposed")
_NUMBER: Final = re.compile(r"\{([a-z_]+)\}")
_MATRIX: Final = 2


@value_class
class NamingLine:
    """One line of `[names]`."""

    pattern: str
    """Stored names: `{word}` is a number, `*` one part of a name, `**` any number of parts."""
    to: str
    """The tensor's name, with the numbers of the pattern; empty for arrays that are left behind."""
    stacked: int | None = None
    """The dim whose indices are tensors of their own, numbered by the one `{word}` that only `to` has."""
    shape: tuple[int, ...] | None = None
    """The shape in which the array, or an index of it, is seen; one extent may be -1."""
    transposed: bool = False

    def expression(self) -> re.Pattern[str]:
        """Return the pattern, its numbers as groups."""
        text = re.escape(self.pattern).replace(r"\*\*", ".*").replace(r"\*", "[^.]+")
        return re.compile(re.sub(r"\\\{([a-z_]+)\\\}", r"(?P<\1>[0-9]+)", text))

    def tensors(self, stored: Tensor, numbers: Mapping[str, str]) -> Iterator[Tensor]:
        """Yield the tensors that lie in an array.

        Raises UsageError if the array has no such dim or shape, or is not stored as one whole.
        """
        if len(stored.chunks) != 1 or not isinstance(stored.chunks[0].where, Region):
            raise UsageError(f"{stored.name} is stored in parts, and [names] is for arrays that are stored whole")
        chunk, where = stored.chunks[0], stored.chunks[0].where
        if self.stacked is None:
            yield self._seen(self.to.format(**numbers), stored, chunk, stored.shape, where)
            return
        if not 0 <= self.stacked < len(stored.shape):
            raise UsageError(f"[names] says stacked = {self.stacked} of {stored.name}, which is {list(stored.shape)}")
        (counted,) = set(_NUMBER.findall(self.to)) - numbers.keys()
        rest = (*stored.shape[: self.stacked], *stored.shape[self.stacked + 1 :])
        strides = (*where.strides[: self.stacked], *where.strides[self.stacked + 1 :])
        for index in range(stored.shape[self.stacked]):
            at = Region(where.file, where.offset + index * where.strides[self.stacked], strides)
            yield self._seen(self.to.format(**numbers, **{counted: index}), stored, chunk, rest, at)

    def _seen(self, name: str, stored: Tensor, chunk: Chunk, shape: tuple[int, ...], where: Region) -> Tensor:
        views = [_RowView(0, shape, 0, where.strides)]
        if self.shape is not None:
            shape, views = _reshape_array(stored.name, shape, where.strides, self.shape)
        if self.transposed and len(shape) != _MATRIX:
            raise UsageError(f"[names] transposes {stored.name}, but it is {list(shape)}")
        turn = -1 if self.transposed else 1
        chunks = []
        for view in views:
            origin = (view.row, *(0,) * (len(shape) - 1)) if shape else ()
            there = Region(where.file, where.offset + view.offset, view.strides[::turn])
            chunks.append(replace(chunk, box=Box(origin[::turn], view.shape[::turn]), where=there))
        return Tensor(name, stored.dtype, shape[::turn], tuple(chunks))


@value_class
class NamingTable:
    """All of `[names]`."""

    lines: tuple[NamingLine, ...]

    def applied(self, stored: Manifest) -> Manifest:
        """Return the checkpoint under the names that the file gives.

        Raises UsageError for a name that no line matches, or that two arrays would have.
        """
        expressions = [line.expression() for line in self.lines]
        tensors: dict[str, Tensor] = {}
        unmatched = []
        for name, tensor in stored.tensors.items():
            found = next(((n, match) for n, e in enumerate(expressions) if (match := e.fullmatch(name))), None)
            if found is None:
                unmatched.append(name)
                continue
            line = self.lines[found[0]]
            for made in line.tensors(tensor, found[1].groupdict()) if line.to else ():
                if made.name in tensors:
                    raise UsageError(f"[names] calls two arrays {made.name}: {name} is the second")
                tensors[made.name] = made
        if unmatched:
            raise UsageError(
                f"no line of [names] matches {format_first_few(unmatched)}",
                hint='give each a name, or leave it behind: "opt_state.**" = ""',
            )
        return replace(stored, tensors=tensors)


def parse_names(table: Mapping[str, object], path: str) -> NamingTable | None:
    """Parse the lines of `[names]`; None if there are none. Raises UsageError for one that is not understood."""
    return NamingTable(tuple(_parse_line(pattern, said, path) for pattern, said in table.items())) if table else None


def _parse_line(pattern: str, said: object, path: str) -> NamingLine:
    where = f"the name {pattern!r} of {path}"
    fields: dict[str, object] = {"to": said} if isinstance(said, str) else dict(said) if isinstance(said, dict) else {}
    if "to" not in fields or not fields.keys() <= set(_FIELDS):
        raise UsageError(f"{where} is not understood", hint=f"write a name, or a table of {', '.join(_FIELDS)}")
    to, stacked = fields["to"], fields.get("stacked")
    shape, transposed = fields.get("shape"), fields.get("transposed", False)
    if not isinstance(to, str) or not isinstance(transposed, bool):
        raise UsageError(f"{where} has to or transposed of the wrong kind")
    if stacked is not None and (not isinstance(stacked, int) or isinstance(stacked, bool)):
        raise UsageError(f"{where} has stacked = {stacked!r}, which is not a dim")
    if shape is not None and (
        not isinstance(shape, list)
        or not all(isinstance(extent, int) and not isinstance(extent, bool) and extent >= -1 for extent in shape)
        or shape.count(-1) > 1
    ):
        raise UsageError(f"{where} has shape = {shape!r}, which is not a shape")
    words = _NUMBER.findall(pattern)
    if len(set(words)) < len(words):
        raise UsageError(f"{where} has one number twice", hint="call each differently; the new name need not have all")
    if not set("{}").isdisjoint(_NUMBER.sub("", to)):
        raise UsageError(
            f"{where} has braces in {to!r} that do not name a number", hint="numbers are called {n} or {layer}"
        )
    extra = set(_NUMBER.findall(to)) - set(words)
    if len(extra) != (stacked is not None):
        raise UsageError(
            f"{where} has {len(extra)} numbers that its pattern does not have",
            hint="the indices of a stacked dim are numbered by the one number that only the new name has",
        )
    return NamingLine(pattern, to, stacked, tuple(shape) if shape is not None else None, transposed)


class _RowView(NamedTuple):
    """Rows of an array that is seen in another shape."""

    row: int
    """The first of them."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from where the array begins."""
    strides: tuple[int, ...]
    """Bytes."""


def _reshape_array(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]
) -> tuple[tuple[int, ...], list[_RowView]]:
    """Return the shape in full, and the same elements seen in it without moving any.

    They are one view, or one for each index of dim 0: of heads between which those of other layers lie, as MaxText
    stacks layers. Raises UsageError if neither is possible.
    """
    size = prod(shape)
    known = prod(extent for extent in wanted if extent != -1)
    full = tuple(size // known if extent == -1 and known else extent for extent in wanted)
    if prod(full) != size:
        raise UsageError(f"[names] sees {name} as {list(wanted)}, but its shape is {list(shape)}")
    if not size:
        return full, [_RowView(0, full, 0, (0,) * len(full))]
    whole = _reshape_strides(shape, strides, full)
    if whole is not None:
        return full, [_RowView(0, full, 0, whole)]
    if full and full[0] % shape[0] == 0:
        each = (full[0] // shape[0], *full[1:])
        part = _reshape_strides(shape[1:], strides[1:], each)
        if part is not None:
            return full, [_RowView(n * each[0], each, n * strides[0], part) for n in range(shape[0])]
    raise UsageError(f"[names] sees {name} as {list(wanted)}, which its stacked dim does not allow")


def _reshape_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the strides of an array seen in another shape; None if its elements do not lie so."""
    import numpy as np

    seen = np.lib.stride_tricks.as_strided(np.empty(1, np.uint8), shape, strides, writeable=False)
    try:
        return seen.reshape(wanted, copy=False).strides
    except ValueError:
        return None
