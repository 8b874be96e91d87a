"""Checkpoints of torch.distributed.checkpoint: what torch wrote is found bit for bit; what is wrong has a verdict."""

from __future__ import annotations

import collections
import io
import math
import os
import pickle
import re
import shutil
import time
import zipfile
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_builder import Runs, changed
from stored_bytes import check, scan
from torch.distributed.checkpoint.metadata import TensorProperties

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import CoverageError, HostileError, SourceError, UnsupportedError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.libraries.dcp import items
from shardctl.libraries.dcp.items import ItemReader
from shardctl.libraries.dcp.metadata import StoredItem
from shardctl.libraries.dcp.save import _check_disjoint
from shardctl.libraries.torch_save.item_writer import encode_tensor
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.storage.local import LocalSource
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Region
from shardctl.verbs.reshard import reshard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FIXTURES = Path(__file__).parents[2] / "fixtures" / "dcp"
WHOLE = ("fsdp2", "tp", "fsdp-tp", "fsdp1", "flat", "alone", "accelerate", "kinds", "tied", "hf", "hf-whole")
TRAINED = ("fsdp2", "fsdp-tp", "flat", "accelerate")


def whole(name: str) -> dict:
    """What torch made of the checkpoint when it was written."""
    return torch.load(FIXTURES / f"{name}.whole.pt", weights_only=True)


@pytest.mark.parametrize("name", WHOLE)
def test_every_weight_is_what_torch_makes_of_it(name):
    manifest = scan(FIXTURES / name)
    assert manifest.format == ("safetensors" if name.startswith("hf") else "dcp")
    assert manifest.warnings == ()
    check(FIXTURES / name, manifest.tensors, whole(name)["weights"])


@pytest.mark.parametrize("name", TRAINED)
def test_every_optimizer_state_is_what_torch_makes_of_it(name):
    optimizer = whole(name)["optimizer"]
    training = scan(FIXTURES / name).training
    expected = {
        f"optimizer.{state}.{parameter}": value
        for parameter, states in optimizer["state"].items()
        for state, value in states.items()
    }
    check(FIXTURES / name, training.states, expected)
    assert training.step == 2
    groups = {group.parameters[0]: group for group in training.groups}
    for group in optimizer["param_groups"]:
        found = groups[group["params"][0]]
        assert sorted(found.parameters) == sorted(group["params"])
        assert found.settings == {key: value for key, value in group.items() if key != "params"}


def test_items_of_one_length_that_are_laid_out_differently_are_each_read_as_they_are(tmp_path):
    plain = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    state = {"a": plain, "b": plain.t(), "c": plain + 1, "d": (plain + 2).t()}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    manifest = scan(tmp_path / "saved")
    assert {t.chunks[0].where.strides for t in manifest.tensors.values()} == {(32, 4), (4, 32)}
    check(tmp_path / "saved", manifest.tensors, state)


@pytest.mark.parametrize("near", [items._HEADER_READ_SPAN_BYTES, 2000, 0])
def test_the_last_of_many_items_is_compared_with_the_first(tmp_path, monkeypatch, near):
    monkeypatch.setattr(items, "_HEADER_READ_SPAN_BYTES", near)
    plain = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    state = {f"a{n}": plain + n for n in range(5)} | {"b": plain.t()}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    manifest = scan(tmp_path / "saved")
    assert manifest.tensors["b"].chunks[0].where.strides == (4, 32)
    check(tmp_path / "saved", manifest.tensors, state)


# What is wrong has a verdict


def first(metadata, key="model.norm.weight"):
    """The place of a tensor of the fixture `tp`."""
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def moved(**fields):
    def change(metadata):
        for name, value in fields.items():
            setattr(first(metadata), name, value)

    return change


def overlapping(metadata):
    tensor = metadata.state_dict_metadata["lm_head.weight"]
    tensor.chunks[1].offsets = torch.Size((tensor.chunks[1].offsets[0] - 1, 0))


