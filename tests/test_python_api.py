"""What `import shardctl` offers: documented, typed, lazy, and with something to see in a notebook."""

from __future__ import annotations

import gc
import html.parser
import importlib
import importlib.util
import inspect
import json
import pydoc
import re
import shutil
import subprocess
import sys
import traceback
import typing
from pathlib import Path

import numpy as np
import pytest
import typer

import shardctl
import shardctl.api
from shardctl.base.errors import ShardctlError, SourceError, UsageError
from shardctl.base.garbage_collection import pause_garbage_collection
from shardctl.base.workers import ExecutionOptions
from shardctl.cli.app import FUNCTIONS, app
from shardctl.cli.program import run
from shardctl.conversion.plan_file import read_plan_file
from shardctl.options import PlanOptions, ReshardOptions, SourceOptions, VerifyOptions
from shardctl.report.result_views import render_notebook_view

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "fixtures" / "configs" / "llama.json"
LLAMA = ROOT / "fixtures" / "llmcompressor" / "llama"
VERBS = ("plan", "reshard", "verify", "inspect", "diff", "digest", "load", "lens")
COMMANDS = VERBS[:6]


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
        assert str(signature.return_annotation).startswith(f"{verb.capitalize()}Result")
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
        ("shardctl.base.notebook", "shardctl.base.result_view"),
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


