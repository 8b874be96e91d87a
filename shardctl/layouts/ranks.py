"""One set of safetensors files per rank, each box with its place in the global tensor.

The files are what torch's `HuggingFaceStorageWriter` writes and its `HuggingFaceStorageReader` reads into any mesh
(torch 2.13, torch/distributed/checkpoint/hf_storage.py), and what `from_pretrained` of transformers >= 5.20 takes
as a distributed checkpoint (transformers/distributed/checkpoint.py). Both demand both names of a tied weight.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from shardctl.layouts.packing import Array, FileBuilder, container_metadata
from shardctl.views import merged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardctl.box import Box
    from shardctl.dtype import DType
    from shardctl.layouts.form import Form, Place
    from shardctl.manifest import Manifest
    from shardctl.pieces import Held, Placed

NAME: Final = "ranks"
_Known = dict[object, "list[Box]"]
"""Boxes of arrays of experts, by what they are worked out from; those of all layers are alike."""


def pack(
    have: Manifest, placed: Placed, form: Form, dtypes: dict[str, DType], *, max_shard_size: int | None = None
) -> Manifest:
    """The files of every rank that holds weights no earlier dp or cp replica holds."""
    builder = FileBuilder(container_metadata(have))
    known: _Known = {}
    for rank, held in placed.ranks():
        files = _files(rank_arrays(held, form, dtypes, known), max_shard_size)
        for number, arrays in enumerate(files, 1):
            path = f"shard-{rank + 1:05d}-model-{number:05d}-of-{len(files):05d}.safetensors"
            builder.add(path, arrays, _sharding(arrays))
    return builder.manifest(NAME, have, dtypes)


def rank_arrays(held: Sequence[Held], form: Form, dtypes: dict[str, DType], known: _Known) -> Iterator[list[Array]]:
    """The rank's arrays, the boxes of one name together; those of experts stand where the first of them would."""
    shared: dict[str, list[Held]] = {}
    for piece in held:
        if piece.tensor.name in form.places:
            shared.setdefault(form.places[piece.tensor.name].array, []).append(piece)
    for piece in held:
        dtype, place = dtypes[piece.tensor.name], form.places.get(piece.tensor.name)
        if place is None:
            for name in piece.names:
                yield [Array.of(name, piece.tensor, dtype, box) for box in piece.boxes]
        elif shared[place.array][0] is piece:
            yield _joined(shared[place.array], place, form, dtype, known)


def _joined(pieces: Sequence[Held], place: Place, form: Form, dtype: DType, known: _Known) -> list[Array]:
    """The fewest boxes of an array of experts that hold `pieces` of them; `known` are those of arrays before."""
    positions = [form.places[piece.tensor.name].position for piece in pieces]
    views = [place.fusion.places.views[position] for position in positions]
    key = (id(place.fusion.places), *positions, None, *(piece.boxes for piece in pieces))
    boxes = known.get(key)
    if boxes is None:
        images = (v.image(p.tensor.shape, box) for p, v in zip(pieces, views, strict=True) for box in p.boxes)
        boxes = known[key] = merged(images)
    parts = tuple((piece.tensor, view) for piece, view in zip(pieces, views, strict=True))
    return [Array(place.array, dtype, place.fusion.shape, box, parts) for box in boxes]


def _files(groups: Iterable[Sequence[Array]], max_shard_size: int | None) -> list[list[Array]]:
    """The rank's arrays in files: a name at most once per file, and at most `max_shard_size` bytes unless alone."""
    files: list[list[Array]] = []
    names: list[set[str]] = []
    sizes: list[int] = []
    for group in groups:
        start = 0
        for array in group:
            nbytes = array.nbytes if max_shard_size is not None else 0
            for number in range(start, len(files) + 1):
                if number == len(files):
                    files.append([])
                    names.append(set())
                    sizes.append(0)
                full = max_shard_size is not None and sizes[number] + nbytes > max_shard_size
                if array.name not in names[number] and not (full and files[number]):
                    break
            files[number].append(array)
            names[number].add(array.name)
            sizes[number] += nbytes
            start = number + 1
    return files


def _sharding(arrays: Sequence[Array]) -> dict[str, str]:
    info = {
        array.name: {"saved_offsets": list(array.box.origin), "global_shape": list(array.shape)}
        for array in sorted(arrays, key=lambda a: a.name)
    }
    return {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
