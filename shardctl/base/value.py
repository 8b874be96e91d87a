"""Decorates classes of fields, of which there are hundreds, and of some hundreds of thousands of instances."""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from collections.abc import Callable

_Fields = TypeVar("_Fields")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value_class(kind: type[_Fields]) -> type[_Fields]:
    """Make what `dataclass(frozen=True, slots=True)` makes, but mypy refuses assignments to fields, not Python.

    A frozen dataclass sets each of its fields by a call of `object.__setattr__`, so that an instance takes four times
    as long to make, which was a sixth of the time of planning for 100,000 tensors. And each of its methods is compiled
    anew while its module loads, which was a third of the time in which the program starts; here only `__init__` is, and
    not before the first instance is made, because a command makes instances of a third of the classes that it loads.

    >>> @value_class
    ... class Place:
    ...     line: int
    ...     column: int = 0
    >>> Place(3), Place(3) == Place(3, 0), len({Place(3), Place(3)})
    (Place(line=3, column=0), True, 1)
    """
    return _share_methods(dataclass(slots=True, eq=False, repr=False, init=False)(kind), kind, {})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def settings_class(kind: type[_Fields]) -> type[_Fields]:
    """Make what `dataclass(frozen=True, slots=True, kw_only=True)` makes, with methods like those of `value_class`.

    Python, too, refuses assignments to fields, because users make these.
    """
    made = dataclass(slots=True, kw_only=True, eq=False, repr=False, init=False)(kind)
    refused = {"__setattr__": _refuse_assignment, "__delattr__": _refuse_assignment, "__setstate__": _restore_fields}
    return _share_methods(made, kind, refused)


@dataclass_transform(field_specifiers=(field,))
def state_class(kind: type[_Fields]) -> type[_Fields]:
    """Make what `dataclass(slots=True)` makes, for instances that change, with methods like those of `value_class`."""
    return _share_methods(dataclass(slots=True, eq=False, repr=False, init=False)(kind), kind, {"__hash__": None})


def _refuse_assignment(self: object, name: str, *_: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r} of {type(self).__name__}")


def _restore_fields(self: object, state: tuple[None, dict[str, object]]) -> None:
    """Set the fields of a copied or unpickled instance."""
    for name, value in state[1].items():
        object.__setattr__(self, name, value)


def _share_methods(made: type[_Fields], kind: type, methods: dict[str, Any]) -> type[_Fields]:
    """Give a dataclass the methods of its own body, then those in `methods`, then those that all classes share."""
    every = fields(made)  # type: ignore[arg-type] # it is a dataclass
    compared, shown = [each.name for each in every if each.compare], [each.name for each in every if each.repr]
    values: Callable[[object], object] = attrgetter(*compared) if compared else type

    def equals(self: object, other: object) -> bool:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    def compute_hash(self: object) -> int:
        return hash(values(self))

    def format_fields(self: object) -> str:
        return f"{type(self).__qualname__}({', '.join([f'{name}={getattr(self, name)!r}' for name in shown])})"

    shared = {"__eq__": equals, "__hash__": compute_hash, "__repr__": format_fields, "__init__": _LateInit(made)}
    for name, method in (shared | methods).items():
        if kind.__dict__.get(name) is None:
            setattr(made, name, method)
    return made


class _LateInit:
    """Stands for the `__init__` of a class until somebody asks for it, and is then replaced."""

    __slots__ = ("_made",)

    def __init__(self, made: type) -> None:
        self._made = made

    def __get__(self, instance: object, owner: type) -> object:
        init = _compile_init(self._made)
        type.__setattr__(self._made, "__init__", init)
        return init if instance is None else init.__get__(instance, owner)


class _FactoryMark:
    """Is the default of arguments whose value a factory makes."""

    def __repr__(self) -> str:
        return "<factory>"


_MADE: Final = _FactoryMark()


def _compile_init(made: Any) -> Any:  # noqa: ANN401 - a class and a method of whatever fields there are
    """Compile what sets the fields of an instance, with the arguments and defaults that `dataclass` would give it."""
    names: dict[str, Any] = {"_MADE": _MADE, "_set_field": object.__setattr__}
    positional, keywords, lines = ["self"], ["*"], []
    form = "_set_field(self, {0!r}, {1})" if made.__setattr__ is _refuse_assignment else "self.{0} = {1}"
    for each in fields(made):
        value, default_name = each.name, f"_default_{each.name}"
        has_factory = each.default_factory is not MISSING
        names[default_name] = each.default_factory if has_factory else each.default
        if each.init:
            default = "=_MADE" if has_factory else "" if each.default is MISSING else f"={default_name}"
            (keywords if each.kw_only else positional).append(value + default)
        if has_factory:
            value = f"{default_name}() if {value} is _MADE else {value}" if each.init else f"{default_name}()"
        elif not each.init:
            value = default_name
        if each.init or has_factory or each.default is not MISSING:
            lines.append(form.format(each.name, value))
    if hasattr(made, "__post_init__"):
        lines.append("self.__post_init__()")
    arguments = ", ".join([*positional, *(keywords if keywords[1:] else [])])
    exec(f"def __init__({arguments}):\n " + "\n ".join(lines or ["pass"]), names)  # noqa: S102 - as dataclasses do
    init = names["__init__"]
    init.__qualname__, init.__module__ = f"{made.__qualname__}.__init__", made.__module__
    init.__annotations__ = {each.name: each.type for each in fields(made) if each.init} | {"return": None}
    return init
