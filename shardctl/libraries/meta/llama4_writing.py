"""Plans Llama 4 as Meta's own code loads it: one `consolidated.NN.pth` per rank, and `params.json`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shardctl.base.errors import PartitionError, UsageError
from shardctl.libraries.arrays.composing import build_manifest, compose_arrays
from shardctl.libraries.meta.llama4_arrays import NAME, SCHEMA, TITLE
from shardctl.libraries.meta.llama4_params import build_llama4_params
from shardctl.libraries.meta.params import PARAMS
from shardctl.libraries.torch_save.item_writer import build_archive, build_tensor_value
from shardctl.models.tables.config import ModelConfig
from shardctl.tensors.manifest import CheckpointFile, Region
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.naming_scheme import NamingScheme, format_rank_prefix

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.manifest import Chunk, Manifest


def pack_llama4(request: PackRequest, number_file: Callable[[int], str]) -> Manifest:
    """Return the file of every tp rank, or of the only one; `number_file` gives what its name begins with.

    Raises as `Layout.pack` says.
    """
    SCHEMA.check(request.model)
    mesh = request.mesh
    ranks = mesh.degree("tp")
    if mesh.world != ranks:
        raise PartitionError(f"Meta's files are those of tp ranks, but the mesh is {mesh}", hint="use --tp alone")
    if request.options.get("meta_embedding") == "hidden":
        raise UsageError("Meta's code for Llama 4 cuts the embedding along the vocabulary, not along the hidden dim")
    seen = request.config.get("vision_config")
    heads = ModelConfig(seen).size("num_attention_heads", 16) if isinstance(seen, dict) else ranks
    if heads % ranks:
        raise PartitionError(
            f"{TITLE} gives every rank whole heads, but what it sees with has {heads}, not for tp={ranks}"
        )
    content = (json.dumps(build_llama4_params(request.config, request.model), indent=2) + "\n").encode()
    dialect = NamingScheme(NAME, Mesh.of(tp=ranks), {rank: format_rank_prefix(rank) for rank in range(ranks)})
    files = {PARAMS: CheckpointFile(PARAMS, len(content), ((0, content),))}
    stored: list[tuple[str, Chunk]] = []
    for rank, arrays in compose_arrays(request, SCHEMA, dialect).items():
        path = f"{number_file(rank)}pth"
        state = {
            array.name: build_tensor_value(array.dtype, array.box.shape, number) for number, array in enumerate(arrays)
        }
        item = build_archive(state, [array.nbytes for array in arrays])
        for array, start in zip(arrays, item.starts, strict=True):
            stored += array.chunks(Region(path, start, ()))
        files[path] = CheckpointFile(path, item.size, item.literals)
    return build_manifest(NAME, request, SCHEMA, dialect, files, stored)
