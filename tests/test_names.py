"""Names can be guessed and searched for: few have one word, and no class has the name of another."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "docs" / "benchmarks" / "names.py"
MOST = 0.25
"""The share of names of one word that the house rules allow: verbs of the command line, and words of the glossary."""


def test_names_of_the_package():
    spec = importlib.util.spec_from_file_location("names", SCRIPT)
    names = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    found = names.measure_names(names.PACKAGE)
    assert found.functions > 1000, "the package was found"
    assert found.one_word_functions < MOST / 5
    assert found.one_word_classes < MOST / 2
    assert found.surplus_classes == 0


def test_words_are_counted_as_people_count_them():
    spec = importlib.util.spec_from_file_location("names", SCRIPT)
    names = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    words = {"told": 1, "read_header": 2, "Part": 1, "RankFile": 2, "DType": 2, "HTTPError": 2}
    assert {name: names.count_words(name) for name in words} == words
