"""Writes what turns the stored arrays of one checkpoint into those of another, as a weight delta that SGLang reads.

    with stage_delta(Path("weight_v000001")) as staging:  # a hidden directory next to the destination
        written = write_delta(base, new, changed, staging, effort)
        publish_delta(staging, Path("weight_v000001"))  # by one rename, after the caller has checked it

The base is a directory of Hugging Face safetensors, because a delta changes the arrays of such files. The other
checkpoint may have any layout: its tensors are copied into the arrays of the base, batch by batch, in a scratch file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO, Final

import numpy as np

from shardctl.base.amounts import format_file_size, format_plural
from shardctl.base.errors import DestinationError, SourceError, UsageError, format_first_few
from shardctl.base.value import state_class, value_class
from shardctl.base.workers import NullWatcher, raise_if_stopped, split_into_batches
from shardctl.checkpoint.delta_source import (
    BaseArray,
    DeltaSource,
    compute_array_digests,
    join_stored_digests,
    list_stored_arrays,
    read_applied_version,
)
from shardctl.conversion.engine.budget import divide_host_memory
from shardctl.conversion.engine.engine import execute_plan
from shardctl.conversion.engine.lock import DestinationLock
from shardctl.libraries.files.extra_tensors import add_extra_tensors
from shardctl.libraries.files.file_names import SAFETENSORS
from shardctl.libraries.files.index import DELTA_ENCODING
from shardctl.libraries.files.weight_deltas import BASE_DIGEST, INDEX, RESULT_DIGEST, begin_checksum, import_library
from shardctl.libraries.safetensors.header import HEADER_ALIGNMENT, METADATA
from shardctl.storage import linux
from shardctl.storage.durable import sync_directory, translate_os_errors, write_file
from shardctl.storage.local import LocalSource, LocalTarget
from shardctl.tensors.copyplan import join_manifests
from shardctl.tensors.manifest import CheckpointFile, Region, Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardctl.base.workers import ExecutionOptions
    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Chunk

_COMPRESSION_LEVEL: Final = 1
"""Of zstd, as the trainers write it: differences are mostly zeros, which a higher level packs little better."""
_CHECKSUM: Final = "xxh3-128"
_CHECKSUM_DIGITS: Final = 32
_BATCH_BYTES: Final = 256 << 20
"""Bytes of arrays that are rebuilt at once on disk, unless one alone is larger: fewer cost a plan for each few."""
_FILE_BYTES: Final = 5 << 30
"""Bytes of arrays whose differences share a file, as in the Hub's checkpoints."""
_BLOCK_BYTES: Final = 1 << 20
_ALIGNMENT: Final = 64
_PHASE: Final = "delta"
"""The phase of progress in which differences are written."""
_MEMORY_BYTES: Final = 1 << 30
_SCRATCH_FILE: Final = "arrays"
_MAX_OFFSET: Final = 10**18
_VERSION_IN_NAME: Final = re.compile(r"_v(\d{1,18})$")


@value_class
class WrittenDelta:
    """A weight delta that was written."""

    path: str
    version: int
    base_version: int
    arrays: int
    """Stored arrays that it changes."""
    base_arrays: int
    """Those of the base."""
    nbytes: int
    """Bytes of its files."""
    base_digest: str
    """Of the stored arrays that it was made for."""
    digest: str
    """The same of what it makes of them."""
    warnings: tuple[str, ...] = ()
    """What it does not hold."""

    def describe(self) -> str:
        """Say in one line what was written, and that it was checked."""
        return (
            f"wrote {self.path}: version {self.version} on {self.base_version}, {self.arrays:,} of "
            f"{format_plural(self.base_arrays, 'array')} changed ({format_file_size(self.nbytes)}); applied to the "
            "first, it gives the second"
        )


@contextmanager
def stage_delta(destination: Path) -> Iterator[Path]:
    """Make a directory in which a delta is written, and remove it if it was not published.

    Raises DestinationError if the destination exists, or while another run writes it.
    """
    _require_free(destination)
    root = destination.parent / f".{destination.name}.shardctl-delta"
    lock = DestinationLock(root / "lock", f"writing {destination}")
    with translate_os_errors(destination, "making"):
        root.mkdir(parents=True, exist_ok=True)
    lock.acquire()
    try:
        staging = root / "delta"
        with translate_os_errors(root, "emptying"):
            shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
            staging.mkdir()
        yield staging
    finally:
        shutil.rmtree(root / "delta", ignore_errors=True)
        lock.release()
        with suppress(OSError):  # which another run may have begun to use
            root.rmdir()


