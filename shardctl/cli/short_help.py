"""Formats the help of a verb on one screen: the options that most people use, a line each."""

from __future__ import annotations

import re
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.amounts import format_plural

if TYPE_CHECKING:
    from collections.abc import Sequence

ALL: Final = "--help-all"
"""What lists every option."""
_WIDTH: Final = 80
_NAMES: Final = 26
"""Columns of the flags and what they take."""
_CHOICES: Final = 40
"""Characters of choices that are listed."""
_VERBS: Final = 12
"""Columns of the verbs."""
_SENTENCE: Final = re.compile(r"[.;](?= |$)")


def format_short_help(program: str, command: Any, common: Sequence[str], examples: str, *, brief: bool) -> str:  # noqa: ANN401 - click's
    """Format the usage, the `common` options in this order, and the `examples` of a verb.

    What is `brief` fits a terminal of 80 columns and 24 lines: one line for each option, and no examples.
    """
    parameters = {flag: parameter for parameter in command.params for flag in parameter.opts}
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    names = " ".join(_format_argument(parameter) for parameter in arguments)
    number = sum(flag.startswith("--") for flag in parameters)
    rows = [(_format_argument(parameter), parameter.help) for parameter in arguments]
    rows += [
        (f"{flag} {_format_value(parameters[flag])}".rstrip(), _describe_option(parameters[flag], brief=brief))
        for flag in common
    ]
    more = f"{program} {ALL} lists all {format_plural(number, 'option')}." if number > len(common) else ""
    if brief:
        lines = [_format_row(name, help_ or "", 1) for name, help_ in rows]
        more = f"{program} --help says more{', ' if more else '.'}" + more.removeprefix(f"{program} ")
        return "\n".join([f"Usage: {program} [OPTIONS] {names}", *lines, more, ""])
    return "\n".join(
        [
            f"Usage: {program} [OPTIONS] {names}",
            "",
            fill(" ".join((command.help or "").split()), _WIDTH),
            "",
            *(_format_row(name, help_ or "") for name, help_ in rows),
            "",
            examples.strip(),
            "",
            more,
            "",
        ]
    )


def format_program_help(program: str, command: Any) -> str:  # noqa: ANN401 - click's
    """Format the help of the program on one screen: its verbs, and what follows them."""
    rows = [(name, verb.help) for name, verb in command.commands.items()]
    rows += [("--version", "Print the version and exit."), ("--help", "Show this message and exit.")]
    return "\n".join(
        [
            f"Usage: {program} [OPTIONS] COMMAND [ARGS]...",
            "",
            fill(" ".join((command.help or "").split()), _WIDTH),
            "",
            *(_format_verb_row(name, help_ or "") for name, help_ in rows),
            "",
            command.epilog.strip(),
            "",
        ]
    )


def _format_argument(parameter: Any) -> str:  # noqa: ANN401 - click's
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name.strip('[]')}]"


def _format_value(parameter: Any) -> str:  # noqa: ANN401 - click's
    """Format what an option takes, without the limits that follow; nothing for a flag."""
    if parameter.is_flag:
        return ""
    listed = str(parameter.metavar or parameter.display_type(None)).partition(" [")[0].strip("<>")
    return listed if len(listed) <= _NAMES // 2 else "NAME"


def _describe_option(parameter: Any, *, brief: bool) -> str:  # noqa: ANN401 - click's
    """Return the first sentence of an option's help, and unless `brief` the choices that its column has no room for."""
    sentence = split_first_sentence(parameter.help or "")
    choices = str(parameter.display_type(None)).strip("<>").replace("|", ", ")
    listed = not brief and _format_value(parameter) == "NAME" and ", " in choices and len(choices) <= _CHOICES
    return f"{sentence} ({choices})" if listed else sentence


def _format_row(name: str, text: str, most: int = 2) -> str:
    """Format the first sentence of a help text beside the name, on so many lines at most."""
    sentence = split_first_sentence(text)
    lines = wrap(sentence, _WIDTH - _NAMES - 2, max_lines=most, placeholder=" ...", break_on_hyphens=False)
    head = (
        [f"  {name:{_NAMES}}{lines[0]}"]
        if len(name) < _NAMES - 1 or most == 1
        else [f"  {name}", f"{'':{_NAMES + 2}}{lines[0]}"]
    )
    return "\n".join([*head, *(f"{'':{_NAMES + 2}}{line}" for line in lines[1:])])


def _format_verb_row(name: str, text: str) -> str:
    lines = wrap(split_first_sentence(text), _WIDTH - _VERBS - 2, break_on_hyphens=False)
    return "\n".join([f"  {name:{_VERBS}}{lines[0]}", *(f"{'':{_VERBS + 2}}{line}" for line in lines[1:])])


def split_first_sentence(text: str) -> str:
    """Return the first sentence of a text, without its end.

    >>> split_first_sentence("Number of ranks; they are those of the stage. Default: 1.")
    'Number of ranks'
    """
    return _SENTENCE.split(" ".join(text.split()), maxsplit=1)[0]
