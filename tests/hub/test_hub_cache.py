"""Files that huggingface_hub has downloaded are read from its cache, others from the Hub; offline, the cache is all."""

import shutil
from pathlib import Path

import pytest
from hub_models import content, model, write
from huggingface_hub import constants, hf_hub_download, snapshot_download

from shardctl.base.errors import ChangedError, SourceError
from shardctl.cli.program import run
from shardctl.options import ReshardOptions
from shardctl.storage.addresses import open_source
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard

pytestmark = pytest.mark.usefixtures("files")
NAME = "someone/llama"
TP2 = ReshardOptions(mesh=Mesh.of(tp=2))
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def files(hub):
    files = model()
    hub.add(NAME, files)
    return files


@pytest.fixture
def offline(monkeypatch):
    def go():
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    return go


def download(hub, *, only=None):
    """Fill the cache as users do: with `snapshot_download`, or with `hf_hub_download` for some files."""
    if only is None:
        snapshot_download(NAME, endpoint=hub.url, cache_dir=constants.HF_HUB_CACHE)
    for path in only or ():
        hf_hub_download(NAME, path, endpoint=hub.url, cache_dir=constants.HF_HUB_CACHE)
    hub.requests.clear()


def test_nothing_is_fetched_twice(hub, files, tmp_path):
    download(hub)
    reshard(NAME, tmp_path / "out", TP2)
    assert {request.route for request in hub.requests} == {"info", "tree"}, "which commit it is must be asked"
    reshard(write(files, tmp_path / "here"), tmp_path / "right", TP2)
    assert content(tmp_path / "out") == content(tmp_path / "right")


def test_a_log_does_not_replace_a_file_of_the_cache_that_is_the_source(hub, capfd):
    download(hub)
    blobs = sorted(Path(constants.HF_HUB_CACHE).glob("*/blobs/*"))
    before = [path.read_bytes() for path in blobs]
    for path in (blobs[0], next(Path(constants.HF_HUB_CACHE).glob("*/snapshots/*/config.json"))):
        assert run(["inspect", NAME, "--log", str(path)]) == 6
        assert f"--log {path} is a file of SRC {NAME}" in capfd.readouterr().err
    assert [path.read_bytes() for path in blobs] == before


def test_what_is_missing_in_the_cache_is_fetched(hub, files, tmp_path):
    download(hub, only=[SHARD, "config.json"])
    reshard(NAME, tmp_path / "out", TP2)
    fetched = {request.path for request in hub.asked("resolve")}
    assert {SHARD, "config.json"}.isdisjoint(fetched)
    assert "model-00001-of-00003.safetensors" in fetched
    reshard(write(files, tmp_path / "here"), tmp_path / "right", TP2)
    assert content(tmp_path / "out") == content(tmp_path / "right")


def test_a_file_that_did_not_change_is_known_in_a_later_commit(hub, files):
    download(hub)
    hub.repositories[NAME].push({**files, "README.md": b"# New\n"})
    source = open_source(NAME)
    source.read_at(SHARD, 0, memoryview(bytearray(10)))
    assert not hub.asked("resolve")
    assert source.folder is None, "no directory of the cache holds the whole commit"


def test_a_download_that_did_not_end_is_not_believed(hub, files):
    download(hub)
    for blob in Path(constants.HF_HUB_CACHE).rglob("blobs/*"):
        if blob.stat().st_size == len(files[SHARD]):
            blob.write_bytes(files[SHARD][:-1])
    inspect(NAME)
    assert {request.path for request in hub.asked("resolve")} >= {SHARD}


def test_a_file_of_the_cache_that_changes_while_it_is_read(hub, tmp_path, monkeypatch):
    from shardctl.storage.hub.source import HubSource

    download(hub)
    real = HubSource.read_at
    blob = next(blob for blob in Path(constants.HF_HUB_CACHE).rglob("blobs/*") if blob.stat().st_size > 100_000)

    def changing(self, path, offset, into):
        real(self, path, offset, into)
        if len(into) > 10_000:
            blob.write_bytes(blob.read_bytes())

    monkeypatch.setattr(HubSource, "read_at", changing)
    with pytest.raises(ChangedError, match="changed while it was read"):
        reshard(NAME, tmp_path / "out", TP2)


class TestOffline:
    def test_a_model_that_is_there(self, hub, files, tmp_path, offline):
        expected = digest(write(files, tmp_path / "here")).digest
        commit = hub.repositories[NAME].references["main"]
        download(hub)
        offline()
        assert digest(NAME).digest == expected
        assert digest(f"{NAME}@{commit}").digest == expected
        assert inspect(f"hf://{NAME}").parameters
        assert not hub.requests

    def test_a_run_goes_on_offline(self, hub, offline):
        """The version of a file is the same from the Hub and from the cache."""
        online = dict(open_source(NAME).files())
        download(hub)
        offline()
        assert dict(open_source(NAME).files()) == online

    def test_a_model_that_is_not(self, offline):
        offline()
        with pytest.raises(SourceError, match="is neither a path here nor in the Hub's cache at main") as refused:
            inspect(NAME)
        assert f"hf download {NAME}" in refused.value.hint
        with pytest.raises(SourceError, match="is not in the Hub's cache at"):
            inspect(f"{NAME}@{'0' * 40}")

    def test_a_model_of_which_a_shard_is_missing(self, hub, offline):
        download(hub, only=["config.json", "model.safetensors.index.json", "model-00001-of-00003.safetensors"])
        offline()
        with pytest.raises(SourceError, match=f"{SHARD} is missing"):
            inspect(NAME)

    def test_a_cache_without_links(self, hub, offline):
        """As on systems that have none."""
        download(hub)
        folder = next(Path(constants.HF_HUB_CACHE).glob("models--*"))
        for link in list(folder.rglob("snapshots/*/**/*")):
            if link.is_symlink():
                target = link.resolve()
                link.unlink()
                shutil.copy(target, link)
        shutil.rmtree(folder / "blobs")
        offline()
        assert inspect(NAME).parameters
