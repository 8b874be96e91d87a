"""What a rank holds arrives on its device, bit for bit, as one array a tensor."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stored_bits import bits

import shardctl
from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import Interrupted, SourceError, UnsupportedError, UsageError
from shardctl.base.workers import ExecutionOptions, StopRequest
from shardctl.cli.program import run
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.running.device import list_devices, measure_host_memory
from shardctl.running.load import BoxGrid, WantedTensor, load_tensors
from shardctl.running.state_dict import load
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Region, compute_dense_strides
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def same(found, expected):
    assert list(found.keys()) == list(expected.keys()) or set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def checkpoint(place, config, dtype=torch.bfloat16, **changes):
    """Random weights of a tiny model, and the config."""
    said = {**json.loads((CONFIGS / f"{config}.json").read_text()), **changes}
    generator = torch.Generator().manual_seed(5)
    tensors = {t.name: torch.randn(t.shape, generator=generator).to(dtype) for t in describe_model(said).own()}
    place.mkdir(parents=True)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps(said))
    return place


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("load") / "llama", "llama", num_key_value_heads=2, num_attention_heads=4)


def cut(source, place, **degrees):
    reshard(source, place, ReshardOptions(mesh=Mesh.of(**degrees)))
    return place


def files(place, rank):
    """What safetensors reads from a rank's files, and where each array begins; several arrays of a name in order."""
    found = {}
    for file in sorted(place.glob(f"shard-{rank + 1:05d}-*.safetensors")):
        with safe_open(file, "pt") as opened:
            info = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for name in opened.keys():  # noqa: SIM118 - safe_open is no dict
                found.setdefault(name, []).append((info[name]["saved_offsets"], opened.get_tensor(name)))
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_gets_what_its_file_holds(llama, tmp_path, device):
    place = cut(llama, tmp_path / "ranks", tp=2, pp=2)
    for rank in range(4):
        expected = load_file(next(place.glob(f"shard-{rank + 1:05d}-*")))
        found = shardctl.load(place, rank=rank, device=device)
        same(found, expected)
        assert {str(tensor.device) for tensor in found.values()} == {device}


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_rank_everything_is_whole(llama, tmp_path, device):
    expected = load_file(llama / "model.safetensors")
    same(shardctl.load(llama, device=device), expected)
    same(shardctl.load(cut(llama, tmp_path / "ranks", tp=2, fsdp=2), device=device), expected)


def test_small_blocks_and_many_threads(llama, tmp_path):
    expected = load_file(llama / "model.safetensors")
    same(load(llama, effort=ExecutionOptions(threads=4, block=64)), expected)
    place = cut(llama, tmp_path / "ranks", tp=2)
    same(load(place, effort=ExecutionOptions(threads=3, block=100)), expected)


def test_the_boxes_of_a_fused_tensor_are_one_array(tmp_path):
    """q, k and v of GPT-2 under tp are three stretches of columns, in three files."""
    source = checkpoint(tmp_path / "gpt2", "gpt2")
    place = cut(source, tmp_path / "ranks", tp=2)
    name = "transformer.h.0.attn.c_attn.weight"
    for rank in range(2):
        held = files(place, rank)
        assert len(held[name]) == 3
        expected = {
            key: torch.cat([t for _, t in sorted(parts, key=lambda p: p[0])], dim=-1) if len(parts) > 1 else parts[0][1]
            for key, parts in held.items()
        }
        same(shardctl.load(place, rank=rank), expected)


def test_what_another_rank_wrote_for_it_is_read_from_there(llama, tmp_path):
    place = cut(llama, tmp_path / "ranks", dp=2, tp=2)
    assert not list(place.glob("shard-00003-*"))
    for rank, twin in ((2, 0), (3, 1)):
        same(shardctl.load(place, rank=rank), load_file(next(place.glob(f"shard-{twin + 1:05d}-*"))))


def test_experts_of_one_rank_and_all_else_of_another(tmp_path):
    source = checkpoint(tmp_path / "mixtral", "mixtral")
    place = tmp_path / "ranks"
    reshard(source, place, ReshardOptions(mesh=Mesh.of(dp=2, ep=2), experts="split"))
    whole = [load_file(next(place.glob(f"shard-{rank + 1:05d}-*"))) for rank in range(2)]
    experts = set(whole[1])
    assert experts < set(load_file(source / "model.safetensors"))
    found = shardctl.load(place, rank=1)
    mine = {n: t for n, t in whole[0].items() if ".experts." not in n} | whole[1]
    same(found, mine)


