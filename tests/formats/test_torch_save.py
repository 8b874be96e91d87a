"""Files of torch.save: what torch writes is found bit for bit, what is wrong has a verdict, and nothing runs."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from safetensors.torch import load_file
from stored_bits import bits
from torch_corpus import BAD, GOOD, file, one, tensor
from zip_builder import Entry

from shardctl.base.errors import ShardctlError, SourceError, UnsupportedError, UsageError
from shardctl.libraries import registry as formats
from shardctl.libraries.torch_save import reading as torch_save
from shardctl.options import ReshardOptions
from shardctl.storage.local import LocalSource
from shardctl.tensors.manifest import Region
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard

if TYPE_CHECKING:
    from pathlib import Path


def scan(path: Path):
    source = LocalSource(path)
    try:
        return torch_save.scan_torch_save(source)
    finally:
        source.close()


def gather(root: Path, found) -> bytes:
    """The bytes of a tensor in row-major order, fetched by the region's offset and strides alone."""
    (chunk,) = found.chunks
    assert isinstance(chunk.where, Region)
    assert chunk.box.shape == found.shape
    content = np.fromfile(root / chunk.where.file, np.uint8)
    shape, unit = found.dtype.unit_shape(found.shape), found.dtype.unit_bytes
    if 0 in shape:
        return b""
    reach = chunk.where.offset + sum((n - 1) * s for n, s in zip(shape, chunk.where.strides, strict=True)) + unit
    assert 0 <= chunk.where.offset <= reach <= len(content)
    base = content[chunk.where.offset :]
    view = as_strided(base, (*shape, unit), (*chunk.where.strides, 1), writeable=False)
    return view.tobytes()


def check(root: Path, manifest, state: dict[str, torch.Tensor]) -> None:
    """Every tensor of `state`, or the tensor it is tied to, is found with torch's own shape, dtype and bits."""
    by_name = {name: t for t in manifest.tensors.values() for name in (t.name, *t.ties)}
    assert [*by_name] == [*by_name.keys() & state.keys()] or by_name.keys() == state.keys()
    for name, value in state.items():
        found = by_name[name]
        packed = value.dtype == torch.float4_e2m1fn_x2
        shape = (*value.shape[:-1], 2 * value.shape[-1]) if packed else tuple(value.shape)
        assert (found.shape, found.dtype.torch) == (shape, str(value.dtype).removeprefix("torch.")), name
        assert gather(root, found) == bits(value), name