def load_script():
    spec = importlib.util.spec_from_file_location("python_api", ROOT / "docs" / "python_api.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_signatures_docstrings_and_the_page_are_those_of_the_options():
    """If this fails, run `python docs/python_api.py`."""
    script = load_script()
    assert script.format_source(script.write_functions(script.API.read_text())) == script.API.read_text()
    assert script.page() == script.PAGE.read_text()


NOT_OPTIONS = {"path", "destination", "a", "b", "progress", "effort", "host_memory"}


@pytest.mark.parametrize("verb", COMMANDS)
def test_keywords_are_the_long_options_of_the_command(verb):
    script = load_script()
    command = typer.main.get_command(app).commands[verb]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    names = {script.name_keyword(next(name for name in each.opts if name.startswith("--"))) for each in options}
    aliases = [alias for option in FUNCTIONS[verb].declared.values() for alias in option.aliases]
    names |= {script.name_keyword(alias.partition("=")[0]) for alias in aliases}
    left = {"json", "report", "junit", "summary", "each", "fail_fast", "worker", "newest_good"}
    left |= {"quiet", "verbose", "log", "help", "help_all"} | ({"engine"} if verb == "reshard" else set())
    keywords = inspect.signature(getattr(shardctl, verb)).parameters
    assert {name for name in keywords if not name.startswith(("source_options", "plan_options", "reshard_options"))} - {
        *(NOT_OPTIONS - names), "destination_options", "verify_options", "inspect_options",
    } == names - left  # fmt: skip


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_argument_has_a_sentence(verb):
    function = getattr(shardctl, verb)
    said = inspect.getdoc(function)
    for name in inspect.signature(function).parameters:
        assert f"\n    {name}: " in said
    assert "\nExample:\n" in said
    assert "\nErrors:\n" in said


def test_the_examples_of_docstrings_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").symlink_to(LLAMA)
    shutil.copytree(LLAMA, tmp_path / "run" / "step-9")
    for name in (*COMMANDS, "reshard_each", "contribute", "find_newest"):
        said = inspect.getdoc(getattr(shardctl.api, name))
        code = said.partition("\nExample:\n")[2].partition("\n\n")[0]
        exec(inspect.cleandoc(f"\n{code}"), {"shardctl": shardctl})  # noqa: S102 - it is our own


def test_help_shows_a_keyword_on_each_line():
    shown = pydoc.plain(pydoc.render_doc(shardctl.plan)).splitlines()
    assert "    seq_len: int | str | None = None," in shown
    assert max(map(len, shown)) <= 160


@pytest.mark.parametrize(
    ("given", "mesh"),
    [
        ({"tp": 2}, "tp2"),
        ({"tp": np.int64(2)}, "tp2"),
        ({"mesh": "tp=2"}, "tp2"),
        ({"mesh": {"tp": 2}}, "tp2"),
        ({"mesh": shardctl.Mesh.of(tp=2)}, "tp2"),
        ({"mesh": {"dp": 2, "tp": 2}}, "dp2 x tp2"),
        ({"mesh": "tp=2,fsdp=2"}, "tp2 x fsdp2"),
        ({"mesh": shardctl.Mesh.parse("tp=2,fsdp=2")}, "tp2 x fsdp2"),
    ],
    ids=str,
)
def test_a_mesh_is_degrees_a_text_a_dictionary_or_an_object(given, mesh):
    planned = shardctl.plan(LLAMA, **given)
    assert str(planned.mesh) == mesh
    assert planned.mesh == shardctl.Mesh.parse(mesh.replace(" x ", ",").replace("p2", "p=2"))


@pytest.mark.parametrize("gpu", ["h100", "80GB", {"name": "mine", "memory_gib": 80}])
def test_a_device_is_a_name_a_size_a_dictionary_or_an_object(gpu):
    planned = shardctl.plan(LLAMA, tp=2, gpu=gpu, seq_len=32768, batch=50)
    assert planned.fits
    assert shardctl.plan(LLAMA, gpu=planned.forecast.device).forecast.device == planned.forecast.device


def test_a_device_that_is_no_device_is_refused():
    with pytest.raises(UsageError, match="memory_gib") as raised:
        shardctl.plan(LLAMA, gpu={"name": "mine"})
    assert "docs/devices.md" in raised.value.hint


def test_words_of_engines_mean_the_same():
    ours = shardctl.plan(LLAMA, tp=2, gpu="h100", seq_len=1024, batch=3, utilization=0.5, kv_dtype="fp8", max_seqs=4)
    theirs = shardctl.plan(
        LLAMA, tensor_parallel_size=2, gpu="h100", max_model_len=1024, users=3, gpu_memory_utilization=0.5,
        kv_cache_dtype="fp8", max_num_seqs=4,
    )  # fmt: skip
    assert mask(ours.to_dict()) == mask(theirs.to_dict())
    assert shardctl.plan(LLAMA, seq_len="32k").forecast.work.context == 32_000
    assert "recompute full" in str(shardctl.plan(LLAMA, for_="train", gradient_checkpointing=True))
    for both in ({"batch": 3, "users": 3}, {"recompute": "full", "gradient_checkpointing": True}):
        with pytest.raises(UsageError, match="are both given"):
            shardctl.plan(LLAMA, **both)
    with pytest.raises(UsageError, match="users takes a whole number, not '3'"):
        shardctl.plan(LLAMA, users="3")


def test_what_is_wrong_with_mesh_7_is_said():
    with pytest.raises(UsageError, match="mesh takes a text, a dictionary or a Mesh, not 7") as raised:
        shardctl.plan(LLAMA, mesh=7)
    assert "tp=4" in raised.value.hint


def list_keywords():
    return [
        (verb, name)
        for verb in COMMANDS
        for name, each in inspect.signature(getattr(shardctl, verb)).parameters.items()
        if name not in {"path", "destination", "a", "b"} or verb == "plan" or each.default is each.empty
    ]


@pytest.mark.parametrize(("verb", "name"), list_keywords())
def test_a_wrong_type_is_a_usage_error(verb, name, tmp_path):
    arguments = {"a": LLAMA, "b": LLAMA} if verb == "diff" else {"path": LLAMA}
    if verb == "reshard":
        arguments["destination"] = tmp_path / "out"
    with pytest.raises(UsageError) as raised:
        getattr(shardctl, verb)(**arguments | {name: object()})
    assert raised.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shardctl.plan(LLAMA, tp="2"), "tp takes a whole number, not '2'"),
        (lambda: shardctl.plan(LLAMA, tp=True), "tp takes a whole number, not True"),
        (lambda: shardctl.plan(LLAMA, tp=0), "tp is 0, and must be at least 1"),
        (lambda: shardctl.plan(LLAMA, zero=4), "zero is 4, and must be from 0 to 3"),
        (lambda: shardctl.plan(LLAMA, kv_dtype="fp9"), "kv_dtype has no choice 'fp9'"),
        (lambda: shardctl.plan(LLAMA, mesh={"tq": 2}), "unknown mesh axis 'tq'"),
        (lambda: shardctl.plan(LLAMA, mesh={"tp": "2"}), "mesh axis tp takes a number of ranks, not '2'"),
        (lambda: shardctl.plan(LLAMA, mesh={}), "the mesh is empty"),
        (lambda: shardctl.plan(LLAMA, ReshardOptions(mesh=7)), "mesh takes a text"),
        (lambda: shardctl.plan(LLAMA, "tp=2"), "reshard_options takes ReshardOptions, not 'tp=2'"),
        (lambda: shardctl.plan(LLAMA, memory=-1), "memory is -1"),
        (lambda: shardctl.plan(""), "a path is empty"),
        (lambda: shardctl.api.contribute(LLAMA, "out", worker=7), "worker takes a text or a WorkerId, not 7"),
        (lambda: shardctl.api.reshard_each("x*", "out", tp="2"), "tp takes a whole number"),
        (lambda: shardctl.load(7), "path takes a path or an address, not 7"),
    ],
)
def test_a_wrong_value_is_named(call, message):
    with pytest.raises(UsageError, match=message) as raised:
        call()
    assert raised.value.hint


