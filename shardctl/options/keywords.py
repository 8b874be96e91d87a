"""Makes option objects from the keyword arguments of the Python API, which has one for every long flag.

>>> from shardctl.options import DestinationOptions, ReshardOptions
>>> keywords = OptionKeywords({"tp": 2, "memory": "2GiB", "overwrite": True}, ReshardOptions, DestinationOptions)
>>> str(keywords.make(ReshardOptions).mesh), keywords.make(DestinationOptions).overwrite
('tp2', True)
"""

from __future__ import annotations

import keyword
import operator
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, ForwardRef, Literal, Union, cast, get_args, get_origin

from shardctl.base.errors import UsageError
from shardctl.options.declaration import (
    Chosen,
    CommandOption,
    DeclaredOption,
    HelpPanel,
    OptionGroup,
    declared_options,
    flat_options,
    make_options,
    read_option,
)
from shardctl.options.places import parse_place
from shardctl.options.plan_options import find_device
from shardctl.options.sizes import parse_price, parse_rate, parse_run_tokens, parse_size, parse_token_count
from shardctl.tensors.mesh import AXES, EXPERT_AXES, Mesh

if TYPE_CHECKING:
    from collections.abc import Sequence

_CAPITAL_LETTER_PATTERN: Final = re.compile(r"(?<!^)(?=[A-Z])")
_MAX_SHOWN: Final = 60
"""Characters of a value that an error shows; of a longer one it names the type alone."""
_MESH_OPTION: Final = "mesh"
"""The option that takes a text, a dictionary or an object."""


class _ClassName(str):
    """The name of a class that an annotation has as a text, because importing it is slow."""

    __slots__ = ()


def name_keyword(flag: str) -> str:
    """Return what Python calls a flag: its words with underscores, and one more after a word of Python.

    >>> name_keyword("--seq-len"), name_keyword("--for")
    ('seq_len', 'for_')
    """
    name = flag.removeprefix("--").replace("-", "_")
    return f"{name}_" if keyword.iskeyword(name) else name


def list_alias_keywords(option: CommandOption) -> list[tuple[str, str]]:
    """List the other keywords of an option, each with the value that it means, or '' if it takes one.

    >>> list_alias_keywords(CommandOption(HelpPanel.TRAINING, "", aliases=("--users", "--gradient-checkpointing=full")))
    [('users', ''), ('gradient_checkpointing', 'full')]
    """
    parts = (alias.partition("=") for alias in option.aliases)
    return [(name_keyword(flag), value) for flag, _, value in parts]


def name_parameter(kind: type[object]) -> str:
    """Return the name of the parameter that takes an option object, such as `reshard_options`."""
    return _CAPITAL_LETTER_PATTERN.sub("_", kind.__name__).lower()


def warn_of_object(name: str, instead: str = "give its options as keywords, such as tp=4", *, frames: int) -> None:
    """Warn that a parameter goes with the next release; the code to blame is so many `frames` above the caller."""
    warnings.warn(f"{name} goes with the next release: {instead}", DeprecationWarning, stacklevel=frames + 2)


