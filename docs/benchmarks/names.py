"""Measures the names of a package: python docs/benchmarks/names.py [FOLDER ...] (by default shardctl).

A name of one word says a verb without its object, or an object without its kind: it can be neither guessed nor found by
a search. The table has the share of such names among functions and classes at the top level of modules, the mean length
of the functions' names, how many classes bear a name that another class has too, and the share of docstrings of
functions, methods included and properties not, that do not begin with a verb.
"""

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "shardctl"
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+")


NO_VERBS = {
    *("a", "all", "an", "as", "at", "both", "by", "each", "every", "for", "from", "how", "in", "its", "nothing", "of"),
    *("one", "that", "the", "these", "this", "those", "what", "where", "whether", "which", "who", "why", "with"),
}
"""What the descriptions of values begin with: with few others, all that function docstrings began with but verbs."""


class NameTable(NamedTuple):
    """What was counted in one package."""

    functions: int
    one_word_functions: float
    """Share of the functions."""
    mean_length: float
    """Characters of a function's name, without leading underscores."""
    classes: int
    one_word_classes: float
    surplus_classes: int
    """Classes less different names of classes."""
    docstrings_without_verb: float
    """Share of the functions' docstrings."""


def list_definitions(folder: Path) -> tuple[list[str], list[str]]:
    """List the names of functions and of classes at the top level of every module below a folder, tests left out."""
    functions, classes = [], []
    for path in sorted(folder.rglob("*.py")):
        if {"tests", "test"}.isdisjoint(path.relative_to(folder).parts):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    functions.append(node.name.strip("_"))
                elif isinstance(node, ast.ClassDef):
                    classes.append(node.name.strip("_"))
    return functions, classes


def list_docstrings(folder: Path) -> list[str]:
    """List the docstrings of all functions and methods, but for properties, which describe a value."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = " ".join(map(ast.unparse, node.decorator_list))
                if "property" not in decorators:
                    found.append(ast.get_docstring(node) or "")
    return list(filter(None, found))


def begins_without_verb(docstring: str) -> bool:
    """Return whether the first word is one of `NO_VERBS`, or no word of letters."""
    first = docstring.split(maxsplit=1)[0].rstrip(",.:;")
    return first.lower() in NO_VERBS or not first.isalpha()


def count_words(name: str) -> int:
    return len(WORD.findall(name))


def measure_names(folder: Path) -> NameTable:
    (functions, classes), docstrings = list_definitions(folder), list_docstrings(folder)
    return NameTable(
        functions=len(functions),
        one_word_functions=sum(count_words(name) == 1 for name in functions) / max(len(functions), 1),
        mean_length=sum(map(len, functions)) / max(len(functions), 1),
        classes=len(classes),
        one_word_classes=sum(count_words(name) == 1 for name in classes) / max(len(classes), 1),
        surplus_classes=len(classes) - len(set(classes)),
        docstrings_without_verb=sum(map(begins_without_verb, docstrings)) / max(len(docstrings), 1),
    )


if __name__ == "__main__":
    folders = [Path(text) for text in sys.argv[1:]] or [PACKAGE]
    print(
        "| | functions | of one word | mean length | classes | of one word | names used twice "
        "| docstrings without verb |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for each in folders:
        found = measure_names(each)
        print(
            f"| {each.name} | {found.functions:,} | {found.one_word_functions:.0%} | {found.mean_length:.1f} "
            f"| {found.classes:,} | {found.one_word_classes:.0%} | {found.surplus_classes} "
            f"| {found.docstrings_without_verb:.0%} |"
        )
