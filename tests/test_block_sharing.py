"""Blocks that files of a result share with those of the source: what they hold, and where they cannot be shared."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from shardctl.api import Mesh, ReshardOptions, VerifyOptions, reshard, verify
from shardctl.base.errors import DestinationError, UsageError
from shardctl.storage import linux
from shardctl.tensors.bands import PAGE

REFLINK = ReshardOptions(reflink=True)
SHAPES = {"a.weight": (600, 512), "b.weight": (513, 512), "c.bias": (3,), "d.weight": (2048, 4)}


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "source")


def write_source(folder):
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def shared(monkeypatch):
    """What is shared on a file system that can, which is played by copying: sizes, and places that are whole blocks."""
    sizes = []

    def copy(source, start, size, target, offset):
        assert start % PAGE == size % PAGE == offset % PAGE == 0
        assert os.pwrite(target, os.pread(source, size, start), offset) == size
        sizes.append(size)
        return True

    monkeypatch.setattr(linux, "share_blocks", copy)
    return sizes


def load_all(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("most", [None, 600_000])
def test_files_that_share_blocks_hold_the_tensors_of_the_source(most, source, shared, tmp_path):
    done = reshard(source, tmp_path / "out", ReshardOptions(reflink=True, max_shard_size=most))
    assert all(torch.equal(value, load_all(source)[name]) for name, value in load_all(tmp_path / "out").items())
    assert load_all(tmp_path / "out").keys() == SHAPES.keys()
    probes = 1
    assert sum(shared) - probes * PAGE == done.shared_bytes > 0.9 * (done.written_bytes - 3 * PAGE)
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=str(source))).ok


def test_without_the_option_headers_are_as_the_library_writes_them(source, shared, tmp_path):
    done = reshard(source, tmp_path / "out", ReshardOptions())
    assert (shared, done.shared_bytes) == ([], 0)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("shared")
def test_rows_of_ranks_share_blocks_and_columns_are_written(tmp_path):
    folder = tmp_path / "llama"
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=4, vocab_size=512
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    done = reshard(folder, tmp_path / "out", ReshardOptions(mesh=Mesh.of(tp=2), reflink=True))
    assert 0 < done.shared_bytes < done.written_bytes
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=str(folder))).ok


@pytest.mark.usefixtures("shared")
def test_a_cast_shares_nothing(source, tmp_path):
    done = reshard(source, tmp_path / "out", ReshardOptions(dtype="fp32", reflink=True))
    assert done.shared_bytes == 0
    assert torch.equal(load_all(tmp_path / "out")["a.weight"], load_all(source)["a.weight"].float())


@pytest.mark.usefixtures("shared")
def test_small_tensors_that_lie_together_share_blocks(tmp_path):
    (tmp_path / "source").mkdir()
    tensors = {f"t{number:03}": torch.randn(100) for number in range(200)}
    save_file(tensors, tmp_path / "source/model.safetensors")
    done = reshard(tmp_path / "source", tmp_path / "out", REFLINK)
    assert done.shared_bytes > 0.8 * done.written_bytes
    assert all(torch.equal(value, tensors[name]) for name, value in load_all(tmp_path / "out").items())


def test_a_destination_that_cannot_share_is_refused(source, monkeypatch, tmp_path):
    monkeypatch.setattr(linux, "share_blocks", lambda *_: False)
    with pytest.raises(DestinationError, match="cannot share blocks with the files of"):
        reshard(source, tmp_path / "out", REFLINK)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_blocks_that_cannot_be_shared_after_all_are_written(source, monkeypatch, tmp_path):
    answers = iter([True])
    monkeypatch.setattr(linux, "share_blocks", lambda *_: next(answers, False))
    done = reshard(source, tmp_path / "out", REFLINK)
    assert done.shared_bytes == 0
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=str(source))).ok


def test_a_bucket_shares_no_blocks(source):
    with pytest.raises(UsageError, match="--reflink is for a local directory"):
        reshard(source, "hf://owner/name", REFLINK)


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_a_file_system_that_can_keeps_one_copy(kind, tmp_path):
    """The kernel's own: what is written to a result later changes nothing in its source."""
    make = shutil.which(f"mkfs.{kind}", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if make is None or os.geteuid():
        pytest.skip(f"mkfs.{kind} or the right to mount is missing")
    image, place = tmp_path / "image", tmp_path / "place"
    place.mkdir()
    image.touch()
    os.truncate(image, 400 << 20)
    subprocess.run([make, "-q", image], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", image, place], check=False, capture_output=True).returncode:
        pytest.skip(f"{kind} cannot be mounted here")
    try:
        source = write_source(place / "source")
        data = (source / "model.safetensors").read_bytes()
        done = reshard(source, place / "out", REFLINK)
        assert done.shared_bytes > 0.9 * done.written_bytes
        assert load_all(place / "out").keys() == SHAPES.keys()
        with (place / "out/model.safetensors").open("r+b") as file:
            file.seek(len(data) // 2)
            file.write(bytes(PAGE))
        assert (source / "model.safetensors").read_bytes() == data
    finally:
        subprocess.run(["umount", place], check=True)