def test_experts_in_one_array(tmp_path):
    source = checkpoint(tmp_path / "mixtral", "mixtral")
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(dp=4, ep=2, etp=2), experts="fused"))
    for rank in range(4):
        found = shardctl.load(tmp_path / "ranks", rank=rank)
        name = next(n for n in found if n.endswith("experts.gate_up_proj"))
        parts = sorted(files(tmp_path / "ranks", rank)[name], key=lambda part: part[0])
        assert len(parts) == 2, "gate rows and up rows"
        assert bits(found[name]) == bits(torch.cat([t for _, t in parts], dim=1))


def test_heads_that_several_ranks_hold(tmp_path):
    source = checkpoint(tmp_path / "gemma", "llama", num_attention_heads=8, num_key_value_heads=2, head_dim=4)
    reshard(
        source,
        tmp_path / "ranks",
        ReshardOptions(mesh=Mesh.of(tp=4)),
        source_options=SourceOptions(kv_heads="replicate"),
    )
    for rank in range(4):
        same(
            shardctl.load(tmp_path / "ranks", rank=rank),
            load_file(next((tmp_path / "ranks").glob(f"shard-{rank + 1:05d}-*"))),
        )


def test_every_type_that_torch_has(tmp_path):
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 100, (4, 8), generator=generator, dtype=torch.uint8)
    tensors = {
        kind.name: raw.view(getattr(torch, kind.torch)).clone()
        for kind in BY_NAME.values()
        if kind.bits >= 8 and kind.torch and kind.name != "BOOL"
    }
    tensors |= {"bool": raw > 50, "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    same(shardctl.load(tmp_path), load_file(tmp_path / "model.safetensors"))


def test_values_that_are_not_numbers_stay_as_they_are(tmp_path):
    odd = torch.tensor([0x7FC01234, 0xFFC00001 - (1 << 32), -(1 << 31)], dtype=torch.int32).view(torch.float32)
    save_file({"odd": odd}, tmp_path / "model.safetensors")
    assert bits(shardctl.load(tmp_path)["odd"]) == bits(odd)


def test_a_torch_file_whose_tensors_share_storage(tmp_path):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    torch.save({"all": base, "turned": base.t(), "some": base[1:3, 2:]}, tmp_path / "pytorch_model.bin")
    found = shardctl.load(tmp_path)
    for name, expected in {"all": base, "turned": base.t(), "some": base[1:3, 2:]}.items():
        assert torch.equal(found[name], expected)
        assert found[name].is_contiguous()


def test_the_tensors_are_the_callers_own(tmp_path):
    """Nothing is mapped: the file may go."""
    place = checkpoint(tmp_path / "copy", "llama")
    found = shardctl.load(place)
    before = {name: tensor.clone() for name, tensor in found.items()}
    with (place / "model.safetensors").open("r+b") as file:
        file.truncate(0)
    same(found, before)
    next(iter(found.values())).zero_()


class Reader:
    """A file in memory."""

    def __init__(self, data):
        self.data = data

    def read_at(self, path, offset, into):
        assert path == "f"
        into[:] = self.data[offset : offset + len(into)]


@given(st.data())
def test_boxes_side_by_side_make_an_array(data):
    """Any product of intervals, against NumPy's own indexing."""
    shape = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    chosen = []
    for extent in shape:
        edges = sorted(data.draw(st.sets(st.integers(0, extent), min_size=2, max_size=6)))
        spans = list(pairwise(edges))
        chosen.append([span for span in spans if data.draw(st.booleans())] or spans[:1])
    boxes = [Box((a, c), (b - a, d - c)) for a, b in chosen[0] for c, d in chosen[1]]
    values = np.arange(shape[0] * shape[1], dtype="<i4").reshape(shape)
    stored, chunks, kind = b"", [], BY_NAME["I32"]
    for box in data.draw(st.permutations(boxes)):
        strides = compute_dense_strides(kind, box.shape)
        chunks.append(Chunk(box, kind, Region("f", len(stored), strides), "w"))
        stored += values[box.slices()].tobytes()
    wanted = {"w": WantedTensor.part("w", chunks)}
    loaded = load_tensors(
        wanted, Reader(stored), "cpu", ExecutionOptions(threads=1, block=data.draw(st.sampled_from([4, 16, 999])))
    )
    rows, columns = ([i for a, b in spans for i in range(a, b)] for spans in chosen)
    assert loaded.tensors["w"].tolist() == values[np.ix_(rows, columns)].tolist()
    assert loaded.nbytes == loaded.peak_bytes == 4 * len(rows) * len(columns)


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (2, 2)), Box((2, 2), (2, 2))],
        [Box((0, 0), (2, 2)), Box((1, 0), (2, 2))],
        [Box((0, 0), (2, 4)), Box((2, 0), (2, 2))],
    ],
)
def test_boxes_that_make_no_array_are_refused(boxes):
    with pytest.raises(SourceError, match="w: the boxes"):
        BoxGrid.of("w", boxes)


