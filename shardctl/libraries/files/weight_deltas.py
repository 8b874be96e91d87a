"""Reads and writes SGLang's weight deltas: directories with the compressed difference of each changed tensor.

The format is that of SGLang's `/pull_weights` (sgl-project/sglang `srt/weight_sync/disk_delta.py`) and of slime's
`--update-weight-mode delta` (THUDM/slime `docs/en/advanced/delta-weight-sync.md`). A delta has the files of a Hugging
Face checkpoint. Each array is one zstd frame, called as the tensor that it changes, with the checksum of the tensor's
new bytes in the file's `__metadata__`. The frame of `xor` holds ``new ^ old``; that of `overwrite` the number of
changed bytes, their positions and their new values, positions and number as little-endian u4.
"""

from __future__ import annotations

import importlib
import re
import zlib
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from shardctl.base.errors import SourceError, UnsupportedError, format_first_few
from shardctl.base.extras import format_install_command
from shardctl.base.value import value_class
from shardctl.libraries.files.file_names import INDEX_SUFFIX, SAFETENSORS, WHOLE_SAFETENSORS
from shardctl.libraries.files.index import DELTA_ENCODING, read_index
from shardctl.libraries.files.links import check_link
from shardctl.libraries.safetensors.header import read_header

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardctl.libraries.files.index import WeightIndex
    from shardctl.storage import Source

INDEX: Final = WHOLE_SAFETENSORS + INDEX_SUFFIX
MARKER: Final = ".weight_sync/state.json"
"""The file in which SGLang notes which version a directory has."""
BASE_DIGEST: Final = "base_digest"
"""shardctl's own key: the digest of the stored arrays that the delta was made for."""
RESULT_DIGEST: Final = "digest"
"""The same of what the delta makes of them."""
ENCODINGS: Final = ("xor", "overwrite")
CHECKSUMS: Final = ("xxh3-128", "blake3", "adler32")
MAX_OVERWRITTEN_BYTES: Final = 1 << 32
"""Bytes of a tensor that `overwrite` can change: positions have 32 bits."""
MAX_WINDOW_BYTES: Final = 8 << 20
"""Window of a frame that is still read: 0.5 MiB at zstd's level 1, which the writers use, and 8 MiB at level 19.

Every decoder holds one, so a larger limit takes more memory from the copies, and a smaller one refuses other levels.
"""
_INPUT_BYTES: Final = 128 << 10
"""Compressed bytes that are read at once; zstd's own recommendation."""
_SCRATCH_BYTES: Final = 256 << 10
"""Bytes that are decompressed at once, which stay in the core's cache until they are applied."""
DECODER_BYTES: Final = 2 * (MAX_WINDOW_BYTES + _INPUT_BYTES + (1 << 20)) + 8 * _SCRATCH_BYTES
"""Memory of one decoder: `overwrite` reads a frame at two positions."""
_COUNT_BYTES: Final = 4
_VERSION: Final = re.compile(r"\d{1,18}")


@value_class
class StoredPatch:
    """The compressed difference of one tensor."""

    path: str
    """The file of the delta."""
    offset: int
    """Of the frame in that file."""
    nbytes: int
    """Bytes of the frame."""
    checksum: str
    """Of the tensor's new bytes, in hexadecimal."""


@value_class
class WeightDelta:
    """A delta: its index and headers were read, and none of its frames."""

    source: Source
    version: int
    base_version: int
    encoding: str
    checksum_format: str
    base_digest: str
    """Of the stored arrays that it was made for; empty if shardctl did not write it."""
    digest: str
    """The same of what it makes of them."""
    patches: Mapping[str, StoredPatch]
    """By the tensor's stored name; a tensor that is not here is unchanged."""


class Checksum(Protocol):
    """A checksum on its way."""

    def update(self, data: memoryview, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return what it is so far, in hexadecimal."""


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: memoryview) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def import_library(name: str) -> Any:  # noqa: ANN401 - a module without types
    """Import a package of the extra `delta`; raises UnsupportedError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"weight deltas need {name}, which is not installed", hint=format_install_command("delta")
        ) from error


def begin_checksum(algorithm: str) -> Checksum:
    """Begin the checksum of a tensor's bytes."""
    if algorithm == "adler32":
        return _Adler32()
    library = import_library("xxhash" if algorithm == "xxh3-128" else "blake3")
    found: Checksum = library.xxh3_128() if algorithm == "xxh3-128" else library.blake3()
    return found


