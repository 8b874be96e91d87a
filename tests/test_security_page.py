"""Every promise of docs/SECURITY.md names tests that there are, and none stands twice."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "SECURITY.md").read_text(encoding="utf-8")
PROMISES = [line for line in PAGE.partition("## What is promised")[2].partition("## What is not")[0].splitlines()
            if line.startswith("| ") and not line.startswith("| promise")]  # fmt: skip


NAMED = r"`(tests/[\w/]+\.py)::(\w+)`"


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[2:40])
def test_a_promise_names_tests_that_are_there(row):
    named = re.findall(NAMED, row)
    assert named
    for path, test in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, path


def test_nothing_stands_twice():
    promises = [row.split(" | ")[0] for row in PROMISES]
    tests = re.findall(NAMED, "".join(PROMISES))
    assert len({*promises}) == len(promises) > 20
    assert len({*tests}) == len(tests)
