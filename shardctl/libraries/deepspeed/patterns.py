"""Matches names against patterns that a checkpoint brings along, in time that grows with their lengths only.

Python's own `re` could be kept busy for years by a pattern made for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from shardctl.base.errors import HostileError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MAX_PATTERN_LENGTH: Final = 1_000
_MAX_MATCHING_STEPS = 5_000_000
"""Steps of matching, at about one a microsecond; a model of 10,000 tensors takes a million."""
_REGEX_SPECIAL_CHARACTERS: Final = frozenset("[](){}|?*+^$\\")
_CHARACTER_CLASSES: Final[dict[str, Callable[[str], bool]]] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
}


class _PatternAtom(NamedTuple):
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
        return self.kind == "any" or _CHARACTER_CLASSES[self.text](character)


class NamePatterns:
    r"""Some patterns, of which a name may fit one; patterns of plain characters cost nothing, however many there are.

    Raises UnsupportedError for a pattern with more than characters, classes and repetitions of them.

    >>> NamePatterns([r"^\d+\.mlp\.weight$", "head"]).find("12.mlp.weight")
    '^\\d+\\.mlp\\.weight$'
    """

    __slots__ = ("_others", "_plain", "_spent")

    def __init__(self, patterns: Iterable[str]) -> None:
        self._plain: dict[str, str] = {}
        self._others: list[tuple[str, tuple[_PatternAtom, ...], bool]] = []
        self._spent = 0
        for pattern in patterns:
            atoms, whole = _parse_pattern(pattern)
            if whole and all(atom.kind == "is" and not atom.repeats for atom in atoms):
                self._plain.setdefault("".join(atom.text for atom in atoms), pattern)
            else:
                self._others.append((pattern, atoms, whole))

    def find(self, name: str) -> str | None:
        """Return the pattern that describes what `name` begins with, as `re.match` says it; None if none does.

        Raises HostileError if patterns and names were made to take long.
        """
        if name in self._plain:
            return self._plain[name]
        return next(
            (pattern for pattern, atoms, whole in self._others if self._match_atoms(atoms, name, whole=whole)), None
        )

    def _match_atoms(self, atoms: tuple[_PatternAtom, ...], name: str, *, whole: bool) -> bool:
        active = _close_states({0}, atoms)
        for character in name:
            if not whole and len(atoms) in active:
                return True
            self._spent += len(active)
            active = _close_states(
                {at if atoms[at].repeats else at + 1 for at in active if at < len(atoms) and atoms[at].fits(character)},
                atoms,
            )
            if not active:
                return False
            if self._spent > _MAX_MATCHING_STEPS:
                raise HostileError("the checkpoint's patterns of names take too long to match")
        return len(atoms) in active


def _close_states(active: set[int], atoms: tuple[_PatternAtom, ...]) -> set[int]:
    """Add the states that can be reached by leaving out what may be absent."""
    found = set()
    for at in active:
        reached = at
        while reached not in found:
            found.add(reached)
            if reached < len(atoms) and atoms[reached].repeats:
                reached += 1
    return found


def _parse_pattern(pattern: str) -> tuple[tuple[_PatternAtom, ...], bool]:
    """Parse the atoms of a pattern, and whether it describes the whole name."""
    text = pattern.removeprefix("^")
    whole = text.endswith("$") and not text.endswith("\\$")
    text = text[:-1] if whole else text
    atoms: list[_PatternAtom] = []
    at = 0
    while at < len(text):
        character = text[at]
        at += 1
        if character == "\\" and at < len(text) and (text[at] in _CHARACTER_CLASSES or not text[at].isalnum()):
            atoms.append(_PatternAtom(text[at], "class" if text[at] in _CHARACTER_CLASSES else "is"))
            at += 1
        elif character in "*+" and atoms and not atoms[-1].repeats:
            last = atoms[-1] if character == "+" else atoms.pop()
            atoms.append(last._replace(repeats=True))
        elif character in _REGEX_SPECIAL_CHARACTERS or len(text) > _MAX_PATTERN_LENGTH:
            raise UnsupportedError(
                f"the checkpoint tells how tensor-parallel parts fit together with the pattern {ascii(pattern)[:200]}, "
                "which shardctl does not understand"
            )
        else:
            atoms.append(_PatternAtom(character, "any" if character == "." else "is"))
    return tuple(atoms), whole
