"""Runs a command line; the one place that turns exceptions into text and exit codes."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import typer

from shardctl.base.errors import UsageError
from shardctl.cli import streams
from shardctl.cli.app import FUNCTIONS, VERBS, answer_shell, app, format_own_help, format_verb_help
from shardctl.cli.chosen_settings import list_defaults, read_settings
from shardctl.cli.command_line import remember_command
from shardctl.cli.completion import ASK
from shardctl.cli.endings import FinishedError, TerminatedError, raise_on_termination
from shardctl.cli.parser_errors import translate_parser_error
from shardctl.cli.quick_values import quicken_values
from shardctl.cli.short_help import ALL, move_choices
from shardctl.cli.signature import replace_aliases
from shardctl.report.documents import format_schema_name
from shardctl.report.failure import FailureReport, describe_failure

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code; raises nothing but what ends the interpreter."""
    streams.begin_run(args)
    code = _run_command(args)
    streams.end_run(code)
    return code


def _run_command(args: Sequence[str]) -> int:
    streams.prepare_streams()
    remember_command(args)
    try:
        with raise_on_termination():
            code = _invoke_command(list(args)) if args else _invoke_command(["--help"]) or 2
            streams.flush_streams()
            return code
    except KeyboardInterrupt:
        return _report_failure(FailureReport("interrupted", "run the same command again", 130), args)
    except TerminatedError:
        return _report_failure(FailureReport("terminated", "run the same command again", 143), args)
    except (FinishedError, SystemExit):  # rich ends the process so when the reader of the help has left
        return 0
    except Exception as error:  # noqa: BLE001 - the last line of defence; nothing goes on after it
        if isinstance(error, OSError) and _asks_help(args) and streams.is_abandoned_pipe(error):
            return 0
        import traceback  # no run without a failure needs it

        if streams.RUN.talk.verbose or os.environ.get("SHARDCTL_DEBUG", "0") not in {"", "0"}:
            streams.print_message(traceback.format_exc())
        else:
            streams.RUN.write(traceback.format_exc())
        said = [f"{setting.option}={setting.value}" for setting in streams.RUN.settings]
        return _report_failure(describe_failure(translate_parser_error(error, [*said, *args])), args)


def _invoke_command(args: list[str]) -> int:
    if args[:1] == [ASK]:
        answer_shell(args[1:])
        return 0
    _refuse_empty_values(args)
    brief = "-h" in _list_given(args)
    args = _spell_out_help(args)
    named = _find_verb(args)
    args = replace_aliases(args, FUNCTIONS[named]) if named is not None else args
    command = typer.main.get_command(app)
    quicken_values(command)
    asked = {"--help", ALL}.intersection(_list_given(args))
    if asked:
        _fill_in_choices(command, args)
        verb = _find_verb(args)
        if verb is not None and ALL not in asked:
            streams.print_text(format_verb_help(verb, command, brief=brief))
            return 0
        if args == ["--help"]:
            streams.print_text(format_own_help(command))
            return 0
        if verb is not None:
            move_choices(command.commands[verb])  # type: ignore[attr-defined]  # click's group
        args = ["--help" if arg == ALL else arg for arg in args]
    defaults = {} if asked else _apply_settings(args)
    try:
        with command.make_context("shardctl", args, default_map=defaults) as context:
            code: int | None = command.invoke(context)
            return code or 0
    except typer.Exit as done:
        return done.exit_code


def _apply_settings(args: list[str]) -> dict[str, dict[str, Any]]:
    """Return what files and variables set for the verb of a command line, and keep it to be said."""
    verb = _find_verb(args)
    if verb is None:
        return {}
    read = read_settings(FUNCTIONS, os.environ)
    chosen = read.choose(verb, FUNCTIONS[verb], _list_given(args))
    streams.RUN.settings = tuple(chosen.values())
    streams.print_warnings(read.warnings)
    return {verb: list_defaults(chosen, FUNCTIONS[verb])}


def _list_given(args: list[str]) -> list[str]:
    return args[: args.index("--")] if "--" in args else args


def _find_verb(args: Sequence[str]) -> str | None:
    """Find the first argument that is a verb; one that follows is a checkpoint of that name."""
    return next((arg for arg in args if arg in VERBS), None)


def _spell_out_help(args: list[str]) -> list[str]:
    """Return the long form of `-h`, `-V` and `help VERB`."""
    if args[:1] == ["help"]:
        return [*args[1:], "--help"]
    if args[:1] == ["-V"]:
        return ["--version"]
    given = _list_given(args)
    return ["--help" if arg == "-h" else arg for arg in given] + args[len(given) :]


def _refuse_empty_values(args: list[str]) -> None:
    """Raise UsageError for `--option ""`, as scripts write it whose variable is not set: it would mean the default."""
    given = _list_given(args)
    spread = [part for arg in given for part in (arg.split("=", 1) if arg.startswith("--") else [arg])]
    for option, value in pairwise(spread):
        if option.startswith("--") and not value:
            raise UsageError(f"{option} has an empty value", hint="give it a value, or leave it out")


def _fill_in_choices(command: object, args: Sequence[str]) -> None:
    """Put the names of formats and layouts into the help of a verb; only where it has some are they loaded."""
    verbs = [verb for name, verb in getattr(command, "commands", {}).items() if name in args]
    parameters = [each for verb in verbs for each in verb.params if "{" in (getattr(each, "help", None) or "")]
    if not parameters:
        return
    from shardctl.libraries.catalogue import list_choices

    for word, names in list_choices().items():
        for parameter in parameters:
            parameter.help = parameter.help.replace(f"{{{word}}}", names)


def _asks_help(args: Sequence[str]) -> bool:
    """Return whether nothing is done but to print help, which its printer writes by itself."""
    return not args or not {"--help", "--version", "-h", "-V", "help", ALL}.isdisjoint(args)


def _report_failure(failed: FailureReport, args: Sequence[str]) -> int:
    """Say it on stderr, and as the last record where JSON was asked for; both must survive a bad command line."""
    given = _list_given(list(args))
    verb = _find_verb(given)
    try:
        if "--json" in given and verb:
            streams.print_record(failed.document(format_schema_name(verb)))
        streams.print_settings()
        streams.print_failure(failed)
        streams.flush_streams()
    except OSError:
        return failed.exit_code or 1  # there is nowhere left to say it
    return failed.exit_code