def outside(metadata):
    tensor = metadata.state_dict_metadata["lm_head.weight"]
    tensor.chunks[1].offsets = torch.Size((40, 0))


def twice(metadata):
    """Two entries share the bytes of one."""
    info = first(metadata)
    other = first(metadata, "model.layers.0.input_layernorm.weight")
    other.relative_path, other.offset, other.length = info.relative_path, info.offset, info.length


def swapped(metadata):
    """Metadata of another save: what is at the place has another shape."""
    one, two = first(metadata), first(metadata, "model.embed_tokens.weight")
    for field in ("relative_path", "offset", "length"):
        a, b = getattr(one, field), getattr(two, field)
        setattr(one, field, b)
        setattr(two, field, a)


def nowhere(metadata):
    del metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == "model.norm.weight")]


def other_dtype(metadata):
    metadata.state_dict_metadata["model.norm.weight"].properties.dtype = torch.int32


def unknown_dtype(metadata):
    metadata.state_dict_metadata["model.norm.weight"].properties.dtype = torch.complex128


def boxless(metadata):
    metadata.state_dict_metadata["model.norm.weight"].chunks = []


def no_storage(metadata):
    metadata.storage_data = None


def with_planner(metadata):
    metadata.planner_data = collections.Counter("abc")


DAMAGED = {
    "absolute path": (moved(relative_path="/etc/passwd"), HostileError, "not the name of a file beside it"),
    "path upwards": (moved(relative_path="../tp/__0_0.distcp"), HostileError, "not the name of a file beside it"),
    "windows path": (moved(relative_path="..\\__0_0.distcp"), HostileError, "not the name of a file beside it"),
    "folder": (moved(relative_path="a/__0_0.distcp"), HostileError, "not the name of a file beside it"),
    "no such file": (moved(relative_path="__7_0.distcp"), SourceError, "__7_0.distcp is missing"),
    "offset too far": (moved(offset=1 << 40), SourceError, "should reach byte"),
    "negative offset": (moved(offset=-1), SourceError, "is malformed"),
    "length too long": (moved(length=1 << 40), SourceError, "should reach byte"),
    "length too short": (moved(length=100), SourceError, "zip archive"),
    "length is a flag": (moved(length=True), SourceError, "is malformed"),
    "inside another": (moved(offset=100, length=900), HostileError, "lies inside another entry"),
    "overlapping boxes": (overlapping, HostileError, "overlap in [23:24, 0:16]"),
    "box outside": (outside, SourceError, "is not inside the shape [48, 16]"),
    "one item twice": (twice, HostileError, "lies inside another entry"),
    "of another save": (swapped, SourceError, "but the metadata says"),
    "item without a place": (nowhere, SourceError, "does not say where 'model.norm.weight'"),
    "another type": (other_dtype, SourceError, "is F32 [16], but the metadata says I32 [16]"),
    "a type of torch alone": (unknown_dtype, UnsupportedError, "torch.complex128, which safetensors cannot hold"),
    "no box": (boxless, SourceError, "without a box"),
    "no storage": (no_storage, UnsupportedError, "a storage of its own"),
    "a planner's class": (with_planner, UnsupportedError, "mentions collections.Counter"),
    "zstd": (moved(transform_descriptors=["stream.zstd/1"]), UnsupportedError, "stream.zstd/1"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_metadata_that_lies_is_refused(name, tmp_path):
    change, error, message = DAMAGED[name]
    with pytest.raises(error) as caught:
        scan(changed(FIXTURES / "tp", tmp_path / "bad", change))
    assert message in caught.value.message
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("where", ["whole", "planner", "checkpoint id", "offset"])
def test_metadata_that_runs_code_is_refused_and_does_not_run(where, protocol, tmp_path):
    mark = tmp_path / "ran"

    def change(metadata):
        attack = Runs(os.system, f"touch {mark}")
        if where == "whole":
            return attack
        if where == "planner":
            metadata.planner_data = {"a": attack}
        elif where == "checkpoint id":
            metadata.storage_meta.checkpoint_id = attack
        else:
            first(metadata).offset = attack
        return None

    with pytest.raises(HostileError, match="runs code"):
        scan(changed(FIXTURES / "tp", tmp_path / "bad", change, protocol))
    assert not mark.exists()


def test_getattr_chains_are_refused(tmp_path):
    chain = Runs(getattr, Runs(getattr, dict, "__class__"), "__subclasses__")
    with pytest.raises(HostileError):
        scan(changed(FIXTURES / "tp", tmp_path / "bad", lambda _: chain))


def test_an_item_that_runs_code_is_refused_and_does_not_run(tmp_path):
    """An item's own pickle, not the metadata's."""
    mark = tmp_path / "ran"
    place = tmp_path / "bad"
    buffer = io.BytesIO()
    torch.save(Runs(os.system, f"touch {mark}"), buffer)

    def change(metadata):
        info = first(metadata)
        info.relative_path, info.offset, info.length = "__9_0.distcp", 0, buffer.getbuffer().nbytes

    changed(FIXTURES / "tp", place, change)
    (place / "__9_0.distcp").write_bytes(buffer.getvalue())
    with pytest.raises(HostileError, match="runs code"):
        scan(place)
    assert not mark.exists()


def test_a_setting_that_runs_code_is_refused_and_does_not_run(tmp_path):
    mark, place = tmp_path / "ran", tmp_path / "bad"
    buffer = io.BytesIO()
    torch.save(Runs(os.system, f"touch {mark}"), buffer)

    def change(metadata):
        info = first(metadata, "optim.param_groups.0.lr")
        info.relative_path, info.offset, info.length = "__9_0.distcp", 0, buffer.getbuffer().nbytes

    changed(FIXTURES / "fsdp2", place, change)
    (place / "__9_0.distcp").write_bytes(buffer.getvalue())
    with pytest.raises(HostileError, match="runs code"):
        scan(place)
    assert not mark.exists()


def test_a_save_that_did_not_finish_is_named(tmp_path):
    place = shutil.copytree(FIXTURES / "fsdp2", tmp_path / "bad")
    (place / ".metadata").unlink()
    with pytest.raises(SourceError, match=r"__0_0.distcp is there, but .metadata is not") as caught:
        scan(place)
    assert "did not finish" in caught.value.hint


def test_a_box_that_no_chunk_covers_is_named(tmp_path):
    def change(metadata):
        metadata.state_dict_metadata["lm_head.weight"].chunks.pop(1)

    place = changed(FIXTURES / "tp", tmp_path / "bad", change)
    shutil.copy(FIXTURES / "config.json", place)
    with pytest.raises(
        CoverageError, match=r"lm_head.weight \[48, 16\]: elements \[24:48, 0:16\] are stored in no file"
    ):
        reshard(place, tmp_path / "out")


def test_the_metadata_of_ranks_that_save_alone_must_agree(tmp_path):
    place = shutil.copytree(FIXTURES / "alone", tmp_path / "bad")
    path = place / "__1.metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - our own fixture
    metadata.state_dict_metadata["model.model.norm.weight"].size = torch.Size((17,))
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        SourceError, match=r"'model.model.norm.weight' is float32 \[16\] for one rank and float32 \[17\]"
    ):
        scan(place)


def test_copies_of_ranks_that_save_alone_must_be_equal(tmp_path):
    place = shutil.copytree(FIXTURES / "alone", tmp_path / "bad")
    shutil.copy(FIXTURES / "config.json", place)
    (chunk, _) = scan(place).tensors["model.norm.weight"].chunks
    with (place / chunk.where.file).open("r+b") as file:
        file.seek(chunk.where.offset)
        file.write(b"\x01")
    with pytest.raises(SourceError, match=r"model.norm.weight"):
        reshard(place, tmp_path / "out")


def test_several_checkpoints_in_one_folder_are_not_guessed_between(tmp_path):
    shutil.copytree(FIXTURES / "tp", tmp_path / "pytorch_model_fsdp_0")
    shutil.copytree(FIXTURES / "tp", tmp_path / "pytorch_model_fsdp_1")
    with pytest.raises(SourceError, match="holds several checkpoints: pytorch_model_fsdp_0, pytorch_model_fsdp_1"):
        scan(tmp_path)


def test_an_optimizer_alone_is_no_model():
    with pytest.raises(SourceError, match="holds states of an optimizer, and no weights") as caught:
        scan(FIXTURES / "accelerate" / "optimizer_0")
    assert "directory above" in caught.value.hint


def test_nothing_of_torch_1_is_mistaken(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"\x80\x02ctorch.distributed._shard.checkpoint.metadata\nMetadata\n.")
    with pytest.raises(UnsupportedError, match=r"torch 1\.12 or 1\.13"):
        scan(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"<html>", b"\0" * 64, b"\x80\x04"]
)
def test_metadata_that_is_none_is_named(content, tmp_path):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(SourceError, match=r"\.metadata"):
        scan(tmp_path)


