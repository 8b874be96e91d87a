"""Whatever goes wrong on the way, the bytes are right or there is an error; never anything else."""

import threading
import time

import hub_server as server
import pytest
from hub_models import content, model, write
from hub_server import status
from huggingface_hub import constants

from shardctl.base.errors import AccessError, ChangedError, HostileError, Interrupted, SourceError, TransientError
from shardctl.base.workers import StopRequest
from shardctl.options import ReshardOptions
from shardctl.storage import retries as patience
from shardctl.storage.addresses import open_source
from shardctl.storage.hub import ranges
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard

NAME = "someone/llama"
TP2 = ReshardOptions(mesh=Mesh.of(tp=2))
SHARD = "model-00002-of-00003.safetensors"


pytestmark = pytest.mark.usefixtures("files")


@pytest.fixture
def files(hub):
    files = model()
    hub.add(NAME, files)
    return files


@pytest.fixture
def right(files, tmp_path):
    """What comes out if nothing goes wrong."""
    reshard(write(files, tmp_path / "here"), tmp_path / "right", TP2)
    return content(tmp_path / "right")


PASSING = {
    "503": status(503),
    "500": status(500),
    "429": status(429),
    "429 with a time": status(429, Retry_After="0"),
    "no answer": server.dropped,
    "half a body": server.short_body,
    "half a range": server.short_answer,
    "half a length": server.short_length,
    "another range": server.other_range,
    "no range": server.no_range,
    "another size": server.other_size,
    "too much": server.too_long,
    "an address refused": status(403),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_trouble_with_a_range_is_overcome(hub, right, tmp_path, fault):
    hub.fail("cdn", *[fault, None] * 3)
    planned = plan(NAME, TP2)
    assert planned.conversion.read_bytes
    hub.fail("cdn", fault, None, None, fault, fault, None, fault)
    reshard(NAME, tmp_path / "out", TP2)
    assert hub.faults_left == 0
    assert content(tmp_path / "out") == right


@pytest.mark.parametrize("fault", [status(503), status(429), server.dropped], ids=["503", "429", "no answer"])
@pytest.mark.parametrize("route", ["info", "resolve"])
def test_trouble_with_the_hub_itself_is_overcome(hub, right, tmp_path, route, fault):
    hub.fail(route, fault, fault)
    reshard(NAME, tmp_path / "out", TP2)
    assert hub.faults_left == 0
    assert content(tmp_path / "out") == right


def test_small_files_are_taken_from_all_of_them_where_ranges_are_ignored(hub, right, tmp_path):
    hub.fail("cdn", *[server.ignored_range] * 50)
    hub.fail("resolve", *[server.ignored_range] * 3, path=".json")
    reshard(NAME, tmp_path / "out", TP2)
    assert content(tmp_path / "out") == right


def test_large_ones_are_refused_there(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "_MAX_WHOLE_FILE_BYTES", 1000)
    hub.fail("cdn", *[server.ignored_range] * 50)
    with pytest.raises(SourceError, match=r"a part of .* was requested, but all of it was sent") as refused:
        reshard(NAME, tmp_path / "out", TP2)
    assert "proxy" in refused.value.hint
    assert not (tmp_path / "out").exists()


def test_bodies_that_somebody_compressed_are_refused(hub, tmp_path):
    hub.fail("cdn", server.encoded)
    with pytest.raises(SourceError, match="encoded as gzip"):
        reshard(NAME, tmp_path / "out", TP2)


def test_a_body_that_ends_early_is_gone_on_with(hub, files):
    """Only what is missing is asked for again."""
    hub.fail("cdn", server.short_body)
    source = open_source(NAME)
    size = len(files[SHARD])
    into = bytearray(size)
    source.read_at(SHARD, 0, memoryview(into))
    assert bytes(into) == files[SHARD]
    assert [request.range for request in hub.asked("cdn")] == [f"bytes=0-{size - 1}", f"bytes={size // 2}-{size - 1}"]


def test_an_address_is_asked_for_once_and_again_when_it_is_over(hub, tmp_path):
    large = model(hidden_size=256, vocab_size=8192)
    hub.add(NAME, large)
    hub.uses = 2
    reshard(NAME, tmp_path / "out", TP2)
    reshard(write(large, tmp_path / "large"), tmp_path / "from-large", TP2)
    assert content(tmp_path / "out") == content(tmp_path / "from-large")
    asked = [request for request in hub.asked("resolve") if request.path == SHARD]
    assert len(asked) > 1

    hub.uses, hub.requests = None, []
    reshard(NAME, tmp_path / "again", TP2)
    assert len([request for request in hub.asked("resolve") if request.path == SHARD]) == 1


def test_all_addresses_are_over_at_once(hub, files):
    source = open_source(NAME)
    parts = [memoryview(bytearray(70_000)) for _ in "12"]
    source.read_at(SHARD, 0, parts[0])
    hub.expire()
    threads = [threading.Thread(target=source.read_at, args=(SHARD, 100_000, part)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bytes(part) for part in parts] == [files[SHARD][100_000:170_000]] * 2
    assert len(hub.asked("resolve")) == 2, "one thread asks for all"


def test_what_never_works_ends_as_passing_trouble(hub, tmp_path):
    hub.fail("cdn", *[status(503)] * 500)
    with pytest.raises(
        TransientError, match=r"reading .* failed 8 times, the last time because the server answered with HTTP 503"
    ) as trouble:
        reshard(NAME, tmp_path / "out", TP2)
    assert "same command again" in trouble.value.hint
    assert trouble.value.exit_code == 7


def test_the_same_command_goes_on_after_it(hub, tmp_path):
    large = model(hidden_size=256, vocab_size=8192)
    hub.add(NAME, large)
    reshard(write(large, tmp_path / "large"), tmp_path / "all", TP2)
    hub.fail("cdn", None, None, *[status(503)] * 500, path=server.sha256(large["model-00003-of-00003.safetensors"]))
    with pytest.raises(TransientError):
        reshard(NAME, tmp_path / "out", TP2)
    hub._faults.clear()
    done = reshard(NAME, tmp_path / "out", TP2)
    assert done.kept_bytes
    assert done.notes == ("8 files from the Hub, all with the expected hashes",)
    assert content(tmp_path / "out") == content(tmp_path / "all")


def test_a_server_is_waited_for_as_long_as_it_asks(hub):
    hub.fail("cdn", status(429, Retry_After="1"))
    began = time.monotonic()
    inspect(NAME)
    assert time.monotonic() - began >= 1


def test_a_branch_that_moves_midway_changes_nothing(hub, right, tmp_path):
    def pushed(handler, *_):
        hub.repositories[NAME].push(model(seed=8))
        handler.answer(503)

    hub.fail("cdn", None, None, None, pushed)
    done = reshard(NAME, tmp_path / "out", TP2)
    assert content(tmp_path / "out") == right
    assert hub.repositories[NAME].references["main"] not in done.record.source["address"]


def test_a_branch_that_moved_is_begun_anew(hub, tmp_path):
    """What an interrupted run kept is of another commit."""
    hub.fail("cdn", *[None] * 4, *[status(503)] * 500)
    with pytest.raises(TransientError):
        reshard(NAME, tmp_path / "out", TP2)
    hub._faults.clear()
    later = model(seed=8)
    hub.repositories[NAME].push(later)
    done = reshard(NAME, tmp_path / "out", TP2)
    assert done.kept_bytes == 0
    reshard(write(later, tmp_path / "later"), tmp_path / "right", TP2)
    assert content(tmp_path / "out") == content(tmp_path / "right")


@pytest.mark.parametrize(
    "header", [{"X_Repo_Commit": "f" * 40}, {"X_Linked_Etag": '"' + "f" * 64 + '"'}, {"X_Linked_Size": "7"}], ids=str
)
def test_another_file_than_was_listed_is_refused(hub, tmp_path, header):
    hub.fail("resolve", status(302, Location="http://127.0.0.1:1/x", **header), path=SHARD)
    with pytest.raises(ChangedError, match="not the file that the Hub listed"):
        reshard(NAME, tmp_path / "out", TP2)


def test_one_wrong_bit_in_a_file_that_is_read_whole_is_found(hub, right, tmp_path):
    hub.fail("cdn", *[None] * 5, server.flipped_bit)
    with pytest.raises(ChangedError, match=r"its sha256 is .* is expected|were read twice"):
        reshard(NAME, tmp_path / "out", TP2)
    assert not (tmp_path / "out").exists()
    done = reshard(NAME, tmp_path / "out", TP2)
    assert done.kept_bytes == 0, "nothing of what was wrong is kept"
    assert content(tmp_path / "out") == right


def test_one_wrong_bit_in_a_config_is_found(hub):
    hub.fail("resolve", server.flipped_bit, path="config.json")
    with pytest.raises(ChangedError, match="its sha1 is"):
        inspect(NAME)


def test_the_hub_is_not_there(hub, monkeypatch):
    hub.close()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TransientError, match=r"is not a path here, and .* cannot be reached") as trouble:
        inspect(NAME)
    assert "HF_HUB_OFFLINE" in trouble.value.hint
    with pytest.raises(TransientError, match=rf"^the Hub is needed for {NAME}, but .* cannot be reached"):
        inspect(f"hf://{NAME}")


def test_a_hub_that_says_nothing_is_asked_again(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    said = threading.Event()
    hub.fail("tree", lambda *_: said.wait(30))
    try:
        assert inspect(NAME).files
        hub.fail("tree", *[lambda *_: said.wait(30)] * 3)
        with pytest.raises(TransientError, match=r"cannot be reached: .*timed out"):
            inspect(NAME)
    finally:
        said.set()


def test_a_page_that_asks_to_log_in_to_a_network_is_no_answer(hub):
    hub.fail("info", *[lambda handler, *_: handler.answer(200, b"<html>Welcome to the hotel</html>")] * 3)
    with pytest.raises(TransientError, match="not in the form of the Hub"):
        inspect(NAME)


def test_a_signal_ends_the_waiting(hub, monkeypatch):
    monkeypatch.setattr(patience, "FIRST_WAIT", 60)
    hub.fail("cdn", *[status(503)] * 9)
    source, stop = open_source(NAME), StopRequest()
    source.set_stop_request(stop)
    threading.Timer(0.3, lambda: setattr(stop, "signal", 2)).start()
    with pytest.raises(Interrupted):
        source.read_at(SHARD, 0, memoryview(bytearray(10)))


class TestRefusals:
    def test_what_does_not_exist(self):
        with pytest.raises(SourceError, match="neither a path here nor a model on the Hub that you may see") as refused:
            inspect("someone/nothing")
        assert refused.value.exit_code == 4
        assert "hf auth login" in refused.value.hint

    def test_the_same_with_a_token(self, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_good")
        with pytest.raises(SourceError, match="neither a path here"):
            inspect("someone/nothing")

    def test_a_token_that_is_none(self, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_bad")
        with pytest.raises(AccessError, match="401") as refused:
            inspect(NAME)
        assert refused.value.exit_code == 5

    def test_a_gated_model(self, hub, monkeypatch):
        hub.add(NAME, model(), gated=True)
        with pytest.raises(AccessError, match="is gated") as refused:
            inspect(NAME)
        assert f"accept its terms at {hub.url}/{NAME}" in refused.value.hint
        monkeypatch.setenv("HF_TOKEN", "hf_good")
        assert inspect(NAME).parameters

    def test_a_revision_that_does_not_exist(self):
        with pytest.raises(SourceError, match="has no revision 'v9'"):
            inspect(f"{NAME}@v9")

    def test_a_folder_that_does_not_exist(self):
        with pytest.raises(SourceError, match="none is missing in someone/llama"):
            inspect(f"hf://{NAME}/none")

    def test_names_that_no_repository_has(self):
        with pytest.raises(SourceError, match="neither a path here nor a name that the Hub allows"):
            inspect("someone/a--b")


def test_the_digest_is_right_in_spite_of_everything(hub, files, tmp_path):
    expected = digest(write(files, tmp_path / "here")).digest
    hub.fail("cdn", *[each for fault in PASSING.values() for each in (fault, fault, None)])
    assert digest(NAME).digest == expected


def test_redirects_within_the_hub_are_followed_with_the_token(hub, files, monkeypatch):
    """As to `/api/resolve-cache/...`, and to the new name of a repository."""
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    commit = hub.add("new/name", files).references["main"]
    moved = status(307, Location=f"/new/name/resolve/{commit}/config.json", X_Repo_Commit=commit)
    hub.fail("resolve", moved, path="config.json")
    source = open_source(NAME)
    for _ in "12":
        into = bytearray(len(files["config.json"]))
        source.read_at("config.json", 0, memoryview(into))
        assert bytes(into) == files["config.json"]
    assert [request.token for request in hub.asked("resolve")] == ["hf_good"] * 2


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:abc/x?Signature=secret",
        "http://127.0.0.1:99999/x?Signature=secret",
        "http://[::1/x?Signature=secret",
        f"http://{'a' * 300}/x?Signature=secret",
        "file:///etc/passwd?Signature=secret",
        "ftp://127.0.0.1/x?Signature=secret",
    ],
)
def test_a_redirect_to_what_is_no_address_is_refused_without_saying_it(hub, address):
    hub.fail("resolve", status(302, Location=address), path=SHARD)
    with pytest.raises(SourceError, match="redirected to an address that is not HTTP") as raised:
        digest(NAME)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("name", ["../evil.py", "/evil.py", "a/../../evil.py", "a//evil.py", "./evil.py", "e\0.py", ""])
def test_names_that_lead_out_of_the_repository_are_refused(hub, files, tmp_path, name):
    hub.repositories[NAME].push({**files, name: b"evil"})
    with pytest.raises(HostileError, match="outside of its repository"):
        reshard(NAME, tmp_path / "deep" / "out", TP2)
    assert list(tmp_path.rglob("*evil*")) == []


@pytest.mark.parametrize("size", [-1, "12", None])
def test_sizes_that_are_none_are_refused(hub, size):
    entries = [{"type": "file", "path": "config.json", "size": size, "oid": "0" * 40}]
    hub.fail("tree", lambda handler, *_: handler.json(entries))
    with pytest.raises(SourceError, match="with a size of"):
        inspect(NAME)


def test_a_signed_address_with_a_space_is_never_said(hub):
    hub.fail("resolve", *[status(302, Location="http://127.0.0.1:1/x y?Signature=secret")] * 20, path=SHARD)
    with pytest.raises(TransientError, match="the connection failed") as raised:
        digest(NAME)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("number", [301, 302, 307])
@pytest.mark.parametrize("route", ["info", "tree", "resolve"])
def test_a_redirect_without_a_target(hub, route, number):
    hub.fail(route, *[status(number)] * 20)
    with pytest.raises(SourceError, match=r"redirects a request .*without saying where to"):
        digest(NAME)


def test_redirects_without_end(hub):
    commit = hub.repositories[NAME].references["main"]
    hub.fail("resolve", *[status(302, Location=f"/{NAME}/resolve/{commit}/config.json")] * 9)
    with pytest.raises(SourceError, match=r"redirects requests for config\.json without end"):
        open_source(NAME).read_at("config.json", 0, memoryview(bytearray(9)))
