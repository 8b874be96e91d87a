"""Makes the signature of a command from the dataclasses of options that its function takes."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, get_args, get_origin

import typer
from typer.models import ArgumentInfo

from shardctl.base.errors import UsageError
from shardctl.options.declaration import (
    CommandOption,
    DeclaredOption,
    HelpPanel,
    NamedPath,
    OptionGroup,
    PathAccess,
    declared_options,
    flat_options,
    make_options,
    read_option,
)
from shardctl.options.places import parse_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


DESTINATION: Final = "DST"
"""What the help calls the argument that is a place to write to."""
EVERY: Final = "every"
"""The owner of the options that all verbs have."""


class OmittedOptions(frozenset[str]):
    """Beside a dataclass in an annotation: the fields that are no options of this verb, and keep their defaults.

    >>> OmittedOptions({"kv_heads"})
    OmittedOptions({'kv_heads'})
    """

    __slots__ = ()


class _OptionFields(NamedTuple):
    """A parameter of the function that is a dataclass of options."""

    kind: type[object]
    omitted: frozenset[str]

    def options(self) -> Iterator[tuple[DeclaredOption, CommandOption]]:
        return (each for each in flat_options(self.kind) if each[0].name not in self.omitted)


def spread_options(
    function: Callable[..., int | None], every: type[object], take: Callable[[Any], None]
) -> Callable[..., int | None]:
    """Return the function as typer takes it: instead of each dataclass of options, a parameter for every option.

    The options of the dataclass `every`, which all verbs have, are given to `take` before the function is called.

    Options are shown in the order of `HelpPanel`, within a panel in the order of declaration. Where two dataclasses
    declare an option of the same name, the later declaration stands, in the place of the earlier, whose field keeps its
    default.
    """
    groups: dict[str, _OptionFields] = {}
    owners: dict[str, str] = {}
    found: dict[str, tuple[HelpPanel, Parameter]] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        option = read_option(parameter.annotation)
        if isinstance(option, CommandOption):
            kind = get_args(parameter.annotation)[0]
            declared = DeclaredOption(parameter.name, kind, parameter.default, option)
            found[parameter.name] = option.panel, _as_parameter(declared, option)
            continue
        group = _read_group(parameter.annotation)
        if group is None:
            found[parameter.name] = HelpPanel.GENERAL, parameter
            continue
        groups[parameter.name] = group
        _spread_group(parameter.name, group, owners, found)

    _spread_group(EVERY, _OptionFields(every, frozenset()), owners, found)
    paths = list_named_paths(function, every)

    def command(**given: object) -> int | None:
        if any(each.access is PathAccess.WRITTEN and given.get(each.parameter) is not None for each in paths):
            from shardctl.cli.output_files import check_outputs  # few runs write such a file

            check_outputs(paths, given)
        take(_collect_options(every, {name: value for name, value in given.items() if owners.get(name) == EVERY}))
        values = {name: value for name, value in given.items() if name not in owners and value is not None}
        for each, group in groups.items():
            own = {name: value for name, value in given.items() if owners.get(name) == each}
            values[each] = _collect_options(group.kind, own)
        return function(**values)

    panels = list(HelpPanel)
    ordered = sorted(found.values(), key=lambda one: (one[1].kind, panels.index(one[0])))
    command.__name__, command.__doc__, command.__module__ = function.__name__, function.__doc__, function.__module__
    command.__annotations__ = {}
    command.named_paths = paths  # type: ignore[attr-defined]
    command.declared = dict(_list_declared(function, every))  # type: ignore[attr-defined]
    command.__signature__ = inspect.Signature([parameter for _, parameter in ordered])  # type: ignore[attr-defined]
    return command


def _list_declared(function: Callable[..., object], every: type[object]) -> Iterator[tuple[str, CommandOption]]:
    """List the options of a command, each with its flag; of two with one flag, the later declaration stands."""
    for declared, option in flat_options(every):
        yield declared.flag, option
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        option_or_group, group = read_option(parameter.annotation), _read_group(parameter.annotation)
        if isinstance(option_or_group, CommandOption):
            yield DeclaredOption(parameter.name, None, None, option_or_group).flag, option_or_group
        for declared, option in group.options() if group is not None else ():
            yield declared.flag, option


def list_aliases(function: Callable[..., object]) -> dict[str, tuple[str, str]]:
    """List the aliases of a command's options, each with the option and the value that it stands for, "" for none."""
    declared: Mapping[str, CommandOption] = getattr(function, "declared", {})
    return {
        alias.partition("=")[0]: (flag, alias.partition("=")[2])
        for flag, option in declared.items()
        for alias in option.aliases
    }


