"""Writes a manual page for the program and each of its commands: `python docs/man_pages.py FOLDER`.

They are made of the same declarations as `--help-all`. `man -l FOLDER/shardctl-plan.1` shows one; those in
`share/man/man1` of a folder whose `bin` is on the PATH are found by `man shardctl-plan`.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from shardctl.base.version import __version__
from shardctl.cli.app import EXIT_CODES, app
from shardctl.libraries.catalogue import list_choices

if TYPE_CHECKING:
    from collections.abc import Iterator


def escape(text: str) -> str:
    """Text as roff has it: hyphens are minus signs, so that what is copied works, and no line is a request."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return "\n".join(f"\\&{line}" if line.startswith(".") else line for line in escaped.split("\n"))


def list_parameters(function: Any) -> Iterator[tuple[Any, Any]]:
    """Each parameter's type and what typer knows of it."""
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        kind, info = parameter.annotation, parameter.default
        if get_origin(kind) is Annotated:
            kind, info = get_args(kind)[:2]
        if isinstance(info, typer.models.ParameterInfo):
            yield kind, info


def list_values(kind: Any) -> list[str]:
    """The words that a fixed choice has."""
    return [each for part in (kind, *get_args(kind)) for each in get_args(part) if isinstance(each, str)]


def format_option(kind: Any, info: Any) -> str:
    """An option with its flags, what it takes, and its help."""
    takes = "" if kind is bool else info.metavar or "|".join(list_values(kind)) or "TEXT"
    flags = ", ".join(f"\\fB{escape(flag)}\\fR" for flag in info.param_decls)
    default = info.default
    usual = f" Default: {default}." if default not in {None, False, (), ...} and "Default:" not in info.help else ""
    help_ = info.help + usual
    for word, names in list_choices().items():
        help_ = help_.replace(f"{{{word}}}", names)
    value = f" \\fI{escape(takes)}\\fR" if takes else ""
    return f".TP\n{flags}{value}\n{escape(help_)}\n"


def format_page(name: str, function: Any, examples: str) -> str:
    """The page of one command."""
    parameters = list(list_parameters(function))
    places = [info for _, info in parameters if isinstance(info, typer.models.ArgumentInfo)]
    arguments = [(info.metavar or "SHELL", info) for info in places]
    synopsis = " ".join(f"\\fI{escape(metavar)}\\fR" for metavar, _ in arguments)
    panels: dict[str, str] = {}
    for kind, info in parameters:
        if isinstance(info, typer.models.OptionInfo) and not info.hidden:
            panel = str(info.rich_help_panel or "Options")
            panels[panel] = panels.get(panel, "") + format_option(kind, info)
    about = escape(" ".join((inspect.getdoc(function) or "").split()))
    title = f"shardctl\\-{name}"
    lines = [f'.TH "{title.upper()}" 1 "" "shardctl {__version__}" "shardctl"', ".SH NAME"]
    lines += [f"{title} \\- {about.partition('. ')[0].rstrip('.').lower()}", ".SH SYNOPSIS"]
    lines += [f"\\fBshardctl {name}\\fR [\\fIOPTIONS\\fR] {synopsis}".rstrip(), ".SH DESCRIPTION", about]
    for metavar, info in arguments:
        lines += [".TP", f"\\fI{escape(metavar)}\\fR", escape(info.help or "")]
    for panel, text in panels.items():
        lines += [f'.SH "{panel.upper()}"', text.rstrip()]
    lines += [".SH EXAMPLES", ".nf", escape(examples.strip().partition("\n")[2]), ".fi"]
    return "\n".join([*lines, ".SH SEE ALSO", "\\fBshardctl\\fR(1)", ""])


def format_program(names: list[str]) -> str:
    """The page of the program, with its exit codes."""
    codes, _, _ = EXIT_CODES.partition("\n\nshardctl VERB")
    others = ",\n".join(f"\\fBshardctl\\-{name}\\fR(1)" for name in names)
    return "\n".join(
        [
            f'.TH "SHARDCTL" 1 "" "shardctl {__version__}" "shardctl"',
            ".SH NAME",
            "shardctl \\- plan, reshard and verify model checkpoints",
            ".SH SYNOPSIS",
            "\\fBshardctl\\fR \\fICOMMAND\\fR [\\fIOPTIONS\\fR] [\\fIARGUMENTS\\fR]",
            ".SH DESCRIPTION",
            escape(app.info.help or ""),
            '.SH "EXIT STATUS"',
            ".nf",
            escape(codes.partition("\n")[2]),
            ".fi",
            ".SH SEE ALSO",
            others,
            "",
        ]
    )


def write_pages(folder: Path) -> list[Path]:
    """Write all pages; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    commands = {each.name: each for each in app.registered_commands}
    pages = {f"shardctl-{name}": format_page(name, each.callback, each.epilog or "") for name, each in commands.items()}
    pages["shardctl"] = format_program(list(commands))
    for name, text in pages.items():
        (folder / f"{name}.1").write_text(text, encoding="utf-8")
    return [folder / f"{name}.1" for name in pages]


if __name__ == "__main__":
    for path in write_pages(Path(sys.argv[1])):
        print(path)
