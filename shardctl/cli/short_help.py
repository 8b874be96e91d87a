"""Formats the help of a verb: the options that most people use, in the groups that --help-all has."""

from __future__ import annotations

import re
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.amounts import format_plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.options.declaration import CommandOption

ALL: Final = "--help-all"
"""What lists every option."""
_HELP_WIDTH_COLUMNS: Final = 80
_OPTION_COLUMN_WIDTH: Final = 24
"""Columns of the flags and what they take."""
_MAX_ROW_LINES: Final = 4
"""Lines of an option in --help; in -h it has one."""
_MAX_CHOICES_CHARACTERS: Final = 40
"""Characters of choices that are listed."""
_CHOICES_METAVAR: Final = "NAME"
"""What stands for choices that are too long for the column of the flags."""
_COMMAND_COLUMN_WIDTH: Final = 12
"""Columns of the verbs."""
_SENTENCE_END_PATTERN: Final = re.compile(r"[.;](?= |$)")
_DEFAULT: Final = re.compile(r"Default: (.+?)\.(?= |$)")
"""Where the help of an option says what happens without it."""


def format_short_help(
    program: str,
    command: Any,  # noqa: ANN401 - click's
    common: Sequence[str],
    declared: Mapping[str, CommandOption],
    examples: str,
    page: str,
    *,
    brief: bool,
) -> str:
    """Format the usage, the `common` options in their groups, the `examples` of a verb and its `page`.

    In what is `brief`, every option has one line, the one of its declaration, and there are no examples.
    """
    parameters = {flag: parameter for parameter in command.params for flag in parameter.opts}
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    names = " ".join(_format_argument(parameter) for parameter in arguments)
    number = sum(flag.startswith("--") for flag in parameters)
    most = 1 if brief else _MAX_ROW_LINES
    groups: dict[str, list[str]] = {}
    for flag in common:
        parameter = parameters[flag]
        text = _describe_briefly(parameter, declared[flag].brief) if brief else _describe_option(parameter)
        row = _format_row(f"{flag} {_format_value(parameter)}".rstrip(), text, most)
        groups.setdefault(str(parameter.rich_help_panel), []).append(row)
    lines = [_format_row(_format_argument(each), split_first_sentence(each.help or ""), most) for each in arguments]
    for panel, rows in groups.items():
        lines += [f"{panel}:", *rows]
    more = f"{program} {ALL} lists all {format_plural(number, 'option')}" if number > len(common) else ""
    usage, guide = f"Usage: {program} [OPTIONS] {names}", f"Documentation: {page}"
    if brief:
        more = f"{program} --help says more" + more.replace(f"{program} ", ", ", 1)
        return "\n".join([usage, *lines, f"{more}.", guide, ""])
    about = fill(" ".join((command.help or "").split()), _HELP_WIDTH_COLUMNS)
    more = f"{more}." if more else ""
    return "\n".join([usage, "", about, "", *lines, "", examples.strip(), "", *filter(None, [more, guide]), ""])


def format_program_help(program: str, command: Any) -> str:  # noqa: ANN401 - click's
    """Format the help of the program on one screen: its verbs, and what follows them."""
    rows = [(name, verb.help) for name, verb in command.commands.items()]
    rows += [("--version", "Print the version and exit."), ("--help", "Show this message and exit.")]
    return "\n".join(
        [
            f"Usage: {program} [OPTIONS] COMMAND [ARGS]...",
            "",
            fill(" ".join((command.help or "").split()), _HELP_WIDTH_COLUMNS),
            "",
            *(_format_verb_row(name, help_ or "") for name, help_ in rows),
            "",
            command.epilog.strip(),
            "",
        ]
    )


def move_choices(command: Any) -> None:  # noqa: ANN401 - click's
    """Move the choices of options from the column of types, which they widen, into the help for --help-all.

    Where that column is wide, typer's table cuts the names of options and the longest words of the help.
    """
    for parameter in command.params:
        choices = _list_choices(parameter)
        if parameter.param_type_name == "option" and ", " in choices and not parameter.metavar:
            parameter.metavar, parameter.help = _CHOICES_METAVAR, f"{parameter.help} One of: {choices}."


