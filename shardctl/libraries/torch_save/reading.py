"""Reads checkpoints of torch.save: one file, an index with its shards, or a directory without an index."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import HostileError, SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.files.choice import FileChoice, choose_given_file, choose_index, parse_numbered_name
from shardctl.libraries.files.copies import CopyCollector, place_tensors
from shardctl.libraries.files.file_names import INDEX_SUFFIX, TORCH_SAVED, WHOLE_TORCH
from shardctl.libraries.files.impostors import (
    ADAPTERS,
    find_lone_adapter,
    list_unfinished_downloads,
    refuse_adapter,
    refuse_impostor,
    refuse_unfinished,
)
from shardctl.libraries.files.index import WeightIndex, read_index, read_shard_index
from shardctl.libraries.files.links import check_link
from shardctl.libraries.files.rank_files import parse_rank_file_name
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.reader import Format, find_given_file
from shardctl.libraries.torch_save.legacy_magics import MAGICS
from shardctl.libraries.torch_save.pickle_budget import budget_of
from shardctl.libraries.torch_save.zip_signatures import LOCAL_MAGIC
from shardctl.storage import read_bytes
from shardctl.storage.entry_limit import charge_entries
from shardctl.storage.excluded_names import is_excluded
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import CheckpointFile, Chunk, Manifest, OpaqueObject, Region, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardctl.libraries.torch_save.saved_optimizer import SavedOptimizer
    from shardctl.libraries.torch_save.state_dict import StateDict
    from shardctl.libraries.torch_save.tensors import SavedFile, StorageView
    from shardctl.storage import Source, Span

_SHARD_FILE_SUFFIX: Final = ".bin"
_INDEX_FILE_SUFFIX: Final = _SHARD_FILE_SUFFIX + INDEX_SUFFIX
_STANDARD_INDEX: Final = WHOLE_TORCH + INDEX_SUFFIX
_NON_MODEL_FILE_PATTERN: Final = re.compile(
    r"(optimizer|scheduler|scaler|training_args|random_states|rng_state).*|.*(model|optim)_states\.pt"
    r"|consolidated\.[0-9]+\.pth|common\.pt"
)
"""What Trainer and accelerate keep to resume, and the files of DeepSpeed, Meta and Megatron-LM: containers of their
own."""
_FILE_HEAD_BYTES: Final = 512
_PREFETCHED_END_BYTES: Final = 1 << 16
"""Bytes of either end of a file that is far away in which pickle and directory usually are."""
_TAR_MAGIC_SLICE: Final = slice(257, 262)
_MAX_EXPANSION_RATIO: Final = 16
_REPEATED_FREE: Final = 256 << 20
"""Tensors may be views that repeat elements (`expand`), but all of them together hold at most this many bytes more
than 16 times the file's: beyond, a small file would fill a disk."""


def detect_torch_save(source: Source) -> bool:
    """Detect whether the directory holds files of torch.save or an index of some, or the file looks like one."""
    given = find_given_file(source)
    if given is not None:
        return given.endswith((*TORCH_SAVED, _INDEX_FILE_SUFFIX)) or _has_magic(source, given)
    return bool(
        _list_candidates(source)
        or find_lone_adapter(source) == ADAPTERS[1]
        or any("/" not in path and path.endswith(_INDEX_FILE_SUFFIX) for path in source.files())
        or any(path.startswith("pytorch_model") for path in list_unfinished_downloads(source, _SHARD_FILE_SUFFIX))
    )


def scan_torch_save(source: Source, *, prefer_index: bool = False) -> Manifest:
    """Read every pickle without running it, and say where each tensor is.

    A tensor that is also in a file where the index does not place it has a chunk there too, unless `prefer_index`; so
    has one that two files hold and no index places.

    Names whose elements are the very same bytes (same file, offset, strides, shape and dtype) are one tensor: the
    first is its name and the others its `ties`. Views that overlap in any other way are tensors of their own, and so
    are empty ones.

    Raises:
        SourceError: a file is missing, malformed or not what its name says, or files contradict each other.
        HostileError: a file tries to run code, to leave its directory or to exhaust the reader.
        UnsupportedError: a container or a tensor of a kind that is not converted.
    """
    chosen = _choose_files(source)
    source.expect(span for path in chosen.files for span in _list_end_spans(path, source.files()[path].size))
    warnings = list(chosen.warnings)
    read_files: dict[str, WeightsFile] = {}
    for path in chosen.files:
        read_files[path] = found = read_weights(source, path, trained=len(chosen.files) == 1)
        warnings += found.state.warnings
    if chosen.index is not None:
        warnings += _check_index(chosen.index, read_files)
    files = place_tensors({path: found.state.views for path, found in read_files.items()}, chosen.index)
    tensors = {tensor.name: tensor for found in read_files.values() for tensor in _build_tensors(found, files)}
    owners = {name: tensor.name for tensor in tensors.values() for name in (tensor.name, *tensor.ties)}
    copies = CopyCollector(chosen.index, prefer_index=prefer_index)
    for found in read_files.values():
        for name, copy in _list_copies(found, files):
            tensors[owners[name]] = copies.add(tensors[owners[name]], copy)
    warnings += copies.check_undecided(source)
    objects, left = list_side_files(source, set(read_files))
    inside = [
        OpaqueObject(name, "drop", file=path) for path, found in read_files.items() for name in found.state.others
    ]
    training = None
    for path, optimizer in ((path, each.optimizer) for path, each in read_files.items() if each.optimizer):
        training = optimizer.collect_training(source, tensors, warnings)
        inside += [] if training.states else [OpaqueObject(optimizer.key, "drop", file=path)]
    return Manifest(
        format=FORMAT.name,
        tensors=tensors,
        files={path: CheckpointFile(path, source.files()[path].size) for path in read_files},
        objects=(*objects, *inside),
        warnings=(*warnings, *left),
        training=training,
    )


