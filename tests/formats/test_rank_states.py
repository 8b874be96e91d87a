"""Optimizer states in Megatron-LM's directories of ranks: read to the bit, and refused where no order fits."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardctl.api import ReshardOptions, SourceOptions, reshard
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.errors import SourceError
from shardctl.libraries.megatron.buffer_layout import place_parameters
from shardctl.libraries.registry import scan_checkpoint
from shardctl.storage.local import LocalSource

ROOT = Path(__file__).parents[2]
HERE = ROOT / "fixtures" / "rank_states"
CASES = {"distributed": ROOT / "fixtures" / "fsdp_dtensor" / "moe" / "hf", "replicated": HERE / "replicated" / "hf"}
KEEP = "keep"
STATES = "distrib_optim.pt"
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


def test_a_missing_file_of_states_is_named(tmp_path):
    place = tmp_path / "copy"
    shutil.copytree(HERE / "distributed", place)
    path = sorted(place.rglob(STATES))[1]
    path.unlink()
    (text,) = find_left(place)
    assert f"mp_rank_00_000_001/{FILE} has no {STATES} beside it" in text


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
