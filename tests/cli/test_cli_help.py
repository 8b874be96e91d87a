import inspect
import re
from pathlib import Path

import pytest
from cli_checkpoints import shardctl

from shardctl import __version__
from shardctl.cli.app import EXIT_CODES, FUNCTIONS, VERBS, app
from shardctl.libraries.catalogue import LAYOUT_FILES
from shardctl.options.declaration import HelpPanel


def words(text):
    """Help without the frame that typer draws around it, which changes with its version."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)


def test_the_version_is_data(say):
    assert say("--version") == (0, f"shardctl {__version__}\n", "")


def test_help_says_what_each_exit_code_means(say):
    code, out, err = say("--help")
    assert (code, err) == (0, "")
    tail = [line.strip() for line in out.splitlines() if line.strip()]
    golden = [line.strip() for line in EXIT_CODES.splitlines() if line.strip()]
    assert tail[-len(golden) :] == golden


@pytest.mark.parametrize("asked", ["--help", "--help-all"])
def test_help_fits_a_terminal_of_80_columns(say, asked):
    for verb in ([], *([v] for v in VERBS)):
        assert max(map(len, say(*verb, asked).out.splitlines())) <= 80


def test_short_forms_of_help_and_version(say):
    assert say("-V") == say("--version")
    assert say("-h") == say("--help")
    assert say("reshard", "plan", "-h") == say("reshard", "-h"), "a checkpoint may be called as a verb is"
    assert say("plan", "./llama", "--tp", "2", "-h") == say("plan", "-h")
    assert say("help", "plan") == say("plan", "--help")


@pytest.mark.parametrize("verb", VERBS)
def test_the_shortest_help_has_a_written_line_for_each_option(say, verb):
    code, out, err = say(verb, "-h")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith("...")]
    for flag in VERBS[verb].COMMON:
        brief = FUNCTIONS[verb].declared[flag].brief
        assert 0 < len(brief) <= 50, flag
        assert re.search(rf"^  {flag} .*{re.escape(brief)}", out, re.MULTILINE), flag
    assert lines[-2].startswith(f"shardctl {verb} --help says more")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("asked", ["-h", "--help"])
def test_help_groups_options_and_ends_with_a_page_that_explains_them(say, verb, asked):
    out = say(verb, asked).out
    groups = re.findall(r"^([A-Z][a-z ]+):$", out.partition("Examples:")[0], re.MULTILINE)
    assert groups
    assert len(set(groups)) == len(groups)
    assert set(groups) <= set(HelpPanel)
    page = out.splitlines()[-1].removeprefix("Documentation: ")
    assert f"shardctl {verb}" in (Path(__file__).parents[2] / page).read_text()


@pytest.mark.parametrize("asked", ["-h", "--help"])
def test_help_shows_defaults(say, asked):
    shown = {
        "plan": {"--zero": "0", "--profile": "fsdp2", "--kv-dtype": "the model's type", "--detail": "summary"},
        "reshard": {"--memory": "1GiB", "--from": "detected", "--dtype": "keep"},
        "verify": {"--level": "quick"},
    }
    for verb, defaults in shown.items():
        out = words(say(verb, asked).out)
        for flag, default in defaults.items():
            assert f"default: {default})" in re.split(r" --[a-z]", out.partition(f" {flag} ")[2])[0], flag


def test_help_includes_what_engines_and_trainers_call_by_name(say):
    for asked in ("-h", "--help"):
        out = say("plan", asked).out
        assert all(f"\n  {flag} " in out for flag in ("--profile", "--zero", "--cp", "--kv-dtype", "--utilization"))
        out = say("reshard", asked).out
        assert all(f"\n  {flag} " in out for flag in ("--create", "--average-with", "--apply"))
        out = say("verify", asked).out
        assert all(f"\n  {flag} " in out for flag in ("--text", "--write-golden", "--golden"))


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_names_what_lists_the_rest(say, verb):
    code, out, err = say(verb, "--help")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 75
    assert "..." not in re.sub(r"rtx-4090, \.\.\.", "", out), "no help is cut"
    assert "…" not in say(verb, "--help-all").out, "no name is cut"
    common, every = (
        set(re.findall(r"^[ │]+(--[a-z0-9-]+)", text, re.MULTILINE)) for text in (out, say(verb, "--help-all").out)
    )
    assert common <= every | {"--help"}
    assert len(common) <= 26
    if len(every) > len(common) + 1:
        assert re.search(rf"^shardctl {verb} --help-all lists all \d+ options\.$", out, re.MULTILINE)
    assert out.count(f"\n  shardctl {verb} ") in {2, 3}


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_command_ends_with_two_or_three_examples(say, verb):
    code, out, err = say(verb, "--help-all")
    assert (code, err) == (0, "")
    assert len(_list_examples(out)) in {2, 3}
    assert all(line.startswith(f"shardctl {verb} ") for line in _list_examples(out))


def _list_examples(text):
    return [line.strip() for line in text.rpartition("Examples:")[2].strip().splitlines()]


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_are_command_lines_that_exist(say, verb):
    """They end for want of a source, not for want of an option."""
    for line in _list_examples(say(verb, "--help-all").out):
        code, _, err = say(*line.split()[1:])
        assert code == 4, err


def test_without_a_command_there_is_help_and_the_code_for_usage(say):
    code, out, _ = say()
    assert code == 2
    assert "Exit codes:" in out


def test_every_verb_is_listed_and_none_that_does_not_exist(say):
    out = words(say("--help").out)
    assert [verb for verb in VERBS if f" {verb} " in out] == list(VERBS)
    assert list(VERBS) == ["inspect", "plan", "reshard", "finish", "verify", "attest", "diff", "digest"]


def test_help_names_every_layout(say):
    said = words(say("plan", "--help-all").out).partition("--to LAYOUT")[2]
    assert said.split("Default")[0].replace(" or ", ", ").strip(" .").split(", ") == list(LAYOUT_FILES)


def test_plan_and_reshard_take_the_same_wishes(say, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # a longer name continues on the next line

    def options(verb):
        return set(re.findall(r"--[a-z0-9-]+", say(verb, "--help-all").out.partition("Examples:")[0]))

    assert options("reshard") - options("plan") == {
        "--dry-run",
        "--overwrite",
        "--no-resume",
        "--hash",
        "--worker",
        "--engine",
        "--prove",
        "--each",
        "--fail-fast",
        "--create",
        "--private",
        "--allow-overflow",
    }
    own = {
        "--allocator",
        "--chunked-loss",
        "--mtp-layers",
        "--offload-checkpoints",
        "--overlap-all-to-all",
        "--price",
        "--tokens",
        "--optimizer-in-backward",
        "--detail",
        "--out",
        "--search",
        "--gpu",
        "--gpus",
        "--for",
        "--seq-len",
        "--batch",
        "--kv-dtype",
        "--encoder-len",
        "--batched-tokens",
        "--max-seqs",
        "--encoder-tp",
        "--disk-rate",
        "--probe",
        "--decode-cp",
        "--utilization",
    }
    training = options("plan") - options("reshard") - own
    assert own <= options("plan")
    assert training == {
        "--extra-model",
        "--lora-rank",
        "--lora-targets",
        "--base-dtype",
        "--lora-dropout",
        "--prepare-base",
        "--train-only",
        "--precision",
        "--optimizer",
        "--zero",
        "--profile",
        "--recompute",
        "--microbatches",
        "--global-batch",
        "--schedule",
        "--vp",
        "--offload",
        "--offload-parameters",
        "--gradient-dtype",
        "--no-sequence-parallel",
        "--attention",
        "--calibrate",
        "--no-dropout",
        "--no-grad-accum-fusion",
        "--fused-loss",
        "--cp-a2a",
        "--recompute-every",
        "--recompute-modules",
        "--compile",
        "--exp-avg-dtype",
        "--exp-avg-sq-dtype",
        "--float8",
        "--float8-gather",
        "--optimizer-kernel",
    }


def test_what_plan_and_reshard_share_is_said_alike():
    """But for `--dtype`, of which plan takes types to quantize to, and `--json`, for which reshard prints lines."""

    def parameters(verb):
        command = next(c for c in app.registered_commands if c.name == verb).callback
        found = inspect.signature(command).parameters.values()
        return {each.name: (each.annotation, vars(each.default)) for each in found if hasattr(each.default, "help")}

    plan, reshard = parameters("plan"), parameters("reshard")
    assert len(plan.keys() & reshard.keys()) > 30
    assert {name for name in plan.keys() & reshard.keys() if plan[name] != reshard[name]} == {"dtype", "json"}


def test_python_dash_m_is_the_same_program():
    done = shardctl("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"shardctl {__version__}\n", "")


@pytest.mark.parametrize("columns", ["9" * 20, "10001", "0"])
def test_help_for_a_terminal_that_cannot_be_so_wide(say, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    found = say("plan", "--help-all")
    assert found.code == 0
    assert max(map(len, found.out.splitlines())) < 1000
