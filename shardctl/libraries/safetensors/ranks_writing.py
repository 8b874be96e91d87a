"""Plans one set of safetensors files per rank, with the place of each box in its global tensor.

The files are what torch's `HuggingFaceStorageWriter` writes and its `HuggingFaceStorageReader` reads into any mesh
(torch 2.13, torch/distributed/checkpoint/hf_storage.py), and what `from_pretrained` of transformers >= 5.20 takes
as a distributed checkpoint (transformers/distributed/checkpoint.py). Both demand both names of a tied weight.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from shardctl.box import Box, merge_boxes
from shardctl.libraries.safetensors.hf_writing import build_shared_array
from shardctl.libraries.safetensors.packing import FileBuilder, TensorArray, build_container_metadata
from shardctl.libraries.safetensors.sharding_info import GLOBAL_SHAPE, KEY, OFFSETS, VERSION_KEY
from shardctl.libraries.writer import Layout
from shardctl.value import value_class
from shardctl.views import ViewGroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardctl.dialect import LibraryDialect
    from shardctl.dtype import DType
    from shardctl.libraries.arrays.form import ArrayForm, FusedPlace
    from shardctl.libraries.writer import PackRequest
    from shardctl.manifest import Manifest
    from shardctl.pieces import TensorShard

NAME: Final = "ranks"
Known = dict[object, "_AlikeArrays"]
"""What arrays of several tensors, or of parts of some, have in common, by what it is worked out from."""


def pack_ranks(request: PackRequest) -> Manifest:
    """Return the files of every rank that holds weights no earlier dp or cp replica holds."""
    assert request.placed is not None  # noqa: S101 - as the layout says of its ranks
    have, dtypes = request.have, request.dtypes
    builder = FileBuilder(build_container_metadata(have))
    known: Known = {}
    for rank, held in request.placed.ranks():
        files = _split_into_files(list_rank_arrays(held, request.form, dtypes, known), request.max_shard_size)
        for number, arrays in enumerate(files, 1):
            path = f"{_number_files(rank)}model-{number:05d}-of-{len(files):05d}.safetensors"
            builder.add(path, arrays, _build_sharding_info(arrays))
    return builder.manifest(NAME, have, dtypes)


def _format_file_prefix(dialect: LibraryDialect, rank: int) -> str:
    del dialect
    return _number_files(rank)


def _number_files(rank: int) -> str:
    """Return what the names of a rank's files begin with."""
    return f"shard-{rank + 1:05d}-"


def list_rank_arrays(
    held: Sequence[TensorShard], form: ArrayForm, dtypes: dict[str, DType], known: Known
) -> Iterator[list[TensorArray]]:
    """List the rank's arrays, the boxes of one name together; those of experts stand where the first of them would."""
    order: list[TensorShard | list[tuple[TensorShard, FusedPlace]]] = []
    shared: dict[str, list[tuple[TensorShard, FusedPlace]]] = {}
    for piece in held:
        places = form.places.get(piece.tensor.name)
        if places is None:
            order.append(piece)
            continue
        for place in places:
            if place.array in shared:
                shared[place.array].append((piece, place))
            else:
                shared[place.array] = [(piece, place)]
                order.append(shared[place.array])
    for some in order:
        if isinstance(some, list):
            yield _join_parts(some, dtypes[some[0][0].tensor.name], known)
        else:
            dtype = dtypes[some.tensor.name]
            for name in some.names:
                yield [TensorArray.of(name, some.tensor, dtype, box) for box in some.boxes]


def _join_parts(pieces: Sequence[tuple[TensorShard, FusedPlace]], dtype: DType, known: Known) -> list[TensorArray]:
    """Return the fewest boxes of an array that hold `pieces` of its tensors; `known` are those of arrays before."""
    place = pieces[0][1]
    fusion = place.fusion
    key = (id(fusion.places), *(place.position for _, place in pieces), *(id(piece.boxes) for piece, _ in pieces))
    alike = known.get(key)
    if alike is None:
        alike = known[key] = _AlikeArrays.of(pieces)
    tensors = tuple(piece.tensor for piece, _ in pieces)
    return [build_shared_array(place, dtype, box, tensors, alike.views) for box in alike.boxes]


@value_class
class _AlikeArrays:
    """What such arrays of all layers have in common on a rank."""

    boxes: list[Box]
    """Of the array."""
    views: ViewGroup
    """Of the tensors that have elements in them."""
    held: tuple[tuple[Box, ...], ...]
    """What the rank holds of each tensor; as long as these are kept, no others have their ids."""

    @classmethod
    def of(cls, pieces: Sequence[tuple[TensorShard, FusedPlace]]) -> _AlikeArrays:
        """Make them from those of one layer."""
        views = ViewGroup(
            tuple(place.fusion.places.views[place.position] for _, place in pieces),
            tuple(place.fusion.places.boxes[place.position] for _, place in pieces),
        )
        held = tuple(piece.boxes for piece, _ in pieces)
        images = (
            view.image(part.shape, Box(tuple(a - b for a, b in zip(own.origin, part.origin, strict=True)), own.shape))
            for view, part, some in zip(views.views, views.parts, held, strict=True)
            for box in some
            if (own := box.intersect(part)) is not None
        )
        return cls(merge_boxes(images), views, held)


def _split_into_files(groups: Iterable[Sequence[TensorArray]], max_shard_size: int | None) -> list[list[TensorArray]]:
    """Split the rank's arrays into files: a name once per file, and at most `max_shard_size` bytes unless alone."""
    files: list[list[TensorArray]] = []
    names: list[set[str]] = []
    sizes: list[int] = []
    for group in groups:
        start = 0
        if max_shard_size is None and files and len(group) == 1 and group[0].name not in names[0]:  # nearly all
            files[0].append(group[0])
            names[0].add(group[0].name)
            continue
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


def _build_sharding_info(arrays: Sequence[TensorArray]) -> dict[str, str]:
    """Build the metadata that says where in its global tensor each array is; what arrays share is spelled once."""
    spelled: dict[tuple[tuple[int, ...], tuple[int, ...]], str] = {}
    entries = []
    for array in sorted(arrays, key=lambda a: a.name):
        place = (array.box.origin, array.shape)
        said = spelled.get(place)
        if said is None:
            said = json.dumps({OFFSETS: list(array.box.origin), GLOBAL_SHAPE: list(array.shape)})
            spelled[place] = said
        entries.append(f"{json.dumps(array.name)}: {said}")
    return {VERSION_KEY: "1.0", KEY: f"{{{', '.join(entries)}}}"}


LAYOUT: Final = Layout(
    NAME,
    pack_ranks,
    ranks="always",
    options=frozenset({"max_shard_size", "names", "experts"}),
    states="on request",
    prefix=_format_file_prefix,
)
