"""Finds the model and the mesh of a checkpoint from its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UsageError
from shardctl.libraries.megatron.arguments import convert_arguments_to_config
from shardctl.tensors.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardctl.libraries.megatron.dist_common import CommonState
    from shardctl.tensors.manifest import OwnConfig

_MOST: Final = 1 << 20


def build_own_config(common: CommonState | None, names: Collection[str]) -> OwnConfig | None:
    """Build the config of transformers that follows from arguments; `names` are those of arrays."""
    if common is None or not common.arguments:
        return None
    return convert_arguments_to_config(common.arguments, tied="output_layer.weight" not in names)


def build_written_mesh(common: CommonState | None) -> Mesh:
    """Build the mesh; one device if nothing says what it was."""
    arguments = common.arguments if common is not None else {}

    def degree(name: str, default: int = 1) -> int:
        value = arguments.get(name)
        return value if type(value) is int and 0 < value < _MOST else default

    tp, pp = degree("tensor_model_parallel_size"), degree("pipeline_model_parallel_size")
    routed = bool(arguments.get("num_experts"))
    try:
        return Mesh.of(
            pp=pp,
            dp=degree("data_parallel_size"),
            cp=degree("context_parallel_size"),
            tp=tp,
            ep=degree("expert_model_parallel_size") if routed else 1,
            etp=degree("expert_tensor_parallel_size", tp) if routed else tp,
        )
    except UsageError:
        return Mesh.of(pp=pp, tp=tp)
