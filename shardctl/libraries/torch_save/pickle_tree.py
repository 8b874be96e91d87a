"""Represents what a pickle says as plain containers and inert nodes; nothing is imported or called.

A tree may be deep, shared and cyclic: whoever walks it must not recurse along it, and should look only where it must.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from shardctl.base.value import value_class


@value_class
class GlobalNode:
    """A name that the pickle would have imported."""

    module: str
    name: str
    """May be dotted: protocol 4 and `getattr` reach into classes."""

    def __str__(self) -> str:
        path = f"{self.module}.{self.name}"
        return path if path.isprintable() else ascii(path)  # it goes to terminals


@dataclass(eq=False, slots=True)
class CallNode:
    """A call or construction that the pickle asked for, and everything it did to the result."""

    function: GlobalNode | CallNode
    args: tuple[Any, ...]
    kwargs: dict[Any, Any] | None = None
    """Keyword arguments (NEWOBJ_EX)."""
    state: Any = None
    """What `__setstate__` or `__dict__` would have received (BUILD)."""
    items: dict[Any, Any] | None = None
    """What was stored by key (SETITEM, SETITEMS)."""
    elements: list[Any] | None = None
    """What was appended or added (APPEND, APPENDS, ADDITEMS)."""

    def __str__(self) -> str:
        return f"{self.function}()" if isinstance(self.function, GlobalNode) else "a call of a call"

    __repr__ = __str__  # the generated one would follow the tree


@dataclass(eq=False, slots=True)
class FoldedCall:
    """One of very many calls that are alike, of which a shortcut kept the values alone; nothing refers to its parts."""

    function: GlobalNode
    values: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class PersistentNode:
    """An object that lives outside the pickle, such as a storage."""

    id: Any

    def __repr__(self) -> str:
        return "Persistent()"


@value_class
class ParsedPickle:
    """One pickle, read."""

    value: Any
    persistents: tuple[PersistentNode, ...]
    """In the order met."""
    globals: tuple[GlobalNode, ...]
    """Every name mentioned, once, in the order met."""
    end: int
    """Position after the STOP opcode."""


def as_mapping(node: object) -> dict[Any, Any] | None:
    """Return the items of a dict or of a `collections` mapping; None for anything else."""
    if isinstance(node, dict):
        return node
    if not isinstance(node, CallNode) or node.function not in MAPPINGS:
        return None
    return node.items or {}


MAPPINGS: Final = frozenset({GlobalNode("collections", "OrderedDict"), GlobalNode("collections", "defaultdict")})
"""Classes that hold what a dict holds."""
