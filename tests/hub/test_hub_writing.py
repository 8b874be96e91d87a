"""A result on the Hub: files are sent as they are filled, and one commit makes a checkpoint of all, or none does."""

from __future__ import annotations

import json

import pytest
from hub_models import content, model, write
from hub_server import HubServer, status
from huggingface_hub import _commit_api, constants

from shardctl.base.errors import AccessError, DestinationError, OccupiedDestinationError, TransientError, UsageError
from shardctl.options import DestinationOptions, ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.record import ATTESTATION
from shardctl.verbs.digest import digest
from shardctl.verbs.dry_run import rehearse_reshard
from shardctl.verbs.finish import finish
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

NAME = "someone/result"
PLACE = f"hf://{NAME}"
TP2 = ReshardOptions(mesh=Mesh.of(tp=2))
CREATE = DestinationOptions(create=True)


@pytest.fixture(autouse=True)
def writer(hub, monkeypatch, tmp_path):
    """A token that may write, and Git LFS's protocol: Xet's needs a server of its own."""
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    monkeypatch.setattr(_commit_api, "is_xet_available", lambda: False)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return hub


@pytest.fixture
def source(tmp_path):
    return write(model(), tmp_path / "source")


def files(hub, branch="main"):
    repository = hub.repositories[NAME]
    return repository.commits[repository.references[branch]]


def test_one_commit_has_what_a_directory_would_have(hub, source, tmp_path):
    made = reshard(source, PLACE, TP2, destination_options=CREATE)
    reshard(source, tmp_path / "out", TP2)
    there = files(hub)
    assert {path: data for path, data in there.items() if path not in {"shardctl.json", ".gitattributes"}} == content(
        tmp_path / "out"
    )
    assert json.loads(there["shardctl.json"])["schema"].startswith("shardctl")
    assert len(hub.repositories[NAME].commits) == 2, "the one that made the repository, and one"
    assert made.record.digest == digest(source).digest == digest(PLACE).digest
    assert verify(PLACE, VerifyOptions(level="full", against=str(source))).ok
    assert not list((tmp_path / "home").rglob("group-*"))


@pytest.mark.parametrize("way", ["verify", "redirect"])
def test_the_token_goes_to_no_other_host_when_a_result_is_written(hub, source, way):
    """What verifies an upload is at any address that the Hub names, and the library sends the token there."""
    other = HubServer()
    elsewhere = f"{other.url}/api/models/{NAME}/commit/main"
    try:
        if way == "verify":
            hub.verifies = elsewhere
        else:
            hub.fail("commit", status(307, Location=elsewhere))
        with pytest.raises((DestinationError, AccessError)):
            reshard(source, PLACE, TP2, destination_options=CREATE)
        assert {request.token for request in other.requests} == {""}
        assert "hf_good" in {request.token for request in hub.requests}
    finally:
        other.close()


def test_without_the_option_nothing_is_made(hub, source):
    with pytest.raises(DestinationError, match="there is no model someone/result") as caught:
        reshard(source, PLACE, TP2)
    assert caught.value.hint == "add --create to make it"
    assert NAME not in hub.repositories
    hub.add(NAME, {".gitattributes": b""})
    with pytest.raises(DestinationError, match="has no revision 'tp2'"):
        reshard(source, f"{PLACE}@tp2", TP2)
    assert hub.repositories[NAME].references.keys() == {"main"}


def test_a_branch_beside_what_is_there(hub, source):
    """The source is on main of the same repository, and stays as it is."""
    hub.add(NAME, model())
    before = dict(files(hub))
    with pytest.raises(DestinationError, match="is not empty and was not written by shardctl"):
        reshard(source, PLACE, TP2)
    empty = DestinationOptions(create=True)
    hub.repositories[NAME].push({"README.md": b"hello"}, "tp2")
    reshard(f"{PLACE}@main", f"{PLACE}@tp2", TP2, destination_options=empty)
    assert files(hub) == before
    assert "shard-00001-model-00001-of-00001.safetensors" in files(hub, "tp2")
    assert digest(f"{PLACE}@tp2").digest == digest(PLACE).digest


def test_private(hub, source):
    private = DestinationOptions(create=True, private=True)
    reshard(source, PLACE, TP2, destination_options=private)
    assert hub.repositories[NAME].private
    hub.add("someone/public", {".gitattributes": b""})
    with pytest.raises(DestinationError, match="is there already, and it is not private"):
        reshard(source, "hf://someone/public", TP2, destination_options=private)
    with pytest.raises(UsageError, match="--private says how --create makes a repository"):
        reshard(source, PLACE, TP2, destination_options=DestinationOptions(private=True))
    with pytest.raises(UsageError, match="are for a destination on the Hub"):
        reshard(source, source.parent / "out", TP2, destination_options=CREATE)