def test_option_objects_work_for_one_more_release(tmp_path):
    """The warning names the line of the caller."""
    new = shardctl.plan(LLAMA, tp=2, gpu="h100", strict=True)
    with pytest.warns(DeprecationWarning, match="reshard_options goes with the next release") as warned:
        old = shardctl.plan(
            LLAMA,
            ReshardOptions(mesh=shardctl.Mesh.of(tp=2)),
            plan_options=PlanOptions(device=new.forecast.device),
            source_options=SourceOptions(strict=True),
        )
    assert mask(old.to_dict()) == mask(new.to_dict())
    assert {each.filename for each in warned} == {__file__}
    assert len(warned) == 3
    with pytest.warns(DeprecationWarning, match="reshard_options"):
        shardctl.reshard(LLAMA, tmp_path / "out", ReshardOptions(mesh=shardctl.Mesh.of(tp=2)))
    with pytest.warns(DeprecationWarning, match="verify_options|effort") as warned:
        found = shardctl.verify(
            tmp_path / "out", VerifyOptions(level="full", against=LLAMA), effort=ExecutionOptions(threads=1)
        )
    assert found.ok
    own = {str(each.message).partition(" ")[0] for each in warned if each.filename == __file__}
    assert own == {"verify_options", "effort"}
    with pytest.warns(DeprecationWarning, match="write memory"):
        assert shardctl.digest(LLAMA, host_memory=1 << 30).digest == new_digest(tmp_path / "out")


def new_digest(path):
    return shardctl.digest(path, memory="1GiB").digest


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_option_in_both_ways_is_an_error():
    tp2 = ReshardOptions(mesh=shardctl.Mesh.of(tp=2), dtype="bf16")
    for both in ({"tp": 2}, {"mesh": "tp=2"}, {"dtype": "fp16"}):
        verb = shardctl.reshard if "dtype" in both else shardctl.plan
        with pytest.raises(UsageError, match="given as a keyword and in reshard_options"):
            verb(LLAMA, *(["out"] if verb is shardctl.reshard else []), tp2, **both)
    assert str(shardctl.plan(LLAMA, tp2, gpu="h100").mesh) == "tp2"
    with pytest.raises(UsageError, match="threads is given as a keyword and in effort"):
        shardctl.verify(LLAMA, threads=2, effort=ExecutionOptions())
    with pytest.raises(UsageError, match="--mesh and --tp are both given"):
        shardctl.plan(LLAMA, mesh="tp=2", tp=2)


def test_errors_have_the_hint_of_the_command_line(capfd):
    with pytest.raises(SourceError) as raised:
        shardctl.inspect("/no/such/model")
    assert run(["inspect", "/no/such/model"]) == raised.value.exit_code
    assert capfd.readouterr().err.splitlines()[-1] == f"hint:  {raised.value.hint}"
    assert f"hint: {raised.value.hint}" in "".join(traceback.format_exception(raised.value)).splitlines()
    with pytest.raises(ShardctlError) as raised:
        shardctl.lens("/no/such/model")
    assert raised.value.hint


def test_a_keyword_that_does_not_exist_has_a_hint():
    with pytest.raises(TypeError, match="seqlen") as raised:
        shardctl.plan(LLAMA, seqlen=8)
    assert raised.value.__notes__ == ["hint: did you mean seq_len?"]


def test_a_plan_file_is_followed(tmp_path):
    shardctl.plan(LLAMA, tp=2, dtype="fp16", out=tmp_path / "plan.json")
    for plan in (tmp_path / "plan.json", read_plan_file(tmp_path / "plan.json")):
        done = shardctl.reshard(LLAMA, tmp_path / type(plan).__name__, plan=plan, memory="512MiB")
        assert str(done.record.mesh) == "tp2"
        assert {tensor.dtype.name for tensor in done.record.tensors.values()} == {"F16"}
    with pytest.raises(UsageError, match="--plan and --dtype are both given"):
        shardctl.reshard(LLAMA, tmp_path / "out", plan=tmp_path / "plan.json", dtype="bf16")
    with pytest.raises(UsageError, match="plan takes a path"):
        shardctl.reshard(LLAMA, tmp_path / "out", plan=7)


def test_progress_is_told_to_a_callable(tmp_path):
    seen = []
    done = shardctl.reshard(LLAMA, tmp_path / "out", tp=2, progress=seen.append)
    assert seen[0].total_bytes == seen[-1].done_bytes == seen[-1].total_bytes > 0
    assert seen[-1].files_done == seen[-1].files == 2
    assert done.written_bytes <= seen[-1].total_bytes
    seen.clear()
    assert shardctl.verify(tmp_path / "out", level="full", against=LLAMA, progress=seen.append).ok
    assert {"content", "identity"} <= {each.phase for each in seen}
    shardctl.digest(LLAMA, progress=seen.append)
    shardctl.diff(LLAMA, tmp_path / "out", progress=seen.append)


