"""What a search says of a mesh is what a plan of that mesh says, to the byte, and its best mesh is the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardctl.base.errors import UsageError
from shardctl.hardware.devices import get_device
from shardctl.options import PlanOptions, ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.plan import plan

CONFIGS = Path(__file__).parents[2] / "fixtures"
SMALL, LARGE = CONFIGS / "configs", CONFIGS / "configs_public"
ASKED = (
    (SMALL / "mixtral.json", PlanOptions(use="train", seq_len=64)),
    (SMALL / "mixtral.json", PlanOptions(use="train", seq_len=64, profile="megatron", zero=1, recompute="selective")),
    (
        SMALL / "deepseek_v3.json",
        PlanOptions(use="train", seq_len=64, profile="deepspeed", zero=2, optimizer="adamw-8bit"),
    ),
    (SMALL / "t5.json", PlanOptions(use="train", seq_len=64, schedule="gpipe", batch=3)),
    (SMALL / "llama.json", PlanOptions(use="train", seq_len=64, virtual_stages=1, optimizer="adafactor", profile="hf")),
    (SMALL / "qwen3_moe.json", PlanOptions(use="train", seq_len=64, optimizer="shampoo")),
    (LARGE / "t5-base.json", PlanOptions(use="train", seq_len=512, virtual_stages=2)),
    (SMALL / "qwen3_moe.json", PlanOptions(use="serve", batch=3)),
)


def needed(estimate):
    total = estimate.binding.total()
    return estimate.binding.holding.rank, total.nbytes, total.low, total.high


@pytest.mark.parametrize(("path", "plan_options"), ASKED, ids=[f"{p.stem}-{n}" for n, (p, _) in enumerate(ASKED)])
def test_every_mesh_is_as_its_own_plan(path, plan_options):
    searched = plan(path, ReshardOptions(), plan_options=replace(plan_options, search=True, devices=8))
    found, tried = searched.explored, 0
    for one in found.found.ranked[:: max(1, len(found.found.ranked) // 12)]:
        alone = plan(path, ReshardOptions(mesh=one.mesh), plan_options=found.compared(plan_options, one.mesh))
        assert needed(alone.forecast.estimate) == needed(one.estimate), str(one.mesh)
        assert [stage.layers for stage in alone.stages] in ([*one.stages], []), str(one.mesh)
        tried += 1
    assert tried > 3
    assert needed(searched.forecast.estimate) == needed(found.found.ranked[0].estimate)
    assert searched.mesh == found.found.ranked[0].mesh


def test_microbatches_of_the_best_mesh_are_those_it_was_compared_with():
    """GPipe holds all of them, so that fewer would be another plan than the one the table shows."""
    plan_options = PlanOptions(
        use="train",
        device=replace(get_device("l40s"), usable_bytes=48 << 30),
        devices=4,
        search=True,
        seq_len=1024,
        schedule="gpipe",
        allocator="native",
    )
    searched = plan(LARGE / "llama-3.1-8b.json", ReshardOptions(), plan_options=plan_options)
    best = searched.explored.found.ranked[0]
    assert (str(best.mesh), searched.forecast.work.microbatches) == ("pp2 x tp2", 4)
    assert needed(searched.forecast.estimate) == needed(best.estimate)


def test_measured_peaks_count_for_every_mesh_and_every_change(tmp_path):
    log = tmp_path / "peaks"
    runs = [{"mesh": "fsdp=4", "recompute": "none", "sequence": n, "peak": (38000 + n) * 10**6} for n in (512, 4096)]
    log.write_text("\n".join(map(json.dumps, runs)))
    asked = PlanOptions(
        use="train", device=get_device("h100"), devices=4, search=True, seq_len=8192, calibration=log, recompute="none"
    )
    searched = plan(LARGE / "llama-3.1-8b.json", ReshardOptions(), plan_options=asked)
    plain = plan(LARGE / "llama-3.1-8b.json", ReshardOptions(), plan_options=replace(asked, calibration=None))
    assert needed(searched.forecast.estimate) == needed(searched.explored.found.ranked[0].estimate)
    assert len(searched.explored.found.ranked) > len(plain.explored.found.ranked)
    assert searched.forecast.calibration.scale < 0.5
    alone = replace(asked, device=get_device("l40s"), search=False, devices=None)
    advised = plan(LARGE / "llama-3.1-8b.json", ReshardOptions(mesh=Mesh.of(fsdp=2)), plan_options=alone).counsel.advice
    for one in advised:
        changed = replace(alone, seq_len=one.ask.work.sequence, recompute=one.ask.work.recompute)
        if one.ask.mesh == Mesh.of(fsdp=2) and one.ask.work.offload == "none" and one.ask.work.optimizer == "adamw":
            tried = plan(LARGE / "llama-3.1-8b.json", ReshardOptions(mesh=one.ask.mesh), plan_options=changed)
            assert needed(tried.forecast.estimate)[1] == one.nbytes


def test_stages_are_those_of_a_mesh():
    with pytest.raises(UsageError, match="--stages applies to one mesh"):
        plan(
            SMALL / "llama.json",
            ReshardOptions(stages="1,1"),
            plan_options=PlanOptions(use="train", search=True, devices=2),
        )
    assert plan(
        SMALL / "llama.json", ReshardOptions(mesh=Mesh.of(pp=2), stages="1,1"), plan_options=PlanOptions(search=True)
    ).fits


def test_where_no_mesh_fits_the_closest_is_the_plan():
    plan_options = PlanOptions(
        use="train",
        device=get_device("h100"),
        devices=3,
        search=True,
        seq_len=8192,
        allocator="native",
        recompute="none",
    )
    searched = plan(LARGE / "llama-3.1-8b.json", ReshardOptions(), plan_options=plan_options)
    assert not searched.fits
    assert searched.explored.found.ranked == ()
    assert searched.mesh.world == 3
    closest = next(one for one in searched.explored.found.rejected if one.mesh is not None)
    assert searched.mesh == closest.mesh
    assert all(advice.ask.mesh.world != 1 for advice in searched.counsel.advice)
