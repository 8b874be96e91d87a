"""What reading from the Hub costs: requests and bytes."""

import io

import hub_server
import pytest
from hub_models import SHARDS, large, model
from hub_server import status

from shardctl.conversion.plan_file import read_plan_file
from shardctl.options import PlanOptions, ReshardOptions
from shardctl.storage.addresses import open_source
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard

NAME = "someone/large"


def count_requests(hub):
    return {route: len(hub.asked(route)) for route in ("info", "tree", "headers", "resolve", "cdn")}


def test_a_plan_of_812_gb_takes_six_requests(hub, monkeypatch):
    """The Hub gives 1,000 entries on a page, and all headers of main at once."""
    monkeypatch.setattr(hub_server, "PAGE", 1000)
    hub.add(NAME, large())
    planned = plan(NAME, ReshardOptions(mesh=Mesh.of(tp=8, pp=4)))
    assert planned.parameters > 405e9
    assert count_requests(hub) == {"info": 2, "tree": 1, "headers": 1, "resolve": 2, "cdn": 0}
    hub.requests.clear()
    assert len(inspect(NAME).tensors) == 1137
    assert len(hub.requests) == 6


def test_headers_at_once_say_what_the_files_say(hub, tmp_path):
    """The same plan and the same tensors as from the files; tensors themselves are never read by such headers."""
    hub.add(NAME, model(shards=6))
    at_once = inspect(NAME)
    assert not hub.asked("cdn")
    hub.fail("headers", status(404))
    alone = inspect(NAME)
    assert len(hub.asked("cdn")) == 6
    assert at_once.tensors == alone.tensors
    planned, other = tmp_path / "a.json", tmp_path / "b.json"
    plan(NAME, ReshardOptions(), plan_options=PlanOptions(out=planned))
    hub.fail("headers", status(404))
    plan(NAME, ReshardOptions(), plan_options=PlanOptions(out=other))
    assert planned.read_text() == other.read_text()
    hub.requests.clear()
    reshard(NAME, tmp_path / "out", plan=read_plan_file(planned))
    assert not hub.asked("headers")
    assert digest(tmp_path / "out").digest == digest(NAME).digest


@pytest.mark.parametrize("said", [{}, {"headers": {}}, {"headers": []}, [], "no", 3, None])
def test_an_answer_of_another_form_is_not_used(hub, said):
    files = model(shards=6)
    paths = [path for path in files if path.endswith(".safetensors")]
    for headers in (said, {"headers": dict.fromkeys(paths, said)}):
        hub.repositories.clear()
        hub.requests.clear()
        hub.add(NAME, files)
        hub.fail("headers", lambda handler, *_, headers=headers: handler.json(headers))
        assert len(inspect(NAME).tensors) == 39
        assert len(hub.asked("cdn")) == 6


def test_main_that_moved_meanwhile_is_not_mixed_with_what_was_listed(hub):
    repository = hub.add(NAME, model(shards=6))

    def push(handler, *_):
        repository.push(model(shards=6, seed=8, vocab_size=256))
        handler._headers(NAME, "model.safetensors.index.json")

    hub.fail("headers", push)
    tensors = {tensor.name: tensor.shape for tensor in inspect(NAME).tensors}
    assert tensors["lm_head.weight"] == (512, 64)
    assert len(hub.asked("cdn")) == 6


def test_another_branch_has_its_files_read(hub):
    """And half a megabyte of them: headers, and a little more."""
    files = large()
    repository = hub.add(NAME, files)
    repository.references["v2"] = repository.references["main"]
    plan(f"{NAME}@v2", ReshardOptions(mesh=Mesh.of(tp=8, pp=4)))
    asked = count_requests(hub)
    assert asked == {"info": 1, "tree": 5, "headers": 0, "resolve": SHARDS + 2, "cdn": SHARDS}, "once to each place"
    assert hub.sent["cdn"] < 600_000
    assert sum(hub.sent.values()) < 1_000_000, "with the index, the config and the list of files"


def test_without_an_index_a_header_is_guessed_to_have_64_kib(hub):
    files = model(shards=4)
    del files["model.safetensors.index.json"]
    hub.add(NAME, files)
    inspect(NAME)
    ranges = [request.range for request in hub.asked("cdn")]
    assert ranges == ["bytes=0-65535"] * 4


def test_pickles_are_read_from_both_ends(hub):
    """Two requests a file and one a tensor that is not near another, several at once and none for more than 64 KiB."""
    torch = pytest.importorskip("torch")
    files = {}
    for number in (1, 2, 3):
        file = io.BytesIO()
        torch.save({f"t{number}.{i}": torch.zeros(100_000) for i in range(4)}, file)
        files[f"pytorch_model-0000{number}-of-00003.bin"] = file.getvalue()
    hub.add(NAME, files)
    assert len(inspect(NAME).tensors) == 12
    assert len(hub.asked("cdn")) <= 3 * (2 + 4)
    assert hub.sent["cdn"] < 3 * 150_000


def test_every_byte_comes_once(hub, tmp_path):
    """What was fetched with the headers is used again when the elements are read.

    One thread reads in order; of several, one that is far ahead on a busy machine has its stretch read again.
    """
    files = model(shards=3, hidden_size=256, vocab_size=4096)
    hub.add(NAME, files)
    reshard(NAME, tmp_path / "out", ReshardOptions(mesh=Mesh.of(tp=2), threads=1))
    shards = sum(len(content) for path, content in files.items() if path.endswith(".safetensors"))
    assert shards <= hub.sent["cdn"] < shards * 1.02 + 3 * 65536


def test_small_tensors_come_together(hub):
    """One request a megabyte, not one a tensor."""
    files = model(shards=1, num_hidden_layers=40)
    hub.add(NAME, files)
    tensors = len(inspect(NAME).tensors)
    hub.requests.clear()
    digest(NAME)
    size = len(files["model-00001-of-00001.safetensors"])
    assert tensors > 350
    assert len(hub.asked("cdn")) <= 4 + size // (1 << 20) * 2


def test_a_small_file_takes_one_request_and_a_large_one_that_and_its_address(hub):
    hub.add(NAME, model())
    source = open_source(NAME)
    source.read_at("config.json", 0, memoryview(bytearray(10)))
    source.read_at("tokenizer.json", 0, memoryview(bytearray(2)))
    source.read_at("model-00001-of-00003.safetensors", 0, memoryview(bytearray(10)))
    assert len(hub.asked("resolve")) + len(hub.asked("cdn")) == 4


@pytest.mark.parametrize("shards", [1, 3])
def test_connections_are_used_again(hub, tmp_path, shards):
    hub.add(NAME, model(shards=shards))
    reshard(NAME, tmp_path / "out")
    assert hub.connections <= 2 * 9, "of eight threads and the main one, to both servers"
    assert len(hub.requests) > 9
