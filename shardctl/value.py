"""Decorates classes of values, of which there are hundreds, and of some hundreds of thousands of instances."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from collections.abc import Callable

_Value = TypeVar("_Value")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value_class(kind: type[_Value]) -> type[_Value]:
    """Make what `dataclass(frozen=True, slots=True)` makes, but mypy refuses assignments to fields, not Python.

    A frozen dataclass sets each of its fields by a call of `object.__setattr__`, so that an instance takes four times
    as long to make, which was a sixth of the time of planning for 100,000 tensors. And each of its methods is compiled
    anew while its module loads, which was a third of the time in which the program starts; here only `__init__` is.

    >>> @value_class
    ... class Place:
    ...     line: int
    ...     column: int = 0
    >>> Place(3), Place(3) == Place(3, 0), len({Place(3), Place(3)})
    (Place(line=3, column=0), True, 1)
    """
    made = dataclass(slots=True, eq=False, repr=False)(kind)
    every = fields(made)  # type: ignore[arg-type] # it is a dataclass
    compared, shown = [each.name for each in every if each.compare], [each.name for each in every if each.repr]
    values: Callable[[object], object] = attrgetter(*compared) if compared else type

    def equals(self: object, other: object) -> bool:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    def compute_hash(self: object) -> int:
        return hash(values(self))

    def format_fields(self: object) -> str:
        return f"{type(self).__qualname__}({', '.join([f'{name}={getattr(self, name)!r}' for name in shown])})"

    for name, method in (("__eq__", equals), ("__hash__", compute_hash), ("__repr__", format_fields)):
        if kind.__dict__.get(name) is None:
            setattr(made, name, method)
    return made