def _list_end_spans(path: str, size: int) -> tuple[Span, Span]:
    """List where the pickle of a file is, and the directory of its records."""
    return (path, 0, _PREFETCHED_END_BYTES), (path, max(size - _PREFETCHED_END_BYTES, 0), _PREFETCHED_END_BYTES)


def open_saved(source: Source, path: str) -> SavedFile:
    """Read as `read_saved` a file that no checkpoint may link to from elsewhere, and whose download has ended."""
    refuse_unfinished(source, path)
    check_link(source, path)
    return read_saved(source, path)


def read_saved(source: Source, path: str) -> SavedFile:
    """Read what torch.save wrote into a file, in whichever of its containers, but for the storages.

    Raises:
        SourceError: the file is something else, truncated or malformed.
        HostileError: it tries to run code or to exhaust the reader.
        UnsupportedError: a container of before 2017, TorchScript, compressed or big-endian data.
    """
    from shardctl.libraries.torch_save.legacy_file import read_legacy
    from shardctl.libraries.torch_save.zip_file import read_torch_zip

    head = _read_head(source, path)
    if head.startswith(LOCAL_MAGIC):
        return read_torch_zip(source, path)
    if head.startswith(MAGICS):
        return read_legacy(source, path)
    if head[_TAR_MAGIC_SLICE] == b"ustar":
        raise UnsupportedError(
            f"{path} is a tar archive, as torch.save wrote before version 0.1.10", hint="save it again with torch"
        )
    if not head.startswith(b"\x80"):
        refuse_impostor(source, path, "a file of torch.save")
    try:  # torch would unpickle any file, so an attack need not look like a checkpoint
        return read_legacy(source, path)
    except HostileError:
        raise
    except SourceError as error:
        raise SourceError(f"{path} is neither a zip archive nor a pickle that torch.save wrote") from error


# Which files


def _choose_files(source: Source) -> FileChoice:
    given = find_given_file(source)
    if given is not None:
        return choose_given_file(given, _SHARD_FILE_SUFFIX)
    names = _list_candidates(source)
    indexes = [path for path in source.files() if "/" not in path and path.endswith(_INDEX_FILE_SUFFIX)]
    index = None
    if _STANDARD_INDEX in indexes or len(indexes) == 1 or (indexes and WHOLE_TORCH not in names):
        read = read_index if WHOLE_TORCH in names else read_shard_index
        index = read(source, choose_index(indexes, _STANDARD_INDEX))
    if index is not None and (WHOLE_TORCH not in names or index.path == _STANDARD_INDEX):
        if WHOLE_TORCH in names and not {WHOLE_TORCH}.issuperset(index.shards):
            raise SourceError(
                f"{source.name} holds two checkpoints: {WHOLE_TORCH}, and the files that {index.path} names",
                hint=f"give {WHOLE_TORCH} itself, or move it away",
            )
        return FileChoice((WHOLE_TORCH,) if WHOLE_TORCH in names else index.shards, index, index.warnings)
    if WHOLE_TORCH in names:
        return FileChoice((WHOLE_TORCH,))
    if names:
        _check_numbering(names)
        return FileChoice(tuple(names))
    refuse_adapter(source)
    if find_lone_adapter(source) == ADAPTERS[1]:
        return FileChoice((ADAPTERS[1],))
    for path in list_unfinished_downloads(source, _SHARD_FILE_SUFFIX):
        refuse_unfinished(source, path)
    raise SourceError(f"{source.name} holds no file of torch.save")


def _list_candidates(source: Source) -> list[str]:
    """List the files of the root that are weights by their names or by their first bytes."""
    whole = not {WHOLE_TORCH, _STANDARD_INDEX}.isdisjoint(source.files())
    return [
        path
        for path in source.files()
        if "/" not in path
        and path.endswith(TORCH_SAVED)
        and path not in ADAPTERS
        and not _NON_MODEL_FILE_PATTERN.fullmatch(path)
        and (parse_rank_file_name(path) is None or whole)
        and (path.startswith("pytorch_model") or _has_magic(source, path))
    ]


def _has_magic(source: Source, path: str) -> bool:
    head = _read_head(source, path)
    return head.startswith(MAGICS) or (head.startswith(LOCAL_MAGIC) and b"/data.pkl" in head)


