"""Plain Hugging Face safetensors: whole tensors, in files of bounded size, with an index."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from shardctl.box import Box
from shardctl.layouts.packing import Array, FileBuilder, container_metadata
from shardctl.manifest import File, Manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.dtype import DType
    from shardctl.manifest import Tensor

NAME: Final = "hf"
USUAL_SHARD: Final = 5_000_000_000
"""Bytes of tensors per file, as huggingface_hub's `split_torch_state_dict_into_shards` has it."""


def pack(have: Manifest, dtypes: dict[str, DType], *, max_shard_size: int = USUAL_SHARD) -> Manifest:
    """Every tensor whole, under the names that the original checkpoint used, in the source's order."""
    groups: list[list[Array]] = [[]]
    room = max_shard_size
    for tensor in have.tensors.values():
        dtype = dtypes[tensor.name]
        for name in _names(tensor):
            size = dtype.nbytes(tensor.shape)
            if size > room and groups[-1]:
                groups.append([])
                room = max_shard_size
            groups[-1].append(Array(name, tensor, dtype, Box.whole(tensor.shape)))
            room -= size
    return _build(have, groups, dtypes)


def _names(tensor: Tensor) -> Sequence[str]:
    """The source's own names; of a tie only the first unless the source stored more."""
    return tensor.spelling or (tensor.name, *tensor.ties)


def _build(have: Manifest, groups: list[list[Array]], dtypes: dict[str, DType]) -> Manifest:
    builder = FileBuilder(container_metadata(have))
    weight_map: dict[str, str] = {}
    for number, arrays in enumerate(groups, 1):
        path = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        builder.add(path, arrays)
        weight_map |= {array.name: path for array in arrays}
    if len(groups) > 1:
        total = sum(array.dtype.nbytes(array.box.shape) for arrays in groups for array in arrays)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        content = (json.dumps(index, indent=2) + "\n").encode()
        path = "model.safetensors.index.json"
        builder.files[path] = File(path, len(content), ((0, content),))
    return builder.manifest(NAME, have, dtypes)
