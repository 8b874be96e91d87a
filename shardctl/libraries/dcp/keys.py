"""Sorts the keys of a distributed checkpoint: weights, optimizer states, settings, and the rest.

A checkpoint is whatever nested dicts the trainer handed to `torch.distributed.checkpoint.save`. Its planner joins the
way to each value into a key with dots, and keeps the way itself (torch `distributed/checkpoint/_nested_dict.py`).
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.base.settings import as_steps
from shardctl.base.value import state_class
from shardctl.tensors.manifest import ParameterGroup
from shardctl.tensors.training import format_state_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from shardctl.base.settings import Setting
    from shardctl.tensors.manifest import Tensor

Way = tuple[str, ...]
"""The keys of the nested dicts and lists that lead to a value."""

MODELS: Final = ("model", "state_dict", "model_state_dict", "module", "app")
"""Where trainers put the weights, beside an optimizer or counters."""
_TRAINER_STATE_KEYS: Final = frozenset(
    {
        *("algorithms", "callbacks", "dataset_state", "eval_metrics", "schedulers", "train_metrics"),
        *("dataloader", "dataset", "epoch", "extra_state", "global_step", "grad_scaler", "iteration", "lr_scheduler"),
        *("lr_schedulers", "random_states", "rng", "rng_state", "rng_states", "sampler", "scaler", "scheduler", "step"),
        *("timers", "train_state", "trainer_state"),
    }
)
"""What else they keep to resume (torchtitan `components/checkpointer`, accelerate, Lightning, Composer)."""
STEPS: Final = frozenset({"step", "global_step", "global_steps", "iteration"})
"""What trainers call the number of steps that were done."""
_STEP_KEY: Final = "step"
"""What optimizers call it."""
_STATE_KEY: Final = "state"
_PARAM_GROUPS_KEY: Final = "param_groups"
_PARAMS_KEY: Final = "params"
_STATE_KEY_PATH_LENGTH: Final = 3
"""Keys from an optimizer's `state` to a value: that one, the parameter, and the state's name."""


@state_class
class SortedKeys:
    """Every key of a checkpoint, by what it is."""

    weights: dict[str, str] = field(default_factory=dict)
    """Keys of weights, each with the name that the model has for it."""
    states: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Keys of optimizer states, each with the parameter and the state's own name."""
    settings: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Keys of an optimizer's settings, each with its group (a number, or the one parameter in it) and its name."""
    others: list[str] = field(default_factory=list)
    """The keys of everything else."""
    strange: list[str] = field(default_factory=list)
    """Those of them that are tensors and nothing that trainers are known to keep."""
    model: Way = ()
    """Where in the nested dicts the weights were."""

    def notes(self) -> tuple[str, ...]:
        """Return how the keys of weights were understood."""
        return (f"the names of weights are the parts of the keys after {'.'.join(self.model)!r}",) if self.model else ()


def sort_keys(
    tensors: Collection[str], objects: Iterable[str], places: Mapping[str, tuple[str | int, ...]]
) -> SortedKeys:
    """Return what each key is, from its place alone; a key without a place is one of the outermost dict."""
    ways = {key: tuple(map(str, places.get(key, (key,)))) for key in (*tensors, *objects)}
    found = SortedKeys()
    roots = _list_optimizer_roots(ways.values())
    rest: dict[str, Way] = {}
    for key, way in ways.items():
        root = next((r for r in roots if way[: len(r)] == r and _is_optimizer_key(way[len(r) :])), None)
        if root is None:
            rest[key] = way
        else:
            _sort_state(found, key, way[len(root) :])
    found.model = _find_model_root({way for key, way in rest.items() if key in tensors})
    depth = len(found.model)
    for key, way in rest.items():
        inside = way[:depth] == found.model and not (depth == 0 and way[0] in _TRAINER_STATE_KEYS)
        if key in tensors and inside:
            found.weights[key] = ".".join(way[depth:])
        else:
            found.others.append(key)
            if key in tensors and _TRAINER_STATE_KEYS.isdisjoint(way):
                found.strange.append(key)
    return found


def split_flat_key(text: str, parameters: Collection[str]) -> tuple[str, str]:
    """Return the parameter and the name in the `<parameter>.<name>` of a flattened optimizer.

    The longest known parameter counts, because names may have dots too; without one, the last word is the name.

    >>> split_flat_key("a.weight.factor.0", {"a.weight"}), split_flat_key("a.weight.lr", ())
    (('a.weight', 'factor.0'), ('a.weight', 'lr'))
    """
    at = text.rfind(".")
    while at > 0:
        if text[:at] in parameters:
            return text[:at], text[at + 1 :]
        at = text.rfind(".", 0, at)
    parameter, _, name = text.rpartition(".")
    return parameter, name


def build_named_states(
    found: SortedKeys,
    weights: Collection[str],
    tensors: Collection[str],
    made: Callable[[str, str], Tensor],
    warnings: list[str],
) -> dict[str, Tensor]:
    """Build optimizer states by name, each `made` of its key, which is one of `tensors`, and its name.

    What is left behind is added to `warnings`, but for steps that are no tensors: `find_steps_done` finds those.
    Raises SourceError for two states of one name.
    """
    states: dict[str, Tensor] = {}
    strange: list[str] = []
    plain: list[str] = []
    numbered = True
    told = {
        key: (parameter, state) if parameter else split_flat_key(state, weights)
        for key, (parameter, state) in found.states.items()
    }
    known = _match_names({parameter for parameter, _ in told.values()}, weights)
    for key, (stored, state) in told.items():
        parameter = known.get(stored, stored)
        if key not in tensors:
            plain += [key] if state != _STEP_KEY else []
            continue
        if parameter not in weights:
            strange.append(key)
            numbered = numbered and parameter.isdecimal()
            continue
        name = format_state_name(state, parameter)
        if name in states:
            raise SourceError(
                f"{key!r} and {states[name].chunks[0].name!r} are both the state {state} of {parameter}",
                hint="several optimizers of one model cannot be told apart",
            )
        states[name] = made(key, name)
    why = "their parameters are numbered, not named" if numbered else "their weights are not here"
    for keys, reason in ((strange, why), (plain, "they are no tensors")):
        if keys:
            warnings.append(f"{len(keys)} optimizer states such as {keys[0]!r} are left behind: {reason}")
    return states