def read_delta(source: Source) -> WeightDelta:
    """Read the index and the headers of a delta.

    Raises SourceError if it is not a delta or a malformed one, UnsupportedError for an encoding, a compression or a
    checksum that is not known.
    """
    if INDEX not in source.files():
        raise SourceError(
            f"{source.name} is not a weight delta: it has no {INDEX}",
            hint="give the directory of one version, such as weight_v000001",
        )
    index = read_index(source, INDEX, delta=True)
    said = index.metadata
    if DELTA_ENCODING not in said:
        raise SourceError(
            f"{source.name} is not a weight delta: its {INDEX} names no {DELTA_ENCODING}",
            hint="a whole checkpoint is read by itself: give it in the place of the base, without this --apply",
        )
    for key, known in ((DELTA_ENCODING, ENCODINGS), ("compression_format", ("zstd",)), ("checksum_format", CHECKSUMS)):
        if said.get(key) not in known:
            raise UnsupportedError(
                f"{source.name} has the {key} {said.get(key)!r:.100}, which is not known",
                hint=f"known: {', '.join(known)}",
            )
    return WeightDelta(
        source,
        _parse_version(source, said, "version"),
        _parse_version(source, said, "base_version"),
        said[DELTA_ENCODING],
        said["checksum_format"],
        str(said.get(BASE_DIGEST, "")),
        str(said.get(RESULT_DIGEST, "")),
        _read_patches(source, index),
    )


def _read_patches(source: Source, index: WeightIndex) -> Mapping[str, StoredPatch]:
    """Read where the differences are; raises SourceError if headers and index contradict each other."""
    patches: dict[str, StoredPatch] = {}
    held = {}
    for path in (path for path in source.files() if "/" not in path and path.endswith(SAFETENSORS)):
        check_link(source, path)
        header = read_header(source, path)
        held[path] = {array.name: array.nbytes for array in header.arrays}
        for array in header.arrays:
            if array.dtype.name != "U8" or len(array.shape) != 1:
                raise SourceError(f"{source.name}: {array.name} in {path} is not one dim of bytes, as a delta has them")
            if array.name not in header.metadata:
                raise SourceError(f"{source.name}: {path} has no checksum of {array.name}")
            if array.name in patches:
                raise SourceError(f"{source.name}: {array.name} is in {path} and in {patches[array.name].path}")
            patches[array.name] = StoredPatch(path, array.offset, array.nbytes, header.metadata[array.name])
    missing = sorted(set(index.shards) - held.keys())
    if missing:
        raise SourceError(f"{source.name} lacks {format_first_few(missing)}, which {INDEX} names")
    index.check(held)
    unnamed = sorted(patches.keys() - index.weight_map.keys())
    if unnamed:
        raise SourceError(f"{source.name}: {INDEX} does not name {format_first_few(unnamed)}")
    return patches


def _parse_version(source: Source, said: Mapping[str, Any], key: str) -> int:
    value = said.get(key)
    if not isinstance(value, str | int) or isinstance(value, bool) or _VERSION.fullmatch(str(value)) is None:
        raise SourceError(f"{source.name}: the {key} in {INDEX} is {value!r:.100}, not a number")
    return int(value)


class _CompressedFile:
    """The frame of one tensor, as zstandard reads it."""

    def __init__(self, source: Source, patch: StoredPatch) -> None:
        self._source, self._patch, self._done = source, patch, 0

    def read(self, size: int = -1) -> bytes:
        left = self._patch.nbytes - self._done
        data = bytearray(min(left, size if size > 0 else _INPUT_BYTES, _INPUT_BYTES))
        self._source.read_at(self._patch.path, self._patch.offset + self._done, memoryview(data))
        self._done += len(data)
        return bytes(data)


