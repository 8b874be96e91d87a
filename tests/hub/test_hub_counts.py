"""What reading from the Hub costs: requests and bytes."""

import io

import pytest
from hub_models import SHARDS, large, model

from shardctl.mesh import Mesh
from shardctl.options import ReshardOptions
from shardctl.storage.addresses import open_source
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard

NAME = "someone/large"


def test_a_plan_of_812_gb_takes_half_a_megabyte(hub):
    files = large()
    hub.add(NAME, files)
    assert sum(map(len, files.values())) > 811e9
    planned = plan(NAME, ReshardOptions(mesh=Mesh.of(tp=8, pp=4)))
    assert planned.parameters > 405e9
    asked = {route: len(hub.asked(route)) for route in ("info", "tree", "resolve", "cdn")}
    assert asked == {"info": 1, "tree": 5, "resolve": SHARDS + 2, "cdn": SHARDS}, "once to the Hub, once to the store"
    assert hub.sent["cdn"] < 600_000, "headers, and a little more"
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
