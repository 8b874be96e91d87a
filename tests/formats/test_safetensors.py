"""Whole safetensors checkpoints: which files belong, and that every element is found where the manifest says."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from safetensors_corpus import build
from stored_bits import bits

from shardctl.base.errors import SourceError, UnsupportedError, UsageError
from shardctl.libraries import registry as formats
from shardctl.libraries.safetensors import reading as safetensors
from shardctl.storage import read_bytes
from shardctl.storage.local import LocalSource

INDEX = "model.safetensors.index.json"


def scan(path, **options):
    return formats.scan_checkpoint(LocalSource(path), **options)


def gather(path, manifest, name) -> np.ndarray:
    """The units of a tensor, collected through every region; each element must be stored."""
    source = LocalSource(path)
    tensor = manifest.tensors[name]
    width = tensor.dtype.unit_bytes
    whole = np.zeros((*tensor.dtype.unit_shape(tensor.shape), width), np.uint8)
    seen = np.zeros(whole.shape[:-1], bool)
    for chunk in tensor.chunks:
        assert chunk.dtype == tensor.dtype
        assert chunk.name == name
        data = np.frombuffer(read_bytes(source, chunk.where.file), np.uint8)[chunk.where.offset :]
        shape = chunk.dtype.unit_shape(chunk.box.shape)
        if chunk.box.size:
            view = np.lib.stride_tricks.as_strided(data, (*shape, width), (*chunk.where.strides, 1), writeable=False)
            whole[chunk.box.slices()] = view
            seen[chunk.box.slices()] = True
    assert seen.all()
    return whole


def assert_holds(path, manifest, tensors):
    assert manifest.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert manifest.tensors[name].shape == tuple(tensor.shape)
        assert manifest.tensors[name].dtype.torch == str(tensor.dtype).removeprefix("torch.")
        assert gather(path, manifest, name).tobytes() == bits(tensor), name


def some_tensors(seed=0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "w": torch.randn(5, 3),
        "h": torch.randn(4, 2, 3).bfloat16(),
        "scalar": torch.tensor(3.5),
        "ids": torch.arange(7),
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "f8": torch.randn(2, 8).to(torch.float8_e4m3fn),
        "z": torch.randn(3, dtype=torch.complex64),
    }


def split(tensors, count):
    names = sorted(tensors)
    return [{n: tensors[n] for n in names[i::count]} for i in range(count)]


def save_indexed(path, tensors, count=2, stem="model"):
    weight_map = {}
    for i, part in enumerate(split(tensors, count)):
        file = f"{stem}-{i + 1:05}-of-{count:05}.safetensors"
        save_file(part, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    (path / f"{stem}.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )


# One file


def test_one_file(tmp_path):
    file = tmp_path / "anything.safetensors"
    save_file(some_tensors(), file, {"format": "pt", "note": "x"})
    (tmp_path / "config.json").write_text("{}")
    manifest = scan(file)
    assert_holds(file, manifest, some_tensors())
    assert manifest.format == "safetensors"
    assert manifest.metadata == {"format": "pt", "note": "x"}
    assert {p: f.size for p, f in manifest.files.items()} == {"anything.safetensors": file.stat().st_size}
    assert manifest.objects == ()
    assert manifest.warnings == ()


def test_a_blob_of_the_cache_is_known_by_its_content(tmp_path):
    file = tmp_path / ("ab" * 32)
    save_file(some_tensors(), file)
    assert_holds(file, scan(file), some_tensors())


def test_one_shard_is_read_alone_and_said_to_be_one(tmp_path):
    save_indexed(tmp_path, some_tensors())
    file = tmp_path / "model-00002-of-00002.safetensors"
    manifest = scan(file)
    assert_holds(file, manifest, split(some_tensors(), 2)[1])
    assert manifest.warnings == (f"{file.name} is one of 2 files; only its own tensors are read",)


def test_an_index_given_as_the_source_is_refused_with_a_hint(tmp_path):
    save_indexed(tmp_path, some_tensors())
    with pytest.raises(SourceError, match="is an index, not the weights") as raised:
        scan(tmp_path / INDEX)
    assert raised.value.hint == "give the directory that holds it"


def test_a_tensor_without_byte_strides_is_one_run(tmp_path):
    header = json.dumps({"q": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}})
    (tmp_path / "q.safetensors").write_bytes(build(header, b"\1\2\3"))
    (chunk,) = scan(tmp_path / "q.safetensors").tensors["q"].chunks
    assert chunk.where.strides == ()
    assert chunk.where.offset == 8 + len(header)
    assert chunk.box.shape == (2, 3)


# A directory


def test_a_directory_with_one_model_file(tmp_path):
    save_file(some_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "2_Dense").mkdir()
    save_file({"linear": torch.ones(2)}, tmp_path / "2_Dense" / "model.safetensors")
    manifest = scan(tmp_path)
    assert_holds(tmp_path, manifest, some_tensors())
    assert [(o.name, o.policy) for o in manifest.objects] == [
        ("2_Dense/model.safetensors", "carry"),
        ("config.json", "carry"),
    ]
    assert manifest.warnings == ()


@pytest.mark.parametrize("stem", ["model", "model.fp16", "diffusion_pytorch_model"])
def test_an_index_and_its_shards(tmp_path, stem):
    save_indexed(tmp_path, some_tensors(), 3, stem)
    manifest = scan(tmp_path)
    assert_holds(tmp_path, manifest, some_tensors())
    assert len(manifest.files) == 3
    assert manifest.metadata == {"format": "pt"}
    assert manifest.warnings == manifest.objects == ()


@pytest.mark.parametrize(
    "names", [("model-00001-of-00002", "model-00002-of-00002"), ("a", "b"), ("x-0-of-2", "x-1-of-2")]
)
def test_a_directory_without_index_is_the_union_of_its_files(tmp_path, names):
    for name, part in zip(names, split(some_tensors(), 2), strict=True):
        save_file(part, tmp_path / f"{name}.safetensors")
    assert_holds(tmp_path, scan(tmp_path), some_tensors())


def test_torch_files_beside_safetensors_are_left_behind(tmp_path):
    save_file(some_tensors(), tmp_path / "model.safetensors")
    torch.save(some_tensors(), tmp_path / "pytorch_model.bin")
    manifest = scan(tmp_path)
    assert_holds(tmp_path, manifest, some_tensors())
    assert [(o.name, o.policy) for o in manifest.objects] == [("pytorch_model.bin", "drop")]
    assert manifest.warnings == (
        "pytorch_model.bin holds weights that are not part of this checkpoint; it is left behind",
    )


def test_shards_that_the_index_does_not_name_are_warned_of(tmp_path):
    save_indexed(tmp_path, some_tensors())
    save_file({"other": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    manifest = scan(tmp_path)
    assert_holds(tmp_path, manifest, some_tensors())
    assert manifest.warnings == (
        "consolidated.safetensors holds weights that are not part of this checkpoint; it is left behind",
    )


def test_the_index_decides_between_two_copies_and_tensors_it_forgot_are_kept(tmp_path):
    tensors = {"a": torch.ones(2), "b": torch.ones(3)}
    save_indexed(tmp_path, tensors)
    second = {"a": torch.zeros(2), "b": torch.ones(3), "forgotten": torch.ones(1)}
    save_file(second, tmp_path / "model-00002-of-00002.safetensors", {"format": "pt"})
    files = scan(tmp_path).tensors["a"].files
    assert files == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    manifest = scan(tmp_path, prefer_index=True)
    assert_holds(tmp_path, manifest, tensors | {"forgotten": torch.ones(1)})
    assert manifest.warnings == (
        f"model-00002-of-00002.safetensors holds tensor 'a' and 1 others, which {INDEX} places in another file",
    )


def test_metadata_that_differs_is_warned_of(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors", {"format": "pt", "by": "x"})
    save_file({"b": torch.ones(1)}, tmp_path / "b.safetensors", {"format": "pt", "by": "y"})
    manifest = scan(tmp_path)
    assert manifest.metadata == {"format": "pt", "by": "x"}
    assert manifest.warnings == (
        "__metadata__ 'by' differs between a.safetensors and b.safetensors; that of a.safetensors is kept",
    )


def test_links_of_the_hub_cache(tmp_path):
    snapshot = tmp_path / "models--o--n" / "snapshots" / "c0ffee"
    blobs = tmp_path / "models--o--n" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    save_file(some_tensors(), blobs / ("ab" * 32))
    (snapshot / "model.safetensors").symlink_to("../../blobs/" + "ab" * 32)
    assert_holds(snapshot, scan(snapshot), some_tensors())
    with pytest.raises(SourceError, match="is a Hugging Face cache folder") as raised:
        scan(tmp_path / "models--o--n")
    assert raised.value.hint.endswith("models--o--n/snapshots/c0ffee")


# What is refused


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_missing_number_is_named_without_an_index(tmp_path, gone):
    save_indexed(tmp_path, some_tensors(), 3)
    (tmp_path / INDEX).unlink()
    (tmp_path / f"model-{gone:05}-of-00003.safetensors").unlink()
    with pytest.raises(SourceError, match=f"^model-{gone:05}-of-00003.safetensors is missing: only 2 of the 3"):
        scan(tmp_path)


def test_a_count_that_lies_is_cheap(tmp_path):
    save_file(some_tensors(), tmp_path / "m-1-of-999999999.safetensors")
    with pytest.raises(SourceError, match=r"^m-2-of-999999999\.safetensors is missing: only 1 of the 999999999"):
        scan(tmp_path)


def test_a_count_may_be_wider_than_the_number(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-000002.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "model-00002-of-000002.safetensors")
    assert_holds(tmp_path, scan(tmp_path), {"a": torch.ones(1), "b": torch.ones(1)})


def test_the_same_name_in_two_files_is_refused_if_the_first_values_differ(tmp_path):
    for rank in range(2):
        save_file(
            {**some_tensors(), "part": torch.full((64, 64), rank)}, tmp_path / f"weights-of-rank-{rank}.safetensors"
        )
    with pytest.raises(SourceError, match=r"is in both weights-of-rank-0\.safetensors and weights-of-rank-1") as raised:
        scan(tmp_path)
    assert "DCP_SHARDING_INFO" in raised.value.hint


@pytest.mark.parametrize("other", ["extra.safetensors", "model-00001-of-00001.safetensors", "mtp-1-of-1.safetensors"])
def test_files_of_different_saves_without_index_are_refused(tmp_path, other):
    save_indexed(tmp_path, some_tensors())
    (tmp_path / INDEX).unlink()
    save_file({"other": torch.ones(1)}, tmp_path / other)
    with pytest.raises(SourceError, match="files of different saves and no index") as raised:
        scan(tmp_path)
    assert other in raised.value.message


def test_one_file_and_an_index_of_others_are_two_checkpoints(tmp_path):
    save_indexed(tmp_path, some_tensors())
    save_file(some_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match=r"holds two checkpoints: model\.safetensors, and model-00001-of-00002"):
        scan(tmp_path)


def test_an_index_of_the_one_file_is_no_second_checkpoint(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map":{"a":"model.safetensors"}}')
    assert_holds(tmp_path, scan(tmp_path), {"a": torch.ones(1)})


def test_variants_are_listed(tmp_path):
    save_indexed(tmp_path, some_tensors(), stem="model.fp16")
    save_indexed(tmp_path, some_tensors(), stem="model.bf16")
    with pytest.raises(
        SourceError,
        match=r"2 variants of the model: model\.bf16\.safetensors\.index\.json, model\.fp16\.safetensors\.index\.json",
    ):
        scan(tmp_path)
    save_indexed(tmp_path, some_tensors())
    manifest = scan(tmp_path)
    assert_holds(tmp_path, manifest, some_tensors())
    (warning,) = manifest.warnings
    assert warning.startswith(
        "model.bf16-00001-of-00002.safetensors, model.bf16-00002-of-00002.safetensors, model.fp16"
    )


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_without_its_config_is_refused_with_a_hint(tmp_path, name):
    save_file(some_tensors(), tmp_path / name)
    (tmp_path / "training_args.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match="holds an adapter") as raised:
        scan(tmp_path)
    assert "put adapter_config.json beside it" in raised.value.hint


def test_an_adapter_beside_a_model_travels_along(tmp_path):
    save_file(some_tensors(), tmp_path / "model.safetensors")
    save_file({"lora_A": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    manifest = scan(tmp_path)
    assert_holds(tmp_path, manifest, some_tensors())
    assert [(o.name, o.policy) for o in manifest.objects] == [("adapter_model.safetensors", "carry")]


@pytest.mark.parametrize("suffix", [".incomplete", ".aria2", ".part"])
def test_an_unfinished_download_is_named(tmp_path, suffix):
    (tmp_path / f"model.safetensors{suffix}").write_bytes(b"")
    with pytest.raises(SourceError, match=r"model\.safetensors is not completely downloaded"):
        scan(tmp_path)
    save_file(some_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match=r"model\.safetensors is not completely downloaded"):
        scan(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n", "is a Git LFS pointer"),
        (b"<!doctype html>\n<html></html>", "is a web page"),
    ],
)
def test_what_is_no_shard_is_named(tmp_path, content, message):
    save_indexed(tmp_path, some_tensors())
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(content)
    with pytest.raises(SourceError, match=f"model-00002-of-00002.safetensors {message}"):
        scan(tmp_path)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ((), SourceError, "holds no files"),
        (("config.json", "README.md"), SourceError, "holds no checkpoint, only README.md, config.json"),
        (("model-Q4.gguf", "README.md"), UnsupportedError, r"model-Q4.gguf is a checkpoint in the format GGUF"),
        (("tf_model.h5",), UnsupportedError, "HDF5"),
        (("flax_model.msgpack",), UnsupportedError, "Flax"),
        (("model.ckpt",), UnsupportedError, "ckpt"),
    ],
)
def test_what_is_no_checkpoint_is_described(tmp_path, names, error, message):
    for name in names:
        (tmp_path / name).write_bytes(b"something")
    with pytest.raises(error, match=message) as raised:
        scan(tmp_path)
    assert raised.value.hint


def test_a_gguf_file_is_named(tmp_path):
    (tmp_path / "x").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(SourceError, match="x is a GGUF file, not a checkpoint that shardctl reads"):
        scan(tmp_path / "x")


def test_an_override_chooses_the_format(tmp_path):
    save_file(some_tensors(), tmp_path / "x.bin")
    manifest = formats.scan_checkpoint(LocalSource(tmp_path / "x.bin"), override="safetensors")
    assert_holds(tmp_path / "x.bin", manifest, some_tensors())
    with pytest.raises(UsageError, match="there is no format 'tensorstore'") as raised:
        formats.scan_checkpoint(LocalSource(tmp_path / "x.bin"), override="tensorstore")
    assert "safetensors" in raised.value.hint
    assert formats.detect_format(LocalSource(tmp_path / "x.bin")) is safetensors.FORMAT


# A distributed save

RANK = "shard-{:05}-model-{:05}-of-{:05}.safetensors"


def save_boxes(path, boxes, **extra):
    """Write a file of boxes given as {name: (tensor, offsets[, global shape])}."""
    info = {}
    for name, (_, offsets, *shape) in boxes.items():
        info[name] = {"saved_offsets": offsets} | ({"global_shape": shape[0]} if shape else {}) | extra
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
    save_file({n: t[0].contiguous() for n, t in boxes.items()}, path, metadata)


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(
    "names", [[RANK.format(1, 1, 1), RANK.format(2, 1, 1)], ["left.safetensors", "right.safetensors"]]
)
def test_boxes_of_ranks_make_whole_tensors(tmp_path, names, declared):
    rows, columns, same, scalar = torch.randn(5, 4), torch.randn(4, 6), torch.randn(3), torch.tensor(2.5)
    first = {"rows": (rows[:3], [0, 0]), "columns": (columns[:, :2], [0, 0]), "same": (same, [0]), "s": (scalar, [])}
    second = {"rows": (rows[3:], [3, 0]), "columns": (columns[:, 2:], [0, 2]), "same": (same, [0])}
    whole = {"rows": rows, "columns": columns, "same": same, "s": scalar}
    for name, boxes in zip(names, (first, second), strict=True):
        shaped = {n: (*b, list(whole[n].shape)) for n, b in boxes.items()} if declared else boxes
        save_boxes(tmp_path / name, shaped)
    manifest = scan(tmp_path)
    assert_holds(tmp_path, manifest, whole)
    assert len(manifest.tensors["same"].chunks) == 2
    assert manifest.metadata == {"format": "pt"}
    assert manifest.warnings == ()


def test_a_global_shape_shows_the_hole_of_a_missing_rank(tmp_path):
    save_boxes(tmp_path / RANK.format(1, 1, 1), {"w": (torch.ones(2, 4), [0, 0], [4, 4])})
    manifest = scan(tmp_path)
    assert manifest.tensors["w"].shape == (4, 4)
    assert [str(c.box) for c in manifest.tensors["w"].chunks] == ["[0:2, 0:4]"]


def test_a_plain_file_among_boxes_is_whole(tmp_path):
    w = torch.randn(4, 2)
    save_boxes(tmp_path / "a.safetensors", {"w": (w[:2], [0, 0])})
    save_boxes(tmp_path / "b.safetensors", {"w": (w[2:], [2, 0])})
    save_file({"w": w, "plain": torch.ones(2)}, tmp_path / "c.safetensors")
    manifest = scan(tmp_path)
    assert_holds(tmp_path, manifest, {"w": w, "plain": torch.ones(2)})
    assert [str(c.box) for c in manifest.tensors["w"].chunks] == ["[0:2, 0:2]", "[2:4, 0:2]", "[0:4, 0:2]"]


def test_an_empty_box_at_the_end_is_harmless(tmp_path):
    save_boxes(tmp_path / "a.safetensors", {"w": (torch.ones(3, 2), [0, 0])})
    save_boxes(tmp_path / "b.safetensors", {"w": (torch.ones(0, 2), [3, 0])})
    assert_holds(tmp_path, scan(tmp_path), {"w": torch.ones(3, 2)})


def test_an_entry_for_a_tensor_of_another_file_is_ignored(tmp_path):
    info = json.dumps({"w": {"saved_offsets": [0]}, "elsewhere": {"saved_offsets": [7, 7]}})
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", {"DCP_SHARDING_INFO": info})
    assert_holds(tmp_path, scan(tmp_path), {"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (
            ({"w": (torch.ones(2, 2), [0, 0], [2, 2])}, {"w": (torch.ones(2, 2), [1, 0], [2, 2])}),
            "box .1:3, 0:2. that b",
        ),
        (
            ({"w": (torch.ones(2), [0], [4])}, {"w": (torch.ones(2), [2], [5])}),
            r"\[4\] in a.safetensors but \[5\] in b",
        ),
        (
            ({"w": (torch.ones(2), [0])}, {"w": (torch.ones(2).half(), [2])}),
            "F32 of 1 dims in a.* but F16 of 1 dims in b",
        ),
        (({"w": (torch.ones(2), [0])}, {"w": (torch.ones(2, 1), [2, 0])}), "1 dims in a.* but F32 of 2 dims in b"),
        (({"w": (torch.ones(2), [0, 0])},), "2 numbers in saved_offsets, but 1 dims"),
        (({"w": (torch.ones(2), [-1])},), "saved_offsets that is not a list of sizes"),
        (({"w": (torch.ones(2), [0.5])},), "saved_offsets that is not a list of sizes"),
        (({"w": (torch.ones(2), "0")},), "saved_offsets that is not a list of sizes"),
        (({"w": (torch.ones(2), [0], [2, 2])},), "2 numbers in global_shape, but 1 dims"),
    ],
)
def test_boxes_that_contradict_are_refused(tmp_path, boxes, message):
    for name, content in zip("ab", boxes, strict=False):
        save_boxes(tmp_path / f"{name}.safetensors", content)
    with pytest.raises(SourceError, match=message):
        scan(tmp_path)


@pytest.mark.parametrize(
    ("info", "error", "message"),
    [
        ("{}", SourceError, "does not say where in the model tensor 'w' lies"),
        ("[]", SourceError, "is malformed: expected a JSON object"),
        ("{", SourceError, "is malformed"),
        ('{"w":{}}', SourceError, "no field 'saved_offsets'"),
        ('{"w":1}', SourceError, "expected a JSON object"),
        ('{"w":{"saved_offsets":[0]},"w":{"saved_offsets":[0]}}', SourceError, "'w' appears twice"),
        ('{"w":{"saved_offsets":[0],"fqn":"v"}}', UnsupportedError, "unknown field 'fqn'"),
        ('{"w":{"saved_offsets":' + "[" * 9000 + "}}", SourceError, "malformed"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_sharding_information_that_makes_no_sense_is_refused(tmp_path, info, error, message):
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", {"DCP_SHARDING_INFO": info})
    with pytest.raises(error, match=message) as raised:
        scan(tmp_path)
    assert "a.safetensors" in raised.value.message


def test_a_number_that_no_rank_has_is_a_missing_file(tmp_path):
    save_boxes(tmp_path / RANK.format(1, 1, 3), {"a": (torch.ones(1), [0])})
    save_boxes(tmp_path / RANK.format(2, 3, 3), {"b": (torch.ones(1), [0])})
    with pytest.raises(SourceError, match=r"model-00002-of-00003\.safetensors is missing"):
        scan(tmp_path)


WRITER = """
    import os
    import sys
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, Replicate, distribute_tensor, init_device_mesh

    path, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = {"rows": torch.randn(5, 3), "columns": torch.randn(2, 6).bfloat16(), "same": torch.randn(4)}
    placed = {"rows": Shard(0), "columns": Shard(1), "same": Replicate()}
    state = {name: distribute_tensor(tensor, mesh, [placed[name]]) for name, tensor in whole.items()}
    writer = dcp.HuggingFaceStorageWriter(path, fqn_to_index_mapping={"rows": 1, "columns": 2, "same": 2},
                                          save_distributed=True)
    dcp.save(state, storage_writer=writer)
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo that still end now and then abort an ordinary exit
"""


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_what_torch_saves_on_two_ranks(tmp_path, free_port):
    program = textwrap.dedent(WRITER)
    ranks = [subprocess.Popen([sys.executable, "-c", program, tmp_path, str(rank), str(free_port)]) for rank in (0, 1)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    torch.manual_seed(0)
    whole = {"rows": torch.randn(5, 3), "columns": torch.randn(2, 6).bfloat16(), "same": torch.randn(4)}
    manifest = scan(tmp_path)
    assert_holds(tmp_path, manifest, whole)
    assert [str(c.box) for c in manifest.tensors["rows"].chunks] == ["[0:3, 0:3]", "[3:5, 0:3]"]
    assert set(manifest.files) == {RANK.format(r, m, 2) for r in (1, 2) for m in (1, 2)}


@pytest.mark.filterwarnings("ignore")
def test_what_torch_saves_from_one_process(tmp_path):
    import torch.distributed.checkpoint as dcp

    mapping = {"w": 1, "h": 2, "scalar": 1, "ids": 2}
    tensors = {name: some_tensors()[name] for name in mapping}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping=mapping)
    dcp.save(dict(tensors), storage_writer=writer, no_dist=True)
    assert (tmp_path / INDEX).exists()
    manifest = scan(tmp_path)
    assert_holds(tmp_path, manifest, tensors)
    assert manifest.metadata == {"format": "pt"}


@pytest.mark.filterwarnings("ignore")
def test_torch_reads_the_boxes_as_we_do(tmp_path):
    import torch.distributed.checkpoint as dcp

    w = torch.randn(5, 4)
    boxes = [([0, 0], w[:2, :]), ([2, 0], w[2:, :1]), ([2, 1], w[2:, 1:])]
    for i, (offsets, part) in enumerate(boxes):
        save_boxes(tmp_path / RANK.format(i + 1, 1, 1), {"w": (part, offsets, [5, 4])})
    state = {"w": torch.zeros(5, 4)}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(state["w"], w)
    assert_holds(tmp_path, scan(tmp_path), {"w": w})
