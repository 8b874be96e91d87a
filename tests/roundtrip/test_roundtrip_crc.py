"""A flipped bit in an archive of torch.save ends a conversion and is found by `verify`, wherever it is."""

from __future__ import annotations

import json
import shutil
from functools import partial
from random import Random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damage import flip
from torch.distributed.checkpoint import FileSystemReader

from shardctl.base.errors import ChangedError, SourceError
from shardctl.cli.program import run
from shardctl.conversion.engine import engine
from shardctl.libraries.torch_save.zip_records import read_archive
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.storage.local import LocalSource
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

NAMES = [f"layers.{i}.weight" for i in range(4)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The same tensors as torch saves them in one file and as a distributed save; not to be changed."""
    base = tmp_path_factory.mktemp("crc")
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(64, 48, generator=generator) for name in NAMES}
    for name in ("file", "bare"):
        (base / name).mkdir()
    torch.save(tensors, base / "file" / "pytorch_model.bin")
    torch.serialization.set_crc32_options(compute_crc32=False)
    torch.save(tensors, base / "bare" / "pytorch_model.bin")
    torch.serialization.set_crc32_options(compute_crc32=True)
    dcp.save(tensors, checkpoint_id=base / "dcp", no_dist=True)
    return base


@pytest.fixture
def source(kept, tmp_path, request):
    return shutil.copytree(kept / request.param, tmp_path / "source")


@pytest.fixture
def shardctl(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")

    def call(*args):
        code = run([str(arg) for arg in args])
        out, err = capfd.readouterr()
        return code, out + err

    return call


def record(path, name: str, **window: int):
    source = LocalSource(path)
    try:
        return read_archive(source, path.name, **window).records[name]
    finally:
        source.close()


def place(directory, number: int, name: str = ""):
    """The file that holds tensor `number`, and the record of its elements, or that of another name beside it."""
    path = directory / "pytorch_model.bin"
    if path.exists():
        return path, record(path, name or f"data/{number}")
    items = FileSystemReader(directory).read_metadata().storage_data
    (item,) = (item for index, item in items.items() if index.fqn == NAMES[number])
    path = directory / item.relative_path
    return path, record(path, name or "data/0", start=item.offset, size=item.length)


@pytest.mark.parametrize("source", ["file", "dcp"], indirect=True)
@pytest.mark.parametrize("at", [0, 5_000, -1])
def test_one_bit_of_an_element_ends_a_conversion(source, tmp_path, shardctl, at):
    path, found = place(source, 2)
    flip(path, found.offset + at % found.size)
    code, said = shardctl("reshard", source, tmp_path / "out", "--to", "hf")
    assert code == 4
    assert f"error: {path.name}: the record '{found.name}' ({NAMES[2]}) is damaged: its CRC-32 is" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["file", "dcp"], indirect=True)
def test_neither_a_digest_nor_a_comparison_is_made_of_damage(source, kept, shardctl):
    path, found = place(source, 2)
    flip(path, found.offset + 77)
    for verb in (("digest", source), ("diff", source, kept / "file"), ("diff", kept / "file", source)):
        code, said = shardctl(*verb)
        assert code == 4
        assert f"the record '{found.name}' ({NAMES[2]}) is damaged" in said


@pytest.mark.parametrize("source", ["file", "dcp"], indirect=True)
def test_one_bit_of_an_element_is_a_finding(source, shardctl):
    path, found = place(source, 1)
    flip(path, found.offset + 1_234, 3)
    code, said = shardctl("verify", source, "--level", "full", "--json")
    (finding,) = (f for level in json.loads(said)["levels"] for f in level["findings"] if f["severity"] == "error")
    assert code == 3
    assert (finding["check"], finding["file"], finding["tensor"]) == ("crc32", path.name, NAMES[1])
    assert f"'{found.name}' ({NAMES[1]})" in finding["message"]


@pytest.mark.parametrize("source", ["file", "dcp"], indirect=True)
def test_so_is_one_of_a_record_that_no_tensor_uses(source, shardctl):
    path, found = place(source, 3, ".data/serialization_id")
    flip(path, found.offset + 5)
    code, said = shardctl("verify", source, "--level", "full")
    assert code == 3, said
    assert "is damaged" in said
    assert "no tensor uses it" in said


@pytest.mark.parametrize("source", ["file", "dcp"], indirect=True)
def test_no_bit_of_any_record_flips_unseen(source):
    """One of each record: `data.pkl` and `byteorder` end the reading, others are findings."""
    path = place(source, 0)[0]
    window = {}
    if path.suffix == ".distcp":
        item = next(iter(FileSystemReader(source).read_metadata().storage_data.values()))
        window = {"start": item.offset, "size": item.length}
    archive, intact, random = read_archive(LocalSource(path), path.name, **window), path.read_bytes(), Random(0)
    for found in archive.records.values():
        flip(path, found.offset + random.randrange(found.size), random.randrange(8))
        if found.name in {"data.pkl", "byteorder"}:
            with pytest.raises(SourceError, match=f"the record '{found.name}' is damaged"):
                verify(source, VerifyOptions(level="full"))
        else:
            findings = verify(source, VerifyOptions(level="full")).levels[1].errors
            assert [(f.check, f.file) for f in findings] == [("crc32", path.name)]
            assert f"the record '{found.name}' (" in findings[0].message
        path.write_bytes(intact)


@pytest.mark.parametrize("source", ["file", "dcp"], indirect=True)
def test_the_other_side_of_a_comparison_is_checked_too(source, tmp_path, shardctl):
    reshard(source, tmp_path / "out", ReshardOptions(to="hf"))
    path, found = place(source, 3)
    flip(path, found.offset)
    code, said = shardctl("verify", tmp_path / "out", "--against", source)
    assert code == 3
    assert f"error: [crc32] in {source}: {path.name}: the record '{found.name}' ({NAMES[3]}) is damaged" in said


def test_what_two_workers_read_of_one_record_is_put_together(tmp_path, shardctl):
    """Two tensors in one storage, each in a file of its own: neither worker can tell, but `finish` can."""
    both = torch.randn(2, 64, 48, generator=torch.Generator().manual_seed(1))
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    torch.save({"a": both[0], "b": both[1]}, source / "pytorch_model.bin")
    options = ("--to", "hf", "--max-shard-size", "12KiB")
    for worker in ("0/2", "1/2"):
        assert shardctl("reshard", source, tmp_path / "intact", *options, "--worker", worker)[0] == 0
    assert shardctl("finish", tmp_path / "intact")[0] == 0
    flip(source / "pytorch_model.bin", record(source / "pytorch_model.bin", "data/0").offset + 20_000)
    for worker in ("0/2", "1/2"):
        assert shardctl("reshard", source, out, *options, "--worker", worker)[0] == 0
    code, said = shardctl("finish", out)
    assert code == 4
    assert "error: pytorch_model.bin: the record 'data/0' is damaged: its CRC-32 is" in said
    assert not out.exists()


@pytest.mark.parametrize("to", ["dcp", "universal"])
def test_what_shardctl_wrote_itself_has_right_crcs(kept, tmp_path, to):
    reshard(kept / "file", tmp_path / "out", ReshardOptions(to=to))
    level = verify(tmp_path / "out", VerifyOptions(level="full")).levels[1]
    assert (level.status, [f for f in level.findings if f.check == "crc32"]) == ("passed", [])


@pytest.mark.parametrize("source", ["bare"], indirect=True)
def test_a_crc_that_torch_did_not_compute_is_unknown_and_no_damage(source, tmp_path, shardctl):
    reshard(source, tmp_path / "out", ReshardOptions(to="hf"))
    code, said = shardctl("verify", source, "--level", "full")
    assert code == 0
    assert said.count("10 records in pytorch_model.bin were written without a CRC-32") == 1


@pytest.mark.parametrize("source", ["file", "dcp"], indirect=True)
def test_a_part_that_is_not_wanted_is_not_spoken_of(source, tmp_path, shardctl):
    path, found = place(source, 2)
    flip(path, found.offset)
    code, said = shardctl("reshard", source, tmp_path / "out", "--to", "hf", "--exclude", NAMES[2])
    assert code == 0, said
    assert "CRC" not in said


class KillError(Exception):
    """Stands for a signal that ends the process."""


@pytest.mark.parametrize("source", ["file"], indirect=True)
def test_a_record_that_two_runs_read_is_compared_with_what_both_read(source, tmp_path, monkeypatch):
    """Bands of 8 KiB: the damage is in one that the first run moved, so the second does not read it again."""
    path, found = place(source, 0)
    flip(path, found.offset)
    monkeypatch.setattr("shardctl.conversion.engine.engine.SYNC_BYTES", 1)
    monkeypatch.setattr(
        "shardctl.conversion.engine.engine.split_tensor_bands", partial(_small_bands, engine.split_tensor_bands)
    )
    read_at, reads = LocalSource.read_at, []

    def counted(self, file, offset, into):
        if found.offset <= offset < found.offset + found.size:
            reads.append(offset - found.offset)
            if len(reads) > 1 and kill:
                raise KillError
        read_at(self, file, offset, into)

    monkeypatch.setattr(LocalSource, "read_at", counted)
    kill = True
    with pytest.raises(KillError):
        reshard(source, tmp_path / "out", ReshardOptions(to="hf", threads=1))
    kill = False
    reads.clear()
    with pytest.raises(ChangedError, match=r"the record 'data/0' \(layers.0.weight\) is damaged"):
        reshard(source, tmp_path / "out", ReshardOptions(to="hf", threads=1))
    assert min(reads) > 0
    assert not (tmp_path / "out").exists()


def _small_bands(split, tensor, dtype, block, **options):
    return split(tensor, dtype, min(block, 4_096), **options)