def test_what_a_callable_raises_ends_the_run_and_the_same_call_resumes(tmp_path):
    def refuse(update):
        if update.files_done:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        shardctl.reshard(LLAMA, tmp_path / "out", tp=2, progress=refuse)
    assert not (tmp_path / "out").exists()
    done = shardctl.reshard(LLAMA, tmp_path / "out", tp=2)
    assert done.record.digest == shardctl.digest(LLAMA).digest


def test_a_bar_is_shown_on_stderr(tmp_path, capfd, monkeypatch):
    shardctl.reshard(LLAMA, tmp_path / "quiet", tp=2)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr("shardctl.cli.progress._SAMPLING_INTERVAL_SECONDS", 0.001)
    shardctl.reshard(LLAMA, tmp_path / "out", tp=2, progress=True)
    assert capfd.readouterr().out == ""


def mask(value):
    """A document without what differs from run to run."""
    if isinstance(value, dict):
        return {key: mask(each) for key, each in value.items() if key not in {"seconds", "settings", "free_bytes"}}
    if isinstance(value, str):
        return re.sub(r"[0-9.]+ (s|[kMG]i?B/s)\b|free space .*| +", " ", value)
    return list(map(mask, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(
    ("command", "call"),
    [
        ("plan llama --tp 2 --gpu h100", lambda: shardctl.plan("llama", tp=2, gpu="h100")),
        ("plan llama --for train --fsdp 2", lambda: shardctl.plan("llama", for_="train", fsdp=2)),
        ("plan llama --tp 2 --detail rank", lambda: shardctl.plan("llama", tp=2, detail="rank")),
        ("reshard llama whole --tp 2 --dry-run", lambda: shardctl.reshard("llama", "whole", tp=2, dry_run=True)),
        ("inspect llama", lambda: shardctl.inspect("llama")),
        ("inspect llama --tensors --show-rules", lambda: shardctl.inspect("llama", tensors=True, show_rules=True)),
        ("diff llama cut", lambda: shardctl.diff("llama", "cut")),
        ("diff llama cut --all", lambda: shardctl.diff("llama", "cut", all=True)),
        ("diff llama llama", lambda: shardctl.diff("llama", "llama")),
        ("digest llama --tensors", lambda: shardctl.digest("llama", tensors=True)),
        (
            f"digest llama --expect shardctl1:{'0' * 32}",
            lambda: shardctl.digest("llama", expect=f"shardctl1:{'0' * 32}"),
        ),
        ("digest llama --as vllm --tp 2", lambda: shardctl.digest("llama", as_="vllm", tp=2)),
        ("verify cut --level full", lambda: shardctl.verify("cut", level="full")),
        ("verify cut --against llama", lambda: shardctl.verify("cut", against="llama")),
        ("verify llama --for vllm", lambda: shardctl.verify("llama", for_="vllm")),
        ("reshard llama whole --to hf", lambda: shardctl.reshard("llama", "whole", to="hf")),
        (
            "reshard llama whole --tp 2 --worker 0/2",
            lambda: shardctl.api.contribute("llama", "whole", tp=2, worker="0/2"),
        ),
        ("finish cut", lambda: shardctl.api.finish("cut")),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_results_say_what_the_command_prints(command, call, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").symlink_to(LLAMA)
    shardctl.reshard("llama", "cut", tp=2, dtype="fp16" if command.startswith("diff") else "keep")

    def remove_result():
        for name in ("whole", ".whole.shardctl"):
            shutil.rmtree(name, ignore_errors=True)

    printed = []
    for further in ([], ["--json"]):
        remove_result()
        run([*command.split(), *further])
        printed.append(capfd.readouterr().out)
    remove_result()
    found = call()
    assert mask(str(found).split("\n")) == mask(printed[0].rstrip("\n").split("\n"))
    lines = printed[1].splitlines()
    assert mask(found.to_dict()) == mask(json.loads(lines[-1] if command.startswith("reshard") else printed[1]))
    assert len(repr(found)) < 300
    assert repr(found) == f"<{type(found).__name__} {found.verdict}>"
    assert found.verdict in str(found)
    assert render_notebook_view(found)


def test_what_a_host_program_froze_costs_a_small_call_nothing(monkeypatch):
    """`gc.get_freeze_count` walks through all that is frozen: 74 ms for a million objects, several times a call."""
    asked = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: asked.append(None) or 1)
    with pause_garbage_collection():
        few = [[] for _ in range(1_000)]
    assert (len(few), asked) == (1_000, [])
    with pause_garbage_collection():
        many = [[] for _ in range(200_000)]
    assert (len(many), asked, gc.isenabled()) == (200_000, [None], True)