# What other versions and trainers write


def old_classes(path: Path) -> None:
    """The metadata as torch 2.1 wrote it: other modules, no version, no storage meta, no `index` hints."""
    content = path.read_bytes()
    metadata = pickle.loads(content)  # noqa: S301 - our own fixture
    for name in ("version", "storage_meta"):
        delattr(metadata, name)
    old = pickle.dumps(metadata, 2)
    module = b"ctorch.distributed.checkpoint.metadata\n"
    assert old.count(module + b"TensorProperties\n") == old.count(module + b"_MEM_FORMAT_ENCODING\n") == 1
    former = b"ctorch.distributed._shard.sharded_tensor.metadata\n"
    for name, was in (
        (b"TensorProperties\n", b"TensorProperties\n"),
        (b"_MEM_FORMAT_ENCODING\n", b"MEM_FORMAT_ENCODING\n"),
    ):
        old = old.replace(module + name, former + was)
    path.write_bytes(old)


def test_the_classes_of_torch_2_1_are_known(tmp_path):
    place = shutil.copytree(FIXTURES / "fsdp2", tmp_path / "old")
    old_classes(place / ".metadata")
    manifest = scan(place)
    check(place, manifest.tensors, whole("fsdp2")["weights"])
    assert manifest.training.writer == "torch.distributed.checkpoint"


