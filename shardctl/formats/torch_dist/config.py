"""What the arguments of a checkpoint say of its model and of the mesh that wrote it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.mesh import Mesh
from shardctl.schemas.megatron_arguments import config_of, mesh_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardctl.formats.torch_dist.common import Common
    from shardctl.manifest import OwnConfig


def own_config(common: Common | None, names: Collection[str]) -> OwnConfig | None:
    """The config of transformers that follows from arguments; `names` are those of arrays."""
    if common is None or not common.arguments:
        return None
    return config_of(common.arguments, tied="output_layer.weight" not in names)


def written_for(common: Common | None) -> Mesh:
    """The mesh; one device if nothing says it."""
    return mesh_of(common.arguments) if common is not None else Mesh.of()
