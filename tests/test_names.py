"""Names can be guessed and searched for, and docstrings of functions begin with a verb, with few exceptions."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "benchmarks" / "names.py"
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
    assert found.docstrings_without_verb < MOST / 5


def test_words_are_counted_as_people_count_them():
    spec = importlib.util.spec_from_file_location("names", SCRIPT)
    names = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    words = {"told": 1, "read_header": 2, "Part": 1, "RankFile": 2, "DType": 2, "HTTPError": 2}
    assert {name: names.count_words(name) for name in words} == words


def test_a_docstring_begins_with_a_verb_or_not():
    spec = importlib.util.spec_from_file_location("names", SCRIPT)
    names = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    assert not any(map(names.begins_without_verb, ["List the boxes.", "Return whether it is one.", "Raise it."]))
    assert all(map(names.begins_without_verb, ["The boxes.", "Whether it is one.", "`x` as it is.", "What, if any."]))


def test_former_terms_do_not_return():
    """`docs/terms.md` says what is used in their place."""
    page = (ROOT / "docs" / "terms.md").read_text(encoding="utf-8")
    former = {word for line in page.splitlines() if line.startswith("| ") for word in re.findall(r"`(\w+)`", line)}
    assert len(former) > 25
    named = {
        (path.relative_to(ROOT).as_posix(), word)
        for path in (ROOT / "shardctl").rglob("*.py")
        for word in former.intersection(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    }
    assert named == set()
