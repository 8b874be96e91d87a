"""Declares options on the fields of the dataclasses that verbs take.

    config: Annotated[Path | None, CommandOption(HelpPanel.SOURCE, "The model's config.json.", metavar="PATH")] = None

The command line (`cli/signature.py`) and the plan file (`conversion/plan_file.py`) are made from such fields. A field
without a `CommandOption` is not an option: the verb sets it. The type of an option with a parser may be a string if
importing it would be slow. Modules that declare options do not use `from __future__ import annotations`, because the
program inspects their types when it starts.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, MISSING, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar, get_args

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Chosen = TypeVar("Chosen")
PERMISSION: Final = "--allow-"
"""How flags begin that permit something: only the run itself may be given them, no plan file and no project."""


class HelpPanel(StrEnum):
    """The groups of options in the help of a verb, in the order in which they are shown."""

    GENERAL = "Options"
    MESH = "Mesh"
    PURPOSE = "Workload"
    SERVING = "Serving"
    DEVICES = "Devices"
    TRAINING = "Training"
    WRITING = "Output"
    TRIALS = "On devices"
    REPORTS = "Reports"
    EFFORT = "Effort"
    SOURCE = "Source"


class PathAccess(StrEnum):
    """What a run does with the file or directory that an option or an argument names."""

    READ = "read"
    WRITTEN = "written"
    """A file of its own: a plan, a report or a log, which must not replace anything that the run reads."""
    REPLACED = "replaced"
    """A destination, which becomes a checkpoint."""


class NamedPath(NamedTuple):
    """A parameter of a command whose value is a path or an address."""

    parameter: str
    label: str
    """Its flag, or what the help calls the argument."""
    access: PathAccess


@value_class
class CommandOption:
    """What the command line says of an option besides its type and default, which the field has."""

    panel: HelpPanel
    help: str
    """The text of the help, in which ``{layouts}``, ``{trained}`` and ``{formats}`` are lists from the catalogue."""
    _: KW_ONLY
    brief: str = ""
    """The line of `-h`, of at most 50 characters; every option that a verb lists there has one."""
    flag: str = ""
    """The flag, such as `--from`; by default the name of the field with hyphens."""
    short: str = ""
    """A second flag of one letter, such as `-q`."""
    metavar: str | None = None
    least: int | None = None
    """The smallest number that is accepted."""
    most: int | None = None
    """The largest number that is accepted."""
    parser: Callable[[str], object] | None = None
    """Turns the text into the field's value and raises UsageError; the help then does not show the default."""
    accepts: object = None
    """The type on the command line, if the field's type allows more or is a string."""
    words: Callable[[], Iterable[str]] | None = None
    """Lists words that it takes, for shells that complete them, where the type is no fixed choice."""
    key: str = ""
    """The key in plan files; by default the name of the field."""
    aliases: tuple[str, ...] = ()
    """Other flags that mean it: an engine's word or a former name; ``--flag=value`` is a flag that means one value."""
    former_values: tuple[tuple[str, str], ...] = ()
    """Values that it took under a former name, each with what it is now."""
    hidden: bool = False
    """Whether help leaves it out: an earlier name that still works."""
    shapes_result: bool = True
    """Whether a plan file decides it; options that do not change the result may be given beside a plan."""
    access: PathAccess | None = None
    """Set for every option whose value is a path or an address."""


class ValueFlags(Protocol):
    """A dataclass of several flags that together make one value."""

    def make_value(self) -> object:
        """Make the value; raises UsageError if flags contradict each other."""


class OptionGroup(NamedTuple):
    """Several flags that together make the value of one field, as `--tp` and `--mesh` make the mesh."""

    flags: type[ValueFlags]
    key: str = ""
    """The key in plan files; by default the name of the field."""


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
    """List the fields of a dataclass that are options, in order."""
    found = []
    for field in fields(kind):  # type: ignore[arg-type]  # of a dataclass, as its callers know
        option = read_option(field.type)
        if option is not None:
            assert field.default is not MISSING, f"{kind.__name__}.{field.name} needs a default"  # noqa: S101
            found.append(DeclaredOption(field.name, get_args(field.type)[0], field.default, option))
    return tuple(found)


def flat_options(kind: type[object]) -> Iterator[tuple[DeclaredOption, CommandOption]]:
    """Go through the options of a dataclass as the command line has them: the flags of a group instead of the group."""
    for declared in declared_options(kind):
        if isinstance(declared.option, OptionGroup):
            yield from flat_options(declared.option.flags)
        else:
            yield declared, declared.option


def read_option(annotation: object) -> CommandOption | OptionGroup | None:
    """Read what an annotation declares; None if it declares no option."""
    assert not isinstance(annotation, str), "options are declared without postponed annotations"  # noqa: S101
    metadata = getattr(annotation, "__metadata__", ())
    return next((each for each in metadata if isinstance(each, CommandOption | OptionGroup)), None)


def effort_options(kind: type[object]) -> tuple[str, ...]:
    """List the fields that do not change the result, which may be given beside a plan file."""
    return tuple(declared.name for declared, option in flat_options(kind) if not option.shapes_result)


def find_flag(kind: type[object], name: str) -> str:
    """Find the flag of the option of a field.

    >>> from shardctl.options import PlanOptions
    >>> find_flag(PlanOptions, "virtual_stages")
    '--vp'
    """
    return next(declared.flag for declared, _ in flat_options(kind) if declared.name == name)


def given_options(options: object, panel: HelpPanel) -> tuple[str, ...]:
    """List the fields in a panel of the help whose values are not their defaults, in order."""
    return tuple(
        declared.name
        for declared, option in flat_options(type(options))
        if option.panel == panel and getattr(options, declared.name) != declared.default
    )


def permission_options(kind: type[object]) -> tuple[str, ...]:
    """List the fields that permit something.

    >>> from shardctl.options import SourceOptions
    >>> permission_options(SourceOptions)
    ('allow_unverified',)
    """
    return tuple(each.name for each, _ in flat_options(kind) if each.flag.startswith(PERMISSION))


def withdraw_permissions(options: Chosen) -> Chosen:
    """Return the options of a dataclass with nothing permitted."""
    return replace(options, **dict.fromkeys(permission_options(type(options)), False))  # type: ignore[type-var]


def make_options(kind: type[Chosen], values: Mapping[str, object]) -> Chosen:
    """Make the dataclass from the values of some of its fields; the others keep their defaults."""
    make: Callable[..., Chosen] = kind
    return make(**values)