class _FrameReader:
    """Decompresses the frame of one tensor from its begin to its end."""

    def __init__(self, delta: WeightDelta, name: str) -> None:
        zstandard = import_library("zstandard")
        self.label = f"{delta.source.name}: the delta of {name}"
        self._error: type[Exception] = zstandard.ZstdError
        self._reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(
            _CompressedFile(delta.source, delta.patches[name]), read_size=_INPUT_BYTES
        )

    def read(self, nbytes: int) -> NDArray[np.uint8]:
        """Return the next bytes; raises SourceError if the frame ends before or is damaged."""
        data = np.empty(nbytes, np.uint8)
        view, done = data.data, 0
        while done < nbytes:
            got = self._read_into(view[done:])
            if not got:
                raise SourceError(f"{self.label} ends early", hint=_DAMAGED)
            done += got
        return data

    def skip(self, nbytes: int) -> None:
        """Pass over the next bytes."""
        while nbytes:
            step = min(nbytes, _SCRATCH_BYTES)
            self.read(step)
            nbytes -= step

    def require_end(self) -> None:
        """Raise SourceError if the frame goes on."""
        if self._read_into(memoryview(bytearray(1))):
            raise SourceError(f"{self.label} has more bytes than the tensor", hint=_DAMAGED)

    def _read_into(self, view: memoryview) -> int:
        try:
            got: int = self._reader.readinto(view)
        except self._error as error:
            if "too much memory" in str(error):
                raise UnsupportedError(
                    f"{self.label} has a zstd window of more than {MAX_WINDOW_BYTES >> 20} MiB",
                    hint="the writers use zstd's level 1, with a window of 0.5 MiB",
                ) from error
            raise SourceError(f"{self.label} cannot be decompressed: {error}", hint=_DAMAGED) from error
        return got


_DAMAGED: Final = "the delta is damaged: fetch it again"


class PatchDecoder(Protocol):
    """Applies the difference of one tensor, from its first byte to its last."""

    position: int
    """The next byte of the tensor; earlier ones cannot be changed any more."""

    def patch(self, offset: int, into: memoryview) -> None:
        """Turn the old bytes from `offset` on into the new ones."""

    def finish(self) -> None:
        """Raise SourceError if there is more than the tensor has."""


class _XorDecoder:
    def __init__(self, delta: WeightDelta, name: str) -> None:
        self.position = 0
        self._frame = _FrameReader(delta, name)

    def patch(self, offset: int, into: memoryview) -> None:
        self._frame.skip(offset - self.position)
        target = np.frombuffer(into, np.uint8)
        for start in range(0, len(target), _SCRATCH_BYTES):
            part = target[start : start + _SCRATCH_BYTES]
            np.bitwise_xor(part, self._frame.read(len(part)), out=part)
        self.position = offset + len(target)

    def finish(self) -> None:
        self._frame.require_end()


class _OverwriteDecoder:
    """Reads positions and values, which follow each other in the frame, at two positions of it."""

    def __init__(self, delta: WeightDelta, name: str, nbytes: int) -> None:
        self.position = 0
        self._nbytes = nbytes
        self._positions, self._values = _FrameReader(delta, name), _FrameReader(delta, name)
        self._left = int(self._positions.read(_COUNT_BYTES).view("<u4")[0])
        if self._left > nbytes:
            raise SourceError(
                f"{self._positions.label} changes {self._left:,} bytes of {nbytes:,}",
                hint="it was made for another model, or it is damaged",
            )
        self._values.skip(_COUNT_BYTES + _COUNT_BYTES * self._left)
        self._next = np.empty(0, np.int64), np.empty(0, np.uint8)
        self._before = -1

    def patch(self, offset: int, into: memoryview) -> None:
        target, stop = np.frombuffer(into, np.uint8), offset + len(into)
        while self._fill():
            positions, values = self._next
            low, high = np.searchsorted(positions, (offset, stop))
            target[positions[low:high] - offset] = values[low:high]
            self._next = positions[high:], values[high:]
            if high < len(positions):
                break
        self.position = stop

    def finish(self) -> None:
        assert not self._fill(), "every position is inside the tensor, as was checked"  # noqa: S101
        self._values.require_end()

    def _fill(self) -> bool:
        """Read the next positions and values if none are there; returns whether there are some."""
        if not len(self._next[0]) and self._left:
            count = min(self._left, _SCRATCH_BYTES // _COUNT_BYTES)
            positions = self._positions.read(_COUNT_BYTES * count).view("<u4").astype(np.int64)
            if positions[0] <= self._before or np.any(positions[1:] <= positions[:-1]):
                raise UnsupportedError(f"{self._positions.label} has positions that do not rise", hint=_DAMAGED)
            if positions[-1] >= self._nbytes:
                raise SourceError(
                    f"{self._positions.label} changes byte {positions[-1]:,} of {self._nbytes:,}",
                    hint="it was made for another model, or it is damaged",
                )
            self._next = positions, self._values.read(count)
            self._left, self._before = self._left - count, int(positions[-1])
        return bool(len(self._next[0]))


def begin_patch(delta: WeightDelta, name: str, nbytes: int) -> PatchDecoder:
    """Begin to apply the difference of a tensor of `nbytes` bytes."""
    return _XorDecoder(delta, name) if delta.encoding == "xor" else _OverwriteDecoder(delta, name, nbytes)
