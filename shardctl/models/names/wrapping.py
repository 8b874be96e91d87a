"""Finds below which prefix the stored names are those of a model's class, because trainers wrap models in modules.

>>> strip_wrappers("model._orig_mod.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight")
'model.layers.0.mlp.up_proj.weight'
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.models.names.binding import (
    find_canonical_name,
    has_expected_shape,
    list_contradictions,
    list_head_names,
    list_held_names,
)
from shardctl.tensors.training import format_state_name, split_state_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Manifest, Tensor, TrainingState

_WRAPPER_ATTRIBUTE_NAMES: Final = frozenset(
    {
        "_checkpoint_wrapped_module",
        "_forward_module",
        "_fpw_module",
        "_fsdp_wrapped_module",
        "_orig_mod",
        "_original_module",
    }
)
"""Attributes that torch.compile, FSDP1, activation checkpointing and Lightning put into names, wherever they wrap."""
_MAX_PREFIX_WORDS: Final = 16
"""Longer prefixes are not tried, which bounds the work for a file whose names have thousands of words."""


class AmbiguousNamesError(UnsupportedError):
    """Two parts of a checkpoint are the model equally well; `readings` has all that are a whole one."""

    def __init__(self, message: str, *, hint: str, readings: Sequence[NameReading]) -> None:
        super().__init__(message, hint=hint)
        self.readings = tuple(readings)


@value_class
class NameReading:
    """How stored names are read as those of a model's class."""

    prefix: str
    """What is removed from the names, with its last dot; empty for nothing."""
    names: Mapping[str, str]
    """The name in the class, or an older one, of each stored tensor that the class has, by its stored name."""
    lacking: frozenset[str]
    """The canonical names of the class's tensors that are not among them."""
    misfits: int
    """How many of them have another shape than config.json gives them."""
    current: int
    """How many names are those of the class's state dict, and no older ones or those of its base model alone."""
    complete: bool
    """Whether the class finds all of its tensors; or, by names that only its base model has, all of that one's."""


def knows_all_names(model: Model, names: Collection[str]) -> bool:
    """Return whether the class has tensors of all these names."""
    return all(name in model.tensors or find_canonical_name(model, name) is not None for name in names)


def find_reading(model: Model, stored: Manifest) -> NameReading | None:
    """Find the reading that gives the class all of its tensors and leaves the fewest others.

    If none does, one by which the class knows every name, such as for some layers alone; None if there is none.
    Raises AmbiguousNamesError if two readings are equally good.
    """
    reader = ClassReader(model, stored.tensors)
    readings = reader.list_readings()
    complete = [reading for reading in readings if reading.complete]
    if complete:
        return reader.choose_best(complete)
    known = [reading for reading in readings if len(reading.names) == len(stored.tensors)]
    return min(known, key=lambda each: (len(each.lacking), each.misfits, -each.current, len(each.prefix)), default=None)


def list_whole_readings(model: Model, stored: Manifest) -> tuple[NameReading, ...]:
    """List a reading for each whole model in a checkpoint, by prefix; the same bytes by two names count once."""
    reader = ClassReader(model, stored.tensors)
    return reader.list_distinct([reading for reading in reader.list_readings() if reading.complete])


