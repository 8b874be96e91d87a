"""Reads and writes Megatron-LM's `args`, which argparse keeps and pickle stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import UnsupportedError
from shardctl.base.settings import as_setting
from shardctl.libraries.torch_save.pickle_tree import CallNode, GlobalNode, as_mapping

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.settings import Setting

WEIGHT_SHARDS: Final = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
"""The args with the degrees of generalized tensor parallelism, of dense weights and of experts."""
_GATED_UNITS: Final = ("swiglu", "quick_geglu", "gated_linear_unit")
_MAX_VALUE_CHARACTERS: Final = 80


def require_no_weight_shards(arguments: Mapping[str, Setting], file: str, *, whole: bool) -> None:
    """Raise UnsupportedError for weights that generalized tensor parallelism (GTP) has cut in an order not known here.

    In `torch_dist`, arrays are `whole`: each has the model's order, but for gate and up projections, which GTP cuts
    together before `apply_swiglu_sharded_factory` takes them apart (Megatron-LM core `tensor_parallel/gtp_api.py`,
    `transformer/mlp.py`).
    """
    degrees = {name: value for name in WEIGHT_SHARDS if isinstance(value := arguments.get(name), int) and value > 1}
    gated = any(arguments.get(name) is True for name in _GATED_UNITS)
    if degrees and (gated or not whole):
        said = " and ".join(f"{name} {value}" for name, value in degrees.items())
        what = "gate and up projections" if whole else "weights"
        raise UnsupportedError(
            f"{file} has {said} among its args: generalized tensor parallelism (GTP) cuts {what} in an order that is "
            "not read",
            hint="load it with Megatron-LM, and save it as torch_dist with as many weight shards as tensor-parallel "
            "ranks",
        )


def parse_namespace(node: object) -> dict[str, Setting]:
    """Parse the fields of a pickled `Namespace` or its like, or the items of a dict in its place.

    None of anything else.
    """
    state = node.state if isinstance(node, CallNode) and isinstance(node.state, dict) else node
    return {name: _as_plain_value(value) for name, value in (as_mapping(state) or {}).items() if isinstance(name, str)}


def _as_plain_value(node: Any) -> Setting:  # noqa: ANN401 - a node of a tree
    """Return a plain value as it is, and of anything else what it is: types and functions are texts."""
    found = as_setting(node)
    return (
        found[0]
        if found is not None
        else str(node)[:_MAX_VALUE_CHARACTERS]
        if isinstance(node, GlobalNode | CallNode)
        else ""
    )
