"""Reads a checkpoint of the Hub's layout with weight deltas applied, as if its files had the new bytes.

Whatever reads the source, names, fused arrays and quantization are those of the base. Before the first byte of a tensor
is given out, all that the deltas change is compared with their checksums.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, format_first_few
from shardctl.base.value import state_class, value_class
from shardctl.base.workers import ExecutionOptions, StopRequest, choose_thread_count, run_in_threads
from shardctl.libraries.files.file_names import SAFETENSORS
from shardctl.libraries.files.impostors import list_adapter_files
from shardctl.libraries.files.weight_deltas import (
    DECODER_BYTES,
    MARKER,
    begin_checksum,
    begin_patch,
    read_delta,
)
from shardctl.libraries.reader import find_given_file
from shardctl.libraries.safetensors.header import read_header
from shardctl.storage import FileStat
from shardctl.storage.addresses import open_source
from shardctl.storage.bounded_text import CONFIG_TEXT, parse_json
from shardctl.tensors.box import Box
from shardctl.tensors.digest import compute_checkpoint_digest
from shardctl.tensors.manifest import Chunk, Region, Tensor, compute_dense_strides, first_byte
from shardctl.tensors.record import RECORD
from shardctl.verify.content import measure_content

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardctl.libraries.files.weight_deltas import PatchDecoder, WeightDelta
    from shardctl.libraries.safetensors.header import HeaderArray
    from shardctl.storage import FileProofs, Source, Span
    from shardctl.tensors.bands import ByteReader

_IDLE_DECODERS: Final = 4
"""Decoders that wait for the bytes behind those that they gave: zstd frames have no other entry than their begin."""
_CHECK_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 4 << 20
_WRONG_BASE: Final = "give the base that the delta was made for, and every delta between the two, in order"


@value_class
class BaseArray:
    """An array of the base, where it lies."""

    file: str
    array: HeaderArray


def list_stored_arrays(source: Source) -> dict[str, BaseArray]:
    """List the arrays in the safetensors files of a directory's root, by name.

    Raises SourceError if there is no such file, or if two of them have an array of one name.
    """
    given, adapters = find_given_file(source), list_adapter_files(source)
    paths = [path for path in source.files() if "/" not in path and path.endswith(SAFETENSORS) and path not in adapters]
    if not paths:
        raise SourceError(
            f"{source.name} has no {SAFETENSORS} file, and weight deltas change the arrays of such files",
            hint=f"convert it first: shardctl reshard {source.name} DST --to hf",
        )
    if given is None:
        source.expect((path, 0, 1 << 16) for path in paths)
    found: dict[str, BaseArray] = {}
    for path in paths:
        for array in read_header(source, path).arrays:
            if array.name in found:
                raise SourceError(
                    f"{array.name} is in {found[array.name].file} and in {path} of {source.name}, and a weight delta "
                    "changes one array",
                    hint=f"convert it first: shardctl reshard {source.name} DST --to hf",
                )
            found[array.name] = BaseArray(path, array)
    return found


def read_applied_version(source: Source) -> int | None:
    """Return which version SGLang noted that a directory has; None if it noted nothing."""
    if source.folder is None or find_given_file(source) is not None:
        return None
    found = source.stat_file(MARKER)
    if found is None or found.size > CONFIG_TEXT.size:
        return None
    data = bytearray(found.size)
    source.read_at(MARKER, 0, memoryview(data))
    said = parse_json(bytes(data), MARKER, CONFIG_TEXT)
    version = said.get("version") if isinstance(said, dict) else None
    if not str(version).isdecimal():
        raise SourceError(f"{source.name}: {MARKER} has no version, but {version!r:.100}")
    return int(str(version))


def compute_stored_digest(
    arrays: Mapping[str, BaseArray], reader: ByteReader, effort: ExecutionOptions, phase: str = "deltas"
) -> str:
    """Compute the digest of arrays under their stored names, as `shardctl digest` computes that of tensors."""
    return join_stored_digests(arrays, compute_array_digests(arrays.values(), reader, effort, phase))


def compute_array_digests(
    arrays: Iterable[BaseArray], reader: ByteReader, effort: ExecutionOptions, phase: str
) -> dict[str, str]:
    """Compute the digest of each array, by its stored name; reads in the order of files."""
    tensors = sorted(map(_build_stored_tensor, arrays), key=first_byte)
    digests = measure_content(tensors, reader, effort, values=False, phase=phase).compute_digests()
    return {tensor.name: digest for tensor, digest in zip(tensors, digests, strict=True)}


def join_stored_digests(arrays: Mapping[str, BaseArray], digests: Mapping[str, str]) -> str:
    """Return the digest of a checkpoint of arrays that have these digests."""
    kinds = ((name, each.array) for name, each in arrays.items())
    return compute_checkpoint_digest((name, array.dtype, array.shape, digests[name]) for name, array in kinds)


def _build_stored_tensor(stored: BaseArray) -> Tensor:
    """Build the tensor that a stored array is."""
    array = stored.array
    where = Region(stored.file, array.offset, compute_dense_strides(array.dtype, array.shape))
    return Tensor(
        array.name, array.dtype, array.shape, (Chunk(Box.whole(array.shape), array.dtype, where, array.name),)
    )


def apply_deltas(base: Source, places: Sequence[str]) -> DeltaSource:
    """Return a base with deltas applied in the order in which they are given; closing it closes all of them.

    Raises SourceError if a delta is malformed, does not follow the one before, or changes what the base does not have.
    """
    with ExitStack() as stack:
        stack.callback(base.close)
        deltas = []
        for place in places:
            source = open_source(place)
            stack.callback(source.close)
            deltas.append(read_delta(source))
        found = DeltaSource(base, deltas)
        stack.pop_all()
    return found


@state_class
class _Patched:
    """An array of the base that deltas change."""

    stored: BaseArray
    deltas: list[int]
    """Which of them change it, in order."""


class DeltaSource:
    """A base with deltas applied: its files have the new bytes."""

    def __init__(self, base: Source, deltas: Sequence[WeightDelta]) -> None:
        self.parts = (base, *(delta.source for delta in deltas))
        self.base, self.deltas = base, deltas
        self.name, self.location, self.folder = base.name, base.location, base.folder
        self.arrays = list_stored_arrays(base)
        self.warnings = tuple(self._check_order())
        self._patched: dict[str, list[_Patched]] = {each.file: [] for each in self.arrays.values()}
        self._first = dict.fromkeys(self._patched, 1 << 63)
        self._find_patched()
        self._starts = {path: [each.stored.array.offset for each in found] for path, found in self._patched.items()}
        self._states = self._list_states()
        self._decoders: list[tuple[int, str, PatchDecoder]] = []
        self._lock, self._check_lock = threading.Lock(), threading.Lock()
        self._checked: SourceError | bool = False
        self._stop = StopRequest()

    name: str
    location: str
    folder: Path | None

    def describe(self) -> str:
        """Name the deltas, without the directories that they lie in."""
        return ", ".join(delta.source.location.rstrip("/").rpartition("/")[2] for delta in self.deltas)

    def _check_order(self) -> Iterator[str]:
        """Raise SourceError if a delta does not build on the version before it; yield what is assumed."""
        version = read_applied_version(self.base)
        first = self.deltas[0]
        if version is None:
            version = first.base_version
            if version:
                yield (
                    f"{self.base.name} does not say which version it has; {first.source.name} builds on version "
                    f"{version}, which is assumed"
                )
        name = self.base.name
        for delta in self.deltas:
            if delta.base_version != version:
                raise SourceError(
                    f"{delta.source.name} builds on version {delta.base_version}, and {name} is version {version}",
                    hint=_WRONG_BASE,
                )
            version, name = delta.version, delta.source.name

    def _find_patched(self) -> None:
        """Find what the deltas change; raises SourceError for tensors that the base does not have."""
        found: dict[str, _Patched] = {}
        for number, delta in enumerate(self.deltas):
            unknown = [name for name in delta.patches if name not in self.arrays]
            if unknown:
                raise SourceError(
                    f"{delta.source.name} changes {format_first_few(unknown)}, which {self.base.name} does not have",
                    hint=_WRONG_BASE,
                )
            for name in delta.patches:
                found.setdefault(name, _Patched(self.arrays[name], [])).deltas.append(number)
        for each in sorted(found.values(), key=lambda each: each.stored.array.offset):
            if each.stored.array.nbytes:
                self._patched[each.stored.file].append(each)
        for stored in self.arrays.values():
            self._first[stored.file] = min(self._first[stored.file], stored.array.offset)

    def _list_states(self) -> Mapping[str, FileStat]:
        """List the files with the states of base and deltas; the record of the base is no record of the result."""
        held = [stat for delta in self.deltas for stat in delta.source.files().values()]
        files = {path: stat for path, stat in self.base.files().items() if path != RECORD}
        return {path: _join_states(stat, held) if path in self._patched else stat for path, stat in files.items()}

    @property
    def held_bytes(self) -> int:
        """What base and deltas hold, and the decoders."""
        decoders = (_IDLE_DECODERS + choose_thread_count()) * DECODER_BYTES
        return decoders + sum(part.held_bytes for part in self.parts)

    def files(self) -> Mapping[str, FileStat]:
        """Return the files of the base; those with tensors have other versions than without the deltas."""
        return self._states

    def notes(self) -> tuple[str, ...]:
        """Return what was applied, and what came out about the files."""
        count = len({each.stored.array.name for found in self._patched.values() for each in found})
        said = f"{count:,} of {len(self.arrays):,} arrays were changed by the deltas {self.describe()}"
        return (*self.base.notes(), said)

    @property
    def promised(self) -> Collection[str]:
        """The files of the base that are compared with a hash while they are read: its bytes, not the new ones."""
        return self.base.promised

    def proofs(self) -> FileProofs:
        """Return which files of the base were compared with their hashes."""
        return self.base.proofs()

    def prove(
        self, whole: Collection[str] = (), *, earlier: Collection[str] = (), allow_unverified: bool = False
    ) -> None:
        """Compare files of the base with their hashes, and all files of the deltas."""
        self.base.prove(whole, earlier=earlier, allow_unverified=allow_unverified)
        for delta in self.deltas:
            delta.source.prove(allow_unverified=allow_unverified)

    def cautions(self) -> tuple[str, ...]:
        """Return what may go wrong with reading these files, and what is assumed."""
        return (*(caution for part in self.parts for caution in part.cautions()), *self.warnings)

    def stat_file(self, path: str) -> FileStat | None:
        """Return the file's state now, which changes with any file of a delta."""
        found = self.base.stat_file(path)
        if found is None or path not in self._patched:
            return found
        held = [(delta.source, name) for delta in self.deltas for name in delta.source.files()]
        states = [source.stat_file(name) for source, name in held]
        return _join_states(found, [state for state in states if state is not None]) if all(states) else None

    def beside(self, name: str) -> bytes | None:
        """Return the content of a small file beside a base that is one file."""
        return self.base.beside(name)

    def expect(self, spans: Iterable[Span]) -> None:
        """Pass on what will be read next of the base."""
        self.base.expect(spans)

    def set_headers_only(self) -> None:
        """Tell base and deltas that only headers will be read."""
        for part in self.parts:
            part.set_headers_only()

    def set_stop_request(self, stop: StopRequest) -> None:
        """Raise Interrupted instead of waiting once `stop` is set."""
        self._stop = stop
        for part in self.parts:
            part.set_stop_request(stop)

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` with new bytes; raises SourceError if base or deltas are not what they should be."""
        if path in self._patched and offset + len(into) > self._first[path]:
            self._require_checked()
        self._read_patched(path, offset, into)

    def close(self) -> None:
        """Release what base and deltas hold."""
        self._decoders.clear()
        for part in self.parts:
            part.close()

    def _read_patched(self, path: str, offset: int, into: memoryview) -> None:
        self.base.read_at(path, offset, into)
        found = self._patched.get(path)
        if not found:
            return
        stop = offset + len(into)
        for each in found[max(bisect_right(self._starts[path], offset) - 1, 0) :]:
            array = each.stored.array
            low, high = max(offset, array.offset), min(stop, array.offset + array.nbytes)
            if array.offset >= stop:
                break
            if low < high:
                for number in each.deltas:
                    self._patch(number, array, low - array.offset, into[low - offset : high - offset])

    def _patch(self, number: int, array: HeaderArray, offset: int, into: memoryview) -> None:
        decoder = self._take_decoder(number, array.name, offset)
        if decoder is None:
            decoder = begin_patch(self.deltas[number], array.name, array.nbytes)
        decoder.patch(offset, into)
        if decoder.position < array.nbytes:
            with self._lock:
                self._decoders.append((number, array.name, decoder))
                del self._decoders[:-_IDLE_DECODERS]

    def _take_decoder(self, number: int, name: str, offset: int) -> PatchDecoder | None:
        """Take the waiting decoder that is nearest before an offset of a tensor; None if none is."""
        with self._lock:
            found = [each for each in self._decoders if each[:2] == (number, name) and each[2].position <= offset]
            if not found:
                return None
            nearest = max(found, key=lambda each: each[2].position)
            self._decoders.remove(nearest)
            return nearest[2]

    def _require_checked(self) -> None:
        """Compare what the deltas make with their checksums, once; other threads wait for it."""
        if self._checked is True:
            return
        with self._check_lock:
            if isinstance(self._checked, SourceError):
                raise self._checked
            if self._checked:
                return
            try:
                self._check()
            except SourceError as error:
                self._checked = error
                raise
            self._checked = True

    def _check(self) -> None:
        """Compare the digest if the last delta has one, else the checksums; raises SourceError if they differ."""
        effort = ExecutionOptions(stop=self._stop, block=_BLOCK_BYTES)
        expected = self.deltas[-1].digest
        if not expected:
            self._check_sums(effort)
            return
        try:
            found = compute_stored_digest(self.arrays, _PatchedReader(self._read_patched), effort)
        except SourceError:
            self._check_base(effort)
            raise
        if found != expected:
            self._check_base(effort)
            self._check_sums(effort)
            raise SourceError(
                f"{self.base.name} with {self.describe()} has the digest {found}, and {expected} is expected",
                hint=_WRONG_BASE,
            )

    def _check_base(self, effort: ExecutionOptions) -> None:
        """Raise SourceError if the first delta names the digest of another base."""
        expected = self.deltas[0].base_digest
        found = compute_stored_digest(self.arrays, self.base, effort) if expected else ""
        if found != expected:
            raise SourceError(
                f"{self.base.name} is not the base of {self.deltas[0].source.name}: its arrays have the digest "
                f"{found}, and {expected} is expected",
                hint=_WRONG_BASE,
            )

    def _check_sums(self, effort: ExecutionOptions) -> None:
        """Raise SourceError if a tensor has another checksum than a delta says."""
        wrong: list[tuple[int, str]] = []

        def worker() -> Callable[[_Patched], None]:
            buffer = memoryview(bytearray(_CHECK_BYTES))

            def handle(each: _Patched) -> None:
                wrong.extend(self._list_wrong_sums(each, buffer))

            return handle

        items = (each for found in self._patched.values() for each in found)
        run_in_threads(items, worker, effort.threads, effort.stop)
        if wrong:
            first = min(wrong)[0]
            names = sorted(name for number, name in wrong if number == first)
            before = self.deltas[first - 1].source.name if first else self.base.name
            raise SourceError(
                f"{self.deltas[first].source.name} does not make of {before} what its checksums say: "
                f"{format_first_few(names)} differ" + ("s" if len(names) == 1 else ""),
                hint=f"the delta is damaged, or the base is another one: {_WRONG_BASE}",
            )

    def _list_wrong_sums(self, each: _Patched, buffer: memoryview) -> Iterator[tuple[int, str]]:
        """Yield the deltas after which an array does not have its checksum."""
        array = each.stored.array
        levels = [
            (
                number,
                begin_patch(self.deltas[number], array.name, array.nbytes),
                begin_checksum(self.deltas[number].checksum_format),
            )
            for number in each.deltas
        ]
        for offset in range(0, array.nbytes, _CHECK_BYTES):
            view = buffer[: min(_CHECK_BYTES, array.nbytes - offset)]
            self.base.read_at(each.stored.file, array.offset + offset, view)
            for _, decoder, checksum in levels:
                decoder.patch(offset, view)
                checksum.update(view)
        for number, decoder, checksum in levels:
            decoder.finish()
            if checksum.hexdigest() != self.deltas[number].patches[array.name].checksum:
                yield number, array.name


@value_class
class _PatchedReader:
    """Reads new bytes while they are checked."""

    read_at: Callable[[str, int, memoryview], None]


def _join_states(stat: FileStat, others: Iterable[FileStat]) -> FileStat:
    """Return the state of a file that changes with others, too."""
    listed = list(others)
    state = hashlib.blake2b(digest_size=8)
    for each in listed:
        state.update(f"{each.size} {each.version}\n".encode())
    changed = max([stat.changed, *(each.changed for each in listed)])
    return FileStat(stat.size, f"{stat.version}+{state.hexdigest()}", changed)