def noise(shape, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """Random bits: NaNs of every kind included."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty((), dtype=dtype).element_size()
    count = int(np.prod(shape)) * width
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


class Special(torch.Tensor):
    """A subclass as users write them."""


BASE = noise((6, 8))
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]
STATES = {
    "dtypes": {str(d): noise((3, 5), d, i) for i, d in enumerate(DTYPES)},
    "packed-pairs": {"f4": noise((3, 4), torch.uint8).view(torch.float4_e2m1fn_x2)},
    "scalars-and-empty": {
        "s": noise(()),
        "e": torch.empty(0),
        "e2": torch.empty(3, 0, 2),
        "h": noise((), torch.float16),
    },
    "views": {
        "transposed": BASE.t(),
        "row": BASE[2],
        "column": BASE[:, 3],
        "steps": BASE[::2, 1::3],
        "corner": BASE[4:, 5:],
        "flat": BASE.reshape(-1),
        "same": BASE,
    },
    "chunk-of-a-larger-storage": {"w": noise((4, 4)).chunk(2)[1], "permuted": noise((2, 3, 4)).permute(2, 0, 1)},
    "expanded": {"e": noise((1, 4)).expand(5, 4), "scalar": noise(()).expand(3)},
    "tied": {"embed": BASE, "head": BASE, "part": BASE[:2], "copy": BASE.clone()},
    "parameters": {
        "p": torch.nn.Parameter(noise((2, 3))),
        "frozen": torch.nn.Parameter(noise((2, 3), torch.int32), requires_grad=False),
        "buffer": torch.nn.Buffer(noise((2,))),
        "grad": noise((2, 2)).requires_grad_(),
    },
    "names": {
        "a.b": noise((1,)),
        "": noise((2,)),
        "ü\U0001f600": noise((3,)),
        "x" * 300: noise((1,)),
        "a b/c": noise((1,)),
    },
}
WRITERS = {
    "zip": {},
    "zip-protocol-4": {"pickle_protocol": 4},
    "zip-protocol-5": {"pickle_protocol": 5},
    "legacy": {"_use_new_zipfile_serialization": False},
    "legacy-protocol-1": {"_use_new_zipfile_serialization": False, "pickle_protocol": 1},
    "legacy-protocol-4": {"_use_new_zipfile_serialization": False, "pickle_protocol": 4},
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_what_torch_writes_is_found_bit_for_bit(tmp_path, state, writer):
    torch.save(state, tmp_path / "pytorch_model.bin", **writer)
    manifest = scan(tmp_path)
    check(tmp_path, manifest, state)
    assert manifest.warnings == ()


def test_without_checksums_and_with_another_alignment(tmp_path):
    from torch.utils.serialization import config

    try:
        torch.serialization.set_crc32_options(False)
        config.save.storage_alignment = 4096
        torch.save(STATES["views"], tmp_path / "pytorch_model.bin")
    finally:
        torch.serialization.set_crc32_options(True)
        config.save.storage_alignment = 64
    check(tmp_path, scan(tmp_path), STATES["views"])


def test_the_state_dict_of_a_module(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    model[2].weight = torch.nn.Parameter(model[0].weight.detach().t())
    state = model.state_dict()
    assert state._metadata
    torch.save(state, tmp_path / "model.pt")
    manifest = scan(tmp_path / "model.pt")
    check(tmp_path, manifest, dict(state))
    assert manifest.warnings == ()
    assert [*manifest.tensors] == [*state]


def test_a_subclass_is_read_as_plain_and_said_so(tmp_path):
    value = noise((2, 3)).as_subclass(Special)
    value.note = "kept by torch, not by us"
    torch.save({"w": value, "p": torch.nn.Parameter(noise((2,)))}, tmp_path / "m.pt")
    manifest = scan(tmp_path / "m.pt")
    assert gather(tmp_path, manifest.tensors["w"]) == bits(value)
    (warning,) = manifest.warnings
    assert "'w' (" in warning
    assert "Special" in warning


def test_the_same_bytes_under_two_names_are_one_tensor(tmp_path):
    torch.save(STATES["tied"], tmp_path / "m.pt")
    manifest = scan(tmp_path / "m.pt")
    assert {name: t.ties for name, t in manifest.tensors.items()} == {"embed": ("head",), "part": (), "copy": ()}
    empty = {"a": torch.empty(0), "b": torch.empty(0)}
    empty["c"] = empty["a"]
    torch.save(empty, tmp_path / "e.pt")
    assert [*scan(tmp_path / "e.pt").tensors] == ["a", "b", "c"]


def test_the_strides_of_dims_without_a_step_are_the_dense_ones(tmp_path):
    torch.save({"w": noise((4, 1)).as_strided((4, 1), (1, 77))}, tmp_path / "m.pt")
    assert scan(tmp_path / "m.pt").tensors["w"].chunks[0].where.strides == (4, 4)


# Where the weights are


@pytest.mark.parametrize("key", ["state_dict", "model", "module", "model_state_dict"])
def test_a_training_checkpoint_holds_its_weights_under_a_known_key(tmp_path, key):
    state = collections.OrderedDict(w=noise((2, 3)))
    optimizer = {"state": {0: {"exp_avg": noise((2, 3))}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]}
    torch.save({"epoch": 3, key: state, "optimizer": optimizer, "lr": np.float64(0.5)}, tmp_path / "last.pt")
    manifest = scan(tmp_path / "last.pt")
    check(tmp_path, manifest, state)
    warning, states = manifest.warnings
    assert f"under {key!r}" in warning
    assert "'epoch' (int), 'lr' (numpy" in warning
    assert "1 optimizer states such as 'optimizer.state.0.exp_avg' are left behind" in states
    assert {o.name for o in manifest.objects} == {"epoch", "optimizer", "lr"}
    assert {o.policy for o in manifest.objects} == {"drop"}


def test_what_is_no_tensor_is_named_in_one_warning(tmp_path):
    torch.save({"w": noise((2,)), **{f"n{i}": i for i in range(8)}}, tmp_path / "m.pt")
    (warning,) = scan(tmp_path / "m.pt").warnings
    assert "'n0' (int), 'n1' (int), 'n2' (int), 'n3' (int), 'n4' (int) and 3 more" in warning


# Directories


def shards(root: Path, **extra: object) -> dict[str, torch.Tensor]:
    parts = [{"a": noise((2, 3)), "b": noise((4,), torch.bfloat16)}, {"c": noise((3, 2), torch.int64)}]
    names = [f"pytorch_model-{i + 1:05d}-of-00002.bin" for i in range(2)]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, root / name)
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    index = {"metadata": {"total_size": 80}, "weight_map": weight_map, **extra}
    (root / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return parts[0] | parts[1]


def test_an_index_and_its_shards(tmp_path):
    state = shards(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    manifest = scan(tmp_path)
    check(tmp_path, manifest, state)
    assert manifest.warnings == ()
    assert [o.name for o in manifest.objects if o.policy == "carry"] == ["config.json"]


def test_shards_without_index(tmp_path):
    state = shards(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    check(tmp_path, scan(tmp_path), state)
    (tmp_path / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(SourceError, match="only 1 of the 2 files"):
        scan(tmp_path)


def test_a_shard_that_lacks_what_the_index_says(tmp_path):
    shards(tmp_path, weight_map={"a": "pytorch_model-00002-of-00002.bin"})
    with pytest.raises(SourceError, match=r"places tensor 'a' in pytorch_model-00002-of-00002\.bin, which does not"):
        scan(tmp_path)


def test_a_tie_counts_once_or_twice_in_the_total_size(tmp_path):
    tied = noise((4,))
    torch.save({"a": tied, "b": tied}, tmp_path / "pytorch_model-00001-of-00001.bin")
    for total, warnings in ((16, 0), (32, 0), (48, 1)):
        index = {
            "metadata": {"total_size": total},
            "weight_map": dict.fromkeys("ab", "pytorch_model-00001-of-00001.bin"),
        }
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        assert len(scan(tmp_path).warnings) == warnings


def test_two_checkpoints_in_one_directory(tmp_path):
    state = shards(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(SourceError, match="two checkpoints"):
        scan(tmp_path)
    check(tmp_path, scan(tmp_path / "pytorch_model.bin"), state)


def test_files_without_index_may_not_give_a_name_two_values(tmp_path):
    torch.save({"a": noise((2,))}, tmp_path / "x.pt")
    torch.save({"b": noise((3,))}, tmp_path / "y.pt")
    check(tmp_path, scan(tmp_path), {"a": noise((2,)), "b": noise((3,))})
    torch.save({"a": noise((2,)) + 1}, tmp_path / "z.pt")
    with pytest.raises(SourceError, match=r"tensor 'a' is in both x\.pt and z\.pt"):
        scan(tmp_path)


TRAINER = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth", "optimizer.bin")


def test_the_state_of_a_trainer_is_no_model(tmp_path):
    for name in TRAINER:
        torch.save({"w": noise((2,))}, tmp_path / name)
    assert not torch_save.detect_torch_save(LocalSource(tmp_path))
    torch.save({"w": noise((3,))}, tmp_path / "pytorch_model.bin")
    manifest = scan(tmp_path)
    check(tmp_path, manifest, {"w": noise((3,))})
    assert {o.name for o in manifest.objects if o.policy == "drop"} == {*TRAINER}


@pytest.mark.parametrize(
    ("name", "content", "detected"),
    [
        ("pytorch_model.bin", GOOD, True),
        ("pytorch_model.bin", b"version https://git-lfs.github.com/spec/v1", True),
        ("weights.pth", GOOD, True),
        ("tokenizer.bin", b"anything else", False),
        ("document.bin", b"PK\x03\x04" + bytes(100), False),
        ("consolidated.00.pth", GOOD, False),
        ("mp_rank_00_model_states.pt", GOOD, False),
        ("adapter_model.bin", GOOD, False),
        ("pytorch_model.bin.index.json", b"{}", True),
        ("pytorch_model.bin.incomplete", b"", True),
        ("model.safetensors", b"", False),
    ],
)
def test_a_directory_is_known_by_its_marks(tmp_path, name, content, detected):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    assert torch_save.detect_torch_save(LocalSource(tmp_path)) is detected


@pytest.mark.parametrize("name", ["m.bin", "m.pt", "m.pth", "m.ckpt", "m"])
def test_a_file_is_known_by_its_suffix_or_its_first_bytes(tmp_path, name):
    torch.save({"w": noise((2,))}, tmp_path / name)
    assert torch_save.detect_torch_save(LocalSource(tmp_path / name))
    (tmp_path / "other.txt").write_bytes(b"PK\x03\x04" + bytes(100))
    assert not torch_save.detect_torch_save(LocalSource(tmp_path / "other.txt"))


# What is wrong


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("bad", BAD, ids=lambda b: b.name)
def test_malformed_and_hostile_files_have_a_verdict(sandbox, bad):
    path = sandbox / "m.bin"
    path.write_bytes(bad.content)
    begun = time.process_time()
    with pytest.raises(bad.error) as caught:
        scan(path)
    assert time.process_time() - begun < 20
    assert type(caught.value).__mro__.index(bad.error) <= 1
    assert bad.message in caught.value.message
    assert "m.bin" in caught.value.message
    assert not caught.value.message.endswith(".")
    assert os.listdir(sandbox) == ["m.bin"]  # noqa: PTH208 - the attack would have left a file


def test_the_corpus_differs_from_a_file_that_is_good(sandbox):
    (sandbox / "m.bin").write_bytes(GOOD)
    assert gather(sandbox, scan(sandbox / "m.bin").tensors["w"]) == bytes(16)
    assert torch.load(sandbox / "m.bin", weights_only=True)["w"].tolist() == [0.0] * 4


def test_the_corpus_is_live(sandbox):
    """The attacks do what they say when something unpickles them, so that surviving them proves something."""
    attacks = [bad for bad in BAD if bad.name.startswith("os-system-")]
    assert len(attacks) == 24
    for bad in attacks:
        (sandbox / "m.bin").write_bytes(bad.content)
        with pytest.raises(Exception):  # noqa: B017, PT011 - torch runs the attack, then fails in any way
            torch.load(sandbox / "m.bin", weights_only=False)["w"].shape  # noqa: B018
        assert (sandbox / "shardctl-was-here").exists(), bad.name
        (sandbox / "shardctl-was-here").unlink()


def test_good_but_odd_files_are_read(sandbox):
    odd = {
        "no-byteorder": file(("w", tensor()), extra=(Entry("m/data/0", bytes(16)),)),
        "rebuild-v1": one(function="torch._utils\n_rebuild_tensor", rest=""),
        "torch-size": one("ctorch\nSize\n((K\x04ttR"),
        "list-of-sizes": one("](K\x04e"),
        "cuda-storage": one(storage="torch.cuda\nFloatStorage"),
        "unused-storage": file(("w", tensor()), extra=(Entry("m/data/0", bytes(16)), Entry("m/data/9", bytes(7)))),
        "empty-out-of-place": one("(K\0t", "(K\x01t", offset="K\x7f"),
    }
    for name, content in odd.items():
        (sandbox / "m.bin").write_bytes(content)
        assert [*scan(sandbox / "m.bin").tensors] == ["w"], name


def test_storages_that_are_views_of_others_as_old_files_have_them(tmp_path):
    """Torch before 0.4 wrote `view_metadata`: (key, first element, elements)."""
    import torch_corpus

    raw = torch_corpus.pickled(("w", tensor("(K\x02t").replace(b"K\x04tQ", b"K\x04(U\x01vK\x01K\x03ttQ")))
    tail = b"\x80\x02](U\x010e." + (4).to_bytes(8, "little") + np.arange(4, dtype="<f4").tobytes()
    (tmp_path / "m.bin").write_bytes(torch_corpus.legacy(raw=raw, tail=tail))
    found = scan(tmp_path / "m.bin").tensors["w"]
    assert np.frombuffer(gather(tmp_path, found), "<f4").tolist() == [1.0, 2.0]
    assert torch.load(tmp_path / "m.bin", weights_only=True)["w"].tolist() == [1.0, 2.0]


def test_errors_reach_through_the_package(tmp_path):
    (tmp_path / "m.bin").write_bytes(next(bad.content for bad in BAD if bad.name == "torchscript"))
    with pytest.raises(UnsupportedError):
        formats.scan_checkpoint(LocalSource(tmp_path / "m.bin"))


# Bounds

BOUNDED = """
import resource, sys, time
from pathlib import Path
from shardctl.base.errors import HostileError

def peak():  # ru_maxrss counts what the parent had when it forked, the status only what is of this program
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))

