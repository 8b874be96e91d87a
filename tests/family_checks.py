"""Checks that every small config must pass: one test a config, in which each check is a subtest.

EACH = FamilyChecks()

@EACH.add()
def check_layers_are_numbered(name): ...

@pytest.mark.parametrize("name", FIXTURES)
def test_each_config(name, subtests):
    EACH.run(subtests, name)
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class FamilyChecks:
    """The checks of a file, in order."""

    def __init__(self) -> None:
        self.checks: list[tuple[Callable[..., None], Callable[[str], Iterable[Mapping[str, Any]]]]] = []

    def add(self, cases: Callable[[str], Iterable[Mapping[str, Any]]] = lambda _: [{}]) -> Callable[..., Any]:
        """Add a check that is run for each of the `cases` of a config: the arguments that it gets besides the name."""

        def register(check: Callable[..., None]) -> Callable[..., None]:
            self.checks.append((check, cases))
            return check

        return register

    def run(self, subtests: Any, name: str, **fixtures: Any) -> None:
        """Run every check for a config; each gets those of the fixtures that it takes."""
        for check, cases in self.checks:
            taken = {key: fixtures[key] for key in inspect.signature(check).parameters.keys() & fixtures.keys()}
            for case in cases(name):
                with subtests.test(check.__name__, **case):
                    check(name=name, **taken, **case)