class OptionKeywords:
    """The arguments of one call, checked, from which the objects of its options are made.

    Each kind of options may also be given as an object, under its own name (`reshard_options=ReshardOptions(...)`), for
    one release. The same option in both ways is an error.
    """

    def __init__(self, arguments: Mapping[str, object], *kinds: type[object]) -> None:
        """Take the arguments by parameter; where two kinds have an option of one name, the later kind has it."""
        self._arguments = dict(arguments)
        self._owners = {name_keyword(each.flag): kind for kind in kinds for each, _ in flat_options(kind)}
        for kind in kinds:
            name = name_parameter(kind)
            given = arguments.get(name)
            if given is not None and not isinstance(given, kind):
                raise UsageError(
                    f"{name} takes {kind.__name__}, not {describe_value(given)}",
                    hint="give options as keywords, such as tp=4",
                )
            if given is not None:
                warn_of_object(name, frames=3)
        self._given = {
            name_keyword(each.flag): each.name
            for kind in kinds
            for each, option in flat_options(kind)
            if self._find_value(each, option, kind) != each.default
        }

    def make(self, kind: type[Chosen]) -> Chosen:
        """Make the options of a kind; raises UsageError for a combination that cannot be."""
        given = self._arguments.get(name_parameter(kind))
        values = {}
        for declared in declared_options(kind):
            if isinstance(declared.option, CommandOption):
                flags = [declared]
                value = self._find_value(declared, declared.option, kind)
            else:
                group = declared.option.flags
                flags = [each for each, _ in flat_options(group)]
                chosen = {each.name: self._find_value(each, option, kind) for each, option in flat_options(group)}
                value = make_options(group, chosen).make_value()
            if given is not None and (own := getattr(given, declared.name)) != declared.default:
                both = next((name for each in flags if (name := name_keyword(each.flag)) in self._given), None)
                if both is not None:
                    raise UsageError(
                        f"{both} is given as a keyword and in {name_parameter(kind)}",
                        hint=f"leave {name_parameter(kind)} out: it goes with the next release",
                    )
                value = _check_own_value(declared, own)
            values[declared.name] = value
        if given is None:
            return make_options(kind, values)
        return replace(cast("Any", given), **values)  # type: ignore[no-any-return] # fields that are no options stay

    def list_given(self) -> tuple[str, ...]:
        """List the fields of the options whose keywords differ from their defaults."""
        return tuple(self._given.values())

    def _find_value(self, declared: DeclaredOption, option: CommandOption, kind: type[object]) -> object:
        """Find the checked value of an option, or its default if it is no keyword of this call."""
        name = name_keyword(declared.flag)
        if self._owners.get(name) is not kind or name not in self._arguments:
            return declared.default
        value = check_option(declared, option, self._arguments[name])
        for other, meaning in list_alias_keywords(option):
            given = self._arguments.get(other)
            if meaning:
                given = meaning if check_argument(other, bool, given or False) else None
            if given is None:
                continue
            if value != declared.default:
                raise UsageError(f"{name} and {other} are both given", hint="they are one option: leave one out")
            value = check_option(declared._replace(option=replace(option, flag=f"--{other}")), option, given)
        return value


def _check_own_value(declared: DeclaredOption, value: object) -> object:
    """Return the checked value of a field of an option object."""
    if isinstance(declared.option, OptionGroup):
        return Mesh.parse(format_mesh(value))
    return check_option(declared, declared.option, value)


def check_argument(name: str, annotation: Any, value: object) -> Any:  # noqa: ANN401 - as the annotation says
    """Return an argument that has no field, checked by its annotation; raises UsageError.

    >>> from typing import Annotated
    >>> check_argument("memory", Annotated[int, CommandOption(HelpPanel.EFFORT, "", parser=parse_size)], "1GiB")
    1073741824
    """
    option = read_option(annotation)
    if not isinstance(option, CommandOption):
        option = CommandOption(HelpPanel.GENERAL, "")
    else:
        annotation = get_args(annotation)[0]
    kinds = _list_kinds(annotation)
    return None if value is None and NoneType in get_args(annotation) else _check_value(name, value, kinds, option)


def check_path(name: str, value: object) -> str:
    """Return a path or an address as text; raises UsageError for anything else."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        hint = "write a path, owner/name on the Hub, or the address of a bucket"
        raise UsageError(f"{name} takes a path or an address, not {describe_value(value)}", hint=hint)
    return parse_place(text)


def check_option(declared: DeclaredOption, option: CommandOption, value: object) -> object:
    """Return the value of an option as its field has it; raises UsageError for one that it cannot have."""
    if value is None or value is declared.default:
        return declared.default
    name, kinds = name_keyword(declared.flag), _list_kinds(declared.annotation)
    if declared.name == _MESH_OPTION:
        text = format_mesh(value)
        return text if str in kinds else Mesh.parse(text)
    if option.parser is find_device:
        return _check_device(name, value)
    if get_origin(kinds[0]) is tuple:
        one = isinstance(value, str | os.PathLike) or not isinstance(value, Iterable)
        values = [value] if one else list(cast("Iterable[object]", value))
        return tuple(_check_value(name, each, [get_args(kinds[0])[0]], option) for each in values)
    return _check_value(name, value, kinds, option)


def format_mesh(value: object) -> str:
    """Format a mesh as `--mesh` takes it; raises UsageError for anything else.

    >>> format_mesh({"pp": 2, "tp": 4}), format_mesh(Mesh.parse("pp=2,tp=4"))
    ('pp=2,tp=4', 'dp=1,fsdp=1,cp=1,pp=2,tp=4,ep=1,etp=4')
    """
    hint = 'write mesh="pp=2,tp=4", mesh={"pp": 2, "tp": 4}, mesh=Mesh.of(pp=2, tp=4) or tp=4'
    if isinstance(value, str):
        return value
    degrees: object = value
    if isinstance(value, Mesh):
        degrees = {**dict(value.axes), **{axis: value.degree(axis) for axis in EXPERT_AXES}}
    if not isinstance(degrees, Mapping):
        raise UsageError(f"mesh takes a text, a dictionary or a Mesh, not {describe_value(value)}", hint=hint)
    for axis, degree in degrees.items():
        if axis not in (*AXES, *EXPERT_AXES):
            raise UsageError(f"unknown mesh axis {axis!r}", hint=f"the axes are {', '.join((*AXES, *EXPERT_AXES))}")
        if not _is_whole(degree) or operator.index(degree) < 1:
            raise UsageError(f"mesh axis {axis} takes a number of ranks, not {describe_value(degree)}", hint=hint)
    return ",".join(f"{axis}={operator.index(degree)}" for axis, degree in degrees.items())


def _check_device(name: str, value: object) -> object:
    """Return the device that a text, a dictionary with the keys of a device's file, or an object describes."""
    from shardctl.hardware.devices import DeviceSpec, build_device

    if isinstance(value, DeviceSpec):
        return value
    if isinstance(value, Mapping):
        return build_device(value)
    if isinstance(value, str | os.PathLike):
        return find_device(os.fspath(value))
    raise UsageError(
        f"{name} takes a name, a size, a dictionary or a DeviceSpec, not {describe_value(value)}",
        hint='write gpu="h100", gpu="80GB" or gpu={"name": "mine", "memory_gib": 80}',
    )