def test_what_is_asked_wrongly(llama, tmp_path):
    with pytest.raises(UsageError, match="has no files of ranks"):
        shardctl.load(llama, rank=0)
    place = cut(llama, tmp_path / "ranks", tp=2)
    with pytest.raises(UsageError, match="there is no rank 2; ranks are 0 to 1"):
        shardctl.load(place, rank=2)
    for device, kind in (("cuda:99", UnsupportedError), ("tpu", UsageError), ("cuda:", UsageError)):
        with pytest.raises(kind, match="there is no"):
            shardctl.load(llama, device=device)
    with pytest.raises(AttributeError, match="has no attribute 'save'"):
        _ = shardctl.save
    stopped = StopRequest()
    stopped.signal = 2
    with pytest.raises(Interrupted):
        load(llama, effort=ExecutionOptions(stop=stopped))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_the_cpu():
    assert list_devices("auto") == list_devices("cpu") == ["cpu"]
    with pytest.raises(UnsupportedError, match="there is no CUDA device for cuda"):
        list_devices("cuda")


def test_without_torch_it_says_what_to_install(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError) as caught:
        shardctl.load(llama)
    assert caught.value.hint == "pip install 'torch>=2.9' 'transformers>=5.17'"


def test_a_lens_keeps_its_files_open_and_no_longer(llama):
    def descriptors():
        gc.collect()
        own = Path("/proc/self/fd")
        mine = str(llama.resolve())
        return sum(str(n.readlink()).startswith(mine) for n in own.iterdir() if n.is_symlink())

    expected = load_file(llama / "model.safetensors")
    state = shardctl.lens(llama)
    entry = state["model.norm.weight"]
    del state
    gc.collect()
    assert torch.equal(entry[...], expected["model.norm.weight"])
    assert descriptors() > 0
    del entry
    assert descriptors() == 0


def test_without_torch_a_lens_says_what_to_install(llama, monkeypatch):
    state = shardctl.lens(llama)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError) as caught:
        state["model.norm.weight"][...]
    assert caught.value.hint == "pip install 'torch>=2.9' 'transformers>=5.17'"


def test_the_package_is_as_quick_to_import_as_before():
    program = "import sys, shardctl; print(sorted({'numpy', 'torch', 'shardctl.verbs'} & {*sys.modules}))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


MEASURE = """
import resource, sys, torch
import shardctl
from shardctl.running.state_dict import load
from shardctl.base.workers import ExecutionOptions
def anonymous():
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) * 1024
load(sys.argv[2], effort=ExecutionOptions(threads=2))
before = anonymous()
found = load(sys.argv[1], effort=ExecutionOptions(threads=2))
size = sum(t.nbytes for t in found.values())
print(anonymous() - before - size, size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_little_more_memory_than_what_is_loaded(tmp_path, llama):
    size = 64 << 20
    header = {"w": {"dtype": "BF16", "shape": [size // 2048, 1024], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    said = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path, llama], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(said[1]) == size
    assert int(said[0]) < 48 << 20, "two threads with a block of 8 MiB each, and what the allocator keeps"


def test_the_program_has_no_verb_for_it():
    assert run(["load"]) == 2


@pytest.mark.parametrize(
    ("version", "memory"),
    [("", 400 << 20), ("1", 300 << 20), ("2", 300 << 20), ("container", 300 << 20), ("unlimited", 400 << 20)],
)
def test_host_memory_is_what_the_limit_of_a_container_leaves(tmp_path, version, memory):
    group, top = "/pod/job", tmp_path / "sys/fs/cgroup" / ("memory" if version == "1" else "")
    folder = top if version == "container" else top / "pod"  # the limit is that of the group above
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {400 << 10} kB\n")
    if version:
        (tmp_path / "proc/self/cgroup").write_text(f"4:memory:{group}\n" if version == "1" else f"0::{group}\n")
        folder.mkdir(parents=True)
        names = ("limit_in_bytes", "usage_in_bytes", "total_") if version == "1" else ("max", "current", "")
        (folder / f"memory.{names[0]}").write_text("max\n" if version == "unlimited" else f"{512 << 20}\n")
        (folder / f"memory.{names[1]}").write_text(f"{256 << 20}\n")
        (folder / "memory.stat").write_text(f"anon 1\n{names[2]}inactive_file {44 << 20}\n")
    assert measure_host_memory(tmp_path) == memory