def test_a_save_of_torch_2_15_is_read_and_written_for_older_versions(tmp_path, monkeypatch):
    """TensorProperties has a sixth value since 2.15, the strides, with which older versions end in a ValueError."""
    former = TensorProperties.__getstate__
    wanted = {"a": torch.arange(8.0).reshape(2, 4), "b": torch.ones(3).bfloat16()}
    with monkeypatch.context() as patched:
        patched.setattr(TensorProperties, "__getstate__", lambda self: (*former(self)[:5], (4, 1)))
        dcp.save(wanted, checkpoint_id=tmp_path / "new", no_dist=True)
    check(tmp_path / "new", scan(tmp_path / "new").tensors, wanted)
    reshard(tmp_path / "new", tmp_path / "old", ReshardOptions(to="dcp"))
    found = {f"model.{name}": torch.empty_like(tensor) for name, tensor in wanted.items()}
    dcp.load(found, checkpoint_id=tmp_path / "old", no_dist=True)
    assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("protocol", range(2, 6))  # before, classes without a __reduce__ could not be built like this
def test_every_protocol_is_read(protocol, tmp_path):
    place = changed(FIXTURES / "fsdp-tp", tmp_path / "same", lambda _: None, protocol)
    check(place, scan(place).tensors, whole("fsdp-tp")["weights"])


def test_without_the_planners_data_keys_are_names(tmp_path):
    def change(metadata):
        metadata.planner_data = None

    manifest = scan(changed(FIXTURES / "tp", tmp_path / "bare", change))
    check(tmp_path / "bare", manifest.tensors, whole("tp")["weights"])


