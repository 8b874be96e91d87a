"""Reads the zip format of torch.save (torch 1.6 and later): a record for the pickle, one for each storage.

Layout: torch `serialization.py` (`_save`, `_load`) and `caffe2/serialize/inline_container.h`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import HostileError, SourceError, UnsupportedError
from shardctl.libraries.torch_save.leftovers import SECOND_PICKLE, UNUSED_RECORDS
from shardctl.libraries.torch_save.pickle_budget import budget_of
from shardctl.libraries.torch_save.pickle_machine import parse_pickle
from shardctl.libraries.torch_save.tensors import SavedFile, check_storages
from shardctl.libraries.torch_save.zip_records import read_archive, read_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.libraries.torch_save.leftovers import LeftoverNotes
    from shardctl.libraries.torch_save.pickle_tree import ParsedPickle
    from shardctl.libraries.torch_save.zip_records import ZipRecord
    from shardctl.storage import Source

LARGEST_PICKLE: Final = 128 << 20
"""Bytes of a pickle that are still read; 100,000 tensors take about 14 MB."""
_STORAGE_FOLDER: Final = "data/"
_MAX_BYTEORDER_BYTES: Final = 64
_FORMAT_RECORD_NAMES: Final = frozenset({"data.pkl", "byteorder", "version", ".format_version", ".storage_alignment"})
_OWN_FOLDER: Final = ".data/"
"""Records of the container itself (`inline_container.cc`)."""
_STORAGE_KEY_INDEX: Final = 2
"""Where in a persistent id the key of a storage is."""


def read_torch_zip(source: Source, path: str, *, start: int = 0, size: int | None = None) -> SavedFile:
    """Read the archive in `size` bytes (default: the rest) of a file from byte `start`, but for its storages.

    Raises:
        SourceError: truncated or malformed, or a record has not the CRC-32 that it was written with.
        HostileError: it tries to run code or to exhaust the reader.
        UnsupportedError: a TorchScript program, big-endian data or compressed records.
    """
    archive = read_archive(source, path, start=start, size=size)
    records = archive.records
    if "constants.pkl" in records or any(name.startswith("code/") for name in records):
        raise UnsupportedError(
            f"{path} is a TorchScript program, not a checkpoint",
            hint="torch.save(torch.jit.load(path).state_dict(), ...) makes one",
        )
    pickle = records.get("data.pkl")
    if pickle is None:
        raise SourceError(f"{path} is a zip archive without data.pkl, so torch.save did not write it")
    order = records.get("byteorder")
    if order is not None:
        if order.size > _MAX_BYTEORDER_BYTES:
            raise SourceError(f"{path} has a byte order of {order.size:,} bytes, which is neither little nor big")
        found = read_record(source, path, order)
        if found == b"big":
            raise UnsupportedError(f"{path} holds big-endian data", hint="save it again on a little-endian machine")
        if found != b"little":
            raise SourceError(f"{path} has the byte order {found!r}, which is neither little nor big")
    if pickle.size > LARGEST_PICKLE:
        raise HostileError(f"{path} has a pickle of {pickle.size:,} bytes; more than {LARGEST_PICKLE:,} are not read")
    saved = parse_pickle(read_record(source, path, pickle), f"{path} (data.pkl)", budget=budget_of(source))
    check_storages(saved.persistents, path)
    extents = {
        name.removeprefix(_STORAGE_FOLDER): (record.offset, record.size)
        for name, record in records.items()
        if name.startswith(_STORAGE_FOLDER)
    }
    _note_leftovers(budget_of(source).leftovers, path, records, saved)
    return SavedFile(path, saved.value, extents)


def _note_leftovers(leftovers: LeftoverNotes, path: str, records: Mapping[str, ZipRecord], saved: ParsedPickle) -> None:
    """Note what is in the archive and means nothing to torch, and the names that mean nothing to shardctl."""
    more = records["data.pkl"].size - saved.end
    leftovers.note(path, SECOND_PICKLE, [f"{more:,} bytes in data.pkl"] if more else [])
    leftovers.note_names(path, saved.globals)
    keys = (
        node.id[2] for node in saved.persistents if isinstance(node.id, tuple) and len(node.id) > _STORAGE_KEY_INDEX
    )
    used = {f"{_STORAGE_FOLDER}{key}" for key in keys if isinstance(key, str)}
    unused = (
        name
        for name in records
        if name not in used and name not in _FORMAT_RECORD_NAMES and not name.startswith(_OWN_FOLDER)
    )
    leftovers.note(path, UNUSED_RECORDS, map(ascii, unused))