from shardctl.libraries.torch_save.reading import scan_torch_save
from shardctl.options import ReshardOptions
from shardctl.storage.local import LocalSource
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
begun = time.process_time()
try:
    scan_torch_save(LocalSource(Path(sys.argv[1])))
except HostileError as error:
    print(error)
    print(time.process_time() - begun, peak())
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("opcodes", [b"}K\x01Ns", b"J\xff\xff\xff\x7f"], ids=["slowest", "largest"])
def test_a_hostile_file_has_its_verdict_within_20_s_and_1_gib(tmp_path, opcodes):
    from zip_builder import build

    path = tmp_path / "m.bin"
    path.write_bytes(build(Entry("m/data.pkl", opcodes * ((120 << 20) // len(opcodes)) + b".")))
    done = subprocess.run([sys.executable, "-c", BOUNDED, path], capture_output=True, text=True, check=True)
    message, numbers = done.stdout.splitlines()
    seconds, kilobytes = map(float, numbers.split())
    assert "MiB of objects" in message
    assert seconds < 20
    assert kilobytes < 1 << 20


# Fuzz


def _seeds() -> list[bytes]:
    import io

    seeds = []
    for writer in WRITERS.values():
        buffer = io.BytesIO()
        torch.save(
            {"a": BASE.t(), "b": torch.nn.Parameter(noise((2,))), "c": noise((3,), torch.uint16)}, buffer, **writer
        )
        seeds.append(buffer.getvalue())
    return seeds


SEEDS = _seeds()


@given(st.integers(0, len(SEEDS) - 1), st.data())
@settings(max_examples=300, deadline=None)
def test_mutants_raise_nothing_but_our_own_errors_and_stay_inside_the_file(tmp_path_factory, seed, data):
    mutant = bytearray(SEEDS[seed])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(mutant) - 1))
        if data.draw(st.booleans()):
            mutant[at] = data.draw(st.integers(0, 255))
        else:
            mutant[at] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.integers(0, 9)) == 0:
        del mutant[data.draw(st.integers(1, len(mutant))) :]
    path = tmp_path_factory.getbasetemp() / "mutant.bin"
    path.write_bytes(mutant)
    try:
        manifest = scan(path)
    except ShardctlError:
        return
    for found in manifest.tensors.values():
        gather(path.parent, found)


@pytest.mark.parametrize("key", [None, "state_dict"])
def test_a_sparse_tensor_can_be_left_out(tmp_path, key):
    """The rest is converted, and a warning names what was passed over; without the option, the hint names it."""
    state = {"a.weight": torch.ones(3), "adjacency": torch.eye(4).to_sparse()}
    torch.save(state if key is None else {key: state}, tmp_path / "weights.pt")
    with pytest.raises(UnsupportedError, match="tensor 'adjacency' is sparse") as caught:
        reshard(tmp_path / "weights.pt", tmp_path / "no", ReshardOptions(to="hf"))
    assert caught.value.hint == "save its plain, full tensor instead, or leave it out with --exclude"
    with pytest.raises(UnsupportedError, match="tensor 'adjacency' is sparse"):
        reshard(tmp_path / "weights.pt", tmp_path / "no", ReshardOptions(to="hf", exclude=r"a\.weight"))
    options = ReshardOptions(to="hf", exclude="^adjacency$")
    made = reshard(tmp_path / "weights.pt", tmp_path / "out", options)
    assert any("left out by --exclude: 'adjacency'" in warning for warning in made.warnings)
    assert list(load_file(tmp_path / "out/model.safetensors")) == ["a.weight"]
    assert plan(tmp_path / "weights.pt", reshard_options=options).warnings == made.warnings
    with pytest.raises(UsageError, match=r"--exclude '\(' is not a regular expression"):
        reshard(tmp_path / "weights.pt", tmp_path / "no", ReshardOptions(to="hf", exclude="("))