def test_a_trainers_folder_is_read_with_what_is_beside_it(tmp_path):
    place = shutil.copytree(FIXTURES / "accelerate", tmp_path / "checkpoint-2")
    (place / "trainer_state.json").write_text("{}")
    for name in ("scheduler.pt", "training_args.bin", "rng_state_0.pth"):
        torch.save(Runs(os.system, "false"), place / name)
    shutil.copy(FIXTURES / "config.json", place)
    manifest = scan(place)
    assert manifest.format == "dcp"
    assert manifest.warnings == ()
    assert sorted(manifest.files) == [
        *("optimizer_0/__0_0.distcp", "optimizer_0/__1_0.distcp"),
        *("pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/__1_0.distcp"),
    ]
    policies = {side.name: side.policy for side in manifest.objects}
    assert policies == {
        "config.json": "carry",
        "rng_state_0.pth": "drop",
        "scheduler.pt": "drop",
        "trainer_state.json": "carry",
        "training_args.bin": "drop",
    }


def saved(state: dict, place: Path) -> Path:
    """A checkpoint that this one process writes."""
    dcp.save(state, checkpoint_id=place, no_dist=True)
    return place


def weights() -> dict[str, torch.Tensor]:
    return whole("tp")["weights"]


WRAPPED = {
    "DistributedDataParallel": lambda name: f"module.{name}",
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "checkpointed layers": lambda name: re.sub(r"(layers\.\d+)\.", r"\1._checkpoint_wrapped_module.", name),
    "all of them": lambda name: f"module._orig_mod.{re.sub(r'(self_attn)', r'_fsdp_wrapped_module.self_attn', name)}",
    "a trainer's attribute": lambda name: f"policy.net.{name}",
}


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_names_are_known_in_the_wrappers_of_trainers(wrapping, tmp_path):
    rename = WRAPPED[wrapping]
    place = saved({"model": {rename(name): value for name, value in weights().items()}}, tmp_path / "wrapped")
    with open_checkpoint(place, SourceOptions(config=FIXTURES / "config.json")) as checkpoint:
        assert checkpoint.model_error is None
        check(place, checkpoint.manifest.tensors, weights())
        assert all(tensor.spelling == () for tensor in checkpoint.manifest.tensors.values())


def test_a_model_beside_others_is_found_and_the_others_are_named(tmp_path):
    ema = {name: value + 1 for name, value in weights().items()}
    place = saved({"model": weights(), "ema": ema, "seen": torch.tensor(3), "epoch": 4}, tmp_path / "two")
    manifest = scan(place)
    check(place, manifest.tensors, weights())
    (warning,) = manifest.warnings
    assert "left behind: 'ema." in warning
    assert warning.endswith("and 19 more")


def test_an_optimizer_that_numbers_other_parameters_is_left_behind(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    state = {"model": {"a.weight": torch.zeros(2, 3)}, "optimizer": optimizer.state_dict()}
    manifest = scan(saved(state, tmp_path / "numbers"))
    assert list(manifest.tensors) == ["a.weight"]
    assert not manifest.training.states
    assert "3 optimizer states such as 'optimizer.state.0.step' are left behind" in manifest.warnings[0]


def test_the_optimizers_copies_of_weights_are_taken_where_they_are_meant(tmp_path):
    """FusedAdam of Transformer Engine keeps them among its states (TransformerEngine#2795)."""
    full = {name: torch.arange(6.0).reshape(2, 3) / 7 for name in ("a.weight", "b.weight")}
    states = {name: {"exp_avg": value * 0.5, "master_param": value} for name, value in full.items()}
    state = {
        "model": {name: value.bfloat16() for name, value in full.items()} | {"scale": torch.ones(2)},
        "optimizer": {"state": states, "param_groups": [{"lr": 0.1, "params": list(full)}]},
    }
    place = saved(state, tmp_path / "fused")
    for weights in (None, "module"):
        found = scan(place, weights)
        check(place, found.tensors, state["model"])
        assert len(found.training.states) == 4
    assert any("fp32 copies of 2 weights, which --weights master reads" in text for text in scan(place).training.notes)
    found = scan(place, "master")
    check(place, found.tensors, {**full, "scale": torch.ones(2)})
    assert found.training.states.keys() == {f"optimizer.exp_avg.{name}" for name in full}
    assert "2 weights are the optimizer's fp32 copies of them" in found.training.notes
    states["a.weight"]["master_param"] = torch.ones(3)
    with pytest.raises(SourceError, match=r"copy of a.weight is \[3\], but the weight is \[2, 3\]"):
        scan(saved(state, tmp_path / "other"), "master")


def test_a_group_of_any_number_of_parameters_keeps_them_all(tmp_path):
    """Their names are one item, which for a mixture of experts has megabytes."""
    names = [f"model.layers.{layer}.mlp.experts.{n}.down_proj.weight" for layer in range(61) for n in range(256)]
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": names}, {"lr": 0.2, "params": ["a"]}]
    state = {"model": {"a": torch.zeros(2)}, "optim": {"state": {"a": {"step": 1.0}}, "param_groups": groups}}
    training = scan(saved(state, tmp_path / "many")).training
    assert [group.parameters for group in training.groups] == [tuple(names), ("a",)]
    assert [dict(group.settings) for group in training.groups] == [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2}]


