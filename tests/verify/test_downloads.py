"""`verify --level full` compares a download with the SHA-256 that huggingface_hub noted beside it."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

import pytest
import torch
from huggingface_hub._local_folder import read_download_metadata, write_download_metadata
from safetensors.torch import save_file

from shardctl.cli.program import run

if TYPE_CHECKING:
    from pathlib import Path

FILE = "model.safetensors"


@pytest.fixture
def shardctl(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")

    def call(*args):
        code = run([str(arg) for arg in args])
        out, err = capfd.readouterr()
        return code, out + err

    return call


@pytest.fixture
def weights(tmp_path):
    save_file({"a": torch.arange(6.0)}, tmp_path / FILE)
    return tmp_path / FILE


def damaged(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def in_a_directory(tmp_path, weights) -> Path:
    """As `hf download --local-dir` leaves it."""
    directory = tmp_path / "local"
    directory.mkdir()
    weights.rename(directory / FILE)
    (directory / "config.json").write_text("{}")
    digest = hashlib.sha256((directory / FILE).read_bytes()).hexdigest()
    write_download_metadata(directory, FILE, commit_hash="c" * 40, etag=digest)
    write_download_metadata(directory, "config.json", commit_hash="c" * 40, etag="0" * 40)
    assert read_download_metadata(directory, FILE).etag == digest
    return directory


def in_the_cache(tmp_path, weights) -> Path:
    repository = tmp_path / "models--o--n"
    snapshot = repository / "snapshots" / ("c" * 40)
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    weights.rename(repository / "blobs" / digest)
    (snapshot / FILE).symlink_to(f"../../blobs/{digest}")
    return snapshot


def in_the_store_of_all_repositories(tmp_path, weights) -> Path:
    """Where the blob is a link, too, and what it leads to is called by its Xet hash."""
    snapshot = in_the_cache(tmp_path, weights)
    blob = snapshot / (snapshot / FILE).readlink()
    (tmp_path / "blobs" / "ab").mkdir(parents=True)
    blob.rename(tmp_path / "blobs" / "ab" / ("ab" * 32))
    blob.symlink_to(f"../../blobs/ab/{'ab' * 32}")
    return snapshot


PLACES = [in_a_directory, in_the_cache, in_the_store_of_all_repositories]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_what_the_hub_gave_passes(tmp_path, weights, place, shardctl):
    code, said = shardctl("verify", place(tmp_path, weights), "--level", "full")
    assert code == 0, said


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_one_bit_is_a_finding_of_level_full(tmp_path, weights, place, shardctl):
    directory = place(tmp_path, weights)
    promised = hashlib.sha256((directory / FILE).read_bytes()).hexdigest()
    found = hashlib.sha256(damaged(directory / FILE).read_bytes()).hexdigest()
    code, said = shardctl("verify", directory, "--level", "full")
    assert code == 3
    assert (
        f"error: [sha256] {FILE} is not the file that the Hub gave: its SHA-256 is {found}, and {promised} was noted "
        "when it was downloaded"
    ) in said
    assert said.count("[sha256]") == 1
    assert shardctl("verify", directory)[0] == 0, "which reads headers only"


@pytest.mark.parametrize("note", [b"", b"c\n", b"c\nnot a hash\n1.0\n", b"\xff\n\xff\n\xff\n", b"c" * 5_000_000])
def test_a_note_that_says_nothing_promises_nothing(tmp_path, weights, note, shardctl):
    directory = in_a_directory(tmp_path, weights)
    (directory / ".cache" / "huggingface" / "download" / f"{FILE}.metadata").write_bytes(note)
    damaged(directory / FILE)
    began = time.monotonic()
    assert shardctl("verify", directory, "--level", "full")[0] == 0
    assert time.monotonic() - began < 5
