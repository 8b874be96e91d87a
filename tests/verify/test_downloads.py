"""`verify --level full` compares a download with the SHA-256 that huggingface_hub noted beside it."""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING

import pytest
import torch
from huggingface_hub._local_folder import read_download_metadata, write_download_metadata
from safetensors.torch import save_file

from shardctl.cli.program import run
from shardctl.storage.local import LocalSource

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


def git_name(content: bytes) -> str:
    """What git calls a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def in_a_directory(tmp_path, weights) -> Path:
    """As `hf download --local-dir` leaves it."""
    directory = tmp_path / "local"
    directory.mkdir()
    weights.rename(directory / FILE)
    (directory / "config.json").write_text("{}")
    digest = hashlib.sha256((directory / FILE).read_bytes()).hexdigest()
    write_download_metadata(directory, FILE, commit_hash="c" * 40, etag=digest)
    write_download_metadata(directory, "config.json", commit_hash="c" * 40, etag=git_name(b"{}"))
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


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_it_is_said_which_files_had_a_hash_and_which_had_none(tmp_path, weights, place, shardctl, capfd):
    directory = place(tmp_path, weights)
    (directory / "notes.txt").write_text("mine")
    code, said = shardctl("verify", directory, "--level", "full")
    assert code == 0
    held = sorted({FILE, "config.json"} & {path.name for path in directory.iterdir()}, key=[FILE, "config.json"].index)
    assert f"    {len(held)} file{'s' if len(held) > 1 else ''} with the hash that the Hub stated\n" in said
    assert "    no hash of the Hub to hold against: notes.txt\n" in said
    run(["verify", str(directory), "--level", "full", "--json"])
    found = json.loads(capfd.readouterr().out)["levels"][1]["downloads"]
    assert sorted(found.pop("digests")) == sorted(held)
    assert sorted(found.pop("verified")) == sorted(held)
    assert found == {"differing": [], "without": ["notes.txt"]}


def test_what_is_no_download_has_nothing_to_say(weights, shardctl):
    assert "the Hub" not in shardctl("verify", weights.parent, "--level", "full")[1]


def test_a_small_file_that_was_edited_is_a_warning(tmp_path, weights, shardctl):
    directory = in_a_directory(tmp_path, weights)
    (directory / "config.json").write_text("{ }")
    code, said = shardctl("verify", directory, "--level", "full")
    assert code == 0
    assert "warning: [sha256] config.json is not the file that the Hub gave: its git SHA-1 is " in said


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("entries", [1, 3000])
def test_weights_are_hashed_while_they_are_read_and_not_read_again(
    tmp_path, weights, shardctl, monkeypatch, threads, entries
):
    """With many tensors the header is larger than what is read only to be hashed."""
    large = {"large": torch.zeros(3 << 20, dtype=torch.uint8)}
    save_file(
        large | {f"layer.{i}.weight": torch.full((64,), i % 100, dtype=torch.uint8) for i in range(entries)}, weights
    )
    directory, read = in_a_directory(tmp_path, weights), []
    plain = LocalSource.read_at

    def counted(self, path, offset, into):
        read.append(len(into) if path == FILE else 0)
        plain(self, path, offset, into)

    monkeypatch.setattr(LocalSource, "read_at", counted)
    code, said = shardctl("verify", directory, "--level", "full", "--threads", threads)
    assert code == 0, said
    assert "2 files with the hash" in said
    size = (directory / FILE).stat().st_size
    headers = 4 * (size - (3 << 20) - 64 * entries)
    assert sum(read) <= size + headers, f"{sum(read):,} of {size:,} bytes"


def test_an_empty_file_has_a_hash_too(tmp_path, weights, shardctl):
    directory = in_a_directory(tmp_path, weights)
    (directory / "empty.txt").write_bytes(b"")
    write_download_metadata(directory, "empty.txt", commit_hash="c" * 40, etag=git_name(b""))
    assert "3 files with the hash" in shardctl("verify", directory, "--level", "full")[1]
    write_download_metadata(directory, "empty.txt", commit_hash="c" * 40, etag="0" * 40)
    assert "empty.txt is not the file that the Hub gave" in shardctl("verify", directory, "--level", "full")[1]
