"""What a pickle says, as plain containers and inert nodes: names that nobody imported, calls that nobody made.

A tree may be deep, shared and cyclic: whoever walks it must not recurse along it, and should look only where it must.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle would have imported."""

    module: str
    name: str
    """May be dotted: protocol 4 and `getattr` reach into classes."""

    def __str__(self) -> str:
        path = f"{self.module}.{self.name}"
        return path if path.isprintable() else ascii(path)  # it goes to terminals


@dataclass(eq=False, slots=True)
class Call:
    """A call or construction that the pickle asked for, and everything it did to the result."""

    function: Global | Call
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
        return f"{self.function}()" if isinstance(self.function, Global) else "a call of a call"

    __repr__ = __str__  # the generated one would follow the tree


@dataclass(eq=False, slots=True)
class Persistent:
    """An object that lives outside the pickle, such as a storage."""

    id: Any

    def __repr__(self) -> str:
        return "Persistent()"


@dataclass(frozen=True, slots=True)
class Pickle:
    """One pickle, read."""

    value: Any
    persistents: tuple[Persistent, ...]
    """In the order met."""
    globals: tuple[Global, ...]
    """Every name mentioned, once, in the order met."""
    end: int
    """Position after the STOP opcode."""


def mapping(node: object) -> dict[Any, Any] | None:
    """The items of a dict or of a `collections` mapping; None for anything else.

    Python 2 wrote an ordered dict as a call with a list of pairs.
    """
    if isinstance(node, dict):
        return node
    if not isinstance(node, Call) or str(node.function) not in _MAPPINGS:
        return None
    if node.items is not None or not node.args or not isinstance(node.args[0], list):
        return node.items or {}
    pairs = {p[0]: p[1] for p in node.args[0] if _is_pair(p)}
    return pairs if len(pairs) == len(node.args[0]) else None


_MAPPINGS: Final = frozenset({"collections.OrderedDict", "collections.defaultdict"})


def _is_pair(node: object) -> bool:
    return isinstance(node, list | tuple) and len(node) == 2 and isinstance(node[0], str)  # noqa: PLR2004 - a pair
