"""Reads safetensors checkpoints: one file, an index with its shards, or a directory without an index."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.files.choice import FileChoice, choose_given_file, choose_index, parse_numbered_name
from shardctl.libraries.files.copies import CopyCollector, place_tensors
from shardctl.libraries.files.file_names import INDEX_SUFFIX, SAFETENSORS, WHOLE_SAFETENSORS
from shardctl.libraries.files.impostors import (
    ADAPTERS,
    find_lone_adapter,
    list_adapter_files,
    list_unfinished_downloads,
    refuse_adapter,
    refuse_unfinished,
)
from shardctl.libraries.files.index import read_index, read_shard_index
from shardctl.libraries.files.links import check_link
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.meta.native_params import read_native_config
from shardctl.libraries.meta.params import PARAMS
from shardctl.libraries.reader import Format, find_given_file
from shardctl.libraries.safetensors.header import (
    HeaderArray,
    SafetensorsHeader,
    estimate_header_size,
    looks_like_header,
    read_header,
)
from shardctl.libraries.safetensors.saved_apart import FOLDER, METADATA, list_saved_apart, read_config_apart
from shardctl.libraries.safetensors.sharding_info import KEY, VERSION_KEY, ArrayPlace, read_sharding_info
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import CheckpointFile, Chunk, Manifest, Region, Tensor, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.base.dtype import DType
    from shardctl.storage import Source, Span

_INDEX_FILE_SUFFIX: Final = SAFETENSORS + INDEX_SUFFIX
_STANDARD_INDEX: Final = WHOLE_SAFETENSORS + INDEX_SUFFIX
_RANK_FILE: Final = re.compile(rf"(?:{FOLDER})?shard-[0-9]{{5}}-(model-[0-9]{{5}}-of-[0-9]{{5}}\.safetensors)")
"""What torch's HuggingFaceStorageWriter writes and transformers >= 5.20 recognises."""


def detect_safetensors(source: Source) -> bool:
    """Detect whether the directory holds safetensors files or an index of some, or the file looks like one."""
    given = find_given_file(source)
    if given is not None:
        return given.endswith((SAFETENSORS, _INDEX_FILE_SUFFIX)) or looks_like_header(source, given)
    return (
        any("/" not in path and path.endswith((SAFETENSORS, _INDEX_FILE_SUFFIX)) for path in source.files())
        or bool(list_saved_apart(source))
        or bool(list_unfinished_downloads(source, SAFETENSORS))
    )


def scan_safetensors(source: Source, *, prefer_index: bool = False) -> Manifest:
    """Read every header, and say where each tensor is.

    A tensor that is also in a file where the index does not place it has a chunk there too, unless `prefer_index`; so
    has one that two files hold and no index places.

    A tensor of a type narrower than a byte whose last dim does not fill whole bytes has no byte strides. Its region's
    strides are then `()`: it can only be copied whole, as one run of `Tensor.nbytes` bytes.

    Raises:
        SourceError: a file is missing, malformed or not what its name says, or files contradict each other.
        HostileError: a file's name or link leaves the directory.
        UnsupportedError: something newer than this version.
    """
    chosen = _choose_files(source)
    source.expect(_list_header_spans(chosen))
    headers = {path: _read_checked_header(source, path) for path in chosen.files}
    placed = {path: read_sharding_info(header) for path, header in headers.items()}
    sharded = any(info is not None for info in placed.values())
    warnings = list(chosen.warnings)
    held = {path: {a.name: a.nbytes for a in header.arrays} for path, header in headers.items()}
    if chosen.index is not None:
        warnings += chosen.index.check(held)
    if sharded:
        tensors = _build_sharded_tensors(headers, placed, chosen.index.weight_map if chosen.index is not None else {})
    else:
        if chosen.index is None:
            _check_one_save(chosen.files)
        files, count = chosen.index.weight_map if chosen.index is not None else {}, sum(map(len, held.values()))
        if len(files) != count:  # else the index, which was checked, names each tensor where it is, and each is once
            files = place_tensors(held, chosen.index)
        twice = count > len(files) and len(headers) > 1
        tensors = _build_whole_tensors(headers, files if twice else {})
        copies = CopyCollector(chosen.index, prefer_index=prefer_index)
        for copy in _list_copies(headers, files) if twice else ():
            tensors[copy.name] = copies.add(tensors[copy.name], copy)
        warnings += copies.check_undecided(source)
    metadata, differing = _merge_metadata(headers)
    objects, left = list_side_files(source, set(headers))
    own_config, unlike = read_native_config(source, headers, tensors)
    dropped = PARAMS
    if own_config is None:
        apart = next(iter(headers)).startswith(FOLDER)
        own_config = read_config_apart(source, FOLDER if apart else "")
        dropped = FOLDER if apart else METADATA
    if own_config is not None or dropped == FOLDER:
        objects = tuple(replace(each, policy="drop") if each.name.startswith(dropped) else each for each in objects)
    return Manifest(
        format=FORMAT.name,
        tensors=tensors,
        files={path: CheckpointFile(path, header.size) for path, header in headers.items()},
        objects=objects,
        metadata=metadata,
        warnings=(*warnings, *differing, *left, *unlike),
        own_config=own_config,
    )