def _format_argument(parameter: Any) -> str:  # noqa: ANN401 - click's
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name.strip('[]')}]"


def _format_value(parameter: Any) -> str:  # noqa: ANN401 - click's
    """Format what an option takes, without the limits that follow; nothing for a flag."""
    if parameter.is_flag:
        return ""
    listed = str(parameter.metavar or parameter.display_type(None)).partition(" [")[0].strip("<>")
    return listed if len(listed) <= _OPTION_COLUMN_WIDTH // 2 else _CHOICES_METAVAR


def _describe_option(parameter: Any) -> str:  # noqa: ANN401 - click's
    """Return the first sentence of an option's help, its default, and the choices that its column has no room for."""
    choices = _list_choices(parameter)
    hidden = _format_value(parameter) == _CHOICES_METAVAR
    listed = hidden and ", " in choices and len(choices) <= _MAX_CHOICES_CHARACTERS
    default = _find_default(parameter)
    notes = [choices] if listed else []
    notes += [f"default: {default}"] if default else []
    return split_first_sentence(parameter.help or "") + (f" ({'; '.join(notes)})" if notes else "")


def _list_choices(parameter: Any) -> str:  # noqa: ANN401 - click's
    """List the words that an option takes, with commas; for another option the name of its type."""
    return str(parameter.display_type(None)).strip("<>").replace("|", ", ")


def _describe_briefly(parameter: Any, brief: str) -> str:  # noqa: ANN401 - click's
    """Return the line of an option, with its default where there is room for it."""
    default = _find_default(parameter)
    whole = f"{brief} (default: {default})" if default else brief
    return whole if "(default:" not in brief and len(whole) <= _HELP_WIDTH_COLUMNS - _OPTION_COLUMN_WIDTH - 2 else brief


def _find_default(parameter: Any) -> str:  # noqa: ANN401 - click's
    """Return what an option is if it is not given, in the words of its help or as its value; "" for nothing."""
    stated = _DEFAULT.search(" ".join((parameter.help or "").split()))
    if stated:
        return stated[1]
    return "" if parameter.default in {None, False, ()} else str(parameter.default)


def _format_row(name: str, text: str, most: int) -> str:
    """Format a text beside the name, on at most so many lines."""
    lines = wrap(
        text, _HELP_WIDTH_COLUMNS - _OPTION_COLUMN_WIDTH - 2, max_lines=most, placeholder=" ...", break_on_hyphens=False
    )
    head = (
        [f"  {name:{_OPTION_COLUMN_WIDTH}}{lines[0]}"]
        if len(name) < _OPTION_COLUMN_WIDTH - 1
        else [f"  {name}", f"{'':{_OPTION_COLUMN_WIDTH + 2}}{lines[0]}"]
    )
    return "\n".join([*head, *(f"{'':{_OPTION_COLUMN_WIDTH + 2}}{line}" for line in lines[1:])])


def _format_verb_row(name: str, text: str) -> str:
    lines = wrap(split_first_sentence(text), _HELP_WIDTH_COLUMNS - _COMMAND_COLUMN_WIDTH - 2, break_on_hyphens=False)
    return "\n".join(
        [
            f"  {name:{_COMMAND_COLUMN_WIDTH}}{lines[0]}",
            *(f"{'':{_COMMAND_COLUMN_WIDTH + 2}}{line}" for line in lines[1:]),
        ]
    )


def split_first_sentence(text: str) -> str:
    """Return the first sentence of a text, without its end.

    >>> split_first_sentence("Number of ranks; they are those of the stage. Default: 1.")
    'Number of ranks'
    """
    return _SENTENCE_END_PATTERN.split(" ".join(text.split()), maxsplit=1)[0]
