"""Files above 50 GB come by Xet where hf_xet is installed; where it is not, that is said before anything is read."""

import hub_server as server
import pytest
from hub_models import content, model, write
from hub_server import status
from huggingface_hub import constants

from shardctl.base.errors import AccessError, HostileError, SourceError, TransientError
from shardctl.options import ReshardOptions
from shardctl.storage.hub import xet
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard

NAME = "someone/llama"
TP2 = ReshardOptions(mesh=Mesh.of(tp=2))
hf_xet = pytest.importorskip("hf_xet")


@pytest.fixture
def files(hub, monkeypatch):
    """A model whose shards count as too large for plain downloads."""
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 100_000)
    files = model()
    hub.add(NAME, files)
    return files


@pytest.fixture
def in_xet(hub, files, tmp_path, monkeypatch):
    """The same in a server of Xet that hf_xet itself keeps in a directory."""
    cas = tmp_path / "cas"
    cas.mkdir()
    repository = hub.repositories[NAME]
    repository.cas = f"local://{cas}"
    monkeypatch.setattr(xet, "_SERVER_URL_SCHEMES", {"local"})
    commit = hf_xet.XetSession().new_upload_commit(endpoint=repository.cas)
    for path in shards(files):
        repository.xet[path] = commit.start_upload_bytes(files[path]).result().xet_info.hash
    commit.wait_to_finish()
    return repository


def shards(files):
    return [path for path in files if path.endswith(".safetensors")]


@pytest.fixture
def right(files, tmp_path):
    reshard(write(files, tmp_path / "here"), tmp_path / "right", TP2)
    return content(tmp_path / "right")


@pytest.mark.usefixtures("in_xet")
def test_ranges_come_from_xet_and_are_hashed(hub, files, right, tmp_path):
    done = reshard(NAME, tmp_path / "out", TP2)
    assert content(tmp_path / "out") == right
    assert set(shards(files)) <= set(done.proofs.verified)
    assert hub.asked("cdn") == []
    assert len(hub.asked("xet")) == 1
    assert not done.warnings


def test_without_hf_xet_that_is_said_before_and_tried(files, right, tmp_path, monkeypatch):
    monkeypatch.setattr("shardctl.storage.hub.source.has_xet", lambda: False)
    monkeypatch.setattr("shardctl.storage.hub.ranges.has_xet", lambda: False)
    warnings = plan(NAME, TP2).warnings
    assert any("files above 50 GB" in text and "hf download someone/llama" in text for text in warnings)
    done = reshard(NAME, tmp_path / "out", TP2)
    assert any("files above 50 GB" in text for text in done.warnings)
    assert content(tmp_path / "out") == right
    assert files


@pytest.mark.parametrize("number", [400, 403])
def test_a_refusal_of_what_is_too_large_says_what_to_do(hub, files, tmp_path, monkeypatch, number):
    monkeypatch.setattr("shardctl.storage.hub.ranges.has_xet", lambda: False)
    refused = status(number, X_Error_Code="FileTooLarge")
    hub.fail("cdn", *[refused] * 200, path=server.sha256(files[shards(files)[0]]))
    with pytest.raises(SourceError, match="refuses to send parts of it") as told:
        reshard(NAME, tmp_path / "out", TP2)
    assert told.value.exit_code == 4
    assert "hf download someone/llama" in told.value.hint


@pytest.mark.usefixtures("in_xet")
def test_a_token_that_is_refused_is_a_matter_of_access(hub, tmp_path):
    hub.fail("xet", *[status(403)] * 99)
    with pytest.raises(AccessError):
        reshard(NAME, tmp_path / "out", TP2)


def test_xet_without_the_file_is_passing_trouble(files, in_xet, tmp_path):
    in_xet.xet[shards(files)[0]] = "0" * 64
    with pytest.raises(TransientError):
        reshard(NAME, tmp_path / "out", TP2)


@pytest.mark.usefixtures("files")
def test_a_server_of_xet_that_is_a_directory_is_refused(in_xet, tmp_path, monkeypatch):
    monkeypatch.setattr(xet, "_SERVER_URL_SCHEMES", {"https", "http"})
    assert in_xet.cas
    with pytest.raises(HostileError, match="not reached by HTTP"):
        reshard(NAME, tmp_path / "out", TP2)