def test_a_run_that_was_cut_off_sends_only_the_rest(hub, source, tmp_path):
    """The commit fails after everything was sent: the same command sends no large file again, and commits."""
    hub.add(NAME, {".gitattributes": b""})
    hub.fail("commit", status(503))
    with pytest.raises(TransientError, match="cannot be committed to: the Hub answers HTTP 503"):
        reshard(source, PLACE, TP2)
    assert files(hub) == {".gitattributes": b""}
    sent = len(hub.asked("put"))
    assert sent == 2
    made = reshard(source, PLACE, TP2)
    assert len(hub.asked("put")) == sent
    assert made.written_bytes == 0
    assert made.kept_bytes > 0
    assert verify(PLACE, VerifyOptions(level="full", against=str(source))).ok
    assert not list((tmp_path / "home").rglob("group-*"))


def test_what_the_hub_has_lost_is_said_and_can_be_sent_again(hub, source):
    hub.add(NAME, {".gitattributes": b""})
    hub.fail("commit", status(503))
    with pytest.raises(TransientError):
        reshard(source, PLACE, TP2)
    hub.objects.clear()
    with pytest.raises(DestinationError, match="points to a file that does not exist") as caught:
        reshard(source, PLACE, TP2)
    assert "--no-resume" in caught.value.hint
    reshard(source, PLACE, TP2, destination_options=DestinationOptions(no_resume=True))
    assert verify(PLACE, VerifyOptions(level="full", against=str(source))).ok


def test_a_file_that_does_not_arrive(hub, source):
    hub.add(NAME, {".gitattributes": b""})
    hub.fail("put", status(400))
    with pytest.raises(DestinationError, match="cannot be written"):
        reshard(source, PLACE, TP2)
    assert files(hub) == {".gitattributes": b""}
    reshard(source, PLACE, TP2)
    assert digest(PLACE).digest == digest(source).digest


def test_done_already_and_replaced(hub, source):
    reshard(source, PLACE, TP2, destination_options=CREATE)
    commits = len(hub.repositories[NAME].commits)
    assert reshard(source, PLACE, TP2).done_before
    with pytest.raises(OccupiedDestinationError, match="already holds a finished checkpoint"):
        reshard(source, PLACE, ReshardOptions(to="hf"))
    assert len(hub.repositories[NAME].commits) == commits
    reshard(source, PLACE, ReshardOptions(to="hf"), destination_options=DestinationOptions(overwrite=True))
    assert len(hub.repositories[NAME].commits) == commits + 1
    assert not [path for path in files(hub) if path.startswith("shard-")]
    hub.repositories[NAME].push(files(hub) | dict.fromkeys(ATTESTATION, b"of the old one"))
    reshard(source, PLACE, TP2, destination_options=DestinationOptions(overwrite=True))
    assert ATTESTATION.isdisjoint(files(hub))
    hub.repositories[NAME].push(files(hub) | {"mine.txt": b""})
    with pytest.raises(DestinationError, match=r"holds more than the checkpoint that would be replaced: mine\.txt"):
        reshard(source, PLACE, TP2, destination_options=DestinationOptions(overwrite=True))


def test_somebody_else_commits_meanwhile(hub, source):
    repository = hub.add(NAME, {".gitattributes": b""})

    def push(handler, *_):
        repository.push({".gitattributes": b"", "theirs.txt": b"1"})
        handler.answer(412, X_Error_Message="A commit has happened since. Please refresh.")

    hub.fail("commit", push)
    with pytest.raises(DestinationError, match="was changed by another program: A commit has happened since"):
        reshard(source, PLACE, TP2)
    assert files(hub) == {".gitattributes": b"", "theirs.txt": b"1"}


def test_who_may_not_write(hub, source, monkeypatch):
    hub.add(NAME, {".gitattributes": b""})
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(AccessError, match="cannot be written") as caught:
        reshard(source, PLACE, TP2)
    assert "a token that may write" in caught.value.hint


def test_a_file_that_the_repository_ignores(hub, source):
    hub.add(NAME, {".gitignore": b"tokenizer.json"})
    with pytest.raises(DestinationError, match=r"a \.gitignore keeps tokenizer\.json out"):
        reshard(source, PLACE, TP2)
    assert files(hub).keys() == {".gitignore"}


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (f"{PLACE}@main/folder", "only a branch of a whole repository can"),
        (f"{PLACE}@{'0' * 40}", "only a branch of a whole repository can"),
        (f"{PLACE}@refs/pr/1", "only a branch of a whole repository can"),
        ("hf://nothing", "is not the address of a model"),
    ],
)
def test_addresses_that_cannot_be_written(source, place, message):
    with pytest.raises(UsageError, match=message):
        reshard(source, place, TP2)


def test_one_process_writes():
    with pytest.raises(UsageError, match="is written by one process"):
        finish(PLACE)


def test_a_rehearsal_makes_nothing(hub, source):
    with pytest.raises(DestinationError, match="there is no model"):
        rehearse_reshard(source, PLACE, TP2)
    rehearse_reshard(source, PLACE, TP2, destination_options=CREATE)
    assert NAME not in hub.repositories
    assert not hub.asked("put")
