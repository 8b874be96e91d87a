"""Translates what the parser of command lines raises into errors of our own, with a hint that helps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import typer

from shardctl.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBER_ERROR_MESSAGES: Final = {
    "Input should be a valid integer": "{value} is not a whole number",
    "Input should be a valid number": "{value} is not a number",
}
"""How pydantic, which typer repeats, begins to say that something is no number."""
_BOUND_ERROR_PATTERN: Final = re.compile(r"Input should be (greater|less) than or equal to (\S+)", re.IGNORECASE)
_BOUND_WORDS: Final = {"greater": "least", "less": "most"}
_PYDANTIC_ERROR_PATTERN: Final = re.compile(
    r"(Input should be|Value error|Unable to parse|Field required)[^:]*", re.IGNORECASE
)
"""How pydantic begins to say what a value should be, in words of its own types."""
_MIN_SIMILARITY: Final = 0.7
"""Below, a suggestion is more often wrong than right: `--users` is not `--towers`."""
_INVALID_VALUE_PATTERN: Final = re.compile(
    r"invalid value for '(?P<option>--[\w-]+)[^']*': (?P<rest>.*)", re.IGNORECASE | re.DOTALL
)
_MISSING_ARGUMENT_PATTERN: Final = re.compile(r"(Missing argument '\w+')\. Choose from:\s*(.*)", re.DOTALL)
_INVALID_CHOICE_PATTERN: Final = re.compile(r"'(?P<value>[^']+)' is not one of (?P<choices>'.*)", re.DOTALL)


def translate_parser_error(error: Exception, args: Sequence[str]) -> Exception:
    """Return a parser's error as one of ours; any other error as it is.

    `args` is the command line, for the values that a message does not repeat.
    """
    if not isinstance(error, typer.TyperException):
        return error
    missing = _MISSING_ARGUMENT_PATTERN.search(error.format_message())
    if missing is not None:
        return UsageError(f"m{missing[1][1:]}", hint=f"use {' '.join(missing[2].split())}")
    return _translate_message(error, args)


def _translate_message(error: typer.TyperException, args: Sequence[str]) -> UsageError:
    """Translate what the parser says of an option or a value."""
    from shardctl.cli import foreign_words  # rarely needed

    message, _, guess = error.message.partition(". Did you mean ")
    context = getattr(error, "ctx", None)
    if not guess:
        named = str(getattr(error, "option_name", "") or getattr(error, "cmd_name", ""))
        near = getattr(error, "possibilities", None) or ()
        guess = " or ".join(each for each in near if _is_similar(named, each))
        message = error.message if near else error.format_message()
    message = message.strip().rstrip(".").replace(": Value error, ", ": ")
    message = message[:1].lower() + message[1:]
    aliases = _list_typed_aliases(args, context)
    rejected = _INVALID_VALUE_PATTERN.fullmatch(message)
    if rejected is not None:
        option, rest = rejected["option"], rejected["rest"]
        for begin, said in _NUMBER_ERROR_MESSAGES.items():
            if rest.startswith(begin):
                value = _find_value(args, aliases.get(option, option))
                message = f"{option}: {said.format(value=repr(value))}"
                guess = guess or _guess_number(value)
        choice = _INVALID_CHOICE_PATTERN.fullmatch(rest)
        guess = guess or (_guess_choice(choice["value"], choice["choices"]) if choice is not None else "")
        if choice is not None and option == "--dtype" and "--quantize" in _list_options(context):
            guess = foreign_words.QUANTIZED.get(choice["value"].lower(), guess)
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
    message = _BOUND_ERROR_PATTERN.sub(lambda found: f"must be at {_BOUND_WORDS[found[1].lower()]} {found[2]}", message)
    message = _PYDANTIC_ERROR_PATTERN.sub("the value is not of the kind that it takes", message)
    for flag, alias in aliases.items():
        message = re.sub(rf"{flag}(?![\w-])", alias, message)
    hint = f"did you mean {guess.rstrip('?')}?" if guess else f"{path} --help lists the arguments"
    return UsageError(message, hint=hint)


def _is_similar(given: str, known: str) -> bool:
    """Return whether a word is near enough to another to be suggested for it."""
    from difflib import SequenceMatcher

    return not given or SequenceMatcher(None, given.strip("-"), known.strip("-")).ratio() > _MIN_SIMILARITY


def _guess_number(value: str) -> str:
    """Guess which whole numbers are meant by thousands that are abbreviated or separated, such as ``8k``."""
    if re.fullmatch(r"\d{1,3}([,_ ']\d{3})+", value):
        return re.sub(r"\D", "", value)
    short = re.fullmatch(r"(\d{1,6})([kKmM])", value)
    if short is None:
        return ""
    number, power = int(short[1]), 1 if short[2] in "kK" else 2
    return f"{number * 1024**power} or {number * 1000**power}"


def _guess_choice(value: str, choices: str) -> str:
    """Guess which choice is meant by another tool's word for one, or by one that is mistyped; else return ''."""
    from difflib import get_close_matches

    from shardctl.cli import foreign_words

    known = re.findall(r"'([^']*)'", choices)
    meant = foreign_words.CHOICES.get(value.lower(), "")
    return meant if meant in known else next(iter(get_close_matches(value.lower(), known, 1, _MIN_SIMILARITY)), "")


def _list_typed_aliases(args: Sequence[str], context: typer.Context | None) -> dict[str, str]:
    """List the options that a command line gives by another name, each with that name: the parser saw the first one."""
    from shardctl.cli.signature import list_aliases

    function = context.command.callback if context is not None else None
    typed = {arg.partition("=")[0]: arg.partition("=")[0].replace("_", "-") for arg in args}
    meant = list_aliases(function) if function is not None else {}
    return {meant[name][0]: arg for arg, name in typed.items() if name in meant and not meant[name][1]}


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