def publish_delta(staging: Path, destination: Path) -> None:
    """Give a finished delta its name, in one step."""
    with translate_os_errors(destination, "publishing"):
        sync_directory(staging)
        try:
            if not linux.rename_without_replacing(staging, destination):
                _require_free(destination)
                staging.rename(destination)
        except FileExistsError:
            _require_free(destination)
        sync_directory(destination.parent)


def _require_free(destination: Path) -> None:
    if os.path.lexists(destination):
        raise DestinationError(f"{destination} exists already", hint="give another name, or remove it yourself")


def write_delta(
    base: OpenedCheckpoint,
    new: OpenedCheckpoint,
    changed: Collection[str],
    destination: Path,
    staging: Path,
    effort: ExecutionOptions,
) -> WrittenDelta:
    """Write into `staging` what turns the arrays of `base` into those of `new`; `changed` tensors differ.

    Raises:
        SourceError: the base is not a directory of Hugging Face safetensors.
        UsageError: the name of the destination contradicts the version that the base says it has.
    """
    version, base_version = _choose_versions(base.source, destination)
    arrays = list_stored_arrays(base.source)
    groups, warnings = _group_arrays(base, arrays, changed)
    writer = _DeltaWriter(base.source, new, staging, effort)
    writer.write(groups)
    digests = compute_array_digests(arrays.values(), base.source, replace(effort, watcher=NullWatcher()), _PHASE)
    base_digest = join_stored_digests(arrays, digests)
    digest = join_stored_digests(arrays, digests | writer.digests)
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{base_version:06d}",
        DELTA_ENCODING: "xor",
        "compression_format": "zstd",
        "checksum_format": _CHECKSUM,
        BASE_DIGEST: base_digest,
        RESULT_DIGEST: digest,
    }
    index = json.dumps({"metadata": metadata, "weight_map": writer.weight_map}, indent=2, ensure_ascii=False).encode()
    with translate_os_errors(destination, "writing"):
        write_file(staging / INDEX, index)
    count = len(writer.weight_map)
    nbytes = writer.nbytes + len(index)
    return WrittenDelta(
        str(destination), version, base_version, count, len(arrays), nbytes, base_digest, digest, tuple(warnings)
    )


def require_base(base: Source, destination: Path) -> None:
    """Raise what `write_delta` would raise of its base, before the checkpoints are compared."""
    import_library("zstandard")
    begin_checksum(_CHECKSUM)
    list_stored_arrays(base)
    _choose_versions(base, destination)


def _choose_versions(base: Source, destination: Path) -> tuple[int, int]:
    """Choose the versions of the delta and of its base: the receiver applies version N to N - 1."""
    applied = base.deltas[-1].version if isinstance(base, DeltaSource) else read_applied_version(base)
    found = _VERSION_IN_NAME.search(destination.name)
    named = int(found[1]) if found is not None else None
    if applied is None:
        version = named or 1
        return version, version - 1
    if named is not None and named != applied + 1:
        raise UsageError(
            f"{destination.name} names version {named}, and {base.name} has version {applied}",
            hint=f"the next one is weight_v{applied + 1:06d}",
        )
    return applied + 1, applied


@state_class
class _RebuiltArrays:
    """Stored arrays of the base that share tensors, so that they are rebuilt together."""

    arrays: list[BaseArray]
    tensors: list[Tensor]
    """The tensors of the base in them."""

    def count_bytes(self) -> int:
        """Count the bytes of the arrays."""
        return sum(each.array.nbytes for each in self.arrays)