def test_a_group_whose_parameters_are_not_named_has_none(tmp_path):
    groups = [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": 7}]
    state = {"model": {"a": torch.zeros(2)}, "optim": {"state": {"a": {"step": 1.0}}, "param_groups": groups}}
    training = scan(saved(state, tmp_path / "numbers")).training
    assert [(group.parameters, group.settings["lr"]) for group in training.groups] == [((), 0.1), ((), 0.2)]


@pytest.mark.parametrize("step", [math.inf, math.nan, 1e300, -1.0, 0.5], ids=str)
def test_a_step_that_is_none_is_not_known(tmp_path, step):
    optimizer = {"state": {"a": {"step": torch.tensor(step, dtype=torch.float64)}}, "param_groups": [{"params": ["a"]}]}
    state = {"model": {"a": torch.zeros(2)}, "optim": optimizer}
    assert scan(saved(state, tmp_path / "odd")).training.step is None


def test_a_number_that_a_key_only_ends_in_step_for_is_not_that_of_steps_done(tmp_path):
    state = {"model": {"a": torch.zeros(2)}, "loader": {"last_step": 5, "eval_step": 100}, "train_state": {"step": 7}}
    assert scan(saved(state, tmp_path / "steps")).training.step == 7


def test_states_that_are_no_tensors_are_said_to_be_that(tmp_path):
    optimizer = {"state": {"a": {"step": 3, "RMS": 0.5}}, "param_groups": [{"params": ["a"]}]}
    manifest = scan(saved({"model": {"a": torch.zeros(2)}, "optim": optimizer}, tmp_path / "adafactor"))
    assert manifest.warnings == ("1 optimizer states such as 'optim.state.a.RMS' are left behind: they are no tensors",)
    assert manifest.training.step == 3


def test_settings_that_could_not_be_written_again_are_not_known(tmp_path):
    groups = [{"lr": 0.1, "name": "\ud800", "huge": 10**300, "params": ["a"]}]
    state = {"model": {"a": torch.zeros(2)}, "optim": {"state": {"a": {"step": 1.0}}, "param_groups": groups}}
    (group,) = scan(saved(state, tmp_path / "odd")).training.groups
    assert (group.parameters, dict(group.settings)) == (("a",), {"lr": 0.1, "name": None, "huge": None})


@pytest.mark.parametrize("order", [list, sorted])
def test_parameters_of_a_flattened_optimizer_are_grouped_by_their_settings(order, tmp_path):
    """The group of the first weight is the first, in whatever order their settings were saved."""
    rates = {"a.weight": 0.1, "a.bias": 0.2, "b.weight": 0.1}
    optimizer = {f"param_groups.{name}.lr": rates[name] for name in order(rates)}
    optimizer |= {f"state.{name}.exp_avg": torch.zeros(2) for name in rates}
    state = {"model": {name: torch.zeros(2) for name in rates}, "optimizer": optimizer}
    training = scan(saved(state, tmp_path / "flattened")).training
    assert [(group.parameters, dict(group.settings)) for group in training.groups] == [
        (("a.weight", "b.weight"), {"lr": 0.1}),
        (("a.bias",), {"lr": 0.2}),
    ]


def test_an_item_of_more_than_four_gigabytes_is_found(tmp_path):
    """Sizes and offsets beyond 32 bits, in a file with a hole in place of the data."""
    shape = ((1 << 30) + 3,)
    head, tail = encode_tensor(BY_NAME["F32"], shape)
    nbytes = 4 * shape[0]
    with (tmp_path / "__0_0.distcp").open("wb") as file:
        file.write(head)
        file.seek(nbytes, io.SEEK_CUR)
        file.write(tail)
    item = StoredItem("__0_0.distcp", 0, len(head) + nbytes + len(tail))
    with closing(LocalSource(tmp_path)) as source:
        assert ItemReader(source).region(item, "big", BY_NAME["F32"], shape) == Region("__0_0.distcp", len(head), (4,))
    with zipfile.ZipFile(tmp_path / "__0_0.distcp") as archive:
        assert archive.getinfo("archive/data/0").file_size == nbytes
        assert archive.read("archive/version") == b"3\n"


def test_the_flavour_of_safetensors_keeps_scalars_and_integers(tmp_path):
    """Which torch's own consolidation turns into 0.0, or refuses."""
    state = {
        "scalar": torch.tensor(3.5),
        "count": torch.tensor(7),
        "ids": torch.arange(5),
        "flags": torch.tensor([True]),
    }
    writer = dcp.HuggingFaceStorageWriter(
        str(tmp_path), save_distributed=True, fqn_to_index_mapping=dict.fromkeys(state, 1)
    )
    dcp.save(state, storage_writer=writer, no_dist=True)
    manifest = scan(tmp_path)
    assert manifest.format == "safetensors"
    check(tmp_path, manifest.tensors, state)


def test_flat_parameters_are_refused_with_a_reason(tmp_path):
    place = saved({"model": {"_flat_param": torch.zeros(9), "layers.0._flat_param": torch.zeros(9)}}, tmp_path / "flat")
    with pytest.raises(UnsupportedError, match="in one row, but not their names and order"), open_checkpoint(place):
        pass


def test_flat_parameters_of_a_known_model_are_taken_apart(tmp_path):
    pickled = FIXTURES.parent / "pickled_ranks"
    weights = torch.load(pickled / "local.whole.pt", weights_only=True)["weights"]
    flat = {"weight_of_rank_0": torch.zeros(3)}  # what use_orig_params=True leaves beside them
    for unit in ("model.layers.0.", "model.layers.1.", ""):
        inside = [
            t.flatten() for name, t in weights.items() if name.startswith(unit) and (unit or "layers" not in name)
        ]
        flat[f"{unit}_flat_param"] = torch.cat(inside)
    place = saved({"model": flat}, tmp_path / "flat")
    with open_checkpoint(place, SourceOptions(config=pickled / "flat.json")) as checkpoint:
        check(place, checkpoint.manifest.tensors, weights)


def test_a_folder_of_several_saves_says_which_to_give(tmp_path):
    for step in (1, 2):
        shutil.copytree(FIXTURES / "tp", tmp_path / f"step-{step}")
    with pytest.raises(SourceError, match="in folders of their own: step-1, step-2") as caught:
        scan(tmp_path)
    assert caught.value.hint == f"give one of them, such as {tmp_path}/step-2"


def test_two_optimizers_of_one_model_are_not_guessed_between(tmp_path):
    osd = {"state": {"a.weight": {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1, "params": ["a.weight"]}]}
    state = {"model": {"a.weight": torch.zeros(2)}, "optim": osd, "optimizer": osd}
    with pytest.raises(SourceError, match=r"are both the state exp_avg of a\.weight"):
        scan(saved(state, tmp_path / "two"))


def test_boxes_in_an_order_that_takes_forever_are_refused_soon(tmp_path):
    """Thin boxes side by side, each a row below the last, and two that go past all of them: no dim tells them apart."""

    def change(metadata):
        tensor = metadata.state_dict_metadata["lm_head.weight"]
        count = 6_000
        tensor.size = torch.Size((2 * count, 2 * count))
        chunk = type(tensor.chunks[0])
        tensor.chunks = [chunk(torch.Size((n, 2 * n)), torch.Size((count, 1))) for n in range(count)]
        tensor.chunks.append(chunk(torch.Size((0, 1)), torch.Size((1, 2 * count - 1))))
        tensor.chunks.append(chunk(torch.Size((2 * count - 2, 0)), torch.Size((1, 2 * count - 2))))

    place = changed(FIXTURES / "tp", tmp_path / "slow", change)
    start = time.process_time()
    with pytest.raises(HostileError, match="in an unusual order"):
        scan(place)
    assert time.process_time() - start < 20


def test_boxes_of_many_layers_and_experts_are_told_apart_soon():
    """As Megatron-LM stacks them: 30,000 boxes, of which each dim alone tells a few hundred apart."""
    boxes = [Box((layer, expert, 0), (1, 1, 4)) for expert in range(300) for layer in range(100)]
    assert _check_disjoint("experts", tuple(boxes), 1_000_000) == len(boxes)
    with pytest.raises(HostileError, match="overlap"):
        _check_disjoint("experts", (*boxes, Box((99, 299, 3), (1, 1, 1))), 1_000_000)


def test_boxes_of_which_only_one_can_be_told_apart_at_a_time_are_refused_soon():
    count = 3_000  # rows and columns in turn, each as long as what the ones before have left
    boxes = []
    for n in range(count):
        boxes.append(Box((n, n), (1, count - n)))
        boxes.append(Box((n + 1, n), (count - n, 1)))
    start = time.process_time()
    with pytest.raises(HostileError, match="in an unusual order"):
        _check_disjoint("spiral", tuple(boxes), 1_000_000)
    assert time.process_time() - start < 20


def test_places_that_do_not_fit_their_keys_are_not_believed(tmp_path):
    def change(metadata):
        metadata.planner_data = dict.fromkeys(metadata.planner_data, ("model",))

    manifest = scan(changed(FIXTURES / "tp", tmp_path / "odd", change))
    check(tmp_path / "odd", manifest.tensors, weights())


@pytest.mark.parametrize("name", ["tp", "flat", "alone"])
def test_damaged_files_have_verdicts_and_never_a_traceback(name, tmp_path):
    place = shutil.copytree(FIXTURES / name, tmp_path / "damaged")
    files = sorted(path for path in place.iterdir() if path.name != "config.json")
    verdicts = collections.Counter()
    for seed in range(60):
        random = Random(seed)
        path = random.choice(files)
        whole_file = path.read_bytes()
        content = bytearray(whole_file)
        for _ in range(random.choice([1, 2, 5])):
            at = random.randrange(len(content))
            content[at : at + random.choice([0, 1, 1, 9])] = random.randbytes(random.choice([0, 1, 1, 9]))
        path.write_bytes(content)
        try:
            scan(place)
            verdicts["read"] += 1
        except SourceError:
            verdicts["refused"] += 1
        path.write_bytes(whole_file)
    assert verdicts["refused"] > verdicts["read"]


def test_safetensors_inside_distcp_are_not_supported_and_not_called_hostile(tmp_path):
    """What torch's own writer does if it is told to; its metadata says that every tensor begins at byte 0."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

    writer = FileSystemWriter(tmp_path / "save", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"a": torch.arange(12.0), "b": torch.ones(5)}, storage_writer=writer, no_dist=True)
    with pytest.raises(UnsupportedError, match=r"is not what torch\.save writes") as refused:
        scan(tmp_path / "save")
    assert "HuggingFaceStorageWriter" in refused.value.hint
