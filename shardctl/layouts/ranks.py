"""One set of safetensors files per rank, each box with its place in the global tensor.

The files are what torch's `HuggingFaceStorageWriter` writes and its `HuggingFaceStorageReader` reads into any mesh
(torch 2.13, torch/distributed/checkpoint/hf_storage.py), and what `from_pretrained` of transformers >= 5.20 takes
as a distributed checkpoint (transformers/distributed/checkpoint.py). Both demand both names of a tied weight.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from shardctl.layouts.packing import Array, FileBuilder, container_metadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.dtype import DType
    from shardctl.manifest import Manifest
    from shardctl.pieces import Held, Placed

NAME: Final = "ranks"


def pack(have: Manifest, placed: Placed, dtypes: dict[str, DType], *, max_shard_size: int | None = None) -> Manifest:
    """The files of every rank that holds weights no earlier dp or cp replica holds."""
    builder = FileBuilder(container_metadata(have))
    for rank, held in placed.ranks():
        files = _files(held, dtypes, max_shard_size)
        for number, arrays in enumerate(files, 1):
            path = f"shard-{rank + 1:05d}-model-{number:05d}-of-{len(files):05d}.safetensors"
            builder.add(path, arrays, _sharding(arrays))
    return builder.manifest(NAME, have, dtypes)


def _files(held: Sequence[Held], dtypes: dict[str, DType], max_shard_size: int | None) -> list[list[Array]]:
    """The rank's arrays in files: a name at most once per file, and at most `max_shard_size` bytes unless alone."""
    files: list[list[Array]] = []
    names: list[set[str]] = []
    sizes: list[int] = []
    for piece in held:
        for name in piece.names:
            start = 0
            for box in piece.boxes:
                array = Array(name, piece.tensor, dtypes[piece.tensor.name], box)
                for number in range(start, len(files) + 1):
                    if number == len(files):
                        files.append([])
                        names.append(set())
                        sizes.append(0)
                    full = max_shard_size is not None and sizes[number] + array.nbytes > max_shard_size
                    if name not in names[number] and not (full and files[number]):
                        break
                files[number].append(array)
                names[number].add(name)
                sizes[number] += array.nbytes
                start = number + 1
    return files


def _sharding(arrays: Sequence[Array]) -> dict[str, str]:
    info = {
        array.name: {"saved_offsets": list(array.box.origin), "global_shape": list(array.tensor.shape)}
        for array in sorted(arrays, key=lambda a: a.name)
    }
    return {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