def _group_arrays(
    base: OpenedCheckpoint, arrays: Mapping[str, BaseArray], changed: Collection[str]
) -> tuple[list[_RebuiltArrays], list[str]]:
    """List the arrays in which tensors differ, in the order of the base's files, and warn of those that no tensor has.

    Raises SourceError for tensors outside of these files, or for arrays of which a tensor has only some bytes.
    """
    owners = {(each.file, each.array.offset): each for each in arrays.values() if each.array.nbytes}
    starts = {file: sorted(at for path, at in owners if path == file) for file in {path for path, _ in owners}}
    groups: dict[str, _RebuiltArrays] = {}
    filled = dict.fromkeys(arrays, 0)
    for tensor in add_extra_tensors(base.manifest).tensors.values():
        held: dict[str, BaseArray] = {}
        stored = [(chunk.where, chunk) for chunk in tensor.chunks if chunk.box.size]
        regions = {(w.file, w.offset, c.dtype.nbytes(c.box.shape)) for w, c in stored if isinstance(w, Region)}
        for file, offset, nbytes in regions:
            places = starts.get(file, [])
            at = int(np.searchsorted(places, offset, "right")) - 1
            if at < 0:
                raise SourceError(
                    f"{tensor.name} lies in {file}, and a weight delta changes files of the directory's root only",
                    hint=f"convert it first: shardctl reshard {base.source.name} DST --to hf",
                )
            owner = owners[file, places[at]]
            filled[owner.array.name] += nbytes
            held[owner.array.name] = owner
        joined = list({id(groups[name]): groups[name] for name in held if name in groups}.values())
        group = _RebuiltArrays([], [tensor])
        for each in joined:
            group.arrays += each.arrays
            group.tensors += each.tensors
        group.arrays += [each for name, each in held.items() if name not in groups]
        groups.update(dict.fromkeys((each.array.name for each in group.arrays), group))
    distinct = {id(group): group for group in groups.values()}.values()
    found = [group for group in distinct if any(tensor.name in changed for tensor in group.tensors)]
    partial = [
        each.array.name for group in found for each in group.arrays if filled[each.array.name] != each.array.nbytes
    ]
    if partial:
        raise SourceError(
            f"{base.source.name} has elements of {format_first_few(partial)} that belong to no tensor",
            hint=f"convert it first: shardctl reshard {base.source.name} DST --to hf",
        )
    kept = [name for name, each in arrays.items() if name not in groups and each.array.nbytes]
    warnings = [f"{format_first_few(kept)} of {base.source.name}, which are not tensors of its model, stay as they are"]
    found.sort(key=lambda group: (group.arrays[0].file, group.arrays[0].array.offset))
    return found, warnings if kept else []


class _ScratchTarget(LocalTarget):
    """A directory of files that nobody needs after a crash."""

    def sync(self, path: str) -> None:
        """Leave the file to the page cache."""


