"""A download is held against the hashes that the Hub states, and its weights are not fetched again."""

import hashlib

import pytest
from hub_models import model, write

from shardctl.options import VerifyOptions
from shardctl.storage.local import LocalSource
from shardctl.verbs.verify import verify

NAME = "someone/llama"


@pytest.fixture
def files(hub):
    files = model(shards=2)
    hub.add(NAME, files)
    return files


@pytest.fixture
def weights(files):
    return sorted(name for name in files if name.endswith(".safetensors"))


def run(path, level):
    found = verify(path, VerifyOptions(level=level, against=NAME))
    return found, next(one for one in found.levels if one.name == "identity")


@pytest.mark.parametrize("level", ["quick", "full"])
def test_equal_files_are_not_fetched(hub, files, weights, tmp_path, level, monkeypatch):
    here, read = write(files, tmp_path / "here"), []
    plain = LocalSource.read_at

    def counted(self, path, offset, into):
        read.append(len(into) if path in weights else 0)
        plain(self, path, offset, into)

    monkeypatch.setattr(LocalSource, "read_at", counted)
    found, identity = run(here, level)
    assert found.ok
    size = sum(len(files[name]) for name in weights)
    assert sum(nbytes for route, nbytes in hub.sent.items() if route == "cdn") < size / 4, "headers and small files"
    assert sum(read) < 1.2 * size, "once"
    assert identity.equal_files == tuple(weights)
    assert identity.nbytes == 0
    (note,) = identity.notes
    assert note.startswith(
        f"{identity.tensors} tensors were not read from {NAME}, because 2 files here have the hashes"
    )
    assert not [each for each in found.findings if each.check in {"hash", "sha256"}]


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_file_with_another_hash_is_compared_element_by_element(files, weights, tmp_path, level):
    here = write(files, tmp_path / "here")
    data = bytearray(files[weights[0]])
    data[-1] ^= 1
    (here / weights[0]).write_bytes(data)
    found, identity = run(here, level)
    assert not found.ok
    assert [each.file for each in identity.errors] == [weights[0]]
    assert "differs from someone/llama in 1 elements" in identity.errors[0].message
    assert identity.equal_files == (weights[1],)
    if level == "full":
        downloads = found.levels[1].downloads
        assert downloads.differing == [weights[0]]
        assert downloads.digests[weights[0]] == hashlib.sha256(data).hexdigest()
