"""Reads the format of torch.save before torch 1.6: five pickles, then each storage after its length.

Layout: torch `serialization.py`, `_legacy_save` and `_legacy_load`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import HostileError, SourceError, UnsupportedError
from shardctl.libraries.torch_save.leftovers import SECOND_SAVE
from shardctl.libraries.torch_save.legacy_magics import MAGIC_NUMBER
from shardctl.libraries.torch_save.pickle_budget import budget_of
from shardctl.libraries.torch_save.pickle_machine import parse_pickle
from shardctl.libraries.torch_save.pickle_state import PickleLimits, TruncatedError
from shardctl.libraries.torch_save.pickle_tree import ParsedPickle, as_mapping
from shardctl.libraries.torch_save.tensors import SavedFile, check_storages, parse_storage
from shardctl.libraries.torch_save.zip_file import LARGEST_PICKLE
from shardctl.storage import read_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.storage import Source

_LEGACY_PROTOCOL_VERSION: Final = 1001
_LIMITS_BY_PICKLE: Final = {
    "magic number": PickleLimits(opcodes=1_024),
    "protocol": PickleLimits(opcodes=1_024),
    "system": PickleLimits(opcodes=1_024),
    "data": PickleLimits(),
    "storages": PickleLimits(opcodes=4_000_000),
}
"""The pickles and what each may ask for."""
_PROTO_OPCODE: Final = b"\x80"
"""What a pickle begins with."""
_FIRST_READ: Final = 1 << 20
_READ_GROWTH_FACTOR: Final = 8
"""How many times more is read when the pickles turn out to be longer."""


def read_legacy(source: Source, path: str) -> SavedFile:
    """Read such a file, but for its storages.

    Raises:
        SourceError: truncated or malformed.
        HostileError: it tries to run code or to exhaust the reader.
        UnsupportedError: another protocol, or big-endian data.
    """
    _, protocol, system, saved, keys = _read_pickles(source, path)
    if protocol.value != _LEGACY_PROTOCOL_VERSION:
        raise UnsupportedError(f"{path} has a version of torch's old format other than {_LEGACY_PROTOCOL_VERSION}")
    if (as_mapping(system.value) or {}).get("little_endian") is False:
        raise UnsupportedError(f"{path} holds big-endian data", hint="save it again on a little-endian machine")
    check_storages(saved.persistents, path)
    itemsizes: dict[str, int] = {}
    for node in saved.persistents:
        if isinstance(node.id, tuple) and node.id and node.id[0] == "module":
            continue  # the source code of a pickled class
        found = parse_storage(node, path)
        itemsizes.setdefault(found.key, found.itemsize)
    if not isinstance(keys.value, list):
        raise SourceError(f"{path} does not list its storages")
    extents, end = _read_extents(source, path, keys, itemsizes)
    more = source.files()[path].size - end
    if more and read_bytes(source, path, end, 1) != _PROTO_OPCODE:
        raise SourceError(f"{path} has {more:,} bytes after its last storage")
    leftovers = budget_of(source).leftovers
    leftovers.note(path, SECOND_SAVE, [f"{more:,} bytes"] if more else [])
    leftovers.note_names(path, saved.globals)
    return SavedFile(path, saved.value, extents)


def _read_pickles(source: Source, path: str) -> Sequence[ParsedPickle]:
    """Read magic number, protocol, system, what was saved, and the keys of the storages."""
    size = source.files()[path].size
    length = _FIRST_READ
    while True:  # at most four times
        data = read_bytes(source, path, 0, min(length, size))
        pickles: list[ParsedPickle] = []
        try:
            for part, limits in _LIMITS_BY_PICKLE.items():
                start = pickles[-1].end if pickles else 0
                pickles.append(
                    parse_pickle(data, f"{path} ({part})", start=start, limits=limits, budget=budget_of(source))
                )
                if pickles[0].value != MAGIC_NUMBER:
                    raise SourceError(
                        f"{path} does not begin with torch's magic number, so torch.save did not write it"
                    )
        except TruncatedError:
            if length >= size:
                raise
            if length >= LARGEST_PICKLE:
                raise HostileError(f"{path} has pickles of more than {LARGEST_PICKLE:,} bytes") from None
            length = min(length * _READ_GROWTH_FACTOR, LARGEST_PICKLE)
        else:
            return pickles


def _read_extents(
    source: Source, path: str, keys: ParsedPickle, itemsizes: dict[str, int]
) -> tuple[dict[str, tuple[int, int]], int]:
    """Read offset and bytes of each storage, and where the last ends."""
    size = source.files()[path].size
    extents: dict[str, tuple[int, int]] = {}
    at = keys.end
    for key in keys.value:
        if not isinstance(key, str) or key not in itemsizes or key in extents:
            raise SourceError(f"{path} lists the storage {ascii(key)[:100]} that nothing refers to, or lists it twice")
        if at + 8 > size:
            raise SourceError(f"{path} ends at byte {size:,}, before the storage {key!r}", hint="fetch it again")
        (numel,) = struct.unpack("<q", read_bytes(source, path, at, 8))
        end = at + 8 + numel * itemsizes[key]
        if numel < 0 or end > size:
            raise SourceError(
                f"{path} ends at byte {size:,}, but the storage {key!r} of {numel:,} elements would end at {end:,}",
                hint="the file was truncated or its copy is incomplete; fetch it again",
            )
        extents[key] = (at + 8, end - at - 8)
        at = end
    return extents, at
