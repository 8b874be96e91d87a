"""Finds the states of an optimizer of Megatron-LM that is not distributed, each in the shape of its parameter.

Parameters are numbered in the order of their groups, and in each in the order of the modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardctl.libraries.megatron.dist_groups import has_decay, read_settings
from shardctl.libraries.megatron.dist_parameters import UnknownOrderError
from shardctl.libraries.megatron.state_reader import MASTER
from shardctl.libraries.torch_save.pickle_tree import as_mapping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.libraries.megatron.state_reader import StateReader
    from shardctl.libraries.torch_save.tensors import StorageView
    from shardctl.tensors.manifest import Tensor

_MASTERS: Final = ("fp32_from_fp16_params", "fp32_from_fp16")
_HALVES: Final = frozenset({"F16", "BF16"})


def list_replicated_states(
    reader: StateReader, tree: object, chunks: Sequence[Sequence[tuple[str, StorageView]]]
) -> dict[str, dict[str, Tensor]]:
    """List the states of every parameter; raises UnknownOrderError if groups or shapes are not those of parameters."""
    held = as_mapping(tree) or {}
    masters = next((held[name] for name in _MASTERS if name in held), None)
    inner = as_mapping(held.get("optimizer")) if masters is not None else held
    groups = (inner or {}).get("param_groups")
    states = as_mapping((inner or {}).get("state"))
    if not isinstance(groups, list) or states is None:
        raise UnknownOrderError(f"{reader.saved.path} has no states of an optimizer that is known")
    parameters = [each for chunk in chunks for each in chunk]
    found: dict[str, dict[str, Tensor]] = {}
    seen: set[bool] = set()
    for index, group in enumerate(groups):
        numbers = (as_mapping(group) or {}).get("params")
        if not isinstance(numbers, list) or not numbers:
            continue
        decayed = has_decay(read_settings(group))
        mine = [each for each in parameters if _is_vector(*each) != decayed]
        if decayed in seen or len(mine) != len(numbers):
            raise UnknownOrderError(
                f"a group of {len(numbers)} parameters has the settings of {len(mine)} others; no file names them"
            )
        seen.add(decayed)
        for number, (name, view) in zip(numbers, mine, strict=True):
            found[name] = _read_parameter(reader, states.get(number), name, view)
        _add_masters(reader, masters, index, mine, found)
    if len(found) != len(parameters):
        raise UnknownOrderError(f"{len(found)} of {len(parameters)} parameters have states")
    reader.compare_masters({name: each[MASTER] for name, each in found.items() if MASTER in each})
    return found


def _is_vector(name: str, view: StorageView) -> bool:
    """Return whether a parameter has no weight decay (`get_standard_config_overrides` of `optimizer/__init__.py`)."""
    return len(view.shape) == 1 or name.endswith(".bias")


def _read_parameter(reader: StateReader, node: object, name: str, view: StorageView) -> dict[str, Tensor]:
    """Read the states of a parameter that have its shape; steps are read elsewhere."""
    found = {}
    for state, each in (as_mapping(node) or {}).items():
        if state != "step":
            found[str(state)] = _read_state(reader, each, reader.name_state(name, str(state)), view)
    return found


def _read_state(reader: StateReader, node: object, title: str, view: StorageView) -> Tensor:
    stored = reader.build_view(node, title)
    tensor = reader.build_tensor(title, stored, view.shape)
    where = tensor.chunks[0].where
    if stored.shape != view.shape or stored.strides != getattr(where, "strides", None):
        raise UnknownOrderError(f"{title} is {list(stored.shape)}, and the parameter {list(view.shape)}")
    return tensor


def _add_masters(
    reader: StateReader,
    masters: Any,  # noqa: ANN401 - a node of a tree
    index: int,
    mine: Sequence[tuple[str, StorageView]],
    found: dict[str, dict[str, Tensor]],
) -> None:
    """Add the fp32 copies of a group's parameters in 16 bits; others are the optimizer's own."""
    if masters is None:
        return
    copied = [each for each in mine if each[1].dtype.name in _HALVES]
    group = masters[index] if isinstance(masters, list) and index < len(masters) else None
    if not isinstance(group, list) or len(group) != len(copied):
        raise UnknownOrderError(f"{reader.saved.path} has no fp32 copy of every parameter in 16 bits")
    for (name, view), node in zip(copied, group, strict=True):
        found[name][MASTER] = _read_state(reader, node, reader.name_state(name, MASTER), view)