def _check_value(name: str, value: object, kinds: Sequence[Any], option: CommandOption) -> object:
    """Return a value of one of these kinds: types, words of a choice, or names of classes."""
    words = [kind for kind in kinds if type(kind) is str]
    if words and isinstance(value, str):
        if value in words:
            return value
        near = get_close_matches(value, words, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(map(repr, words))}"
        raise UsageError(f"{name} has no choice {value!r}", hint=hint)
    is_text = isinstance(value, str) or (isinstance(value, os.PathLike) and Path in kinds)
    if is_text and option.parser is not None:
        return option.parser(os.fspath(cast("str", value)))
    if is_text and (str in kinds or Path in kinds):
        return value if isinstance(value, str) and str in kinds else Path(parse_place(os.fspath(cast("str", value))))
    if (bool in kinds and isinstance(value, bool)) or type(value).__name__ in kinds:
        return value
    if int in kinds and _is_whole(value):
        return _check_number(name, operator.index(cast("int", value)), option)
    if float in kinds and isinstance(value, int | float) and not isinstance(value, bool):
        return option.parser(str(value)) if option.parser is not None else float(value)
    raise UsageError(
        f"{name} takes {_describe_kinds(kinds, option)}, not {describe_value(value)}",
        hint=f"{name} is: {option.help}",
    )


def _check_number(name: str, number: int, option: CommandOption) -> object:
    """Return a number within the bounds of an option; sizes are bytes."""
    if option.parser is parse_size and number >= 0:
        return parse_size(f"{number}B")
    least, most = (
        1
        if option.parser in {parse_price, parse_rate, parse_run_tokens, parse_size, parse_token_count}
        else option.least,
        option.most,
    )
    if (least is not None and number < least) or (most is not None and number > most):
        bounds = f"from {least} to {most}" if most is not None else f"at least {least}"
        raise UsageError(f"{name} is {number}, and must be {bounds}", hint=f"{name} is: {option.help}")
    return number


def _is_whole(value: object) -> bool:
    """Return whether a value is a whole number, NumPy's included, and no truth value."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _list_kinds(annotation: object) -> list[Any]:
    """List the types, words of a choice, and names of classes that an annotation allows besides None."""
    if isinstance(annotation, ForwardRef):
        names = [name.strip() for name in annotation.__forward_arg__.split("|")]
        return [Path if name == Path.__name__ else _ClassName(name) for name in names if name != "None"]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in {Union, UnionType}:
        return [kind for each in get_args(annotation) if each is not NoneType for kind in _list_kinds(each)]
    return [annotation]


def _describe_kinds(kinds: Sequence[Any], option: CommandOption) -> str:
    """Describe what an option takes, such as `a whole number or a text`."""
    known = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    named = [repr(kind) if type(kind) is str else known.get(kind, str(kind)) for kind in kinds]
    return " or ".join([*named, "a size such as '5GB'"] if option.parser is parse_size else named)


def describe_value(value: object) -> str:
    """Describe a value that is refused, with its type."""
    shown, kind = repr(value), type(value).__name__
    return f"{shown} ({kind})" if len(shown) <= _MAX_SHOWN else f"a value of type {kind}"