def read_class_names(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` under names of the class, if a reading gives it all of its tensors; else as it is.

    What else is stored becomes extra, but for what contradicts the config, such as one layer more.
    """
    reading = None if knows_all_names(model, stored.tensors) else find_reading(model, stored)
    if reading is None:
        return stored
    others = [name for name in stored.tensors if name not in reading.names]
    bare = {name: each for name in others if (each := strip_wrappers(name)).startswith(reading.prefix)}
    inside = {each.removeprefix(reading.prefix): name for name, each in bare.items()}
    from shardctl.models.names.extra_names import is_ignored

    against = {
        inside[each]: each
        for each in list_contradictions(model, inside)
        if not is_ignored(model.family, model.architecture, each)
    }
    extra = [name for name in others if name not in against]
    found = set_extra_apart(stored, extra) if extra else stored
    return remove_prefix(model, found, reading.prefix, {**reading.names, **against})


def remove_wrappers(stored: Manifest) -> Manifest:
    """Return `stored` without torch's and Lightning's wrapping modules in its names, which no model's class has."""
    if not any(word in name for name in stored.tensors for word in _WRAPPER_ATTRIBUTE_NAMES):
        return stored
    bare = _strip_all(stored.tensors.keys())
    if all(name == each for name, each in bare.items()):
        return stored
    tensors = {bare[name]: replace(tensor, name=bare[name]) for name, tensor in stored.tensors.items()}
    training = stored.training and rename_training(stored.training, strip_wrappers)
    return replace(stored, tensors=tensors, training=training)


def read_quantized_names(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` without the prefix below which most is that belongs to the weights of `model`, quantized or not.

    An array counts for the weight of the module that it lies in.
    """
    if not stored.tensors.keys().isdisjoint(model.tensors):
        return stored
    reader = ClassReader(model, stored.tensors, any_array=True)
    best = max(reader.list_readings(), key=lambda each: (-len(each.lacking), each.current, -len(each.prefix)))
    return remove_prefix(model, stored, best.prefix, best.names) if best.complete else stored


def remove_prefix(model: Model, stored: Manifest, prefix: str, names: Mapping[str, str]) -> Manifest:
    """Return `stored` with other `names` for some tensors, and parameters of the optimizer named alike.

    These may have other wrappers than the weights: then `prefix`, if it is before them, is removed.
    """
    tensors = {names.get(old, old): tensor for old, tensor in stored.tensors.items()}
    tensors = {new: replace(tensor, name=new) if tensor.name != new else tensor for new, tensor in tensors.items()}

    def rename(parameter: str) -> str:
        if parameter in names:
            return names[parameter]
        bare = strip_wrappers(parameter)
        inner = bare.removeprefix(prefix) if bare.startswith(prefix) else parameter
        return inner if inner in tensors or find_canonical_name(model, inner) is not None else parameter

    return replace(stored, tensors=tensors, training=stored.training and rename_training(stored.training, rename))


def strip_wrappers(name: str) -> str:
    """Return a name without the modules that torch and Lightning wrap others in."""
    return ".".join(word for word in name.split(".") if word not in _WRAPPER_ATTRIBUTE_NAMES)


def list_common_prefixes(names: Iterable[str]) -> list[str]:
    """List what all names begin with, in whole words and with something after it; shortest first, the empty one too.

    >>> list_common_prefixes(["module.net.a.weight", "module.net.b.weight"])
    ['', 'module.', 'module.net.']
    """
    common: list[str] | None = None
    for name in names:
        words = name.split(".")[:-1]
        common = words if common is None else common
        same = next((n for n, (a, b) in enumerate(zip(common, words, strict=False)) if a != b), None)
        common = common[: min(len(words), len(common)) if same is None else same]
    return [
        "".join(f"{word}." for word in (common or ())[:n]) for n in range(min(len(common or ()), _MAX_PREFIX_WORDS) + 1)
    ]


def list_bare_prefixes(names: Collection[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each prefix that all names share, without wrappers, with the names that are left, by the given ones."""
    bare = _strip_all(names)
    for prefix in list_common_prefixes(bare.values()):
        yield prefix, {name: each[len(prefix) :] for name, each in bare.items()}


def match_parameters(parameters: Collection[str], weights: Collection[str]) -> dict[str, str]:
    """Match an optimizer's parameters with weights that were saved with other modules around them, or with none.

    A prefix that all of them share counts only where each parameter has a weight then.

    >>> match_parameters(["a.weight"], ["_orig_mod.a.weight"]), match_parameters(["a.w"], ["module.a.w", "module.b.w"])
    ({'a.weight': '_orig_mod.a.weight'}, {'a.w': 'module.a.w'})
    """
    stored = {bare: name for name, bare in _strip_all(weights).items()}
    bare = _strip_all(parameters)
    for own in list_common_prefixes(stored):
        inside = {name[len(own) :]: weight for name, weight in stored.items()}
        for prefix in list_common_prefixes(bare.values()):
            found = {name: inside[each[len(prefix) :]] for name, each in bare.items() if each[len(prefix) :] in inside}
            if len(found) == len(parameters):
                return found
    return {name: stored[each] for name, each in bare.items() if each in stored}


def set_extra_apart(stored: Manifest, extra: Collection[str]) -> Manifest:
    """Return `stored` with some tensors, and the states that an optimizer has of them, as extra ones.

    Raises SourceError for one that is also in the file of extra tensors.
    """
    apart = {name: stored.tensors[name] for name in extra}
    owners = {*apart, *map(strip_wrappers, apart)}
    tensors = {name: tensor for name, tensor in stored.tensors.items() if name not in apart}
    training = stored.training
    if training is not None:
        apart |= {name: t for name, t in training.states.items() if (split_state_name(name) or ("", name))[1] in owners}
        groups = tuple(
            replace(group, parameters=tuple(name for name in group.parameters if name not in owners))
            for group in training.groups
        )
        states = {name: tensor for name, tensor in training.states.items() if name not in apart}
        training = replace(training, states=states, groups=groups)
    twice = next((name for name in apart if name in stored.extra), None)
    if twice is not None:
        raise SourceError(f"{twice} is stored with the weights and as an extra tensor", hint="remove one of the two")
    return replace(stored, tensors=tensors, training=training, extra={**stored.extra, **apart})


def _strip_all(names: Collection[str]) -> dict[str, str]:
    """Return the names without wrappers, by the given ones; as they are if two would be the same."""
    bare = {name: strip_wrappers(name) for name in names}
    return bare if len(set(bare.values())) == len(bare) else {name: name for name in names}


class ClassReader:
    """Reads the stored names as those of a class, below any prefix."""

    def __init__(
        self, model: Model, tensors: Mapping[str, Tensor], *, any_array: bool = False, unwrapped: bool = True
    ) -> None:
        """Read names as those of `model`, without the modules that wrap others if `unwrapped`.

        `any_array` takes whatever a module has for its weight, in any shape: the arrays of a quantized one.
        """
        self.model, self.tensors, self.any_array = model, tensors, any_array
        self.bare = _strip_all(tensors.keys()) if unwrapped else {name: name for name in tensors}
        self.required = frozenset(tensor.name for tensor in model.own() if not tensor.spare)
        self.heads = frozenset(list_head_names(model))
        self.base = self.required - self.heads

    def list_readings(self, least: int | None = None) -> list[NameReading]:
        """List the reading below each prefix that may be that of the model: `least` arrays lie there, or all its own.

        A prefix that all names share always counts.
        """
        if least is None:
            array_of = {name: fusion.name for fusion in self.model.fusions.values() for name in fusion.tensors}
            least = len({array_of.get(name, name) for name in self.base})
        inside: dict[str, list[str]] = defaultdict(list)
        for stored, name in self.bare.items():
            prefix = ""
            for word in name.split(".")[:-1][:_MAX_PREFIX_WORDS]:
                prefix += f"{word}."
                inside[prefix].append(stored)
        found = {"": list(self.tensors)}
        found |= {prefix: inside[prefix] for prefix in list_common_prefixes(self.bare.values())[1:]}
        found |= {prefix: names for prefix, names in inside.items() if len(names) >= least}
        return [self.read_below(prefix, names) for prefix, names in found.items()]

    def read_below(self, prefix: str, inside: Sequence[str]) -> NameReading:
        """Read the names below a prefix."""
        names: dict[str, str] = {}
        held: set[str] = set()
        misfits, current = 0, 0
        # Below the base model's own prefix, the names are those of a whole model that has lost its head.
        only_base = bool(self.model.prefix) and not f".{prefix}".endswith(f".{self.model.prefix}.")
        for stored in inside:
            name = self.bare[stored][len(prefix) :]
            meant = self.find_tensor(name)
            if meant is None:
                continue
            names[stored] = name
            shape = self.tensors[stored].shape
            held.update(list_held_names(self.model, meant, shape))
            misfits += not (self.any_array or has_expected_shape(self.model, meant, shape))
            current += meant == name
            only_base = only_base and not (meant in self.base and name.startswith(f"{self.model.prefix}."))
        lacking = self.required - held
        only_base = only_base and lacking == self.heads
        if lacking and only_base:
            heads = self.find_heads(prefix, lacking)
            names |= heads
            lacking = frozenset() if heads else lacking
        whole = not misfits and (not lacking or only_base)
        return NameReading(prefix, names, lacking, misfits, current, complete=whole)

    def find_tensor(self, name: str) -> str | None:
        """Find the name by which the class knows what a name is of; None if it does not."""
        found = find_canonical_name(self.model, name)
        if found is not None or not self.any_array:
            return found
        return find_canonical_name(self.model, f"{name.rpartition('.')[0]}.weight")

    def find_heads(self, prefix: str, lacking: frozenset[str]) -> dict[str, str]:
        """Find the tensors that a base model's class does not have in the modules around it; none unless all are there.

        Returns what the class calls them, by stored name.
        """
        stored_as = {name: stored for stored, name in self.bare.items()}
        words = prefix.split(".")[:-1]
        for count in reversed(range(len(words))):
            around = "".join(f"{word}." for word in words[:count])
            found = {stored_as[f"{around}{name}"]: name for name in lacking if f"{around}{name}" in stored_as}
            if len(found) == len(lacking):
                fit = all(
                    has_expected_shape(self.model, name, self.tensors[stored].shape) for stored, name in found.items()
                )
                return found if fit else {}
        return {}

    def choose_best(self, complete: Sequence[NameReading]) -> NameReading:
        """Choose the reading that leaves the fewest tensors, and of the same tensors the one with most current names.

        Names that need no change win over a copy. Raises AmbiguousNamesError for others that are equally good.
        """
        best = min(complete, key=self._rank_reading)
        rivals = [each for each in complete if self._rank_reading(each)[:2] == self._rank_reading(best)[:2]]
        other = next((each for each in rivals if not self.holds_same_bytes(best, each)), None)
        if other is None:
            return best
        if not rivals[0].prefix:
            return rivals[0]
        one, two = (each.prefix.removesuffix(".") for each in (best, other))
        raise AmbiguousNamesError(
            f"the tensors below {best.prefix!r} and those below {other.prefix!r} are both a whole "
            f"{self.model.architecture}",
            hint=f"say which is meant with --subtree {one} or --subtree {two}",
            readings=self.list_distinct(complete),
        )

    def list_distinct(self, complete: Sequence[NameReading]) -> tuple[NameReading, ...]:
        """List readings of different bytes, those with the most current names and the shortest prefixes."""
        found: list[NameReading] = []
        for reading in sorted(complete, key=self._rank_reading):
            if not any(self.holds_same_bytes(reading, other) for other in found):
                found.append(reading)
        return tuple(sorted(found, key=lambda each: each.prefix))

    def _rank_reading(self, reading: NameReading) -> tuple[int, ...]:
        """Rank a reading: lower is better; the first two decide."""
        left = len(self.tensors) - len(reading.names)
        return len(reading.lacking), left, -reading.current, len(reading.prefix)

    def holds_same_bytes(self, one: NameReading, other: NameReading) -> bool:
        """Return whether two readings give the class the same stored bytes."""
        return self._locate_tensors(one) == self._locate_tensors(other)

    def _locate_tensors(self, reading: NameReading) -> dict[str | None, object]:
        places = ((find_canonical_name(self.model, n), self.tensors[stored]) for stored, n in reading.names.items())
        return {meant: [(chunk.box, chunk.where) for chunk in tensor.chunks] for meant, tensor in places}


def rename_training(training: TrainingState, name: Callable[[str], str]) -> TrainingState:
    """Return the same with other names of parameters."""
    states = {}
    for full, tensor in training.states.items():
        state, parameter = split_state_name(full) or ("", full)
        new = format_state_name(state, name(parameter))
        states[new] = replace(tensor, name=new)
    groups = tuple(replace(group, parameters=tuple(map(name, group.parameters))) for group in training.groups)
    return replace(training, states=states, groups=groups)