def find_steps_done(found: SortedKeys, value: Callable[[str], Setting]) -> int | None:
    """Find how many steps were done, by what `value` finds under a trainer's key, else under an optimizer's."""
    named = [key for key in found.others if key.rpartition(".")[2] in STEPS]
    steps = [key for key, (_, state) in found.states.items() if state.rpartition(".")[2] == _STEP_KEY]
    return next((done for key in (*named, *steps[:1]) if (done := as_steps(value(key))) is not None), None)


def build_parameter_groups(
    found: SortedKeys, parameters: Collection[str], value: Callable[[str], Setting]
) -> tuple[ParameterGroup, ...]:
    """Build the groups of an optimizer, with what `value` finds under each key of their settings.

    A flattened optimizer has the settings of every parameter; those with the same ones are a group, and that of the
    first of `parameters` is the first, because FSDP1 finds groups by their places.
    """
    settings: dict[str, dict[str, Setting]] = {}
    for key, (group, name) in found.settings.items():
        if not group:
            group, name = split_flat_key(name, parameters)  # noqa: PLW2901 - told apart at last
        settings.setdefault(group, {})[name] = value(key)
    groups: dict[str, tuple[dict[str, Setting], list[str]]] = {}
    for group, values in settings.items():
        flat = _PARAMS_KEY not in values
        listed = values.pop(_PARAMS_KEY, (group,))
        members = [name for name in listed if isinstance(name, str)] if isinstance(listed, tuple) else []
        groups.setdefault(repr(sorted(values.items())) if flat else group, (values, []))[1].extend(members)
    known = _match_names({name for _, members in groups.values() for name in members}, parameters)
    made = [
        ParameterGroup(tuple(known.get(name, name) for name in members), values) for values, members in groups.values()
    ]
    if not any(name == _PARAMS_KEY for _, name in found.settings.values()):
        places = {name: place for place, name in enumerate(parameters)}
        made.sort(key=lambda group: min((places.get(name, len(places)) for name in group.parameters), default=0))
    return tuple(made)


def _match_names(parameters: Collection[str], weights: Collection[str]) -> Mapping[str, str]:
    """Return the weight of each parameter that has another name, because other modules were around it."""
    if all(name in weights or name.isdecimal() for name in parameters):
        return {}
    from shardctl.models.names.wrapping import match_parameters

    return match_parameters(parameters, weights)


def _list_optimizer_roots(ways: Collection[Way]) -> list[Way]:
    """List where optimizers are: what leads to `param_groups`, or to a `state` of three levels.

    Composer has the model and its optimizers in a `state` of the run (`composer/core/state.py`, `state_dict`).
    """
    roots: dict[Way, None] = {}
    of_run = any(way[0] == _STATE_KEY and way[1:2] == (MODELS[0],) for way in ways)
    for way in ways:
        for at, word in enumerate(way):
            flat = at == len(way) - 1 and word.startswith(f"{_PARAM_GROUPS_KEY}.")
            own = word == _STATE_KEY and len(way) - at >= _STATE_KEY_PATH_LENGTH and not (of_run and at == 0)
            if word == _PARAM_GROUPS_KEY or flat or own:
                roots[way[:at]] = None
                break
    return list(roots)


def _is_optimizer_key(way: Way) -> bool:
    if len(way) == 1:
        return way[0].startswith((f"{_STATE_KEY}.", f"{_PARAM_GROUPS_KEY}.")) or way[0] in {
            _STATE_KEY,
            _PARAM_GROUPS_KEY,
        }
    return bool(way) and way[0] in {_STATE_KEY, _PARAM_GROUPS_KEY}


def _sort_state(found: SortedKeys, key: str, way: Way) -> None:
    """Note what a key of an optimizer is; parameters in flattened ones are told apart later, by `split_flat_key`."""
    if len(way) == 1:
        kind, _, text = way[0].partition(".")
        table = found.states if kind == _STATE_KEY else found.settings
        if text:
            table[key] = ("", text)
        else:
            found.others.append(key)
    elif len(way) < _STATE_KEY_PATH_LENGTH:
        found.others.append(key)
    else:
        table = found.states if way[0] == _STATE_KEY else found.settings
        table[key] = (way[1], ".".join(way[2:]))


def _find_model_root(ways: Collection[Way]) -> Way:
    """Find the dict that holds the weights: down through dicts of one entry, or of one with a name that models have."""
    at: Way = ()
    while True:
        inside = [way for way in ways if way[: len(at)] == at and way[len(at)] not in _TRAINER_STATE_KEYS]
        direct = any(len(way) == len(at) + 1 for way in inside)
        groups = list(dict.fromkeys(way[len(at)] for way in inside if len(way) > len(at) + 1))
        known = [group for group in groups if group in MODELS]
        if len(known) == 1:
            at = (*at, known[0])
        elif len(groups) == 1 and not direct:
            at = (*at, groups[0])
        else:
            return at
