"""Plans directories for DeepSeek's inference code: `modelI-mpN.safetensors`, one per rank.

The code takes a config of its own from elsewhere (`inference/configs`); that of transformers travels along, for without
it nobody could read the files back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import PartitionError
from shardctl.libraries.arrays.composing import build_manifest, compose_arrays
from shardctl.libraries.deepseek.arrays import NAME, SCHEMA
from shardctl.libraries.safetensors.packing import FileBuilder
from shardctl.libraries.writer import Layout
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.naming_scheme import NamingScheme, format_rank_prefix

if TYPE_CHECKING:
    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.manifest import Manifest


def pack_deepseek_mp(order: PackRequest) -> Manifest:
    """Return the file of every rank.

    Raises as `Layout.pack` says.
    """
    SCHEMA.check(order.model)
    mesh = order.mesh
    ranks = mesh.degree("tp")
    if mesh.world != ranks or mesh.ep not in (1, ranks):
        raise PartitionError(f"the files are those of tp ranks, but the mesh is {mesh}", hint="use --tp alone")
    dialect = NamingScheme(
        NAME, Mesh.of(tp=ranks, ep=ranks, etp=1), {rank: format_rank_prefix(rank) for rank in range(ranks)}
    )
    builder = FileBuilder({"format": "pt"})
    for rank, arrays in compose_arrays(order, SCHEMA, dialect).items():
        builder.add(f"{_format_file_prefix(dialect, rank)}safetensors", arrays)
    return build_manifest(NAME, order, SCHEMA, dialect, builder.files, builder.stored())


def _format_file_prefix(dialect: NamingScheme, rank: int) -> str:
    return f"model{rank}-mp{dialect.mesh.world}."


LAYOUT: Final = Layout(NAME, pack_deepseek_mp, ranks="library", prefix=_format_file_prefix, served=True)
