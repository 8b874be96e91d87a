"""Registers the commands of the program, and says in its help what the exit codes mean."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from shardctl.base.version import __version__
from shardctl.cli import (
    attest,
    completion,
    diff,
    digest,
    finish,
    inspect,
    plan,
    reshard,
    schema,
    settings,
    streams,
    verify,
)
from shardctl.cli.short_help import format_program_help, format_short_help
from shardctl.cli.signature import spread_options
from shardctl.options.logging_options import LoggingOptions

EXIT_CODES = """\
Exit codes:
  0         done; the answer is yes
  1         unexpected failure (a bug)
  2         usage
  3         done; the answer is no: does not fit, is not correct, differs
  4         source missing, unreadable, malformed, hostile or unsupported
  5         not allowed: token, gated model, permissions
  6         destination refused: not written by shardctl, no space, read-only
  7         temporary failure after all retries: the same command resumes
  130, 143  interrupted, terminated: the same command resumes

shardctl VERB --help shows what most people need, --help-all every option.

Examples:
  shardctl inspect ./llama
  shardctl reshard ./llama ./llama-tp4 --tp 4

Documentation: docs/guide.md, or the pages of pip show --verbose shardctl
"""

app = typer.Typer(
    name="shardctl",
    help="Plan, reshard and verify model checkpoints, from any layout to any other, and prove that nothing is lost.",
    epilog=EXIT_CODES,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(value: bool) -> None:  # noqa: FBT001 - typer calls it so
    if value:
        streams.print_text(f"shardctl {__version__}\n")
        raise typer.Exit


@app.callback()
def shardctl(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options that stand before the command."""


VERBS = {
    verb.__name__.rpartition(".")[2]: verb for verb in (inspect, plan, reshard, finish, verify, attest, diff, digest)
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., int | None]] = {
    name: spread_options(getattr(verb, name), LoggingOptions, streams.begin_logging) for name, verb in VERBS.items()
}
"""What runs each verb, with a parameter for every option."""
for name, verb in VERBS.items():
    app.command(name, epilog=verb.EXAMPLES)(FUNCTIONS[name])
_SHOW_SETTINGS = settings.build_settings_command(FUNCTIONS)
app.command("settings", epilog=settings.EXAMPLES, rich_help_panel="For the shell")(_SHOW_SETTINGS)
app.command("schema", epilog=schema.EXAMPLES, rich_help_panel="For the shell")(schema.schema)
app.command("completion", epilog=completion.EXAMPLES, rich_help_panel="For the shell")(completion.completion)


def format_own_help(command: Any) -> str:  # noqa: ANN401 - click's group
    """Format the help of the program on one screen."""
    return format_program_help("shardctl", command)


def format_verb_help(name: str, command: Any, *, brief: bool) -> str:  # noqa: ANN401 - click's group
    """Format what most people need to know of a verb, briefly for a small terminal."""
    verb = VERBS[name]
    declared = FUNCTIONS[name].declared  # type: ignore[attr-defined]  # `spread_options` sets it
    return format_short_help(
        f"shardctl {name}",
        command.commands[name],
        verb.COMMON,
        declared,
        verb.EXAMPLES,
        getattr(verb, "PAGE", "docs/guide.md"),
        brief=brief,
    )


def answer_shell(asked: list[str]) -> None:
    """Print the words that can stand at the cursor of a shell."""
    others: dict[str, Callable[..., int | None]] = {
        "settings": _SHOW_SETTINGS,
        "schema": schema.schema,
        "completion": completion.completion,
    }
    streams.print_text(completion.answer_shell(FUNCTIONS | others, asked))
