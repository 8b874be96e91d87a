"""Translates what the parser of command lines raises into errors of our own, with a hint that helps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import typer

from shardctl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS: Final = {
    "Input should be a valid integer": "{value} is not a whole number",
    "Input should be a valid number": "{value} is not a number",
}
"""How pydantic, which typer repeats, begins to say that something is no number."""
_REJECTED: Final = re.compile(r"invalid value for '(?P<option>--[\w-]+)[^']*': (?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_CHOICE: Final = re.compile(r"'(?P<value>\w+)' is not one of (?P<choices>'.*)", re.DOTALL)


def translate_parser_error(error: Exception, args: Sequence[str]) -> Exception:
    """Return a parser's error as one of ours; any other error as it is.

    `args` is the command line, for the values that a message does not repeat.
    """
    from shardctl.cli import foreign_words  # rarely needed

    if not isinstance(error, typer.TyperException):
        return error
    message, _, guess = error.message.partition(". Did you mean ")
    context = getattr(error, "ctx", None)
    if not guess:
        guess = " or ".join(getattr(error, "possibilities", None) or ())
        message = error.message if guess else error.format_message()
    message = message.strip().rstrip(".").replace(": Value error, ", ": ")
    message = message[:1].lower() + message[1:]
    rejected = _REJECTED.fullmatch(message)
    if rejected is not None:
        option, rest = rejected["option"], rejected["rest"]
        for begin, said in _NUMBERS.items():
            if rest.startswith(begin):
                message = f"{option}: {said.format(value=repr(_find_value(args, option)))}"
        choice = _CHOICE.fullmatch(rest)
        meant = foreign_words.TYPES.get(choice["value"].lower()) if choice is not None else None
        guess = guess or (meant if choice is not None and meant and f"'{meant}'" in choice["choices"] else "")
    unknown = re.fullmatch(r"no such command '(?P<verb>.*)'", message)
    if unknown is not None:
        guess = foreign_words.VERBS.get(unknown["verb"], guess)
    option = re.fullmatch(r"no such option: --(?P<word>[\w-]+)", message)
    if option is not None:
        meant = foreign_words.OPTIONS.get(option["word"].replace("_", "-").lower(), "")
        guess = meant if meant.partition(" ")[0] in _list_options(context) else guess
    short = re.fullmatch(r"no such option: -\w", message)
    if short is not None and not guess:
        guess = _find_long_option(args, context)
        message = f"no such option: {guess[1:]}" if guess else message
    path = context.command_path if context else "shardctl"
    hint = f"did you mean {guess.rstrip('?')}?" if guess else f"{path} --help lists the arguments"
    return UsageError(message, hint=hint)


def _find_value(args: Sequence[str], option: str) -> str:
    """Find the last value that a command line gives to an option."""
    found = ""
    for arg, following in zip(args, (*args[1:], ""), strict=True):
        if arg == option:
            found = following
        elif arg.startswith(f"{option}="):
            found = arg.removeprefix(f"{option}=")
    return found


def _find_long_option(args: Sequence[str], context: typer.Context | None) -> str:
    """Find the option that one word of a command line would be with a second dash, such as ``-tp``."""
    known = _list_options(context)
    meant = (f"-{arg.partition('=')[0]}" for arg in args if re.match(r"-\w", arg))
    return next((each for each in meant if each in known), "")


def _list_options(context: typer.Context | None) -> set[str]:
    """List the options of the verb that a command line names."""
    return {name for each in context.command.params for name in each.opts} if context is not None else set()