def _choose_files(source: Source) -> FileChoice:
    given = find_given_file(source)
    if given is not None:
        return choose_given_file(given, SAFETENSORS)
    adapters = list_adapter_files(source)
    names = [p for p in source.files() if "/" not in p and p.endswith(SAFETENSORS) and p not in adapters]
    names = names or list_saved_apart(source)
    indexes = [path for path in source.files() if "/" not in path and path.endswith(_INDEX_FILE_SUFFIX)]
    if any(_RANK_FILE.fullmatch(name) for name in names):
        _check_numbering(names)
        return FileChoice(tuple(names))
    if WHOLE_SAFETENSORS in names:
        return _choose_whole_file(source, indexes)
    if indexes:
        index = read_shard_index(source, choose_index(indexes, _STANDARD_INDEX))
        return FileChoice(index.shards, index, index.warnings)
    if names:
        _check_numbering(names)
        return FileChoice(tuple(names))
    refuse_adapter(source)
    if find_lone_adapter(source) == ADAPTERS[0]:
        return FileChoice((ADAPTERS[0],))
    for path in list_unfinished_downloads(source, SAFETENSORS):
        refuse_unfinished(source, path)
    raise SourceError(f"{source.name} holds no {SAFETENSORS} file")


def _choose_whole_file(source: Source, indexes: Sequence[str]) -> FileChoice:
    """Choose where `model.safetensors` exists; an index of other files beside it is a second checkpoint."""
    if _STANDARD_INDEX not in indexes:
        return FileChoice((WHOLE_SAFETENSORS,))
    index = read_index(source, _STANDARD_INDEX)
    others = [path for path in index.shards if path != WHOLE_SAFETENSORS]
    if others:
        raise SourceError(
            f"{source.name} holds two checkpoints: {WHOLE_SAFETENSORS}, and {others[0]} with the others "
            f"that {_STANDARD_INDEX} names",
            hint=f"give {WHOLE_SAFETENSORS} itself, or move it away",
        )
    return FileChoice((WHOLE_SAFETENSORS,), index, index.warnings)


def _parse_numbers(name: str) -> tuple[str, str, str] | None:
    """Parse prefix, number and count of one file of several, or None for a name without numbers; ranks are left out."""
    return parse_numbered_name(_RANK_FILE.sub(r"\1", name), SAFETENSORS)


def _check_numbering(names: Sequence[str]) -> None:
    """Raise SourceError if one of the files `prefix-00001-of-0000N` to `prefix-0000N-of-0000N` is missing.

    Of the files of ranks, each number must be there for some rank: a rank writes no file that would be empty.
    """
    groups: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        numbers = _parse_numbers(name)
        if numbers is not None:
            prefix, number, count = numbers
            groups.setdefault((prefix, count), {})[int(number)] = number
    for (prefix, count), present in groups.items():
        first = min(present.keys() & {0}, default=1)
        for expected in range(first, first + min(int(count), len(present) + 1)):
            if expected not in present:
                width = len(next(iter(present.values())))
                raise SourceError(
                    f"{prefix}-{expected:0{width}}-of-{count}{SAFETENSORS} is missing: only {len(present)} of the "
                    f"{int(count)} files are here",
                    hint="fetch the missing file",
                )


def _check_one_save(names: Sequence[str]) -> None:
    """Refuse numbered files beside others of another numbering, or of none: which belong together is a guess."""
    examples: dict[tuple[str, str] | None, str] = {}
    for name in names:
        numbers = _parse_numbers(name)
        examples[(numbers[0], numbers[2]) if numbers is not None else None] = name
    if len(examples) > 1:
        raise SourceError(
            f"the directory holds files of different saves and no index: {' and '.join(sorted(examples.values()))}",
            hint="leave only the files that belong together",
        )


def _list_header_spans(chosen: FileChoice) -> Iterator[Span]:
    """List where the headers are: if there is an index, their sizes are known well enough to fetch little more."""
    if chosen.index is None:
        yield from ((path, 0, estimate_header_size(None)) for path in chosen.files)
        return
    names: dict[str, list[str]] = {path: [] for path in chosen.files}
    for name, path in chosen.index.weight_map.items():
        names[path].append(name)
    yield from ((path, 0, estimate_header_size(some)) for path, some in names.items())


def _read_checked_header(source: Source, path: str) -> SafetensorsHeader:
    refuse_unfinished(source, path)
    check_link(source, path)
    return read_header(source, path)


@value_class
class _StoredPart:
    """An array in a file, and its place in its global tensor: whole, if `place` is None."""

    file: str
    array: HeaderArray
    place: ArrayPlace | None

    @property
    def origin(self) -> tuple[int, ...]:
        return self.place.origin if self.place is not None else (0,) * len(self.array.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.origin, self.array.shape, strict=True))


