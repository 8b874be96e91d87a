"""Whatever container a model comes in, and however it is packed, its elements are the same ones."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from tiny_models import assert_same, config_of, loaded, stored

from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

NAMES = ["gpt2", "qwen2-tied"]
"""A fused projection, and a tie; other architectures make no difference to containers."""


def _zip_bin(tiny, path):
    torch.save(tiny.model.state_dict(), path / "pytorch_model.bin")


def _legacy_bin(tiny, path):
    torch.save(tiny.model.state_dict(), path / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def _sharded_bin(tiny, path):
    save_torch_state_dict(dict(tiny.model.state_dict()), path, safe_serialization=False, max_shard_size="15KB")
    assert (path / "pytorch_model.bin.index.json").is_file()


def _pt(tiny, path):
    torch.save(tiny.model.state_dict(), path / "model.pt")


def _views_of_one_storage(tiny, path):
    """As DeepSpeed and slicing leave them: transposed, offset, and many in one storage."""
    state = tiny.model.state_dict()
    flat = torch.cat([t.reshape(-1) for t in state.values()])
    views, at = {}, 0
    for name, tensor in state.items():
        views[name] = flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    first = next(name for name, t in state.items() if t.ndim == 2)
    views[first] = state[first].t().contiguous().t()
    torch.save(views, path / "pytorch_model.bin")


def _sharded_safetensors(tiny, path):
    tiny.model.save_pretrained(path, max_shard_size="20KB")
    assert (path / "model.safetensors.index.json").is_file()


def _sharded_by_the_hub_library(tiny, path):
    save_torch_state_dict(dict(tiny.model.state_dict()), path, max_shard_size="15KB")


CONTAINERS = {
    "pytorch_model.bin": _zip_bin,
    "legacy pytorch_model.bin": _legacy_bin,
    "sharded pytorch_model.bin": _sharded_bin,
    "model.pt": _pt,
    "views of one storage": _views_of_one_storage,
    "save_pretrained(max_shard_size)": _sharded_safetensors,
    "save_torch_state_dict": _sharded_by_the_hub_library,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("container", CONTAINERS)
def test_any_container_gives_the_same_ranks_and_comes_back(tiny, tmp_path, name, container):
    source, here = tiny(name), tmp_path / "source"
    shutil.copytree(source.path, here, ignore=shutil.ignore_patterns("*.safetensors"))
    CONTAINERS[container](source, here)
    reshard(here, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2, pp=2)))
    assert digest(here).digest == digest(tmp_path / "ranks").digest == digest(source.path).digest
    assert_same(loaded(tmp_path / "ranks", source.kind).state_dict(), source.model.state_dict())
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(loaded(tmp_path / "back", source.kind).state_dict(), source.model.state_dict())
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=source.path)).ok


@pytest.mark.parametrize("name", NAMES)
def test_shards_of_a_given_size_come_with_an_index_that_transformers_follows(tiny, tmp_path, name):
    source = tiny(name)
    reshard(source.path, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    reshard(tmp_path / "ranks", tmp_path / "hf", ReshardOptions(to="hf", max_shard_size=10_000))
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    held = {file.name: stored(file) for file in files}
    assert index["weight_map"] == {name: file for file, tensors in held.items() for name in tensors}
    sizes = {file: sum(t.nbytes for t in tensors.values()) for file, tensors in held.items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert len(files) > 2
    assert all(size <= 10_000 or len(held[file]) == 1 for file, size in sizes.items())
    assert_same(stored(tmp_path / "hf"), stored(source.path))
    assert_same(loaded(tmp_path / "hf", source.kind).state_dict(), source.model.state_dict())
    assert verify(tmp_path / "hf", VerifyOptions(level="full", against=source.path)).ok


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rank_files_of_a_given_size_load_too(tiny, tmp_path, name):
    source = tiny(name)
    reshard(source.path, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2), max_shard_size=10_000))
    assert len(list(tmp_path.glob("ranks/shard-00001-*"))) > 2
    assert_same(loaded(tmp_path / "ranks", source.kind).state_dict(), source.model.state_dict())
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=source.path)).ok


def payloads(path):
    """The bytes of every file of a directory that shardctl wrote; of its record, what speaks of the result."""
    files = {f.relative_to(path).as_posix(): f.read_bytes() for f in path.rglob("*") if f.is_file()}
    record = json.loads(files.pop("shardctl.json"))
    return files, {key: record[key] for key in ("digest", "layout", "mesh", "stages", "tensors", "files")}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "qwen3-tied"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Mesh.of(tp=4), Mesh.of(fsdp=3, pp=2)),
        (Mesh.of(fsdp=3), Mesh.of(tp=2, pp=2)),
        (Mesh.of(tp=2, pp=2, fsdp=2), Mesh.of(tp=4)),
        (Mesh.of(pp=2), Mesh.parse("fsdp=2,pp=2,tp=2")),
        (Mesh.of(tp=2), Mesh.of(tp=2)),
    ],
    ids=str,
)
def test_from_mesh_to_mesh_is_the_direct_conversion_byte_for_byte(tiny, tmp_path, name, first, second):
    source = tiny(name).path
    reshard(source, tmp_path / "first", ReshardOptions(mesh=first))
    reshard(tmp_path / "first", tmp_path / "second", ReshardOptions(mesh=second))
    reshard(source, tmp_path / "direct", ReshardOptions(mesh=second))
    assert payloads(tmp_path / "second") == payloads(tmp_path / "direct")


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2, fsdp=2), None], ids=["ranks", "hf"])
def test_threads_and_memory_change_no_byte(tiny, tmp_path, mesh):
    def made(**options):
        to = tmp_path / f"to-{len(list(tmp_path.iterdir()))}"
        reshard(tiny("gpt2").path, to, ReshardOptions(mesh=mesh, **options))
        return {f.relative_to(to).as_posix(): hashlib.sha256(f.read_bytes()).digest() for f in to.rglob("*.*")}

    first = made(threads=1)
    assert "shardctl.json" in first
    for options in ({"threads": 2}, {"threads": 7}, {"threads": 1, "host_memory": 100 << 20}, {"threads": 3}):
        assert made(**options) == first


def test_dp_and_cp_replicas_write_no_files(tiny, tmp_path):
    source = tiny("llama")
    reshard(source.path, tmp_path / "replicated", ReshardOptions(mesh=Mesh.of(dp=2, cp=2, tp=2)))
    files = sorted(f.name for f in tmp_path.glob("replicated/*.safetensors"))
    assert files == [f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)]
    assert_same(loaded(tmp_path / "replicated", source.kind).state_dict(), source.model.state_dict())
    assert verify(tmp_path / "replicated", VerifyOptions(level="full", against=source.path)).ok


def test_uneven_stages_as_asked(tmp_path):
    from tiny_models import save

    source = save(tmp_path / "source", {**config_of("llama"), "num_hidden_layers": 5})
    reshard(source.path, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(pp=3), stages="1,3,1"))
    layers = {
        file.name[6:11]: {name.split(".")[2] for name in stored(file) if ".layers." in name}
        for file in tmp_path.glob("ranks/*.safetensors")
    }
    assert layers == {"00001": {"0"}, "00002": {"1", "2", "3"}, "00003": {"4"}}
    assert_same(loaded(tmp_path / "ranks", source.kind).state_dict(), source.model.state_dict())
