"""The CRC-32 that an archive states of a record is compared with what is read; one that torch left out is no damage."""

from __future__ import annotations

import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardctl.base.errors import SourceError
from shardctl.libraries.registry import scan_checkpoint
from shardctl.libraries.torch_save.reading import read_saved
from shardctl.libraries.torch_save.zip_records import read_archive
from shardctl.storage.local import LocalSource

WEIGHTS = {"a.weight": torch.arange(12.0).reshape(3, 4), "b.weight": torch.arange(5.0)}


def flip(path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def record(path, name: str, **window: int):
    source = LocalSource(path)
    try:
        return read_archive(source, path.name, **window).records[name]
    finally:
        source.close()


@pytest.fixture
def file(tmp_path):
    torch.save(WEIGHTS, tmp_path / "m.bin")
    return tmp_path / "m.bin"


@pytest.mark.parametrize("name", ["data.pkl", "byteorder"])
def test_a_flipped_bit_in_a_record_that_is_read_whole_is_damage(file, name):
    found = record(file, name)
    intact = file.read_bytes()
    for offset in range(found.offset, found.offset + found.size):
        flip(file, offset, offset % 8)
        with pytest.raises(SourceError, match=f"m.bin: the record '{name}' is damaged: its CRC-32 is"):
            read_saved(LocalSource(file), "m.bin")
        file.write_bytes(intact)


def test_an_item_of_a_distributed_save_is_no_exception(tmp_path):
    dcp.save(WEIGHTS, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / "__0_0.distcp"
    flip(path, path.read_bytes().index(b"FloatStorage"))
    with pytest.raises(SourceError, match=r"__0_0.distcp: the record 'data.pkl' is damaged"):
        scan_checkpoint(LocalSource(tmp_path))


def test_what_torch_writes_without_a_crc_has_none_to_compare(tmp_path):
    """torch then writes 0, for records of any content; `unzip -t` calls such a file damaged."""
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save(WEIGHTS, tmp_path / "m.bin")
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    with zipfile.ZipFile(tmp_path / "m.bin") as archive:
        assert {info.CRC for info in archive.infolist()} == {0}
        assert archive.testzip() == "m/data.pkl"
    assert set(scan_checkpoint(LocalSource(tmp_path / "m.bin")).tensors) == set(WEIGHTS)