def _build_whole_tensors(headers: Mapping[str, SafetensorsHeader], weight_map: Mapping[str, str]) -> dict[str, Tensor]:
    """Build the tensors of files that hold each whole, from the one file where each is placed, if it is in several."""
    tensors: dict[str, Tensor] = {}
    alike: dict[tuple[DType, tuple[int, ...]], tuple[Box, tuple[int, ...]]] = {}
    for path, header in headers.items():
        for array in header.arrays:
            name, shape = array.name, array.shape
            if weight_map.get(name, path) != path:
                continue
            dtype = array.dtype
            kind = alike.get((dtype, shape))
            if kind is None:
                kind = alike[dtype, shape] = Box.whole(shape), _compute_strides(dtype, shape)
            box, strides = kind
            chunk = Chunk(box, dtype, Region(path, array.offset, strides), name)
            tensors[name] = Tensor(name, dtype, shape, (chunk,))
    return tensors


def _list_copies(headers: Mapping[str, SafetensorsHeader], weight_map: Mapping[str, str]) -> Iterator[Chunk]:
    """List what files hold of tensors that are placed in another one."""
    for path, header in headers.items():
        for array in header.arrays:
            if weight_map.get(array.name, path) != path:
                where = Region(path, array.offset, _compute_strides(array.dtype, array.shape))
                yield Chunk(Box.whole(array.shape), array.dtype, where, array.name)


def _build_sharded_tensors(
    headers: Mapping[str, SafetensorsHeader],
    placed: Mapping[str, Mapping[str, ArrayPlace] | None],
    weight_map: Mapping[str, str],
) -> dict[str, Tensor]:
    """Build the global tensors that the arrays of each name make up."""
    stored: dict[str, list[_StoredPart]] = {}
    for path, header in headers.items():
        info = placed[path]
        for array in header.arrays:
            if weight_map.get(array.name, path) == path:
                place = info[array.name] if info is not None else None
                stored.setdefault(array.name, []).append(_StoredPart(path, array, place))
    tensors = {}
    for name, parts in stored.items():
        shape = _find_global_shape(parts)
        tensors[name] = Tensor(name, parts[0].array.dtype, shape, tuple(_build_chunk(part, shape) for part in parts))
    return tensors


def _find_global_shape(parts: Sequence[_StoredPart]) -> tuple[int, ...]:
    """Find the shape that the files declare, else the furthest extent of any box, as torch computes it."""
    first = parts[0]
    for part in parts:
        if part.array.dtype != first.array.dtype or len(part.array.shape) != len(first.array.shape):
            raise SourceError(
                f"tensor {first.array.name!r} is {_describe_part(first)} in {first.file} but "
                f"{_describe_part(part)} in {part.file}"
            )
    declared = [(part, part.place.global_shape) for part in parts if part.place and part.place.global_shape is not None]
    if not declared:
        return tuple(max(extents) for extents in zip(*(part.stop for part in parts), strict=True))
    one, shape = declared[0]
    for other, another in declared:
        if another != shape:
            raise SourceError(
                f"tensor {first.array.name!r} has the global shape {list(shape)} in {one.file} but {list(another)} in "
                f"{other.file}"
            )
    return shape


def _describe_part(part: _StoredPart) -> str:
    return f"{part.array.dtype} of {len(part.array.shape)} dims"


def _build_chunk(part: _StoredPart, shape: tuple[int, ...]) -> Chunk:
    array = part.array
    if part.place is None and array.shape == shape:
        box = Box.whole(shape)
    else:
        box = Box(part.origin, array.shape)
        if not Box.whole(shape).contains(box):
            raise SourceError(
                f"tensor {array.name!r}: the box {box} that {part.file} holds is not inside the global shape "
                f"{list(shape)}"
            )
    strides = _compute_strides(array.dtype, array.shape)
    return Chunk(box, array.dtype, Region(part.file, array.offset, strides), array.name)


@lru_cache(maxsize=4096)
def _compute_strides(dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return compute_dense_strides(dtype, shape)
    except UnsupportedError:
        return ()


def _merge_metadata(headers: Mapping[str, SafetensorsHeader]) -> tuple[dict[str, str], list[str]]:
    """Merge the `__metadata__` of all files, without what belongs to the container, and warn where files differ."""
    merged: dict[str, tuple[str, str]] = {}
    warnings = []
    for path, header in headers.items():
        for key, value in header.metadata.items():
            if key in {KEY, VERSION_KEY}:
                continue
            kept, other = merged.setdefault(key, (value, path))
            if kept != value:
                warnings.append(f"__metadata__ {key!r} differs between {other} and {path}; that of {other} is kept")
    return {key: value for key, (value, _) in merged.items()}, warnings


FORMAT: Final = Format(
    "safetensors",
    "safetensors files",
    detect_safetensors,
    scan_safetensors,
    scan_indexed=partial(scan_safetensors, prefer_index=True),
    served=True,
)
