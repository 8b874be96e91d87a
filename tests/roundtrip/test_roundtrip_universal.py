"""Universal Checkpoints: what DeepSpeed's own converter makes of a checkpoint, and back again bit for bit.

That DeepSpeed goes on from them with the losses of its own resume is shown by `fixtures/deepspeed/check.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_bits import bits
from test_roundtrip_dcp import CONFIG, TRAINED, compare_with_torch, experts, same, whole  # noqa: F401 - a fixture
from tiny_models import CONFIGS, build, config_of

from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

DEEPSPEED = Path(__file__).parents[2] / "fixtures" / "deepspeed"
DCP = Path(__file__).parents[2] / "fixtures" / "dcp"
SAVES = ("z2", "z3", "z1-fp32", "z2-fp16", "z3-tied", "z2-frozen", "z0")


def load(path: Path):
    return torch.load(path, weights_only=True)


def parameters(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Every tensor of the folder `zero`, by parameter and kind, whatever the file has around it."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for path in sorted(folder.glob("universal/zero/*/*.pt")):
        saved = load(path)
        found.setdefault(path.parent.name, {})[path.stem] = saved["param"] if isinstance(saved, dict) else saved
    return found


@pytest.mark.parametrize(("save", "own"), [("z1-fp32", "universal-z1"), ("z3-fp32", "universal-z3")])
def test_every_file_of_a_parameter_is_what_deepspeeds_converter_writes(save, own, tmp_path):
    reshard(DEEPSPEED / save, tmp_path / "out", ReshardOptions(to="universal"))
    assert (tmp_path / "out" / "latest_universal").read_bytes() == (DEEPSPEED / own / "latest_universal").read_bytes()
    expected, found = parameters(DEEPSPEED / own), parameters(tmp_path / "out")
    buffers = expected.keys() - found.keys()  # the converter makes floats of them; here the module's file has them
    assert buffers <= {"count", "mean"}
    for name, held in found.items():
        assert held.keys() - {"step"} == expected[name].keys() - {"step"}
        for kind, tensor in held.items():
            if kind == "step" and kind not in expected[name]:  # the converter has that of stage 3 elsewhere
                continue
            other = expected[name][kind]
            assert tensor.dtype == other.dtype
            assert bits(tensor) == bits(other)
            assert tensor.shape == other.shape or other.shape == (tensor.numel(),)  # of stage 3 it has no shapes


@pytest.mark.parametrize("stage", [1, 3])
def test_the_files_around_them_have_what_an_engine_asks_for(stage, tmp_path):
    save = f"z{stage}-fp32"
    reshard(DEEPSPEED / save, tmp_path / "out", ReshardOptions(to="universal"))
    prefix = "zero_pp_rank_0_" if stage > 2 else ""
    theirs = load(DEEPSPEED / f"universal-z{stage}" / "universal" / f"{prefix}mp_rank_00_model_states.pt")
    ours = load(tmp_path / "out" / "universal" / f"{prefix}mp_rank_00_model_states.pt")
    assert ours.keys() - theirs.keys() == {"universal_checkpoint_info"}
    assert theirs.keys() - ours.keys() <= {"global_samples", "checkpoint_parallel_dimensions", "epoch"}
    for key in ("optimizer", "lr_scheduler", "skipped_steps", "global_steps", "mp_world_size", "ds_version"):
        assert ours[key] == theirs[key], key
    assert [dict(group) for group in ours["param_shapes"]] == [dict(group) for group in theirs["param_shapes"]]
    assert all(isinstance(shape, torch.Size) for group in ours["param_shapes"] for shape in group.values())
    held = load(tmp_path / "out" / "universal" / "mp_rank_00_model_states.pt")["module"]
    same(held, {name: theirs["module"][name] for name in ("count", "mean")})
    optimizer = load(tmp_path / "out" / "universal" / "zero" / "optimizer_state.pt")
    assert optimizer["ds_version"] == theirs["ds_version"]
    inner = optimizer["optimizer_state_dict"]
    assert bits(inner["state"][0]["step"]) == bits(torch.tensor(2.0))
    assert inner["param_groups"] == optimizer["param_groups"]
    groups = [{"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.02, "weight_decay": 0.0}]
    groups = groups if stage < 3 else [{"lr": 0.01, "weight_decay": 0.01}]
    fixed = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "fused": None, "foreach": None}
    for number, (found, expected) in enumerate(zip(optimizer["param_groups"], groups, strict=True)):
        assert found.items() >= (expected | fixed).items()
        assert found["params"] == [number]


@pytest.mark.parametrize("name", SAVES)
def test_it_reads_back_bit_for_bit(name, tmp_path):
    reshard(DEEPSPEED / name, tmp_path / "universal", ReshardOptions(to="universal"))
    checked = verify(tmp_path / "universal", VerifyOptions(level="full", against=DEEPSPEED / name))
    assert checked.ok, checked.findings
    assert checked.digest == digest(DEEPSPEED / name).digest
    with open_checkpoint(DEEPSPEED / name) as before, open_checkpoint(tmp_path / "universal") as after:
        one, other = before.manifest.training, after.manifest.training
        assert one is not None
        assert other is not None
        assert other.step == one.step
        assert [dict(g.settings) for g in other.groups] == [dict(g.settings) for g in one.groups]
        assert [set(g.parameters) for g in other.groups] == [set(g.parameters) for g in one.groups]
        ties = {name: set(tensor.ties) for name, tensor in before.manifest.tensors.items()}
        assert {name: set(tensor.ties) for name, tensor in after.manifest.tensors.items()} == ties


@pytest.mark.parametrize("name", TRAINED)
def test_from_distributed_checkpoints_to_deepspeed_and_back_to_torch(name, tmp_path):
    reshard(DCP / name, tmp_path / "universal", ReshardOptions(to="universal"), source_options=CONFIG)
    held = parameters(tmp_path / "universal")
    same({key: kinds["fp32"] for key, kinds in held.items()}, whole(name)["weights"])
    reshard(tmp_path / "universal", tmp_path / "dcp", ReshardOptions(to="dcp", mesh=Mesh.of(fsdp=2, tp=2)))
    compare_with_torch(tmp_path / "dcp", whole(name), tmp_path)


@pytest.fixture
def tiny(tmp_path) -> Path:
    build(config_of("llama", divisible=False)).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_weights_alone_are_all_loaded_however_many_groups_the_engine_has(tiny, tmp_path):
    reshard(tiny, tmp_path / "universal", ReshardOptions(to="universal"))
    weights = load_file(tiny / "model.safetensors")
    same({key: kinds["fp32"] for key, kinds in parameters(tmp_path / "universal").items()}, weights)
    groups = load(tmp_path / "universal" / "universal" / "zero" / "optimizer_state.pt")["param_groups"]
    assert groups == [{"params": []}] * len(weights)
    assert digest(tmp_path / "universal").digest == digest(tiny).digest
    reshard(tmp_path / "universal", tmp_path / "dcp", ReshardOptions(to="dcp"))  # which shows no optimizer
    with open_checkpoint(tmp_path / "dcp") as checkpoint:
        training = checkpoint.manifest.training
        assert training is None or not (training.states or training.groups)


def test_what_nothing_trains_is_in_the_modules_file(tmp_path):
    reshard(DEEPSPEED / "z2-frozen", tmp_path / "out", ReshardOptions(to="universal"))
    expected = torch.load(DEEPSPEED / "z2-frozen.whole.pt", weights_only=True)
    assert parameters(tmp_path / "out").keys() == expected["master"].keys()
    module = load(tmp_path / "out" / "universal" / "mp_rank_00_model_states.pt")["module"]
    same(module, {n: t for n, t in expected["module"].items() if n not in expected["master"]})


def test_options_and_states_without_a_place_are_refused(tiny, tmp_path):
    with pytest.raises(UsageError, match="layout universal has no ranks"):
        reshard(tiny, tmp_path / "out", ReshardOptions(to="universal", mesh=Mesh.of(tp=2)))
    with pytest.raises(UsageError, match="--to universal does not use --max-shard-size"):
        reshard(tiny, tmp_path / "out", ReshardOptions(to="universal", max_shard_size=1 << 30))
    (tmp_path / "strange").mkdir()
    tensors = {"a": torch.ones(2), "optimizer.momentum_buffer.a": torch.ones(2)}
    save_file(tensors, tmp_path / "strange" / "model.safetensors")
    with pytest.raises(UnsupportedError, match="a has a state momentum_buffer, and Universal Checkpoints have exp_avg"):
        reshard(tmp_path / "strange", tmp_path / "out", ReshardOptions(to="universal"))


def test_experts_keep_their_arrays_and_states(experts, tmp_path):  # noqa: F811
    place, expected = experts
    source_options = SourceOptions(config=CONFIGS / "qwen3_moe.json")
    reshard(place, tmp_path / "universal", ReshardOptions(to="universal"), source_options=source_options)
    checked = verify(tmp_path / "universal", VerifyOptions(level="full", against=place), source_options=source_options)
    assert checked.ok, checked.findings
    held = parameters(tmp_path / "universal")
    same({key: kinds["fp32"] for key, kinds in held.items()}, expected["weights"])
    for parameter, states in expected["optimizer"]["state"].items():
        same({kind: held[parameter][kind] for kind in states}, states)


def test_one_number_of_steps_for_all_is_given_to_every_parameter(tmp_path):
    """An engine of stage 1 or 2 with torch's own Adam otherwise ends in a KeyError."""
    megatron = DEEPSPEED.parent / "torch_dist"
    llama = SourceOptions(config=megatron / "hf/llama/config.json")
    reshard(megatron / "trained_plain/iter", tmp_path / "out", ReshardOptions(to="universal"), source_options=llama)
    held = parameters(tmp_path / "out")
    with open_checkpoint(megatron / "trained_plain/iter", llama) as checkpoint:
        step = checkpoint.manifest.training.step
    assert {float(each["step"]) for each in held.values()} == {step}
