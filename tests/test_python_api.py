"""What `import shardctl` offers: documented, typed, lazy, and with something to see in a notebook."""

from __future__ import annotations

import html.parser
import importlib
import inspect
import pydoc
import subprocess
import sys
import traceback
import typing
from pathlib import Path

import pytest

import shardctl
import shardctl.api
from shardctl.base.errors import SourceError
from shardctl.report.notebook_views import render_notebook_view

CONFIG = Path(__file__).parents[1] / "fixtures" / "configs" / "llama.json"
VERBS = ("plan", "reshard", "verify", "inspect", "diff", "digest", "load", "lens")


def test_help_shows_the_verbs_with_their_docstrings():
    shown = pydoc.plain(pydoc.render_doc(shardctl))
    functions = shown.partition("\nFUNCTIONS\n")[2].partition("\nDATA\n")[0]
    for verb in VERBS:
        said = inspect.getdoc(getattr(shardctl, verb))
        assert f"\n    {verb}(" in functions
        assert said.splitlines()[0] in functions


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_typed(verb):
    function = getattr(shardctl, verb)
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(each.annotation is not inspect.Parameter.empty for each in signature.parameters.values())
    if verb not in {"load", "lens"}:
        assert f"{verb.capitalize()}Result" == str(signature.return_annotation).rpartition(".")[2]
        assert hasattr(shardctl, f"{verb.capitalize()}Result")


def test_a_module_of_the_same_name_does_not_take_the_place_of_a_verb():
    module = importlib.import_module("shardctl.verify")
    assert shardctl.verify is shardctl.api.verify is not module
    from shardctl.verify import content

    assert content.__name__ == "shardctl.verify.content"


@pytest.mark.parametrize(
    ("former", "name"),
    [
        ("shardctl.errors", "shardctl.base.errors"),
        ("shardctl.digest", "shardctl.tensors.digest"),
        ("shardctl.execute.engine", "shardctl.conversion.engine.engine"),
        ("shardctl.verify.forward.lens", "shardctl.running.forward.lazy_state_dict"),
        ("shardctl.models.quanti" + "sation.settings", "shardctl.models.quantization.settings"),
    ],
)
def test_modules_are_found_where_they_were_before(former, name):
    with pytest.warns(DeprecationWarning, match=name):
        found = importlib.import_module(former)
    assert found is importlib.import_module(name)
    assert found.__spec__.name == name
    assert shardctl.digest is shardctl.api.digest


def test_all_names_are_there_and_others_are_not():
    assert set(shardctl.__all__) <= set(dir(shardctl))
    assert all(getattr(shardctl, name) is not None for name in shardctl.__all__)
    assert set(shardctl.__all__) - {"__version__"} <= set(shardctl.api.__all__)
    with pytest.raises(AttributeError, match="no attribute 'convert'"):
        getattr(shardctl, "convert")  # noqa: B009 - which no type checker allows


def test_nothing_is_imported_before_it_is_asked_for():
    program = "import sys, shardctl; dir(shardctl); print(*sorted(m for m in sys.modules if m.startswith('shardctl')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["shardctl", "shardctl.base", "shardctl.base.former_modules", "shardctl.base.version"]


def test_an_error_shows_its_hint_where_python_shows_it(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(SourceError) as raised:
        shardctl.inspect(tmp_path)
    assert raised.value.hint
    assert f"hint: {raised.value.hint}" in "".join(traceback.format_exception(raised.value)).splitlines()
    assert not getattr(SourceError("without"), "__notes__", [])


class Seen(html.parser.HTMLParser):
    """The elements of a page, and that each is closed."""

    EMPTY: typing.Final = {"meta", "br", "hr", "img", "input", "link"}

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.open += [] if tag in self.EMPTY else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_plan_shows_its_page_in_a_frame_of_its_own():
    planned = shardctl.plan(CONFIG)
    ((tag, attributes),) = Seen(planned._repr_html_()).elements
    assert (tag, attributes["sandbox"]) == ("iframe", "")
    assert attributes["srcdoc"].lower().startswith("<!doctype html>")
    assert "LlamaForCausalLM" in attributes["srcdoc"]


def test_what_was_inspected_is_a_table_and_no_name_is_taken_for_html(tmp_path):
    place = tmp_path / "<b>model"
    place.mkdir()
    (place / "config.json").write_text(CONFIG.read_text())
    found = shardctl.inspect(place / "config.json")
    seen = Seen(found._repr_html_())
    assert {tag for tag, _ in seen.elements} == {"table", "caption", "tr", "th", "td"}
    assert "<b>model" in seen.text
    assert "LlamaForCausalLM (llama)" in seen.text


def test_other_results_have_no_view():
    with pytest.raises(TypeError, match="a str has no view"):
        render_notebook_view("text")
