"""Reads plain values of a command line without typer's own reader, which loads pydantic and prepares every option."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

if TYPE_CHECKING:
    from collections.abc import Callable

_INTEGER_PATTERN: Final = re.compile(r"[0-9]{1,9}")


class QuickReader:
    """Takes the place of what typer makes of an option (`RuntimeParam`), and makes that where it is needed.

    Texts, paths, names of a list and small numbers within their limits are read here, and so is the absence of a value.
    """

    def __init__(self, parameter: Any) -> None:  # noqa: ANN401 - typer's
        self._parameter = parameter

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ANN401 - as typer's
        """Return the value as the command takes it; raises typer's BadParameter for one of another kind."""
        described = self._parameter.type_descriptor
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        if several and value == ():
            return []
        if not several:
            read = _read_value(value, described.annotation, described.parameter_info)
            if read is not None:
                return read
        self._parameter._runtime_param = None  # noqa: SLF001 - typer offers no other way, and makes its own then
        return self._parameter.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _read_value(value: object, annotation: object, info: Any) -> object:  # noqa: ANN401 - typer's
    """Return what `value` means; None for what typer is to read, or to refuse."""
    if get_origin(annotation) is Literal:
        return value if type(value) is str and value in get_args(annotation) else None
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    if info.parser is not None:
        try:
            return info.parser(value) if type(value) is str else None
        except Exception:  # noqa: BLE001 - typer calls it again, and makes its message of it
            return None
    read: object = None
    if kinds == [str] and type(value) is str:
        read = value
    elif kinds == [Path] and type(value) is str and value and not _has_demands(info):
        read = Path(value)
    elif kinds == [int] and (type(value) is int or (type(value) is str and _INTEGER_PATTERN.fullmatch(value))):
        number = int(value)
        within = (info.min is None or number >= info.min) and (info.max is None or number <= info.max)
        read = number if within else None
    return read


def quicken_values(command: Any) -> None:  # noqa: ANN401 - typer's
    """Let a command and those inside it read their values so, where this version of typer works as is known."""
    for each in (command, *getattr(command, "commands", {}).values()):
        for parameter in each.params:
            _quicken_parameter(parameter)
        if not isinstance(each.get_help_option, partial):  # a caller may keep the command
            each.get_help_option = partial(_make_quick_help, each.get_help_option)


def _quicken_parameter(parameter: Any) -> None:  # noqa: ANN401 - typer's
    if getattr(parameter, "_runtime_param", False) is None and hasattr(parameter, "type_descriptor"):
        parameter._runtime_param = QuickReader(parameter)  # noqa: SLF001


def _make_quick_help(make: Callable[[Any], Any], context: Any) -> Any:  # noqa: ANN401 - typer's
    """Make `--help`, which a command has besides its own options."""
    option = make(context)
    _quicken_parameter(option)
    return option


def _has_demands(info: Any) -> bool:  # noqa: ANN401 - typer's
    """Return whether a path must exist, or the like."""
    return bool(info.exists or info.resolve_path or info.writable or info.path_type) or not (
        info.file_okay and info.dir_okay
    )
