"""Optimizer states in Megatron-LM's directories of ranks: read to the bit, and refused where no order fits."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardctl.api import Mesh, ReshardOptions, SourceOptions, VerifyOptions, reshard, verify
from shardctl.base.errors import SourceError, UnsupportedError, UsageError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.libraries.megatron.buffer_layout import place_parameters
from shardctl.libraries.registry import scan_checkpoint
from shardctl.storage.local import LocalSource

ROOT = Path(__file__).parents[2]
HERE = ROOT / "fixtures" / "rank_states"
CASES = {"distributed": ROOT / "fixtures" / "fsdp_dtensor" / "moe" / "hf", "replicated": HERE / "replicated" / "hf"}
KEEP = "keep"
STATES = "distrib_optim.pt"
STATE_NAMES = ("exp_avg", "exp_avg_sq")
FILE = "model_optim_rng.pt"


def run_program(module: str, *words: object) -> None:
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def load(path: Path):
    return torch.load(path, weights_only=False)


@pytest.fixture(params=CASES)
def copied(request, tmp_path) -> tuple[str, Path]:
    """A case that is there to be damaged."""
    shutil.copytree(HERE / request.param, tmp_path / "copy")
    return request.param, tmp_path / "copy"


def find_left(source: Path) -> list[str]:
    found = scan_checkpoint(LocalSource(source))
    assert not found.training.states
    return [text for text in found.warnings if "states are left behind" in text]


@pytest.mark.parametrize("case", CASES)
def test_torch_goes_on_with_the_losses_of_megatron_core(case, tmp_path):
    hf = CASES[case]
    asked = ReshardOptions(to="dcp", optimizer_states=KEEP, experts="fused" if case == "distributed" else "keep")
    done = reshard(HERE / case, tmp_path / "dcp", asked, source_options=SourceOptions(config=hf))
    assert not [text for text in done.warnings if "left" in text]
    words = ("resume", hf, tmp_path / "dcp", tmp_path / "losses.json")
    run_program("fixtures.torch_dist.resume_torch", *words)
    expected = json.loads((HERE / case / "losses.json").read_text())
    rounding = 2e-3 if case == "replicated" else 1e-6  # torch does not compute in 16 bits here
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(expected, rel=rounding)


def test_a_replicated_optimizer_has_the_shapes_of_its_parameters():
    """The two groups are numbered one behind the other: matrices, then vectors."""
    place = HERE / "replicated"
    with open_checkpoint(place, SourceOptions(config=place / "hf")) as checkpoint:
        training = checkpoint.manifest.training
        assert (training.step, training.progress["opt_param_scheduler/num_steps"]) == (2, 8)
        assert [group.settings["wd_mult"] for group in training.groups] == [1.0, 0.0]
        assert all("norm" in name for name in training.groups[1].parameters)
        norm = checkpoint.manifest.training.states["optimizer.exp_avg.model.norm.weight"]
        where = norm.chunks[0].where
        saved = load(place / where.file)
        vectors = saved["optimizer"]["optimizer"]["param_groups"][1]["params"]
        last = saved["optimizer"]["optimizer"]["state"][vectors[-1]]["exp_avg"]
        found = (place / where.file).read_bytes()[where.offset : where.offset + 4 * last.numel()]
        assert found == last.numpy().tobytes()
        master = checkpoint.manifest.tensors["model.norm.weight"].chunks[0].where
        found = (place / master.file).read_bytes()[master.offset : master.offset + 4 * last.numel()]
        assert found == saved["optimizer"]["fp32_from_fp16_params"][1][-1].detach().numpy().tobytes()


def test_either_copy_of_the_weights_is_read():
    for weights, dtype in (("module", "BF16"), ("master", "F32"), (None, "F32")):
        found = scan_checkpoint(LocalSource(HERE / "replicated"), weights=weights)
        assert {tensor.dtype.name for tensor in found.tensors.values()} == {dtype}
    without = LocalSource(ROOT / "fixtures" / "megatron" / "llama-tp1")
    with pytest.raises(SourceError, match="has no weights of an optimizer"):
        scan_checkpoint(without, weights="master")


def test_states_are_those_of_the_first_rank_that_has_the_weights():
    """ep ranks have the same attention, and only the first of them its states."""
    found = scan_checkpoint(LocalSource(HERE / "distributed"))
    array = "decoder.layers.0.self_attention.linear_qkv.weight"
    states = [found.training.states[f"optimizer.exp_avg.mp_rank_00_000_00{rank}/{array}"] for rank in range(2)]
    files = [each.chunks[0].where for each in states]
    assert files[0] == files[1]
    assert files[0].file == f"iter_0000002/mp_rank_00_000_000/{STATES}"


def test_weights_that_are_not_the_optimizers_are_noticed(copied):
    _, place = copied
    path = min(place.rglob(FILE))
    saved = load(path)
    saved["model"]["decoder.layers.0.self_attention.linear_qkv.weight"].data += 1
    torch.save(saved, path)
    (text,) = find_left(place)
    assert "what would be the optimizer's copy of" in text


def test_buffers_of_another_size_are_left_behind(tmp_path):
    place = tmp_path / "copy"
    shutil.copytree(HERE / "distributed", place)
    path = max(place.rglob(STATES))
    saved = load(path)
    for held in (each[0] for each in saved if each):
        for inner in held.values():
            inner["numel_unpadded"] += 64
            for state in ("param", "exp_avg", "exp_avg_sq"):
                inner[state] = torch.cat([inner[state], torch.zeros(64)])
    torch.save(saved, path)
    (text,) = find_left(place)
    assert "which its parameters do not fill in any known way" in text


def test_groups_that_no_setting_tells_apart_are_left_behind(tmp_path):
    place = tmp_path / "copy"
    shutil.copytree(HERE / "replicated", place)
    path = min(place.rglob(FILE))
    saved = load(path)
    for group in saved["optimizer"]["optimizer"]["param_groups"]:
        group["wd_mult"] = 1.0
    torch.save(saved, path)
    (text,) = find_left(place)
    assert "no file names them" in text


def test_a_layer_wise_optimizer_is_told_what_can_be_read(tmp_path):
    """As megatron-core 0.19.2 saves Muon without a layout of its own; with it, its default, it saves no such files."""
    place = tmp_path / "copy"
    shutil.copytree(HERE / "replicated", place)
    path = min(place.rglob(FILE))
    saved = load(path)
    saved["optimizer"] = dict.fromkeys(range(2), saved["optimizer"])
    torch.save(saved, path)
    torch.save(saved["optimizer"], path.with_name("layer_wise_optimizer_0.pt"))
    (text,) = find_left(place)
    assert "; layer_wise_optimizer_N.pt numbers the parameters of each rank" in text
    assert "--ckpt-format torch_dist saves names" in text


def test_a_missing_file_of_states_is_named(tmp_path):
    place = tmp_path / "copy"
    shutil.copytree(HERE / "distributed", place)
    path = sorted(place.rglob(STATES))[1]
    path.unlink()
    (text,) = find_left(place)
    assert f"mp_rank_00_000_001/{FILE} has no states, nor a {STATES} beside it" in text


OWN = {
    "distributed": ReshardOptions(
        to="megatron", mesh=Mesh.of(pp=2, dp=2, ep=2, etp=1), megatron="layers=local", optimizer_states=KEEP
    ),
    "replicated": ReshardOptions(
        to="megatron", mesh=Mesh.of(tp=2), megatron="layers=local,optimizer=replicated", dtype="bf16",
        optimizer_states=KEEP,
    ),
}  # fmt: skip
"""What makes a case of itself."""


def find_unlike(one: object, other: object, path: str = "") -> list[str]:
    """The places in which two dictionaries, lists or arrays differ."""
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        return [] if alike else [path]
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one if "/param_groups" in path else {**one, **other}  # a group has what either Adam asks for
        parts = [(key, one.get(key), other.get(key)) for key in keys]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        parts = list(zip(range(len(one)), one, other, strict=True))
    else:
        return [] if one == other else [path]
    return [place for key, a, b in parts for place in find_unlike(a, b, f"{path}/{key}")]


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_megatron_core_writes(case, tmp_path):
    done = reshard(HERE / case, tmp_path / "out", OWN[case], source_options=SourceOptions(config=CASES[case]))
    assert "--no-load-rng" in done.warnings[-1]
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "2"
    paths = sorted(path.relative_to(HERE / case) for path in (HERE / case).rglob("*.pt"))
    assert paths == sorted(path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.pt"))
    for path in paths:
        ours, theirs = load(tmp_path / "out" / path), load(HERE / case / path)
        if path.name == FILE:
            assert list(ours["model"]) == [name for name in theirs["model"] if name in ours["model"]]
            for each in (ours, theirs):
                del each["args"]
            for name in [name for name in theirs["model"] if name not in ours["model"]]:
                assert theirs["model"].pop(name) is None, name
            if case == "replicated":
                steps = [each.pop("step") for each in theirs["optimizer"]["optimizer"]["state"].values()]
                assert set(map(float, steps)) == {float(ours["optimizer"]["optimizer"]["state"].pop("common_step"))}
        assert [place for place in find_unlike(theirs, ours) if not place.startswith("/opt_param_scheduler")] == []


@pytest.mark.parametrize("case", CASES)
def test_the_other_kind_of_optimizer_has_the_same_states(case, tmp_path):
    """Also on another mesh, and for Transformer Engine's layers."""
    said = SourceOptions(config=CASES[case])
    kind = "distributed" if case == "replicated" else "replicated"
    experts = ",experts=grouped" if case == "distributed" else ""
    for number, more in enumerate(({}, {"mesh": Mesh.of(pp=2)})):
        asked = replace(OWN[case], megatron=f"optimizer={kind}{experts}", **more)
        out = tmp_path / f"out{number}"
        reshard(HERE / case, out, asked, source_options=said)
        assert verify(out, VerifyOptions(level="full")).ok
        reshard(out, tmp_path / f"back{number}", OWN[case], source_options=said)
        for path in sorted((HERE / case).rglob("*.pt")):
            ours = load(tmp_path / f"back{number}" / path.relative_to(HERE / case))
            for each in (theirs := load(path)), ours:
                if path.name == FILE:
                    each.pop("args"), each.pop("opt_param_scheduler")
            theirs = theirs.get("optimizer") if path.name == FILE else theirs
            ours = ours.get("optimizer") if path.name == FILE else ours
            assert {each for each in find_unlike(theirs, ours) if not each.endswith("step")} == set()


