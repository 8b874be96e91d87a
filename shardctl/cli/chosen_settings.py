"""Reads what options are set to by files and variables, and chooses which settings count for a verb.

The command line comes first, then variables, then the project's file, then the user's. Of one place, what is set for
one verb counts more than what is set for all.
"""

from __future__ import annotations

import inspect
import os
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args, get_origin

import typer

from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.cli.signature import list_aliases, replace_aliases
from shardctl.options.declaration import PERMISSION, PathAccess
from shardctl.report.visible import hide_passwords
from shardctl.storage.bounded_text import RULE_TEXT, parse_toml, read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

PREFIX: Final = "SHARDCTL_"
PROJECT: Final = "pyproject.toml"
_PYPROJECT_TABLE: Final = "tool.shardctl"
_OTHER_VARIABLES: Final = frozenset({"DEBUG", "WORKERS", "GPU_TESTS", "VLLM_PYTHON"})
"""What variables with the prefix mean that are no settings."""
_NOT_OF_PROJECTS: Final = frozenset(
    {
        *("--overwrite", "--create", "--engine-python", "--engine", "--plan", "--quiet"),
        *("--log", "--junit", "--summary", "--report", "--out"),
        *("--attestation", "--public-key", "--identity", "--issuer", "--key", "--sigstore", "--policy"),
    }
)
"""Options that permit something, run a program, send a key, write a file, choose what is read, say whom to trust, or
hide what was set: a project may be downloaded, and must not decide that for its user."""
_BOOLEAN_WORDS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_ANNOTATED_ARGS_COUNT: Final = 2


@value_class
class OptionSetting:
    """One option that a file or a variable sets."""

    option: str
    """Its long flag."""
    verb: str
    """For which verb; empty for all that have the option."""
    value: Any
    origin: str
    """The variable, or the file and its table."""

    def document(self) -> dict[str, Any]:
        """Build it for JSON."""
        return {"option": self.option, "verb": self.verb, "value": _hide_value(self.value), "origin": self.origin}

    def __str__(self) -> str:
        return f"{self.option}{'' if self.value is True else f' {_hide_value(self.value)}'} from {self.origin}"


@value_class
class ReadSettings:
    """All settings, those that count more before the others, and where they were looked for."""

    settings: tuple[OptionSetting, ...]
    files: Mapping[str, bool]
    """The files that were looked for, and whether each was there."""
    warnings: tuple[str, ...]

    def choose(self, verb: str, function: Callable[..., Any], args: Sequence[str]) -> dict[str, OptionSetting]:
        """Choose what counts for the parameters of a verb that the command line does not give."""
        chosen: dict[str, OptionSetting] = {}
        for parameter, info in _list_parameters(function):
            flags = [flag for flag in info.param_decls or () if flag.startswith("-")]
            given = any(arg == flag or arg.startswith(f"{flag}=") for arg in args for flag in flags)
            found = (each for each in self.settings if each.option in flags and each.verb in {"", verb})
            setting = None if given else next(found, None)
            if setting is not None:
                chosen[parameter.name] = setting
        return chosen


def read_settings(verbs: Mapping[str, Callable[..., Any]], environment: Mapping[str, str]) -> ReadSettings:
    """Read the settings of this environment, project and user; raises UsageError for one that no verb has."""
    options = {verb: _list_flags(function) for verb, function in verbs.items()}
    known = {flag for flags in options.values() for flag in flags}
    read_flags = {
        each.label
        for function in verbs.values()
        for each in getattr(function, "named_paths", ())
        if each.access is PathAccess.READ
    }
    found, warnings = list[OptionSetting](), list[str]()
    for name, text in sorted(environment.items()):
        if name.startswith(PREFIX) and text and name.removeprefix(PREFIX) not in _OTHER_VARIABLES:
            settings = _read_variable(name, text, options, tuple(verbs.values()))
            if settings is None:
                warnings.append(f"{name} is no setting and no variable of shardctl{_suggest_variable(name, options)}")
            else:
                found += settings
    found.sort(key=lambda setting: not setting.verb)
    files: dict[str, bool] = {}
    for path, table in _list_files(environment):
        files[str(path)] = _is_settings_file(path)
        if files[str(path)]:
            content = parse_toml(read_file(path, RULE_TEXT, UsageError), str(path), RULE_TEXT, UsageError)
            for part in filter(None, table.split(".")):
                content = content.get(part, {}) if isinstance(content, dict) else {}
            origin = f"{path} [{table}]" if table else str(path)
            own = list(_read_table(content, "", origin, options, known, tuple(verbs.values())))
            for setting in own if table else ():
                _refuse_permission(setting)
                if setting.option in read_flags:
                    _require_inside(setting, path.parent)
            found += sorted(own, key=lambda setting: not setting.verb)
    return ReadSettings(tuple(found), files, tuple(warnings))


