"""Matches names against patterns that a checkpoint brings along, in time that grows with their lengths only.

Python's own `re` could be kept busy for years by a pattern made for it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from shardctl.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST: Final = 1_000
_SPECIAL: Final = frozenset("[](){}|?*+^$\\")
_CLASSES: Final[dict[str, Callable[[str], bool]]] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
}


class _Atom(NamedTuple):
    """One character of a name."""

    text: str
    """The character itself, or the letter of a class."""
    kind: str
    """`is`, `any` or `class`."""
    repeats: bool = False
    """Whether there may be any number of them."""

    def fits(self, character: str) -> bool:
        if self.kind == "is":
            return character == self.text
        return self.kind == "any" or _CLASSES[self.text](character)


def matches(pattern: str, name: str) -> bool:
    r"""Whether `name` begins with what `pattern` describes, as `re.match` says it.

    Raises UnsupportedError for a pattern with more than characters, classes and repetitions of them.

    >>> matches(r"^\d+\.mlp\.weight$", "12.mlp.weight"), matches(r"\d+.mlp", "x.mlp")
    (True, False)
    """
    atoms, whole = _parsed(pattern)
    active = _closed({0}, atoms)
    for character in name:
        if not whole and len(atoms) in active:
            return True
        step = set()
        for at in active:
            if at < len(atoms) and atoms[at].fits(character):
                step.add(at if atoms[at].repeats else at + 1)
        active = _closed(step, atoms)
    return len(atoms) in active


def _closed(active: set[int], atoms: tuple[_Atom, ...]) -> set[int]:
    """With what can be reached by leaving out what may be there no time."""
    found = set()
    for at in active:
        reached = at
        found.add(reached)
        while reached < len(atoms) and atoms[reached].repeats:
            reached += 1
            found.add(reached)
    return found


@lru_cache(maxsize=1 << 12)
def _parsed(pattern: str) -> tuple[tuple[_Atom, ...], bool]:
    """The atoms of a pattern, and whether it describes the whole name."""
    text = pattern.removeprefix("^")
    whole = text.endswith("$") and not text.endswith("\\$")
    text = text[:-1] if whole else text
    atoms: list[_Atom] = []
    at = 0
    while at < len(text):
        character = text[at]
        at += 1
        if character == "\\" and at < len(text) and (text[at] in _CLASSES or not text[at].isalnum()):
            atoms.append(_Atom(text[at], "class" if text[at] in _CLASSES else "is"))
            at += 1
        elif character in "*+" and atoms and not atoms[-1].repeats:
            last = atoms[-1] if character == "+" else atoms.pop()
            atoms.append(last._replace(repeats=True))
        elif character in _SPECIAL or len(text) > _LONGEST:
            raise UnsupportedError(
                f"the checkpoint tells how tensor-parallel parts fit together with the pattern {ascii(pattern)[:200]}, "
                "which shardctl does not understand"
            )
        else:
            atoms.append(_Atom(character, "any" if character == "." else "is"))
    return tuple(atoms), whole
