"""Matches regular expressions of a config, which a stranger wrote, without letting one take for ever.

Python tries all ways to divide a text among the repetitions of an expression. Nested repetitions have exponentially
many, and are refused; of the others the time is limited, too, for all names of a model together.

    >>> compile_expression("layers[.][0-9]+", "config.json").matches("layers.12.mlp")
    True
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from math import factorial
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.base.value import state_class, value_class

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_MATCHING_SECONDS: Final = 20.0
"""Of processor time, for all names of a model. Those of DeepSeek-V3 take half a second."""
_MAX_MATCH_COMBINATIONS: Final = 1_000_000_000
"""In which one expression may match a name: seconds. With three repetitions, as released configs have, that is far."""
_LONG_NAME_CHARACTERS: Final = 100
"""Characters of a long name, between any of which a repetition may end."""
_MAX_EXPRESSION_CHARACTERS: Final = 1000
"""Characters of an expression."""
_REGEX_TOKEN_PATTERN: Final = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?[^)]?)?|\)|\||[*+?]|\{[0-9]*,?[0-9]*\}|.", re.DOTALL
)
"""An escaped character, a set, a bracket, an alternative, a repetition, or any other character."""
_spent: ContextVar[_MatchingTime | None] = ContextVar("time spent with matching", default=None)


@state_class
class _MatchingTime:
    """The time that all expressions together have taken.

    The clock of the processor is slow to read, so matches are timed by the other one, which a busy machine lets run on.
    """

    seconds: float = 0.0
    start: float = field(default_factory=thread_time)
    """Of the processor, when matching began."""

    def add(self, seconds: float) -> bool:
        """Add those of one match; returns whether that is too much, by the clock and by the processor's."""
        self.seconds += seconds
        return self.seconds > _MAX_MATCHING_SECONDS and thread_time() - self.start > _MAX_MATCHING_SECONDS


@value_class
class ModuleExpression:
    """A regular expression for the beginning of a module's name."""

    compiled: re.Pattern[str]
    file: str

    def matches(self, name: str) -> bool:
        """Whether it matches; raises SourceError if all together have taken too long."""
        start = perf_counter()
        found = self.compiled.match(name) is not None
        spent = _spent.get()
        if spent is not None and spent.add(perf_counter() - start):
            raise SourceError(
                f"the regular expressions of {self.file} take more than {_MAX_MATCHING_SECONDS:.0f} seconds",
                hint=f"the last was {self.compiled.pattern!r:.100}; fewer repetitions (* and +) are faster",
            )
        return found


@contextmanager
def limit_matching() -> Iterator[None]:
    """Limit the time that all expressions together may take in a `with` block."""
    before = _spent.set(_MatchingTime())
    try:
        yield
    finally:
        _spent.reset(before)


def compile_expression(expression: str, file: str, entry: str = "") -> ModuleExpression:
    """The expression; raises SourceError if it is none, or could take too long. `entry` is what the config has."""
    said = f"{file} has {entry or expression!r:.200}"
    if len(expression) > _MAX_EXPRESSION_CHARACTERS or not _is_bounded(expression):
        raise SourceError(
            f"{said}, a regular expression that could take for ever",
            hint="write it without repetitions within repetitions, and with few of * and +",
        )
    try:
        return ModuleExpression(re.compile(expression), file)
    except (re.error, OverflowError, RecursionError) as error:
        raise SourceError(f"{said}, which is not a regular expression: {error}") from error


def _is_bounded(expression: str) -> bool:
    """Whether there are few ways to match a name, and nothing that matches in several ways is itself repeated.

    >>> [_is_bounded(text) for text in (".*[*+]q_(a|b)_proj", "(a*)*", "(a|aa)+", "(?:x[.])?", "(a?){9}", "a?" * 30)]
    [True, False, False, True, False, False]
    """
    brackets, ways, repetitions = [_Bracket()], 1, 0
    closed = _Bracket()
    for mark in _REGEX_TOKEN_PATTERN.findall(expression):
        before, closed = closed, _Bracket()
        if mark.startswith("("):
            brackets.append(_Bracket())
        elif mark == ")" and len(brackets) > 1:
            closed = brackets.pop()
            ways *= closed.alternatives
            brackets[-1].varies |= closed.varies
        elif mark == "|":
            brackets[-1].alternatives += 1
            brackets[-1].varies = True
        elif mark == "?":
            ways *= 2
            brackets[-1].varies = True
        elif mark in ("*", "+") or (len(mark) > 1 and mark.startswith("{")):
            fixed = mark[1:-1].isdecimal()
            if before.varies and mark not in ("{0}", "{1}"):
                return False
            repetitions += not fixed
            brackets[-1].varies |= not fixed
    lengths: int = _LONG_NAME_CHARACTERS**repetitions
    return ways * brackets[0].alternatives * lengths <= _MAX_MATCH_COMBINATIONS * factorial(repetitions)


@state_class
class _Bracket:
    """What is known of an open bracket, or of one that has just been closed."""

    alternatives: int = 1
    varies: bool = False
    """Whether its content may match in several ways."""