def _read_head(source: Source, path: str) -> bytes:
    return read_bytes(source, path, 0, min(source.files()[path].size, _FILE_HEAD_BYTES))


def _check_numbering(names: Sequence[str]) -> None:
    """Raise SourceError if a file of a numbered set is missing, or if the files come from several saves."""
    groups = {
        (parts[0], parts[2]) if (parts := parse_numbered_name(name, _SHARD_FILE_SUFFIX)) else None for name in names
    }
    if len(groups) > 1 and groups != {None}:
        raise SourceError(
            f"the directory holds files of different saves and no index: {', '.join(names[:3])}",
            hint="leave only the files that belong together",
        )
    group = groups.pop()
    if group is not None and len(names) != int(group[1]):
        raise SourceError(f"only {len(names)} of the {int(group[1])} files {names[0]} and so on are here")


# What is in them


@value_class
class WeightsFile:
    """One file's weights."""

    saved: SavedFile
    state: StateDict
    optimizer: SavedOptimizer | None = None


def read_weights(source: Source, path: str, *, trained: bool = False) -> WeightsFile:
    """Read the weights in a file of torch.save, and with `trained` the optimizer beside them.

    Raises as `open_saved` and `extract_state_dict`, and HostileError for tensors that would fill a disk.
    """
    from shardctl.libraries.torch_save.state_dict import extract_state_dict, find_optimizer

    saved = open_saved(source, path)
    keys = find_optimizer(saved.tree) if trained else None
    state = extract_state_dict(saved.tree, path, partial(is_excluded, source), keys)
    optimizer, views = None, [*state.views.values()]
    if keys is not None:
        from shardctl.libraries.torch_save.saved_optimizer import SavedOptimizer

        optimizer = SavedOptimizer(saved, keys)
        views += optimizer.views.values()
    check_total_size(source, path, views)
    budget_of(source).leftovers.mark_told({*state.others.values(), *(v.subclass for v in state.views.values())})
    saved = replace(saved, tree=None)  # the tree is larger than what is known from it
    return WeightsFile(saved, state, optimizer)


def check_total_size(source: Source, path: str, views: Iterable[StorageView]) -> None:
    """Charge the tensors of a file; raise HostileError if they are too many, or much larger than it."""
    size = source.files()[path].size
    known = set(views)
    budget_of(source).take_tensors(len(known), path)
    charge_entries(source, len(known))
    total = sum(prod(v.shape) * v.dtype.bits // 8 for v in known)
    if total > _MAX_EXPANSION_RATIO * size + _REPEATED_FREE:
        raise HostileError(
            f"{path} has {size:,} bytes, but its tensors would have {total:,}: they overlap, "
            "or their strides repeat elements",
            hint="if that is meant, save x.clone() of the tensors that are views",
        )


def _build_tensors(found: WeightsFile, weight_map: Mapping[str, str]) -> Iterator[Tensor]:
    """Build the tensors of a file that are not placed in another one."""
    saved = found.saved
    names: dict[tuple[Region, tuple[int, ...], str], list[str]] = {}
    for name, view in found.state.views.items():
        if weight_map.get(name, saved.path) == saved.path:
            region = saved.region(view, name)
            alone = name if not prod(view.shape) else ""
            names.setdefault((region, view.shape, f"{view.dtype} {alone}"), []).append(name)
    for (region, shape, _), (name, *ties) in names.items():
        dtype = found.state.views[name].dtype
        yield Tensor(name, dtype, shape, (Chunk(_build_whole_box(shape), dtype, region, name),), ties=tuple(ties))


def _list_copies(found: WeightsFile, weight_map: Mapping[str, str]) -> Iterator[tuple[str, Chunk]]:
    """List what a file holds of tensors that are placed in another one."""
    saved = found.saved
    for name, view in found.state.views.items():
        if weight_map.get(name, saved.path) != saved.path:
            yield name, Chunk(_build_whole_box(view.shape), view.dtype, saved.region(view, name), name)


@lru_cache(maxsize=4096)
def _build_whole_box(shape: tuple[int, ...]) -> Box:
    """Build the box once: the layers of a model repeat a few shapes."""
    return Box.whole(shape)


def _check_index(index: WeightIndex, read_files: Mapping[str, WeightsFile]) -> tuple[str, ...]:
    """Return the index's warnings. Writers differ in whether `total_size` counts tied tensors once or by name."""
    by_name: dict[str, dict[str, int]] = {}
    once: dict[str, dict[str, int]] = {}
    for path, found in read_files.items():
        seen: set[StorageView] = set()
        by_name[path], once[path] = {}, {}
        for name, view in found.state.views.items():
            nbytes = view.dtype.nbytes(view.shape)
            by_name[path][name] = nbytes
            once[path][name] = 0 if view in seen else nbytes
            seen.add(view)
    total = sum(once[file].get(name, 0) for name, file in index.weight_map.items())
    return index.check(once if index.total_size == total else by_name)


FORMAT: Final = Format(
    "torch",
    "files of torch.save",
    detect_torch_save,
    scan_torch_save,
    scan_indexed=partial(scan_torch_save, prefer_index=True),
    saved=True,
    served=True,
)