def replace_aliases(args: Sequence[str], function: Callable[..., object]) -> list[str]:
    """Return a command line with the option itself for each of its aliases; raises UsageError for two names at once."""
    declared: Mapping[str, CommandOption] = getattr(function, "declared", {})
    aliased = {flag: option for flag, option in declared.items() if option.aliases or option.former_values}
    meant = list_aliases(function)
    found, used, expected = list[str](), dict[str, str](), ""
    rest = list(args[args.index("--") :]) if "--" in args else []
    for arg in args[: len(args) - len(rest)]:
        name, equals, value = arg.partition("=")
        flag, fixed = meant.get(name.replace("_", "-"), (name, ""))
        former = dict(aliased[expected].former_values) if expected in aliased else {}
        expected = ""
        if flag not in aliased:
            found.append(former.get(arg, arg))
            continue
        if used.setdefault(flag, name) != name:
            raise UsageError(f"{used[flag]} and {name} are both given", hint="they are one option: leave one out")
        if fixed and equals:
            raise UsageError(f"{name} takes no value", hint=f"{flag} {fixed} is the same; leave the value out")
        if fixed:
            found += [flag, fixed]
        elif equals:
            found.append(f"{flag}={dict(aliased[flag].former_values).get(value, value)}")
        else:
            found.append(flag)
            expected = flag
    return found + rest


def list_named_paths(function: Callable[..., object], every: type[object]) -> tuple[NamedPath, ...]:
    """List the parameters of the command of a function that name files or directories, each once."""
    found: dict[str, NamedPath] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        option, group = read_option(parameter.annotation), _read_group(parameter.annotation)
        argument = next((each for each in get_args(parameter.annotation) if isinstance(each, ArgumentInfo)), None)
        if isinstance(option, CommandOption):
            _add_named_path(found, DeclaredOption(parameter.name, None, None, option), option)
        elif argument is not None and argument.parser is parse_place:
            access = PathAccess.REPLACED if argument.metavar == DESTINATION else PathAccess.READ
            found[parameter.name] = NamedPath(parameter.name, argument.metavar or parameter.name, access)
        for declared, each in group.options() if group is not None else ():
            _add_named_path(found, declared, each)
    for declared, each in flat_options(every):
        _add_named_path(found, declared, each)
    return tuple(found.values())


def _add_named_path(found: dict[str, NamedPath], declared: DeclaredOption, option: CommandOption) -> None:
    if option.access is not None:
        found[declared.name] = NamedPath(declared.name, declared.flag, option.access)


def _spread_group(
    name: str, group: _OptionFields, owners: dict[str, str], found: dict[str, tuple[HelpPanel, Parameter]]
) -> None:
    for declared, option in group.options():
        owners[declared.name] = name
        found[declared.name] = option.panel, _as_parameter(declared, option)


def _read_group(annotation: object) -> _OptionFields | None:
    kind, omitted = annotation, frozenset[str]()
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        omitted = next((each for each in metadata if isinstance(each, OmittedOptions)), omitted)
    if not isinstance(kind, type) or not is_dataclass(kind):
        return None
    unknown = omitted - {declared.name for declared, _ in flat_options(kind)}
    assert not unknown, f"{kind.__name__} has no options {sorted(unknown)}"  # noqa: S101
    return _OptionFields(kind, omitted)


def _as_parameter(declared: DeclaredOption, option: CommandOption) -> Parameter:
    annotation: Any = declared.annotation if option.accepts is None else option.accepts
    usual = declared.default
    if option.parser is not None:  # which typer would give the default to as well
        annotation, usual = str | None, None
    default = typer.Option(
        usual,
        *((declared.flag, option.short) if option.short else (declared.flag,)),
        metavar="" if annotation is bool else option.metavar,
        min=option.least,
        max=option.most,
        parser=option.parser,
        autocompletion=option.words,
        rich_help_panel=option.panel,
        help=option.help,
        hidden=option.hidden,
    )
    return Parameter(declared.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _collect_options(kind: type[object], given: Mapping[str, object]) -> object:
    """Collect the dataclass of the options that were given; what is None has the default of the field."""
    values = dict[str, object]()
    for each in declared_options(kind):
        if isinstance(each.option, OptionGroup):
            names = {flag.name for flag, _ in flat_options(each.option.flags)}
            flags = make_options(each.option.flags, {name: given[name] for name in names & given.keys()})
            values[each.name] = flags.make_value()
        elif given.get(each.name) is not None:
            value = given[each.name]
            values[each.name] = tuple(value) if isinstance(value, list) else value
    return make_options(kind, values)
