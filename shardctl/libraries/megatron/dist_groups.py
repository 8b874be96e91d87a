"""Reads the settings of Megatron-LM's optimizers, and says which parameters each group of them has.

No file names the parameters of a group. Megatron-LM decides by name and shape: biases and vectors have no weight decay
(`_get_param_groups` of `optimizer/__init__.py`), which the group's `wd_mult` says, and experts that are divided have
groups of their own (`is_expert_parallel`). Of two optimizers, Muon's groups are those of the parameters that have its
state (`emerging_optimizers.py`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.settings import as_setting
from shardctl.libraries.torch_save.pickle_tree import as_mapping
from shardctl.tensors.manifest import ParameterGroup
from shardctl.tensors.training import has_momentum

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from shardctl.base.settings import Setting

GROUPS: Final = "param_groups"
_MAX_NESTING_DEPTH: Final = 3
_MAX_PARAM_GROUPS: Final = 64
_EXPERTS_INFIX: Final = ".mlp.experts."
_BIAS_COMPONENT_PATTERN: Final = re.compile(r"bias\.[A-Za-z]+$")
"""A bias of which each part is in an array of its own."""
UNASSIGNED: Final = (
    "the optimizer has several groups of one kind, and no file says which parameters are in which: their settings, "
    "such as lr and betas, are left behind"
)
"""What is said where there are groups and `assign_parameters` finds none."""


def list_groups(optimizer: object) -> Iterator[dict[str, Setting]]:
    """List the settings of every group in an optimizer's state, those of chained optimizers one behind another."""
    yield from _walk_groups(optimizer, _MAX_NESTING_DEPTH)


def _walk_groups(node: object, depth: int) -> Iterator[dict[str, Setting]]:
    held = as_mapping(node)
    if held is None or not depth:
        return
    groups = held.get(GROUPS)
    if isinstance(groups, list):
        yield from map(read_settings, groups[:_MAX_PARAM_GROUPS])
        return
    for part in list(held.values())[:_MAX_PARAM_GROUPS]:
        yield from _walk_groups(part, depth - 1)


def read_settings(group: Any) -> dict[str, Setting]:  # noqa: ANN401 - a node of a tree
    """Read the settings of a group, but for its parameters."""
    found = {}
    for name, value in (as_mapping(group) or {}).items():
        setting = as_setting(value)
        if isinstance(name, str) and name != "params" and setting is not None:
            found[name] = setting[0]
    return found


def assign_parameters(
    groups: Sequence[Mapping[str, Setting]], arrays: Iterable[str], by_momentum: Collection[str] = ()
) -> tuple[ParameterGroup, ...]:
    """Return the groups, each with the arrays that it has; none if that cannot be told.

    Those of `by_momentum` are arrays that have Muon's state.

    >>> both = [{"wd_mult": 1.0, "lr": 0.1}, {"wd_mult": 0.0, "lr": 0.1}]
    >>> for group in assign_parameters(both, ["output_layer.weight", "decoder.final_layernorm.weight"]):
    ...     print(group.parameters)
    ('output_layer.weight',)
    ('decoder.final_layernorm.weight',)
    """
    found: dict[tuple[bool, bool, bool], tuple[list[str], Mapping[str, Setting]]] = {}
    for group in groups:
        kind = bool(group.get("is_expert_parallel")), has_decay(group), has_momentum(group)
        if kind in found and found[kind][1] != group:
            return ()
        found.setdefault(kind, ([], group))
    for name in arrays:
        routed = _EXPERTS_INFIX in name and any(expert for expert, *_ in found)
        kind = routed, not is_vector(name), name in by_momentum
        if kind not in found:
            return ()
        found[kind][0].append(name)
    return tuple(ParameterGroup(tuple(names), group) for names, group in found.values() if names)


def read_clipping(arguments: Mapping[str, Setting]) -> float | None:
    """Read from the `args` the norm to which gradients were clipped; None if they do not say it.

    >>> read_clipping({"clip_grad": 1.0}), read_clipping({})
    (1.0, None)
    """
    said = arguments.get("clip_grad")
    return float(said) if isinstance(said, int | float) and not isinstance(said, bool) else None


def has_decay(group: Mapping[str, Setting]) -> bool:
    """Return whether a group has weight decay."""
    return group.get("wd_mult", group.get("pre_wd_mult", 1.0)) != 0.0


def is_vector(name: str) -> bool:
    """Return whether an array holds biases, weights of norms, or a number for each head of Mamba or gated DeltaNet.

    >>> is_vector("decoder.layers.mlp.linear_fc1.layer_norm_weight"), is_vector("output_layer.weight")
    (True, False)
    >>> is_vector("decoder.layers.0.mixer.A_log"), is_vector("decoder.layers.0.mixer.conv1d.bias.x")
    (True, True)
    """
    return _BIAS_COMPONENT_PATTERN.sub("bias", name).endswith(
        ("bias", "norm.weight", "layer_norm_weight", ".A_log", ".D")
    )
