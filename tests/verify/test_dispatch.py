"""A checkpoint without ranks over all devices, host memory and a folder: here on devices that are none."""

from __future__ import annotations

import json
import weakref
from functools import partial
from itertools import groupby

import pytest
import torch
from fake_cuda import FakeCuda, install_fake_cuda
from forward_models import config_of, save
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardctl.base.errors import UsageError
from shardctl.cli.program import run
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.running import dispatch
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the devices of these tests are none")
LAYERS = 6
MIB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("dispatch") / "llama"
    save(path, config_of("llama", num_hidden_layers=LAYERS))
    return path


@pytest.fixture(scope="module")
def sizes(source):
    """The bytes of each block, read by the library safetensors."""
    found: dict[str, int] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        words = name.split(".")
        block = ".".join(words[:3]) if words[1] == "layers" else ".".join(words[:-1])
        found[block] = found.get(block, 0) + tensor.nbytes
    return found


@pytest.fixture
def devices(monkeypatch):
    return partial(install_fake_cuda, monkeypatch)


def loaded(path, **options):
    found = verify(path, VerifyOptions(level="load", **options)).levels[-1]
    return found, {each.block: each.place for each in found.placement}


def test_whole_blocks_are_spread_over_all_devices(source, sizes, devices):
    fake = devices(8 * MIB, 8 * MIB)
    level, placed = loaded(source, device="cuda")
    assert level.status == "passed", (level.reason, level.findings)
    assert {each.block: each.nbytes for each in level.placement} == sizes
    layers = [placed[f"model.layers.{number}"] for number in range(LAYERS)]
    assert [place for place, _ in groupby(layers)] == ["cuda:0", "cuda:1"], "neighbours stay together"
    held = [sum(sizes[block] for block, at in placed.items() if at == f"cuda:{number}") for number in range(2)]
    assert max(held) - min(held) <= max(sizes.values()), "each has its share"
    assert [fake.peak[number] >= held[number] for number in range(2)] == [True, True]
    assert fake.used == {0: 0, 1: 0}, "nothing stays"


def test_shares_follow_free_memory(source, sizes, devices):
    total = sum(sizes.values())
    devices(3 * MIB, MIB)
    _, placed = loaded(source, device="cuda")
    held = sum(sizes[block] for block, at in placed.items() if at == "cuda:0")
    assert abs(held / total - 0.75) < max(sizes.values()) / total + 0.1


def test_devices_are_filled_in_turn_if_that_is_wanted(source, devices):
    devices(8 * MIB, 8 * MIB)
    _, placed = loaded(source, device="cuda", device_map="sequential")
    assert set(placed.values()) == {"cuda:0"}


def test_the_remainder_goes_to_host_memory_and_then_to_the_folder(source, sizes, devices, tmp_path):
    largest = max(tensor.nbytes for tensor in load_file(source / "model.safetensors").values())
    layer = sizes["model.layers.0"]
    room = 2 * layer + largest
    devices(int(room / 0.95) + 100)
    host = largest + layer + layer // 2
    level, placed = loaded(source, device="cuda", host_memory=host, offload_folder=tmp_path)
    assert level.status == "passed", (level.reason, level.findings)
    assert set(placed.values()) == {"cuda:0", "cpu", "disk"}
    for place, limit in (("cuda:0", room), ("cpu", host)):
        assert sum(sizes[block] for block, at in placed.items() if at == place) <= limit
    assert not list(tmp_path.iterdir()), "its file has no name"
    assert [rank.device for rank in level.ranks] == [*dict.fromkeys(placed.values())]


def test_what_fits_nowhere_exits_2_with_the_sizes(source, sizes, devices, capsys):
    devices(100, 100)
    code = run(["verify", str(source), "--load", "cuda", "--host-memory", "1KiB"])
    said = capsys.readouterr()
    assert code == 2
    assert "host memory 1,024" in said.err
    assert "cuda:0 0, cuda:1 0" in said.err
    assert "--offload-folder DIR" in said.err
    assert f"of {sum(sizes.values()):,} bytes fit nowhere" in said.err