def test_what_has_no_name_and_no_known_place_is_refused(tmp_path):
    case = HERE.parent / "megatron" / "hf"
    keep = {"to": "megatron", "optimizer_states": KEEP}

    def train(name: str) -> Path:
        """A model with states of every tensor: weights in the place of states."""
        place = tmp_path / name
        shutil.copytree(case / name, place)
        held = load_file(place / "model.safetensors")
        named = [(f"optimizer.{state}.{key}", each) for key, each in held.items() for state in STATE_NAMES]
        states = {name: each.float().clone() for name, each in named}
        save_file(held | states, place / "model.safetensors", {"format": "pt"})
        return place

    with pytest.raises(UnsupportedError, match="layers that predict further tokens stand") as caught:
        reshard(train("glm4-moe-predicting"), tmp_path / "out", ReshardOptions(**keep))
    assert "--to torch_dist" in caught.value.hint
    with pytest.raises(UnsupportedError, match=r"in_proj.* stands among the parameters"):
        reshard(train("qwen3-next"), tmp_path / "out", ReshardOptions(**keep))
    llama = train("llama")
    with pytest.raises(UsageError, match="padding=last-row is for weights alone"):
        reshard(llama, tmp_path / "out", ReshardOptions(**keep, megatron="padding=last-row"))
    held = load_file(llama / "model.safetensors")
    save_file(
        {key: each for key, each in held.items() if not key.endswith("_sq.lm_head.weight")},
        llama / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(UnsupportedError, match="has no state"):
        reshard(llama, tmp_path / "out", ReshardOptions(**keep))
    kept = {key: each for key, each in held.items() if not key.endswith(".lm_head.weight") or "optimizer" not in key}
    save_file(kept, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"lm_head.weight in output_layer.weight has no optimizer states"):
        reshard(llama, tmp_path / "out", ReshardOptions(**keep))


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize(
    ("model", "dtype", "saver", "before", "asked", "after"),
    [
        ("llama", "bfloat16", "torch_dist", "tp=2 dp=2", {"tp": 2, "dp": 2}, "tp=2 dp=2"),
        ("qwen2-tied", "bfloat16", "megatron", "pp=2", {"pp": 2}, "replicated pp=2"),
        ("llama-4-layers", "bfloat16", "megatron", "pp=2 vp=2 bucket=2000", {"pp": 2}, "pp=2 vp=2"),
        ("llama", "float32", "megatron", "replicated tp=2", {"tp": 2, "pp": 2}, "tp=2 pp=2"),
        ("qwen3_moe", "bfloat16", "megatron", "pp=2 ep=2", {"pp": 2, "dp": 2, "ep": 2, "etp": 1}, "pp=2 ep=2"),
        ("qwen3_moe", "float32", "megatron", "engine=1 tp=2 ep=2", {"tp": 2, "ep": 2, "etp": 1}, "engine=1 tp=2 ep=2"),
        ("qwen3_moe", "float32", "torch_dist", "ep=2", {"dp": 2, "ep": 2, "etp": 1}, "replicated ep=2"),
    ],
)
def test_megatron_core_goes_on_from_directories_of_ranks(model, dtype, saver, before, asked, after, tmp_path):
    """And from `torch_dist` made of them; where the mesh is the same, losses are to the last bit.

    `engine=1` has stand-ins for Transformer Engine's layers, which write no `torch_dist`.
    """
    hf, run, said = tmp_path / "hf", tmp_path / "run", SourceOptions(config=tmp_path / "hf")
    run_program("fixtures.torch_dist.resume", "model", hf, model, dtype)
    run_program(f"fixtures.{saver}.resume", "train", hf, run, tmp_path / "run.json", *before.split())
    common = {"mesh": Mesh.of(**asked), "optimizer_states": KEEP, "dtype": "bf16" if dtype == "bfloat16" else "keep"}
    kind = "replicated" if "replicated" in after else "distributed"
    layers = "experts=grouped" if "engine" in after else "layers=local" + ",virtual=2" * ("vp" in after)
    ranks = ReshardOptions(to="megatron", megatron=f"{layers},optimizer={kind}", **common)
    reshard(run, tmp_path / "ranks", ranks, source_options=said)
    reshard(tmp_path / "ranks", tmp_path / "dist", ReshardOptions(to="torch_dist", **common), source_options=said)
    mesh = [word for word in after.split() if "=" in word]
    run_program("fixtures.megatron.resume", "resume", hf, tmp_path / "ranks", tmp_path / "ranks.json", *after.split())
    names = ["run", "ranks"]
    if "engine" not in after:
        names.append("dist")
        run_program("fixtures.torch_dist.resume", "resume", hf, tmp_path / "dist", tmp_path / "dist.json", *mesh)
    losses, *found = (json.loads((tmp_path / f"{each}.json").read_text()) for each in names)
    rounding = {"rel": 1e-6, "abs": 0} if dtype == "float32" else {"rel": 0, "abs": 0}
    for each in found:
        assert each == pytest.approx(losses, **rounding)


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_parameters_begin_where_megatron_core_places_them():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if not hasattr(DistributedOptimizer, "_compute_per_buffer_param_layout"):
        pytest.skip("of megatron-core 0.19")
    draw = torch.Generator().manual_seed(3)
    for limit in (None, 100, 300, 10_000):
        for ranks in (1, 2, 3):
            counts = torch.randint(1, 400, (12,), generator=draw).tolist()
            shared = [bool(each) for each in torch.randint(0, 4, (12,), generator=draw) == 0]
            weights = [torch.nn.Parameter(torch.zeros(count)) for count in counts]
            for weight, alone in zip(weights, shared, strict=True):
                weight.shared_embedding = alone
            config = DistributedDataParallelConfig(use_distributed_optimizer=True)
            layout = DistributedOptimizer._compute_per_buffer_param_layout(weights, limit, ranks, config)
            begins = [0]
            for size in layout.per_bucket_numel_unpadded:
                begins.append(begins[-1] + size)
            places = [layout.param_index_map[weight] for weight in weights]
            starts = [begins[bucket] + start - layout.bucket_indices[bucket][0] for start, _, bucket in places]
            assert place_parameters(counts, shared, limit) == (tuple(starts), begins[-1])