class _DeltaWriter:
    """Writes the differences of arrays, one after another."""

    def __init__(self, base: Source, new: OpenedCheckpoint, staging: Path, effort: ExecutionOptions) -> None:
        self._base, self._new, self._staging, self._effort = base, new, staging, effort
        self._tensors = add_extra_tensors(new.manifest).tensors
        self._zstandard = import_library("zstandard")
        self._buffers = tuple(memoryview(bytearray(_BLOCK_BYTES)) for _ in range(2))
        self.weight_map: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        """Of the arrays that were written, by name."""
        self.nbytes = 0

    def write(self, groups: Sequence[_RebuiltArrays]) -> None:
        """Write the files of the delta."""
        self._effort.watcher.begin(sum(group.count_bytes() for group in groups), phase=_PHASE)
        files: list[Collection[str]] = []
        for part in split_into_batches(groups, _FILE_BYTES, _RebuiltArrays.count_bytes):
            path = self._staging / f"part-{len(files)}"
            with translate_os_errors(self._staging, "writing"), path.open("w+b") as file:
                entries = self._write_file(part, file)
            if entries:
                files.append(entries)
                self.nbytes += path.stat().st_size
            else:
                path.unlink()
        for number, entries in enumerate(files):
            name = f"model-{number + 1:05d}-of-{len(files):05d}{SAFETENSORS}"
            (self._staging / f"part-{number}").rename(self._staging / name)
            self.weight_map |= dict.fromkeys(entries, name)

    def _write_file(self, groups: Sequence[_RebuiltArrays], file: BinaryIO) -> Collection[str]:
        """Write one file: the frames behind room for the header, and then the header, which spaces fill up."""
        names = [each.array.name for group in groups for each in group.arrays]
        largest = dict.fromkeys(names, (_MAX_OFFSET, _MAX_OFFSET))
        room = len(_format_header(largest, dict.fromkeys(names, "f" * _CHECKSUM_DIGITS)))
        room += -(8 + room) % HEADER_ALIGNMENT
        start = position = 8 + room
        entries: dict[str, tuple[int, int]] = {}
        sums: dict[str, str] = {}
        for batch in split_into_batches(groups, _BATCH_BYTES, _RebuiltArrays.count_bytes):
            with self._rebuild_arrays(batch) as (source, rebuilt):
                for old, new in rebuilt:
                    file.seek(position)
                    checksum = self._write_frame(old, source, new, file)
                    if checksum:
                        stop = file.tell()
                        entries[old.array.name], sums[old.array.name] = (position - start, stop - start), checksum
                        position = stop
                written = [new for old, new in rebuilt if old.array.name in entries]
                quiet = replace(self._effort, watcher=NullWatcher())
                self.digests |= compute_array_digests(written, source, quiet, _PHASE)
        file.truncate(position)
        file.seek(0)
        file.write(room.to_bytes(8, "little") + _format_header(entries, sums).ljust(room))
        file.flush()
        os.fsync(file.fileno())
        return entries

    @contextmanager
    def _rebuild_arrays(
        self, groups: Sequence[_RebuiltArrays]
    ) -> Iterator[tuple[Source, list[tuple[BaseArray, BaseArray]]]]:
        """Yield a scratch directory, and each array of the base with the same array of the other checkpoint there."""
        scratch = self._staging / "scratch"
        moved, wanted, size = dict[str, BaseArray](), dict[str, Tensor](), 0
        for group in groups:
            shifts: dict[str, list[tuple[int, int, int]]] = {}
            for each in group.arrays:
                start, size = size, size + each.array.nbytes + -each.array.nbytes % _ALIGNMENT
                moved[each.array.name] = BaseArray(_SCRATCH_FILE, replace(each.array, offset=start))
                begin = each.array.offset
                shifts.setdefault(each.file, []).append((begin, begin + each.array.nbytes, start - begin))
            for tensor in group.tensors:
                chunks = tuple(_move_chunk(chunk, shifts) for chunk in tensor.chunks if isinstance(chunk.where, Region))
                wanted[tensor.name] = replace(tensor, chunks=chunks)
        try:
            self._fill_scratch_file(wanted, size, scratch)
            with closing(LocalSource(scratch)) as source:
                yield source, [(each, moved[each.array.name]) for group in groups for each in group.arrays]
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _fill_scratch_file(self, wanted: Mapping[str, Tensor], size: int, scratch: Path) -> None:
        """Copy tensors of the other checkpoint to where they are wanted in the scratch file."""
        source = self._new.source
        have = replace(
            self._new.manifest, tensors={name: self._tensors[name] for name in wanted}, extra={}, training=None
        )
        want = replace(have, tensors=wanted, files={_SCRATCH_FILE: CheckpointFile(_SCRATCH_FILE, size)})
        plan = join_manifests(have, want)
        budget = divide_host_memory(plan, _MEMORY_BYTES, self._effort.threads, beside=source.held_bytes)
        with closing(_ScratchTarget(scratch)) as target:
            allow = self._new.allow_unverified
            execute_plan(plan, source, target, budget, stop=self._effort.stop, allow_unverified=allow)

    def _write_frame(self, old: BaseArray, source: Source, new: BaseArray, file: BinaryIO) -> str:
        """Write the compressed difference of an array, and return the checksum of its new bytes; "" if it is equal."""
        compressor = self._zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compressobj(size=old.array.nbytes)
        checksum, differs = begin_checksum(_CHECKSUM), False
        self._effort.watcher.work_on(old.array.name)
        for offset in range(0, old.array.nbytes, _BLOCK_BYTES):
            raise_if_stopped(self._effort.stop)
            before, after = (each[: min(_BLOCK_BYTES, old.array.nbytes - offset)] for each in self._buffers)
            self._base.read_at(old.file, old.array.offset + offset, before)
            source.read_at(new.file, new.array.offset + offset, after)
            checksum.update(after)
            target = np.frombuffer(before, np.uint8)
            np.bitwise_xor(target, np.frombuffer(after, np.uint8), out=target)
            differs = differs or bool(target.any())
            file.write(compressor.compress(before))
            self._effort.watcher.advance(len(before))
        file.write(compressor.flush())
        return checksum.hexdigest() if differs else ""


def _move_chunk(chunk: Chunk, shifts: Mapping[str, list[tuple[int, int, int]]]) -> Chunk:
    """Return a chunk where its array lies in the scratch file."""
    assert isinstance(chunk.where, Region)  # noqa: S101 - constants are stored nowhere
    where = chunk.where
    shift = next(shift for start, stop, shift in shifts[where.file] if start <= where.offset < max(stop, start + 1))
    return replace(chunk, where=replace(where, file=_SCRATCH_FILE, offset=where.offset + shift))


def _format_header(entries: Mapping[str, tuple[int, int]], sums: Mapping[str, str]) -> bytes:
    arrays = {
        name: {"dtype": "U8", "shape": [stop - start if stop > start else stop], "data_offsets": [start, stop]}
        for name, (start, stop) in entries.items()
    }
    return json.dumps({METADATA: dict(sums), **arrays}, separators=(",", ":"), ensure_ascii=False).encode()
