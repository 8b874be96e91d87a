"""What is folded of a large `.metadata` means what the opcodes one by one mean, also where the file is damaged."""

import pickle
import random
import sys
from contextlib import closing
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardctl.base.errors import ShardctlError
from shardctl.libraries.dcp import metadata as reader
from shardctl.libraries.dcp.metadata import DcpMetadata, read_metadata
from shardctl.libraries.dcp.metadata_shortcut import MetadataShortcut
from shardctl.storage.addresses import open_source

RANKS = 6
NAMES = ("w", "layers.0.größe", "x" * 300, "layers.1.scalar")


def build_metadata(*, shared: bool = False, far: int = 1, info: type = _StorageInfo) -> Metadata:
    """Build the metadata of a save of several ranks; `shared` says that both tables hold the same sizes.

    `info` is the class that says where an item is.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {"step": BytesStorageMetadata()}
    stored = {MetadataIndex("step"): info("__0_0.distcp", 0, 10)}
    for dims, name in enumerate(NAMES[::-1]):
        shape = (RANKS * far, *(3,) * (dims - 1)) if dims else ()
        chunks = []
        for rank in range(RANKS if dims else 1):
            origin = torch.Size([rank * far, *(0,) * (dims - 1)] if dims else [])
            chunks.append(ChunkStorageMetadata(origin, torch.Size([far, *shape[1:]] if dims else [])))
            place = origin if shared else torch.Size(list(origin))
            index = MetadataIndex((name + " ")[:-1], place, None if rank % 3 else rank)
            stored[index] = info(f"__{rank % 2}_0.distcp", rank * far * 7, 100_000 * far)
        properties = TensorProperties(dtype=torch.bfloat16)
        described[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    return Metadata(described, {name: (name,) for name in NAMES}, stored)


def read_both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[DcpMetadata | str, DcpMetadata | str, int]:
    """Read the file with and without the shortcut; returns what each found or refused, and how much was folded."""
    folded = []

    class Counted(MetadataShortcut):
        def fold_objects(self, state):  # type: ignore[no-untyped-def]
            before = len(state.stack)
            super().fold_objects(state)
            folded.append(len(state.stack) - before)

    found: list[DcpMetadata | str] = []
    for shortcut in (Counted, lambda: None):
        monkeypatch.setattr(reader, "MetadataShortcut", shortcut)
        with closing(open_source(folder)) as source:
            try:
                found.append(read_metadata(source, ".metadata"))
            except ShardctlError as error:
                found.append(type(error).__name__)
    return found[0], found[1], sum(folded)


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("far", [1, 300, 70_000, 1 << 33])
def test_folded_objects_mean_what_their_opcodes_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int, far: int
) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(build_metadata(far=far), protocol))
    folded, plain, number = read_both(tmp_path, monkeypatch)
    assert folded == plain
    assert isinstance(plain, DcpMetadata)
    assert sum(map(len, plain.items.values())) == 1 + 3 * RANKS + 1
    assert (number > 2 * RANKS) == (protocol >= 4)


@pytest.mark.parametrize("protocol", [2, 4])
def test_olmo_core_says_with_a_class_of_its_own_where_items_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    """`olmo_core/distributed/checkpoint/filesystem.py` (3.0.0) has the first three fields of torch's class."""
    info = make_dataclass("_StorageInfo", ["relative_path", "offset", "length"])
    info.__module__ = "olmo_core.distributed.checkpoint.filesystem"
    words = info.__module__.split(".")
    for end in range(1, len(words) + 1):
        monkeypatch.setitem(sys.modules, ".".join(words[:end]), ModuleType(words[end - 1]))
    sys.modules[info.__module__]._StorageInfo = info
    (tmp_path / ".metadata").write_bytes(pickle.dumps(build_metadata(), protocol))
    expected, _, _ = read_both(tmp_path, monkeypatch)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(build_metadata(info=info), protocol))
    folded, plain, number = read_both(tmp_path, monkeypatch)
    assert isinstance(expected, DcpMetadata)
    assert folded == plain == expected
    assert (number > 2 * RANKS) == (protocol >= 4)


def test_what_is_referred_to_again_is_read_opcode_by_opcode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(build_metadata(shared=True)))
    folded, plain, number = read_both(tmp_path, monkeypatch)
    assert folded == plain
    assert number


def test_damaged_files_end_alike_with_and_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pickle.dumps(build_metadata())
    generator, ends = random.Random(20), set()
    for _ in range(1_500):
        data = bytearray(whole)
        for _ in range(generator.choice((1, 1, 2, 8))):
            at = generator.randrange(len(data))
            kind = generator.randrange(3)
            if kind == 0:
                data[at] = generator.randrange(256)
            elif kind == 1:
                del data[at : at + generator.randrange(1, 9)]
            else:
                other = generator.randrange(len(data))
                data[at:at] = data[other : other + generator.randrange(1, 80)]
        (tmp_path / ".metadata").write_bytes(data)
        folded, plain, _ = read_both(tmp_path, monkeypatch)
        if isinstance(plain, DcpMetadata):
            assert folded == plain, bytes(data)
        else:
            assert folded == plain, bytes(data)
        ends.add(plain if isinstance(plain, str) else "read")
    assert {"read", "SourceError", "HostileError"} <= ends


def test_names_that_run_code_are_refused_behind_folded_objects(tmp_path: Path) -> None:
    data = pickle.dumps(build_metadata())
    end = data.rindex(b"ub", 0, data.rindex(b"ub"))
    (tmp_path / ".metadata").write_bytes(data[:end] + b"cposix\nsystem\n0" + data[end:])
    with closing(open_source(tmp_path)) as source, pytest.raises(ShardctlError, match="runs code"):
        read_metadata(source, ".metadata")


def choose_places(count: int) -> list[tuple[int, int]]:
    """Choose as many different pairs of numbers that Python hashes alike; the hash of a pair is xxHash's, unkeyed."""
    word, first, second, last = (1 << 64) - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261
    back = pow(second, -1, 1 << 64)

    def mix(total: int, number: int) -> int:
        total = (total + number * second) & word
        return ((total << 31 | total >> 33) & word) * first & word

    end = mix(last, 1) + 5 * second
    found = []
    for number in range(1, 40 * count):
        other = (end - mix(last, number)) * back & word
        if other < 1 << 60:
            found.append((number, other))
    return found[:count]


def test_places_chosen_to_have_one_hash_are_hostile(tmp_path: Path) -> None:
    places = choose_places(2_000)
    assert len(set(places)) == 2_000
    assert len(set(map(hash, places))) == 1
    properties = TensorProperties(dtype=torch.bfloat16)
    described = {"w": TensorStorageMetadata(properties, torch.Size([4, 4]), [])}
    stored = {
        MetadataIndex("w", torch.Size(place)): _StorageInfo("__0_0.distcp", 100 * number, 100)
        for number, place in enumerate(places)
    }
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(described, {}, stored)))
    with closing(open_source(tmp_path)) as source, pytest.raises(ShardctlError, match="takes very long"):
        read_metadata(source, ".metadata")
