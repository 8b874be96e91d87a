"""Plans one set of safetensors files per rank, with the place of each box in its global tensor.

The files are what torch's `HuggingFaceStorageWriter` writes and its `HuggingFaceStorageReader` reads into any mesh
(torch 2.13, torch/distributed/checkpoint/hf_storage.py), and what `from_pretrained` of transformers >= 5.20 takes
as a distributed checkpoint (transformers/distributed/checkpoint.py). Both demand both names of a tied weight.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from itertools import accumulate
from json.encoder import encode_basestring_ascii
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.safetensors.header import (
    ALIGNMENT,
    LARGEST_HEADER,
    METADATA,
    join_members,
    measure_file,
    spell_entry,
    spell_kind,
    spell_metadata,
    spell_text,
)
from shardctl.libraries.safetensors.hf_writing import build_shared_array
from shardctl.libraries.safetensors.packing import FileBuilder, TensorArray, build_container_metadata
from shardctl.libraries.safetensors.sharding_info import GLOBAL_SHAPE, KEY, OFFSETS, VERSION_KEY
from shardctl.libraries.writer import Layout, PackMeasure
from shardctl.tensors.box import Box, merge_boxes
from shardctl.tensors.views import ViewGroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardctl.base.dtype import DType
    from shardctl.libraries.arrays.form import ArrayForm, FusedPlace
    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.manifest import Manifest
    from shardctl.tensors.naming_scheme import NamingScheme
    from shardctl.tensors.pieces import TensorShard

NAME: Final = "ranks"
_ENTRY_SEPARATOR: Final = ", "
"""What stands between the entries of `DCP_SHARDING_INFO`."""
_UNESCAPED_JSON_PATTERN: Final = re.compile(r"[ !#-\[\]-~]*")
"""Characters that JSON spells as they are, each with one byte."""
_quote: Final = encode_basestring_ascii
"""A string as JSON, in ASCII."""
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
            path = _name_file(rank, number, len(files))
            builder.add(path, arrays, _build_sharding_info(arrays))
    return builder.manifest(NAME, have, dtypes)


@value_class
class _KindSize:
    """What the arrays of one type, one box and one shape around it add to a file, but for their names and offsets."""

    order: int
    """Where the file has them, among other types."""
    nbytes: int
    spelled: int
    """Characters of their entries in the header, and in the metadata there."""
    boxes: tuple[Box, ...]
    """As long as they are kept, no others have their id."""


def measure_ranks(request: PackRequest) -> PackMeasure | None:
    """Measure the files that `pack_ranks` packs, if each name has one box on a rank, and one file holds all of them.

    The characters of headers are counted: what an array takes there depends on its kind, its name and the digits of its
    offsets, which follow from the order of the file.
    """
    assert request.placed is not None  # noqa: S101 - as the layout says of its ranks
    besides = join_members([spell_metadata(build_container_metadata(request.have) | _build_sharding_info(()))])
    if request.form.places or request.max_shard_size is not None or not besides.isascii():
        return None
    kinds: dict[tuple[int, int], _KindSize] = {}
    sizes, chunks, dtypes = dict[str, int](), 0, request.dtypes
    for rank, groups in request.placed.list_groups():
        rows, spelled = list[tuple[int, str, int]](), len(besides)
        for some, boxes in groups:
            for _, tensor, names in some:
                dtype = dtypes[tensor.name]
                kind = kinds.get((id(boxes), id(dtype)))
                if kind is None:
                    if len(boxes) != 1 or dtype.bits % 8:
                        return None
                    kind = kinds[id(boxes), id(dtype)] = _measure_kind(dtype, tensor.shape, boxes)
                rows += [(kind.order, name, kind.nbytes) for name in names]
                spelled += len(names) * kind.spelled
        size = _measure_rank_file(rows, spelled) if rows else 0
        if size is None:
            return None
        if rows:
            sizes[_name_file(rank, 1, 1)] = size
        chunks += len(rows)
    return PackMeasure(sizes, chunks)


def _measure_rank_file(rows: list[tuple[int, str, int]], spelled: int) -> int | None:
    """Measure a file of arrays, each with the place of its type, its name and its bytes; None if that is not plain.

    `spelled` are the characters of the header without names and offsets.
    """
    rows.sort()
    names = [name for _, name, _ in rows]
    if len(set(names)) < len(names) or METADATA in names or not _UNESCAPED_JSON_PATTERN.fullmatch("".join(names)):
        return None
    ends = [str(end) for end in accumulate([nbytes for _, _, nbytes in rows])]
    # Each name stands in the metadata, too; each array begins where the one before it ends, and the first at 0.
    spelled += 2 * sum(map(len, names)) + 2 * sum(map(len, ends)) - len(ends[-1]) + len("0")
    spelled += len(_ENTRY_SEPARATOR) * (len(names) - 1)
    return measure_file(spelled, int(ends[-1])) if spelled <= LARGEST_HEADER else None


def _measure_kind(dtype: DType, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> _KindSize:
    (box,) = boxes
    entry = f",{spell_entry('', spell_kind(dtype, box.shape), 0, 0)}"
    place = spell_text(_spell_entry("", box.origin, shape))
    spelled = len(entry) - len("00") + len(place) - len('""')
    return _KindSize(ALIGNMENT[dtype.name], dtype.nbytes(box.shape), spelled, boxes)


def _name_file(rank: int, number: int, count: int) -> str:
    return f"{_number_files(rank)}model-{number:05d}-of-{count:05d}.safetensors"


def _format_file_prefix(dialect: NamingScheme, rank: int) -> str:
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
        """Make them from those of one layer; raises UnsupportedError if elements of others lie between theirs."""
        if not all(place.fusion.places.views[place.position].dense for _, place in pieces):
            raise UnsupportedError(
                f"{pieces[0][1].array} cannot be divided over ranks: rows of heads take turns in it",
                hint="give no mesh; torch.distributed.checkpoint.load reads the result into any",
            )
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


@lru_cache(maxsize=4096)  # arrays are alike
def _spell_place(origin: tuple[int, ...], shape: tuple[int, ...]) -> str:
    return json.dumps({OFFSETS: list(origin), GLOBAL_SHAPE: list(shape)})


def _spell_entry(name: str, origin: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Spell where in a larger array of a shape the array of this name is."""
    return f"{_quote(name)}: {_spell_place(origin, shape)}"


def _build_sharding_info(arrays: Sequence[TensorArray]) -> dict[str, str]:
    """Build the metadata that says where in its global tensor each array is."""
    ordered = sorted(arrays, key=attrgetter("name"))
    entries = [_spell_entry(array.name, array.box.origin, array.shape) for array in ordered]
    return {VERSION_KEY: "1.0", KEY: f"{{{_ENTRY_SEPARATOR.join(entries)}}}"}


LAYOUT: Final = Layout(
    NAME,
    pack_ranks,
    measure=measure_ranks,
    ranks="always",
    options=frozenset({"max_shard_size", "names", "experts"}),
    states="on request",
    prefix=_format_file_prefix,
    served=True,
)
