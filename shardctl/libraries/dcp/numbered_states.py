"""Names the parameters of an optimizer whose `state_dict` numbers them, as `torch.optim.Optimizer` does.

Numbers run through its groups. A model's parameters and its state dict have one order, that of its modules, so that
they are the weights of the file, one after another: all of them in one group, or matrices in the group that decays and
vectors in the one that does not, as trainers divide them. Where there are more weights, such as a buffer of a loss or
an embedding that is not trained, the shapes of the states must leave one choice. Otherwise states are left behind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.tensors.manifest import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardctl.base.settings import Setting
    from shardctl.libraries.dcp.keys import SortedKeys
    from shardctl.tensors.manifest import Tensor

_PARAMS_KEY: Final = "params"
_WEIGHT_DECAY_KEY: Final = "weight_decay"
NUMBERED_NOTE: Final = "parameters of the optimizer are numbered; they were taken in the order of the weights"


def name_parameters(
    found: SortedKeys,
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    value: Callable[[str], Setting],
) -> tuple[SortedKeys, dict[str, Setting]] | None:
    """Name numbered parameters; `shapes` are those of states by key, and `value` finds a setting by its key.

    Returns the keys with names, and the names of each group's members by the key that had numbers; None if parameters
    are not numbered, or are not those that the weights would be.
    """
    listed = {key: group for key, (group, name) in found.settings.items() if name == _PARAMS_KEY}
    groups = {key: _list_numbers(value(key)) for key in sorted(listed, key=lambda key: (len(key), key))}
    roots = {key.rpartition(f".{parameter}.{state}")[0] for key, (parameter, state) in found.states.items()}
    numbers = [number for members in groups.values() for number in members or ("",)]
    if len(roots) != 1 or not numbers or numbers != list(map(str, range(len(numbers)))):
        return None
    decays = {
        key: value(next((k for k, v in found.settings.items() if v == (group, _WEIGHT_DECAY_KEY)), ""))
        for key, group in listed.items()
    }
    ordered = _list_untied(weights)
    sharing = [ordered]
    if len(groups) > 1:
        vectors = [name for name in ordered if len(weights[name].shape) < len(("rows", "columns"))]
        matrices = [name for name in ordered if name not in set(vectors)]
        if len(groups) != len(sharing) + 1 or [bool(decays[key]) for key in groups] not in (
            [True, False],
            [False, True],
        ):
            return None
        sharing = [matrices if decays[key] else vectors for key in groups]
    sizes = {found.states[key][0]: shape for key, shape in shapes.items() if shape and key in found.states}
    chosen = [
        _choose_weights(part, members or (), weights, sizes)
        for part, members in zip(sharing, groups.values(), strict=True)
    ]
    sharing = [part for part in chosen if part is not None]
    if len(sharing) < len(groups):
        return None
    names = dict(zip(numbers, (name for part in sharing for name in part), strict=True))
    for key, (parameter, _) in found.states.items():
        if parameter not in names or (shapes.get(key) and shapes[key] != weights[names[parameter]].shape):
            return None
    states = {key: (names[parameter], state) for key, (parameter, state) in found.states.items()}
    members: dict[str, Setting] = {key: tuple(part) for key, part in zip(groups, sharing, strict=True)}
    return replace(found, states=states), members


def _choose_weights(
    part: Sequence[str], members: Sequence[str], weights: Mapping[str, Tensor], sizes: Mapping[str, tuple[int, ...]]
) -> Sequence[str] | None:
    """Choose the weights of a group in their order; None if there are too few, or more than one choice.

    `sizes` are the shapes of the states by number. There is one choice if the first weights that fit, from the first
    on, are the last ones that fit, from the last on.
    """
    if len(part) <= len(members):
        return part if len(part) == len(members) else None
    if any(number not in sizes for number in members):
        return None
    wanted, shapes = [sizes[number] for number in members], [weights[name].shape for name in part]
    first, last = _find_in_order(shapes, wanted), _find_in_order(shapes[::-1], wanted[::-1])
    if not first or first != [len(part) - 1 - at for at in reversed(last)]:
        return None
    return [part[at] for at in first]


def _find_in_order(shapes: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, ...]]) -> list[int]:
    """Find where shapes lie among others in their order, each as early as it can; empty if one is not there."""
    places = iter(range(len(shapes)))
    found = [next((at for at in places if shapes[at] == shape), -1) for shape in wanted]
    return [] if -1 in found else found


def _list_numbers(members: Setting) -> list[str] | None:
    """List the numbers that a group has; None if it has something else."""
    if not isinstance(members, tuple) or not all(isinstance(each, int) for each in members):
        return None
    return list(map(str, members))


def _list_untied(weights: Mapping[str, Tensor]) -> Sequence[str]:
    """List weights in their order; of those that lie in the same place, the first, which is the parameter."""
    seen = set()
    names = []
    for name, tensor in weights.items():
        places = frozenset(
            (chunk.box, chunk.where) if isinstance(chunk.where, Region) else (chunk.box, name)
            for chunk in tensor.chunks
        )
        if places not in seen:
            names.append(name)
        seen.add(places)
    return names
