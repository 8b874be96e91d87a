"""Checkpoints of DeepSpeed: what its engines had in memory is found bit for bit; what is wrong has a verdict."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from dcp_builder import Runs
from deepspeed_builder import changed, joined, scattered
from hypothesis import given
from hypothesis import strategies as st
from stored_bits import bits
from stored_bytes import gather, scan

from shardctl.base.errors import CoverageError, HostileError, ShardctlError, SourceError, UnsupportedError, UsageError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.libraries import registry as formats
from shardctl.libraries.deepspeed import geometry
from shardctl.libraries.deepspeed.patterns import NamePatterns
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.storage.local import LocalSource
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"
JOINED = ("z1", "z2", "z1-fp32", "z2-fp16", "z2-robin", "z2-aligned", "z1-elastic", "z1-frozen", "z2-frozen",
          "z2-legacy", "bf16", "z0", "z0-fp32", "z2-tied", "z2-experts", "pipeline", "tp-z1")  # fmt: skip
SCATTERED = ("z3", "z3-fp32", "z3-sub", "z3-persisted", "z3-frozen", "z3-gathered", "z3-tied", "tp-z3")
UNIVERSAL = {"universal-z1": "z1-fp32", "universal-z3": "z3-fp32"}
"""What DeepSpeed's converter made, and of which checkpoint."""
ALL = [*JOINED, *SCATTERED, *UNIVERSAL]


def whole(name: str) -> dict:
    """What the live engine had when it saved."""
    return torch.load(FIXTURES / f"{UNIVERSAL.get(name, name)}.whole.pt", weights_only=True)


def check(root: Path, found, expected: dict[str, torch.Tensor]) -> None:
    by_name = {name: tensor for tensor in found.values() for name in (tensor.name, *tensor.ties)}
    assert by_name.keys() == expected.keys()
    for name, value in expected.items():
        tensor = by_name[name]
        assert (tensor.shape, tensor.dtype.torch) == (tuple(value.shape), str(value.dtype)[6:]), name
        assert gather(root, tensor) == bits(value), name


