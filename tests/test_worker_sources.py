"""Workers whose copies of the source differ, though sizes and times say that they are the same."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardctl.base.errors import DestinationError, SourceError
from shardctl.conversion.engine.worker import WorkerId
from shardctl.conversion.worker_part import WHOLE, contribute
from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.finish import finish
from shardctl.verbs.reshard import reshard

sys.path.insert(0, str(Path(__file__).parent / "cli"))
from cli_checkpoints import llama

TP2 = ReshardOptions(mesh=Mesh.of(tp=2), threads=1)
SHARED = "model.norm.weight"
"""Every rank has it whole."""


@pytest.fixture
def source(tmp_path):
    return llama(tmp_path / "source")


def copied(source, place, change):
    """The same with other bytes in its weights, and the same sizes and times."""
    shutil.copytree(source, place)
    path = place / "model.safetensors"
    change(path)
    for each in source.rglob("*"):
        stat = each.stat()
        os.utime(place / each.relative_to(source), ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == (source / path.name).stat().st_size
    return place


def flipped(position):
    def change(path):
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)

    return change


def other_norm(path):
    tensors = load_file(path)
    tensors[SHARED] = tensors[SHARED] + np.ones((), tensors[SHARED].dtype)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("position", [-1, -5_000, -20_000])
def test_a_worker_whose_copy_differs_by_a_byte_is_refused_before_it_writes(source, tmp_path, position):
    other = copied(source, tmp_path / "other", flipped(position))
    contribute(source, tmp_path / "out", TP2, worker=WorkerId(0, 2))
    with pytest.raises(DestinationError) as refused:
        contribute(other, tmp_path / "out", TP2, worker=WorkerId(1, 2))
    assert "with another content of the source, of the same size and time: model.safetensors" in refused.value.message
    contribute(source, tmp_path / "out", TP2, worker=WorkerId(1, 2))
    assert finish(tmp_path / "out").record.digest == reshard(source, tmp_path / "one", TP2).record.digest


def test_of_a_large_file_both_ends_are_compared(tmp_path):
    source = llama(tmp_path / "source", vocab_size=40_000)
    assert (source / "model.safetensors").stat().st_size > WHOLE
    for number, position in enumerate((60_000, -60_000)):
        other = copied(source, tmp_path / f"other{number}", flipped(position))
        out = tmp_path / f"out{number}"
        contribute(source, out, TP2, worker=WorkerId(0, 2))
        with pytest.raises(DestinationError, match="another content"):
            contribute(other, out, TP2, worker=WorkerId(1, 2))


def test_what_several_workers_read_is_compared_to_the_last_bit(source, tmp_path, monkeypatch):
    """Also where the sample misses it: each worker digests what it reads, and they must add up."""
    monkeypatch.setattr("shardctl.conversion.worker_part.sample_source", lambda *_: {})
    other = copied(source, tmp_path / "other", other_norm)
    contribute(source, tmp_path / "out", TP2, worker=WorkerId(0, 2))
    contribute(other, tmp_path / "out", TP2, worker=WorkerId(1, 2))
    with pytest.raises(SourceError) as refused:
        finish(tmp_path / "out")
    assert refused.value.message == (
        f"{SHARED} is not the same for all workers: worker 1/2 read different elements from worker 0/2"
    )
    assert not (tmp_path / "out").exists()


def edit_in_place(path, position):
    """Change a byte; size, modification time and inode stay."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(position, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_finished_part_is_made_again_if_its_source_was_edited_in_place(source, tmp_path, monkeypatch):
    """Where the sample misses the edit; nobody else's part is of the same bytes, so it must be found here."""
    monkeypatch.setattr("shardctl.conversion.worker_part.sample_source", lambda *_: {})
    first = contribute(source, tmp_path / "out", TP2, worker=WorkerId(0, 2))
    (source / "model.safetensors").chmod(0o600)
    touched = contribute(source, tmp_path / "out", TP2, worker=WorkerId(0, 2))
    assert touched.part.kept_bytes == first.part.written_bytes, "chmod costs a comparison"
    edit_in_place(source / "model.safetensors", -100)
    edited = contribute(source, tmp_path / "out", TP2, worker=WorkerId(0, 2))
    assert not edited.done_before
    assert contribute(source, tmp_path / "out", TP2, worker=WorkerId(0, 2)).done_before
    contribute(source, tmp_path / "out", TP2, worker=WorkerId(1, 2))
    assert finish(tmp_path / "out").record.digest == reshard(source, tmp_path / "one", TP2).record.digest


def test_status_change_times_of_another_machine_do_not_matter(source, tmp_path):
    other = copied(source, tmp_path / "other", lambda path: path.chmod(0o600))
    contribute(source, tmp_path / "out", TP2, worker=WorkerId(0, 2))
    assert contribute(other, tmp_path / "out", TP2, worker=WorkerId(0, 2)).done_before
    contribute(other, tmp_path / "out", TP2, worker=WorkerId(1, 2))
    assert finish(tmp_path / "out").record.digest == reshard(source, tmp_path / "one", TP2).record.digest