def test_on_the_cpu_alone_blocks_go_to_host_memory_and_the_folder(source, tmp_path, capsys):
    command = ["verify", str(source), "--forward", "--load", "cpu", "--host-memory", "64KiB", "--against", str(source)]
    code = run([*command, "--offload-folder", str(tmp_path), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == 0, told
    load, forward = told["levels"][-2:]
    assert {each["place"] for each in load["placement"]} == {"cpu", "disk"}
    assert forward["forward"]["worst"]["error"] == 0
    assert not list(tmp_path.iterdir())


def test_a_map_says_where_blocks_go(source, sizes, devices, tmp_path):
    devices(8 * MIB, 8 * MIB)
    file = tmp_path / "map.json"
    wanted = {"": 0, "model.layers": 1, "model.layers.2": "cpu", "lm_head": "cuda:1"}
    file.write_text(json.dumps(wanted))
    level, placed = loaded(source, device="cuda", device_map=str(file))
    assert level.status == "passed", level.reason
    expected = {block: "cuda:1" if block.startswith(("model.layers", "lm_head")) else "cuda:0" for block in sizes}
    assert placed == expected | {"model.layers.2": "cpu"}


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"": 7}, "puts the model on cuda:7"),
        ({"": 0, "model.layers.1.mlp": 1}, "divides the block model.layers.1"),
        ({"": 0, "model.layer": 1}, "names model.layer, of which the checkpoint has nothing"),
        ({"model.layers": 0}, "no device"),
        ({"": True}, "is not a JSON object"),
        ([1], "is not a JSON object"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(source, devices, tmp_path, told, message):
    devices(8 * MIB, 8 * MIB)
    file = tmp_path / "map.json"
    file.write_text(json.dumps(told))
    with pytest.raises(UsageError, match=message):
        loaded(source, device="cuda", device_map=str(file))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_a_map_that_is_no_json_exits_2(source, tmp_path, capsys, text):
    file = tmp_path / "map.json"
    file.write_text(text)
    assert run(["verify", str(source), "--load", "cpu", "--device-map", str(file)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_ranks_have_their_devices_already(source, devices, tmp_path):
    ranks = tmp_path / "ranks"
    reshard(source, ranks, ReshardOptions(mesh=Mesh.of(tp=2)))
    devices(8 * MIB, 8 * MIB)
    with pytest.raises(UsageError, match="is cut into ranks"):
        loaded(ranks, device="cuda", host_memory=MIB)
    assert not loaded(ranks, device="cuda")[1]


def test_a_device_that_fails_is_left_out(source, devices, monkeypatch):
    fake = devices(8 * MIB, 8 * MIB)
    free = iter((8 * MIB, 6 * MIB))
    monkeypatch.setattr(dispatch, "measure_host_memory", lambda: next(free))
    fake.broken[1] = "CUDA error: uncorrectable ECC error encountered"
    level, placed = loaded(source, device="cuda")
    assert level.status == "passed", (level.reason, level.findings)
    assert set(placed.values()) == {"cuda:0"}
    assert any("cuda:1" in note for note in level.notes)
    assert [note for note in level.notes if "of host memory" in note] == [
        f"blocks may take {4 * MIB:,} bytes of host memory, half of what is free; --host-memory sets it"
    ]


def test_a_device_that_others_fill_meanwhile_is_left_out(source, devices, monkeypatch):
    fake = devices(8 * MIB, 8 * MIB)
    usual = fake.tell_memory
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (8 * MIB, usual(device)[1]))
    fake.free = (8 * MIB, 1000)
    level, placed = loaded(source, device="cuda")
    assert level.status == "passed", (level.reason, level.findings)
    assert set(placed.values()) == {"cuda:0"}
    assert any("placed again without cuda:1" in note for note in level.notes)


@pytest.mark.parametrize("layout", ["hf", "dcp"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "qwen2-tied", "t5", "gemma3n_text"])
def test_the_model_runs_where_its_blocks_are(devices, tmp_path, name, layout):
    whole, placed = tmp_path / "whole", tmp_path / "placed"
    save(whole, config_of(name))
    reshard(whole, placed, ReshardOptions(to=layout))
    with StrictDevices(devices(64 * MIB, 64 * MIB)) as strict:
        options = VerifyOptions(level="forward", against=whole, device="cuda")
        level = verify(placed, options).levels[-1]
    assert level.status == "passed", (level.reason, level.findings)
    assert level.forward.worst.error == level.forward.output_error == 0
    assert level.forward.device == "cuda:0, cuda:1"
    assert strict.crossed > 0, "something was computed on the second device"


def test_a_wrong_value_in_a_block_on_the_second_device_is_found(source, devices, tmp_path):
    tensors = load_file(source / "model.safetensors")
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    name = f"model.layers.{LAYERS - 1}.mlp.up_proj.weight"
    tensors[name][3] = 0
    with safe_open(source / "model.safetensors", "pt") as file:
        save_file(tensors, wrong / "model.safetensors", file.metadata())
    (wrong / "config.json").write_bytes((source / "config.json").read_bytes())
    devices(8 * MIB, 8 * MIB)
    load, forward = verify(wrong, VerifyOptions(level="forward", against=source, device="cuda")).levels[-2:]
    assert load.status == forward.status == "failed"
    assert name in load.findings[0].message
    assert [block.name for block in forward.forward.blocks if block.error] == [f"model.layers.{LAYERS - 1}"]


class StrictDevices(torch.overrides.TorchFunctionMode):
    """Refuses to compute with tensors of different devices, as CUDA does: results are where their inputs are."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake, self.crossed = fake, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        given = [each for each in _list_tensors([*args, *kwargs.values()]) if each.ndim]
        homes = {home for each in given if (home := self.fake.find_home(each)) is not None}
        if name not in {"copy_", "__setitem__", "to", "equal", "data", "__get__", "__set__", "cpu", "_make_subclass"}:
            assert len(homes) < 2, f"{name} with tensors on {homes}"
        result = function(*args, **kwargs)
        if len(homes) == 1 and name not in {"to", "cpu", "numpy"}:
            (home,) = homes
            self.crossed += home == 1
            for each in _list_tensors([result]):
                storage = each.untyped_storage()
                if self.fake.homes.setdefault(storage._cdata, home) is home:
                    weakref.finalize(storage, self.fake.homes.pop, storage._cdata, None)
        return result


def _list_tensors(values):
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, tuple | list):
            yield from _list_tensors(each)