def _is_settings_file(path: Path) -> bool:
    try:
        return path.is_file()
    except PermissionError:
        raise
    except OSError as error:  # such as a name that is too long
        raise UsageError(
            f"{path} cannot be looked for: {error.strerror}", hint="check XDG_CONFIG_HOME and HOME"
        ) from error


def _list_files(environment: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """List the nearest project's file, and the user's, each with the table that is shardctl's."""
    try:
        here = Path.cwd()
    except FileNotFoundError as error:
        raise UsageError(
            "the working directory does not exist any more", hint="change to a directory that exists, with cd"
        ) from error
    project = next((place / PROJECT for place in (here, *here.parents) if (place / PROJECT).is_file()), here / PROJECT)
    yield project, _PYPROJECT_TABLE
    base = environment.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")  # noqa: PTH111, PTH118 - a home that is not known is "~"
    yield Path(base, "shardctl", "config.toml"), ""


def _read_table(
    table: object,
    verb: str,
    origin: str,
    options: Mapping[str, frozenset[str]],
    known: set[str],
    aliases: Sequence[Callable[..., Any]],
) -> Iterator[OptionSetting]:
    if not isinstance(table, dict):
        raise UsageError(f"{origin} is no table", hint="write option = value in it")
    for key, given in table.items():
        if not verb and key in options and isinstance(given, dict):
            inside = f"{origin.removesuffix(']')}.{key}]" if origin.endswith("]") else f"{origin} [{key}]"
            yield from _read_table(given, key, inside, options, known, aliases)
            continue
        flag = f"--{key.replace('_', '-')}"
        meant = _replace_alias(flag, given, aliases)
        if meant is None:
            continue
        flag, value = meant
        if flag not in (options[verb] if verb else known):
            near = get_close_matches(key, [each.removeprefix("--") for each in known], 1)
            hint = f"did you mean {near[0]}?" if near else f"shardctl {verb or 'VERB'} --help-all lists the options"
            raise UsageError(f"{origin} sets {key!r}, which is no option", hint=hint)
        yield OptionSetting(flag, verb, _convert_value(value, f"{key!r} in {origin}"), origin)


def _convert_value(value: object, where: str) -> Any:  # noqa: ANN401 - what the parser takes
    """Return what the parser of the command line takes: texts, and booleans for flags."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list):
        return tuple(_convert_value(each, where) for each in value)
    raise UsageError(f"{where} is no text, number, boolean or list", hint="write it as on the command line")


def _replace_alias(flag: str, value: Any, functions: Sequence[Callable[..., Any]]) -> tuple[str, Any] | None:  # noqa: ANN401 - what a file holds
    """Return the option that an alias means, and its value; anything else as it is, and None for what is turned off.

    Raises UsageError where an alias that stands for a value is neither turned on nor off.
    """
    for function in functions:
        meant, fixed = list_aliases(function).get(flag, ("", ""))
        if fixed:
            turned_on = _BOOLEAN_WORDS.get(str(value).lower())
            if turned_on is None:
                raise UsageError(f"{flag} {value} is neither true nor false", hint=f"write 1 or 0, or {meant} {fixed}")
            return (meant, fixed) if turned_on else None
        if meant:
            return meant, value if isinstance(value, bool | list) else replace_aliases([flag, str(value)], function)[1]
    return flag, value


def _read_variable(
    name: str, text: str, options: Mapping[str, frozenset[str]], functions: Sequence[Callable[..., Any]]
) -> list[OptionSetting] | None:
    """Read the setting of a variable; an empty list for an alias that it turns off, None for an unknown name."""
    words = name.removeprefix(PREFIX).lower().replace("_", "-")
    for verb, flags in options.items():
        if words.startswith(f"{verb}-"):
            meant = _replace_alias(f"--{words.removeprefix(f'{verb}-')}", text, functions)
            if meant is None or meant[0] in flags:
                return [] if meant is None else [OptionSetting(meant[0], verb, meant[1], name)]
    meant = _replace_alias(f"--{words}", text, functions)
    if meant is None:
        return []
    known = any(meant[0] in flags for flags in options.values())
    return [OptionSetting(meant[0], "", meant[1], name)] if known else None


def _suggest_variable(name: str, options: Mapping[str, frozenset[str]]) -> str:
    every = {PREFIX + flag[2:].upper().replace("-", "_") for flags in options.values() for flag in flags}
    near = get_close_matches(name, every, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _refuse_permission(setting: OptionSetting) -> None:
    """Raise UsageError for what a project must not say."""
    if setting.option in _NOT_OF_PROJECTS or setting.option.startswith(PERMISSION):
        raise UsageError(
            f"{setting.origin} sets {setting.option}, which a project cannot permit",
            hint="give it on the command line, in a variable, or in the user's config.toml",
        )


def _require_inside(setting: OptionSetting, project: Path) -> None:
    """Raise UsageError for a place that a project names and that is not a part of it: an address, a path elsewhere."""
    for value in setting.value if isinstance(setting.value, tuple) else (setting.value,):
        place = Path(str(value))
        if not os.path.lexists(place) or not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(project)):
            raise UsageError(
                f"{setting.origin} sets {setting.option} to {str(value)!r}, which is not a file or a directory of the "
                "project",
                hint="give it on the command line, in a variable, or in the user's config.toml",
            )


def _hide_value(value: Any) -> Any:  # noqa: ANN401 - a setting's
    """Return the value of a setting as it may be shown."""
    if isinstance(value, tuple):
        return tuple(map(_hide_value, value))
    return hide_passwords(value) if isinstance(value, str) else value


def list_defaults(chosen: Mapping[str, OptionSetting], function: Callable[..., Any]) -> dict[str, Any]:
    """List the values by parameter, as the parser takes them instead of its defaults."""
    values: dict[str, Any] = {}
    for parameter, info in _list_parameters(function):
        setting = chosen.get(parameter.name)
        if setting is None:
            continue
        value, several = setting.value, get_origin(parameter.annotation) is list
        if parameter.annotation is bool and isinstance(value, str):
            if value.lower() not in _BOOLEAN_WORDS:
                raise UsageError(f"{setting} is neither true nor false", hint="write 1 or 0")
            value = _BOOLEAN_WORDS[value.lower()]
        if (parameter.annotation is not bool and isinstance(value, bool)) or (isinstance(value, tuple) and not several):
            raise UsageError(
                f"{setting}: {setting.option} takes one value", hint=f"it takes {info.metavar or 'a text'}"
            )
        values[parameter.name] = (value,) if several and not isinstance(value, tuple) else value
    return values


def _list_parameters(function: Callable[..., Any]) -> Iterator[tuple[inspect.Parameter, typer.models.OptionInfo]]:
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        info = parameter.default
        if get_origin(parameter.annotation) is Annotated:
            annotation, info = get_args(parameter.annotation)[:_ANNOTATED_ARGS_COUNT]
            parameter = parameter.replace(annotation=annotation)  # noqa: PLW2901 - the same without its metadata
        if isinstance(info, typer.models.OptionInfo):
            yield parameter, info


def _list_flags(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(
        flag for _, info in _list_parameters(function) for flag in info.param_decls or () if flag.startswith("--")
    )