def tied(expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The fixtures' own tie: the master is under one of its names only."""
    if "model.embed_tokens.weight" in expected and "lm_head.weight" not in expected:
        return expected | {"lm_head.weight": expected["model.embed_tokens.weight"]}
    return expected


@pytest.mark.parametrize("name", ALL)
def test_the_master_is_what_the_engine_had(name):
    expected = whole(name)
    found = scan(FIXTURES / name)
    assert found.format == "deepspeed"
    assert found.warnings == ()
    master = tied(expected["master"]) if "tied" in name else expected["master"]
    check(FIXTURES / name, found.tensors, expected["module"] | master)


@pytest.mark.parametrize("name", JOINED)
def test_the_modules_own_copy_is_what_the_engine_had(name):
    check(FIXTURES / name, scan(FIXTURES / name, "module").tensors, whole(name)["module"])


@pytest.mark.parametrize("name", ALL)
def test_every_optimizer_state_is_what_the_engine_had(name):
    expected = whole(name)
    training = scan(FIXTURES / name).training
    states = {f"optimizer.{s}.{n}": v for s, held in expected["states"].items() for n, v in held.items()}
    steps = float(expected["step"]) + (name == "z0")  # a first one, without gradients, makes the states
    steps = {f"optimizer.step.{n}": torch.tensor(steps) for n in expected["states"]["exp_avg"]}
    check(FIXTURES / name, training.states, states | steps)
    assert training.step == expected["step"]
    assert training.writer == "DeepSpeed 0.19.8"
    assert training.ranks == 2


@pytest.mark.parametrize("name", ["z2", "z3", "z3-sub", "bf16", "z2-aligned", "universal-z1"])
def test_settings_are_those_of_each_group_of_parameters(name):
    expected = whole(name)["module"]
    first, second = scan(FIXTURES / name).training.groups
    trained = {n: t for n, t in expected.items() if n not in {"count", "mean"}}
    assert set(first.parameters) == {n for n, t in trained.items() if t.ndim > 1}
    assert set(second.parameters) == {n for n, t in trained.items() if t.ndim <= 1}
    assert (first.settings["weight_decay"], second.settings["weight_decay"]) == (0.1, 0.0)
    assert (first.settings["lr"], second.settings["lr"]) == (0.01, 0.02)
    assert first.settings["betas"] == (0.9, 0.999)


def test_a_tag_may_be_given_itself():
    folder = next((FIXTURES / "z2").glob("global_step*"))
    check(folder, scan(folder).tensors, whole("z2")["master"])


def test_the_latest_of_several_is_read(tmp_path):
    place = shutil.copytree(FIXTURES / "z2", tmp_path / "both")
    shutil.copytree(FIXTURES / "z3" / "global_step2", place / "before")
    found = scan(place)
    check(place, found.tensors, whole("z2")["master"])
    assert all(file.startswith("global_step2/") for file in found.files)
    (place / "latest").write_text("before\n")
    check(place, scan(place).tensors, whole("z3")["master"])
    (place / "latest").unlink()
    with pytest.raises(SourceError, match="holds several checkpoints: before, global_step2"):
        scan(place)


@pytest.mark.parametrize("tag", ["../global_step2", "/etc", "", "..", "a/b", "C:x"])
def test_a_tag_that_leads_elsewhere_is_refused(tag, tmp_path):
    place = shutil.copytree(FIXTURES / "z2", tmp_path / "bad")
    (place / "latest").write_text(tag)
    with pytest.raises(HostileError, match="not the name of a folder beside it"):
        scan(place)


def test_a_tag_that_is_not_there_is_named(tmp_path):
    place = shutil.copytree(FIXTURES / "z2", tmp_path / "bad")
    (place / "latest").write_text("global_step9")
    with pytest.raises(SourceError, match="the latest checkpoint is global_step9, which is not here") as caught:
        scan(place)
    assert "global_step2" in caught.value.hint


# The whole way


def config(place: Path) -> None:
    """As transformers' Trainer leaves it beside the folder of a step."""
    settings = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 40,
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("name", ["z2", "z3"])
@pytest.mark.parametrize("layout", ["hf", "dcp"])
def test_it_becomes_any_other_checkpoint(name, layout, tmp_path):
    from safetensors.torch import load_file

    from shardctl.options import ReshardOptions

    place = shutil.copytree(FIXTURES / name, tmp_path / "checkpoint-2")
    config(place)
    (place / "trainer_state.json").write_text("{}")
    reshard(place, tmp_path / "out", ReshardOptions(to=layout))
    if layout == "hf":
        found = load_file(tmp_path / "out" / "model.safetensors")
        for key, value in whole(name)["master"].items():
            assert torch.equal(found[key], value)
        assert not list((tmp_path / "out").rglob("*.pt"))
    else:
        found = scan(tmp_path / "out")
        check(tmp_path / "out", found.tensors, whole(name)["master"])
        states = {k: v for k, v in found.training.states.items() if ".exp_avg." in k}
        check(
            tmp_path / "out", states, {f"optimizer.exp_avg.{n}": v for n, v in whole(name)["states"]["exp_avg"].items()}
        )


def test_inspect_says_what_it_is_and_which_copy_is_read():
    found = inspect(FIXTURES / "z2")
    assert found.training.notes == (
        "ZeRO stage 2, 2 data-parallel ranks",
        "weights are the optimizer's fp32 master; --weights module reads the module's own copy (BF16)",
    )
    assert found.dropped == ("epoch",)
    own = inspect(FIXTURES / "z2", source_options=SourceOptions(weights="module"))
    assert own.training.notes[1] == "weights are the module's own copy (BF16), not the optimizer's fp32 master"
    assert inspect(FIXTURES / "bf16").training.notes[0] == "BF16_Optimizer, 2 data-parallel ranks"
    assert inspect(FIXTURES / "tp-z1").training.notes[0] == "ZeRO stage 1, 1 data-parallel x 2 model-parallel ranks"


@pytest.mark.parametrize("name", ["z3", "z3-fp32"])
def test_a_copy_that_is_not_there_cannot_be_asked_for(name):
    with pytest.raises(UnsupportedError, match=r"the module's own copy of .* is not in the checkpoint"):
        scan(FIXTURES / name, "module")
    with pytest.raises(UnsupportedError, match="no master weights"):
        scan(FIXTURES / "z0-fp32", "master")
    with pytest.raises(UsageError, match="hold one copy of the weights only"):
        scan(FIXTURES.parent / "dcp" / "tp", "master")


# Other numbers of ranks than the fixtures have

SHAPES = st.lists(
    st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6
).map(lambda shapes: {f"p{n}": shape for n, shape in enumerate(shapes)})  # fmt: skip


@given(SHAPES, st.integers(1, 9), st.data())
def test_joined_parts_are_those_of_one_long_array(shapes, ranks, data):
    paddings = [data.draw(st.integers(0, 3)) for _ in shapes]
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    total = sum(sizes) + sum(paddings)
    length = -(-total // ranks)
    line = np.concatenate(
        [np.concatenate([np.full(n, i + 1), np.zeros(p)]) for i, (n, p) in enumerate(zip(sizes, paddings, strict=True))]
    )
    line = np.pad(line, (0, length * ranks - total))
    seen = dict.fromkeys(shapes, 0)
    for rank in range(ranks):
        part = line[rank * length : (rank + 1) * length]
        covered = np.zeros(length)
        for name, run in geometry.list_joined_runs(shapes, geometry.FlatPartition(rank, ranks), length, paddings):
            stretch = part[run.at : run.at + run.stop - run.start]
            assert (stretch == int(name[1:]) + 1).all()
            assert run.start == seen[name]
            seen[name] = run.stop
            covered[run.at : run.at + run.stop - run.start] = 1
        assert ((part != 0) == (covered != 0)).all()
    assert list(seen.values()) == sizes


@pytest.mark.parametrize("ranks", [1, 3, 5, 8])
@pytest.mark.parametrize("build", [joined, scattered])
def test_any_number_of_ranks(build, ranks, tmp_path):
    torch.manual_seed(ranks)
    shapes = {"a": (5, 7), "b": (1,), "c": (2, 3, 4), "none": (0, 3), "d": (11,), "e": (6, 1, 5)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    place = build(tmp_path / "made", weights, ranks)
    found = scan(place)
    check(place, found.tensors, weights)
    moments = {k: t for k, t in found.training.states.items() if ".exp_avg_sq." in k}
    check(place, moments, {f"optimizer.exp_avg_sq.{n}": v * 2 for n, v in weights.items() if v.numel()})


# What is wrong has a verdict


@pytest.mark.parametrize("name", ["z1", "z3", "bf16", "tp-z1", "pipeline", "z2-experts"])
def test_a_missing_rank_is_named(name, tmp_path):
    for file in sorted((FIXTURES / name).rglob("*optim_states.pt")):
        place = shutil.copytree(FIXTURES / name, tmp_path / file.name)
        next(place.rglob(file.name)).unlink()
        with pytest.raises(SourceError, match=f"{file.name} is missing") as caught:
            scan(place)
        assert caught.value.exit_code == 4


def test_a_missing_model_state_is_named(tmp_path):
    place = shutil.copytree(FIXTURES / "z2", tmp_path / "z2")
    next(place.rglob("mp_rank_00_model_states.pt")).unlink()
    with pytest.raises(SourceError, match=r"mp_rank_00_model_states\.pt is missing, which names the parameters"):
        scan(place)
    place = shutil.copytree(FIXTURES / "z3-frozen", tmp_path / "z3")
    next(place.rglob("zero_pp_rank_1_mp_rank_00_model_states.pt")).unlink()
    with pytest.raises(SourceError, match=r"zero_pp_rank_1_mp_rank_00_model_states.pt is missing, with a part of 2"):
        scan(place)


def test_a_missing_file_of_a_universal_checkpoint_is_named(tmp_path):
    place = shutil.copytree(FIXTURES / "universal-z1", tmp_path / "file")
    (place / "universal/zero/cube/fp32.pt").unlink()
    with pytest.raises(SourceError, match=r"zero/cube/fp32.pt is missing"):
        scan(place)
    shutil.rmtree(place / "universal/zero/cube")
    with pytest.raises(SourceError, match=r"zero/cube/ is missing"):
        scan(place)


def test_a_newer_universal_checkpoint_is_refused_and_further_states_are_named(tmp_path):
    place = shutil.copytree(FIXTURES / "universal-z1", tmp_path / "universal")
    state = place / "universal/zero/cube/momentum_buffer.pt"
    shutil.copy(state.with_name("exp_avg.pt"), state)
    assert "momentum_buffer of cube" in scan(place).dropped
    (path,) = place.rglob("*model_states.pt")
    held = torch.load(path, weights_only=False)
    held["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.5}
    torch.save(held, path)
    with pytest.raises(UnsupportedError, match=r"Universal Checkpoint of version 0\.5, and 0\.4 is known"):
        scan(place)


def test_a_rank_too_many_is_named(tmp_path):
    place = shutil.copytree(FIXTURES / "z2", tmp_path / "bad")
    one = next(place.rglob("*pp_rank_1*optim*"))
    shutil.copy(one, one.with_name(one.name.replace("pp_rank_1", "pp_rank_2")))
    with pytest.raises(SourceError, match=r"pp_rank_2.* is there, but the checkpoint is of 2 data-parallel ranks"):
        scan(place)


def test_files_of_two_saves_in_one_folder_are_not_mixed(tmp_path):
    place = shutil.copytree(FIXTURES / "z2", tmp_path / "bad")
    other = next((FIXTURES / "z2-fp16").rglob("*pp_rank_1*optim*"))
    shutil.copy(other, next(place.glob("global_step*")))
    with pytest.raises(SourceError, match="are both of data-parallel rank 1"):
        scan(place)
    one = next(place.rglob("bf16*pp_rank_1*optim*"))
    next(place.rglob("zero_pp_rank_1*optim*")).replace(one)
    with pytest.raises(SourceError):
        scan(place)


def shorter(tree):
    tree["single_partition_of_fp32_groups"][0] = tree["single_partition_of_fp32_groups"][0][:-3].clone()


def renamed(tree):
    (group,) = tree["param_shapes"]
    tree["param_shapes"] = [{f"x{n}" if i == 3 else n: s for i, (n, s) in enumerate(group.items())}]


def swapped(tree):
    names = list(tree["param_shapes"][0])
    tree["param_shapes"] = [{n: tree["param_shapes"][0][n] for n in (names[1], names[0], *names[2:])}]


def larger(tree):
    tree["param_shapes"][0]["model.norm.weight"] = torch.Size((1 << 40, 1 << 20))


def negative(tree):
    tree["param_shapes"][0]["model.norm.weight"] = (-1, -16)


def nameless(tree):
    del tree["param_shapes"]


def no_module(tree):
    del tree["module"]


def fewer_groups(tree):
    tree["param_shapes"] = [*tree["param_shapes"], {}]


def bad_name(tree):
    tree["param_shapes"][0]["\udc80"] = (1,)


MODEL = {
    "renamed": (renamed, SourceError, "of different saves|is in no file|has .* at"),
    "swapped": (swapped, SourceError, "where the shapes of the parameters say"),
    "larger": (larger, SourceError, "hold less than"),
    "negative": (negative, SourceError, "something else in place of a shape"),
    "nameless": (nameless, SourceError, "does not say what is in the flat partitions"),
    "no module": (no_module, SourceError, "is not the state of a module"),
    "another number of groups": (fewer_groups, SourceError, "flat partitions, but .* describes 2"),
    "a name that is no text": (bad_name, SourceError, "a parameter has the name"),
    "not a dict": (lambda _: [1], SourceError, "is not the state of a module"),
}


@pytest.mark.parametrize("name", MODEL)
def test_a_model_state_that_does_not_fit_is_refused(name, tmp_path):
    change, error, message = MODEL[name]
    with pytest.raises(error, match=message) as caught:
        scan(changed(FIXTURES / "z1", tmp_path / "bad", "mp_rank_00_model_states.pt", change))
    assert caught.value.exit_code == 4


def in_parts(change):
    return lambda tree: change(tree["optimizer_state_dict"])


def gone(tree):
    tree["fp32_flat_groups"][0] = torch.empty(0)


def not_flat(tree):
    tree["fp32_flat_groups"][0] = tree["fp32_flat_groups"][0].view(1, -1)


def no_parts(tree):
    del tree["fp32_flat_groups"]


OPTIMIZER = {
    "offloaded": (gone, CoverageError, r"elements \[.*\] should be in .*zero_pp_rank_1.*, whose flat array has 0"),
    "not flat": (not_flat, SourceError, "is not a flat tensor"),
    "no partitions": (no_parts, UnsupportedError, "no flat partitions"),
}


@pytest.mark.parametrize("name", OPTIMIZER)
def test_partitions_that_do_not_fit_are_refused(name, tmp_path):
    change, error, message = OPTIMIZER[name]
    place = scattered(tmp_path / "made", {"a": torch.randn(5, 7), "b": torch.randn(3)}, 3)
    bad = changed(place, tmp_path / "bad", "zero_pp_rank_1_mp_rank_00_optim_states.pt", in_parts(change))
    with pytest.raises(error, match=message) as caught:
        scan(bad)
    assert caught.value.exit_code == 4


def test_a_part_of_another_length_is_refused(tmp_path):
    place = joined(tmp_path / "made", {"a": torch.randn(5, 7), "b": torch.randn(3)}, 3)
    bad = changed(place, tmp_path / "bad", "zero_pp_rank_1_mp_rank_00_optim_states.pt", in_parts(shorter))
    with pytest.raises(SourceError, match="is in parts of 11 elements, but of 14 in"):
        scan(bad)


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
@pytest.mark.parametrize("legacy", [False, True])
def test_files_that_run_code_are_refused_and_do_not_run(file, protocol, legacy, tmp_path):
    mark = tmp_path / "ran"
    place = joined(tmp_path / "made", {"a": torch.randn(5, 7)}, 2)
    path = next(place.rglob(file))
    tree = torch.load(path, weights_only=True)
    tree["client"] = Runs(os.system, f"touch {mark}")
    torch.save(tree, path, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(HostileError, match="runs code"):
        scan(place)
    assert not mark.exists()


def elsewhere(tree):
    tree["shared_params"] = {"a": "nothing"}


def test_a_tie_with_nothing_is_refused(tmp_path):
    place = scattered(tmp_path / "made", {"b": torch.randn(3)}, 2)
    bad = changed(place, tmp_path / "bad", "zero_pp_rank_0_mp_rank_00_model_states.pt", elsewhere)
    with pytest.raises(SourceError, match="'a' shares its elements with 'nothing', which is in no file"):
        scan(bad)


def ways(node, way=()):
    """The way to everything in a tree of dicts and lists."""
    yield way
    inside = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inside:
        yield from ways(value, (*way, key))


def replaced(tree, way, value):
    if not way:
        return value
    inside = tree
    for key in way[:-1]:
        inside = inside[key]
    inside[way[-1]] = value
    return tree


JUNK = [None, -1, 1 << 66, "x", [], {"a": {}}, torch.tensor(3), (1, 2)]


@pytest.mark.parametrize(("fixture", "kind"), [
    ("joined", "optim"), ("joined", "model"), ("scattered", "optim"), ("z0", "model"), ("z3-frozen", "model"),
])  # fmt: skip
@pytest.mark.parametrize("junk", range(len(JUNK)))
def test_anything_anywhere_has_a_verdict(fixture, kind, junk, tmp_path):
    if fixture in {"joined", "scattered"}:
        build = joined if fixture == "joined" else scattered
        place = build(tmp_path / "made", {"a": torch.randn(4, 3), "b": torch.randn(2)}, 2)
    else:
        place = shutil.copytree(FIXTURES / fixture, tmp_path / "made")
    path = min(place.rglob(f"*{kind}_states.pt"))
    whole = path.read_bytes()
    every = list(ways(torch.load(path, weights_only=True)))
    for way in every[junk % 3 :: 3] if len(every) > 40 else every:
        path.write_bytes(whole)
        torch.save(replaced(torch.load(path, weights_only=True), way, JUNK[junk]), path)
        with contextlib.suppress(ShardctlError):
            scan(place)


def other_part(tree):
    tree["ds_zero_partition_groups"] = [{"partition_rank": 0, "partition_count": 3}]


def test_a_part_that_is_there_twice_is_refused(tmp_path):
    place = scattered(tmp_path / "made", {"a": torch.randn(9, 2)}, 3)
    bad = changed(place, tmp_path / "bad", "zero_pp_rank_1_mp_rank_00_optim_states.pt", in_parts(other_part))
    with pytest.raises(CoverageError, match=r"a \[9, 2\]: elements \[0:3, 0:2\] are stored twice"):
        scan(bad)


def hidden_class(value):
    def change(tree):
        (group,) = tree["param_shapes"]
        group["b"] = value

    return change


@pytest.mark.parametrize("shape", [(True, 3), (1.0,), "33", None, (-3,), (1 << 70,), ((3,),)])
def test_a_shape_that_is_none_is_refused(shape, tmp_path):
    place = scattered(tmp_path / "made", {"b": torch.randn(3)}, 2)
    bad = changed(place, tmp_path / "bad", "zero_pp_rank_0_mp_rank_00_model_states.pt", hidden_class(shape))
    with pytest.raises(SourceError, match="something else in place of a shape"):
        scan(bad)


@pytest.mark.parametrize("step", [1e300, float("inf"), float("nan"), 1 << 2000, -3, "2", None, [2], 2.5])
def test_a_step_may_be_anything(step, tmp_path):
    def change(tree):
        tree["optimizer_state_dict"]["state"][0]["step"] = step
        tree["optimizer_state_dict"]["param_groups"][0]["step"] = step

    place = scattered(tmp_path / "made", {"b": torch.randn(3)}, 1)
    found = scan(changed(place, tmp_path / "bad", "*optim_states.pt", in_parts(change)))
    assert ("optimizer.step.b" in found.training.states) is (step in {-3, 2.5} if not isinstance(step, list) else False)


def test_the_modules_own_copy_needs_no_optimizer(tmp_path):
    place = shutil.copytree(FIXTURES / "z2", tmp_path / "some")
    next(place.rglob("*pp_rank_1*optim*")).unlink()
    found = scan(place, "module")
    check(place, found.tensors, whole("z2")["module"])
    assert not found.training.states
    assert "the optimizer is left behind: global_step2/bf16_zero_pp_rank_1" in found.warnings[0]
    next(place.rglob("*pp_rank_0*optim*")).unlink()
    found = scan(place)
    check(place, found.tensors, whole("z2")["module"])
    assert found.warnings == ("the optimizer is left behind: the optimizer's files are not here",)
    place = shutil.copytree(FIXTURES / "z3", tmp_path / "none")
    for path in place.rglob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(SourceError, match=r"'model\.embed_tokens\.weight' is in no file of the checkpoint"):
        scan(place)


def test_safetensors_beside_win_and_say_so(tmp_path):
    """As transformers' Trainer saves: the model in safetensors, and DeepSpeed's files in a folder."""
    from safetensors.torch import save_file

    place = shutil.copytree(FIXTURES / "z2", tmp_path / "checkpoint-2")
    config(place)
    save_file(whole("z2")["module"], place / "model.safetensors", {"format": "pt"})
    found = scan(place)
    assert found.format == "safetensors"
    assert "global_step2/ is left behind" in " ".join(found.warnings)
    with closing(LocalSource(place)) as source:
        found = formats.scan_checkpoint(source, override="deepspeed")
    check(place, found.tensors, whole("z2")["master"])


# Tensor-parallel parts


def without_rules(tree):
    tree.pop("universal_checkpoint_info", None)


def test_parts_of_tensor_parallel_ranks_need_the_rules_of_the_writer(tmp_path):
    place = shutil.copytree(FIXTURES / "tp-z1", tmp_path / "bad")
    for path in place.rglob("*model_states.pt"):
        tree = torch.load(path, weights_only=True)
        without_rules(tree)
        torch.save(tree, path)
    with pytest.raises(UnsupportedError, match="does not say how their parts fit together"):
        scan(place)


@pytest.mark.parametrize(("pattern", "name", "fits"), [
    (r"^a\.b$", "a.b", True), (r"^a\.b$", "a.bc", False), ("a.b", "axbc", True), (r"\d+.x", "12.x", True),
    (r"\d+.x", "a.x", False), (r".*bias", "q.bias", True), (r".*bias", "q.weight", False), ("a*b+", "b", True),
    ("a*b+", "aa", False), ("", "anything", True), ("^$", "a", False),
])  # fmt: skip
def test_patterns_are_matched_as_python_does(pattern, name, fits):
    assert (NamePatterns([pattern]).find(name) == pattern) is fits
    assert (re.match(pattern, name) is not None) is fits


def test_a_pattern_made_to_take_years_takes_none(monkeypatch):
    monkeypatch.setattr("shardctl.libraries.deepspeed.patterns._MAX_MATCHING_STEPS", 100_000)
    assert NamePatterns([".*" * 20 + "x"]).find("a" * 100) is None
    with pytest.raises(HostileError, match="take too long"):
        NamePatterns([".*" * 499 + "x"]).find("a" * 100_000)
    with pytest.raises(UnsupportedError, match="does not understand"):
        NamePatterns(["(a+)+b"])


def test_many_plain_patterns_cost_nothing():
    many = NamePatterns(f"^model\\.layers\\.{n}\\.weight$" for n in range(3_000))
    assert all(many.find(f"model.layers.{n}.weight") for n in range(3_000))
    assert many.find("model.layers.1.weights") is None


@pytest.mark.parametrize("name", ["ep-z2", "z2-tied", "z3-tied"])
def test_tied_weights_without_a_config_are_one_tensor_of_the_result(name, tmp_path):
    """DCP stores each name; only the record says that two are one, and a copy that differs is found."""
    out = tmp_path / "out"
    reshard(FIXTURES / name, out, ReshardOptions(to="dcp"))
    assert verify(out, VerifyOptions(level="full", against=str(FIXTURES / name))).ok
    with open_checkpoint(out) as checkpoint:
        tied = next(tensor for tensor in checkpoint.manifest.tensors.values() if tensor.ties)
    where = tied.chunks[-1].where
    data = bytearray((out / where.file).read_bytes())
    data[where.offset] ^= 1
    (out / where.file).write_bytes(data)
    assert not verify(out, VerifyOptions(level="full")).ok
