"""The decorators make what `dataclass` makes, except that `value_class` leaves the refusal of assignments to mypy."""

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass, replace

import pytest

from shardctl.base.value import settings_class, state_class, value_class


class Plain:
    size: int
    name: str = ""
    parts: tuple[int, ...] = ()
    counts: dict[str, int] = field(default_factory=dict, compare=False)
    known: int | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self):
        if self.size < 0:
            raise ValueError(self.size)


class Odd:  # noqa: PLW1641 - the decorators give it one
    size: int

    def __eq__(self, other):
        return isinstance(other, Odd) and self.size % 2 == other.size % 2

    def __repr__(self):
        return "odd"


def make_class(source, decorate):
    """Make a class of the same body, which decorators do not share."""
    kept = {name: value for name, value in vars(source).items() if name not in {"__dict__", "__weakref__"}}
    return decorate(type(source.__name__, (), {name: copy.copy(value) for name, value in kept.items()}))


Value = value_class(
    type("Value", (), {"__annotations__": {"size": int, "name": str}, "__module__": __name__, "name": ""})
)


def test_equality_hash_and_text_are_those_of_a_frozen_dataclass():
    ours, theirs = make_class(Plain, value_class), make_class(Plain, dataclass(frozen=True, slots=True))
    values = [(1,), (1, "a"), (1, "a", (2,)), (2, "a", (2,)), (1, "", (), {"x": 1})]
    for one in values:
        assert repr(ours(*one)) == repr(theirs(*one))
        assert hash(ours(*one)) == hash(theirs(*one))
        for other in values:
            assert (ours(*one) == ours(*other)) == (theirs(*one) == theirs(*other))
    assert ours(1) != theirs(1)
    assert [each.name for each in fields(ours)] == [each.name for each in fields(theirs)]
    assert is_dataclass(ours)
    assert ours.__slots__ == theirs.__slots__
    assert ours.__match_args__ == theirs.__match_args__
    assert replace(ours(1, "a"), size=3) == ours(3, "a")


def test_methods_of_its_own_stay():
    ours = make_class(Odd, value_class)
    assert repr(ours(1)) == "odd"
    assert hash(ours(1)) == hash(ours(1))


def test_values_are_copied_and_pickled():
    value = Value(3, "x")
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value  # noqa: S301


def test_a_class_without_fields_has_one_value():
    nothing = value_class(type("Nothing", (), {"__module__": __name__}))
    assert nothing() == nothing()
    assert hash(nothing()) == hash(nothing())
    assert repr(nothing()) == "Nothing()"


@value_class
class Base:
    size: int
    _sizes: list[int] = field(default_factory=list)


@value_class
class Extended(Base):
    sizes: int = 3
    name: str = field(default="x", kw_only=True)


_BODY = {"__annotations__": {"size": int, "name": str}, "__module__": __name__, "name": "", "__doc__": ""}
Setting = settings_class(
    type(
        "Setting",
        (),
        {"__annotations__": {"size": int, "name": str}, "__module__": __name__, "name": "", "__doc__": ""},
    )
)
KINDS = (
    (value_class, {"slots": True, "frozen": True}),
    (state_class, {"slots": True}),
    (settings_class, {"slots": True, "frozen": True, "kw_only": True}),
)


@pytest.mark.parametrize(("decorate", "options"), KINDS)
def test_arguments_and_defaults_are_those_of_a_dataclass(decorate, options):
    ours, theirs = make_class(Plain, decorate), make_class(Plain, dataclass(**options))
    assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
    assert ours.__init__.__qualname__ == "Plain.__init__"
    one = ours(size=1)
    assert (one.name, one.parts, one.counts, one.known) == ("", (), {}, None)
    assert one.counts is not ours(size=1).counts
    for made in ours, theirs:
        with pytest.raises(TypeError, match="unexpected keyword argument 'known'"):
            made(size=1, known=2)
        with pytest.raises(ValueError, match="-1"):
            made(size=-1)


def test_fields_are_inherited():
    assert str(inspect.signature(Extended)) == (
        "(size: int, _sizes: list[int] = <factory>, sizes: int = 3, *, name: str = 'x') -> None"
    )
    assert Extended(1) == Extended(1, [], 3, name="x")
    assert Extended(1)._sizes == []
    assert Base(1) != Extended(1)


def test_instances_that_change_have_no_hash():
    ours = make_class(Plain, state_class)
    one = ours(1)
    one.size = 2
    assert one == ours(2)
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_settings_refuse_assignment_and_are_copied():
    setting = Setting(size=3)
    for change in (lambda: setattr(setting, "size", 4), lambda: delattr(setting, "size")):
        with pytest.raises(FrozenInstanceError, match="field 'size'"):
            change()
    assert pickle.loads(pickle.dumps(setting)) == copy.deepcopy(setting) == setting  # noqa: S301
    assert replace(setting, size=4) == Setting(size=4, name="")
