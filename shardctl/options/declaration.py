"""How an option is declared: on the field of a dataclass that a verb takes.

    config: Annotated[Path | None, CommandOption(HelpPanel.SOURCE, "The model's config.json.", metavar="PATH")] = None

The command line (`cli/signature.py`) and the plan file (`conversion/plan_file.py`) are made from such fields. A field
without a `CommandOption` is no option: the verb sets it itself. A type may be a string where importing it would be
slow, if the option has a parser. Modules that declare options do without `from __future__ import annotations`, because
their types are looked at when the program starts.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, MISSING, dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Chosen = TypeVar("Chosen")


class HelpPanel(StrEnum):
    """The groups of options in the help of a verb, in the order in which they are shown."""

    GENERAL = "Options"
    MESH = "Mesh"
    PURPOSE = "What the devices are for"
    SERVING = "Serving"
    DEVICES = "Devices"
    TRAINING = "Training"
    WRITING = "What is written"
    TRIALS = "On devices"
    REPORTS = "Reports"
    EFFORT = "Effort"
    SOURCE = "How the source is understood"


@dataclass(frozen=True, slots=True)
class CommandOption:
    """What the command line says of an option, beside its type and default, which are those of the field."""

    panel: HelpPanel
    help: str
    _: KW_ONLY
    flag: str = ""
    """What it is called, such as `--from`; by default as the field, with hyphens."""
    metavar: str | None = None
    least: int | None = None
    """The smallest number that is accepted."""
    most: int | None = None
    """The largest number that is accepted."""
    parser: Callable[[str], object] | None = None
    """Makes the field's value of what is typed; it raises UsageError. The help does not show the default then."""
    accepts: object = None
    """The type on the command line, where the field's own allows more, or is only a string."""
    key: str = ""
    """What plan files call it; by default as the field."""
    shapes_result: bool = True
    """Whether a plan file decides it; an option that shapes no byte may be given beside a plan."""


class ValueFlags(Protocol):
    """A dataclass of several flags that make one value."""

    def make_value(self) -> object:
        """The value; raises UsageError for flags that contradict each other."""


class OptionGroup(NamedTuple):
    """Several flags of the command line that make the value of one field, as `--tp` and `--mesh` make the mesh."""

    flags: type[ValueFlags]
    key: str = ""
    """What plan files call the value; by default as the field."""


class DeclaredOption(NamedTuple):
    """A field that is an option."""

    name: str
    """Of the field."""
    annotation: Any
    """The type, `None` included where it is allowed; a forward reference where the declaration has a string."""
    default: object
    option: CommandOption | OptionGroup

    @property
    def flag(self) -> str:
        """What the command line calls it."""
        return getattr(self.option, "flag", "") or f"--{self.name.replace('_', '-')}"

    @property
    def key(self) -> str:
        """What plan files call it."""
        return self.option.key or self.name


def declared_options(kind: type[object]) -> tuple[DeclaredOption, ...]:
    """The fields of a dataclass that are options, in order."""
    found = []
    for field in fields(kind):  # type: ignore[arg-type]  # of a dataclass, as its callers know
        option = read_option(field.type)
        if option is not None:
            assert field.default is not MISSING, f"{kind.__name__}.{field.name} needs a default"  # noqa: S101
            found.append(DeclaredOption(field.name, get_args(field.type)[0], field.default, option))
    return tuple(found)


def flat_options(kind: type[object]) -> Iterator[tuple[DeclaredOption, CommandOption]]:
    """Every option of a dataclass as the command line has it: the several flags of a group instead of the group."""
    for declared in declared_options(kind):
        if isinstance(declared.option, OptionGroup):
            yield from flat_options(declared.option.flags)
        else:
            yield declared, declared.option


def read_option(annotation: object) -> CommandOption | OptionGroup | None:
    """What an annotation declares; None if it is that of no option."""
    assert not isinstance(annotation, str), "options are declared without postponed annotations"  # noqa: S101
    metadata = getattr(annotation, "__metadata__", ())
    return next((each for each in metadata if isinstance(each, CommandOption | OptionGroup)), None)


def effort_options(kind: type[object]) -> tuple[str, ...]:
    """The fields that shape no byte of a result, and may be others when a plan file is followed."""
    return tuple(declared.name for declared, option in flat_options(kind) if not option.shapes_result)


def find_flag(kind: type[object], name: str) -> str:
    """What the command line calls the option of a field.

    >>> from shardctl.options import PlanOptions
    >>> find_flag(PlanOptions, "virtual_stages")
    '--vp'
    """
    return next(declared.flag for declared, _ in flat_options(kind) if declared.name == name)


def given_options(options: object, panel: HelpPanel) -> tuple[str, ...]:
    """The fields of a panel of the help that do not have their defaults, in order."""
    return tuple(
        declared.name
        for declared, option in flat_options(type(options))
        if option.panel == panel and getattr(options, declared.name) != declared.default
    )


def make_options(kind: type[Chosen], values: Mapping[str, object]) -> Chosen:
    """The dataclass with the values of some of its fields; the others have their defaults."""
    make: Callable[..., Chosen] = kind
    return make(**values)
