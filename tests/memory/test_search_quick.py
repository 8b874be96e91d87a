"""What rules meshes out quickly rules out none that fits: no rank needs less than the floor, and rankings stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardctl.base.errors import UsageError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.estimate.model.heaviest import HeaviestRanks
from shardctl.estimate.search.mesh_comparison import WeightTotals, list_meshes, search_meshes
from shardctl.estimate.workload import TrainingWorkload
from shardctl.hardware.devices import get_device
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.planning.estimated_model import build_estimated_model
from shardctl.planning.forecast import estimate_needs
from shardctl.planning.mesh_search import LowerBoundChecks, MeshExplorer, SettingsChooser
from shardctl.planning.settings_search import VariedSettings
from shardctl.tensors.mesh import Mesh

FIXTURES = Path(__file__).parents[2] / "fixtures"
MODELS = ("configs/mixtral.json", "configs/deepseek_v3.json", "configs/llama.json", "configs_public/llama-3.1-8b.json")
WORKS = (
    TrainingWorkload(sequence=2048),
    TrainingWorkload(sequence=2048, zero=3, profile="deepspeed"),
    TrainingWorkload(sequence=2048, zero=1, profile="megatron", optimizer="muon"),
    TrainingWorkload(sequence=2048, profile="hf", optimizer="adafactor"),
    TrainingWorkload(sequence=2048, zero=2, optimizer="adamw-8bit"),
    TrainingWorkload(sequence=2048, offload="cpu"),
)


def explorer(name, work, gpu="h100"):
    with open_checkpoint(FIXTURES / name, SourceOptions(described=True)) as checkpoint:
        about = build_estimated_model(checkpoint, ReshardOptions(), trained=True)
    return MeshExplorer(about, work, get_device(gpu), HeaviestRanks(about.inventory))


@pytest.mark.parametrize("work", WORKS, ids=lambda w: f"{w.profile}-{w.zero}-{w.optimizer}-{w.offload}")
@pytest.mark.parametrize("name", MODELS)
def test_no_mesh_needs_less_than_its_floor(name, work):
    every = explorer(name, work)
    floor, bulk = every.floor(every.once(expert=False), every.once(expert=True)), WeightTotals(every.about.inventory)
    lasting = every.floor(every.once(expert=False, gradients=False), every.once(expert=True, gradients=False))
    passing, tried = every.passing(lasting), 0
    for mesh in list_meshes(16, every.law(), every.build_search_space()):
        stages = bulk.stages(mesh)
        try:
            least = estimate_needs(
                every.about, every.heaviest.hold(mesh, stages), mesh, stages, every.work_on(mesh), passes=False
            )
        except UsageError:
            continue
        tried += 1
        assert floor(mesh) <= least.binding.total().nbytes, mesh
        assert passing(mesh, stages) <= every.estimate(mesh, stages).binding.total().nbytes, mesh
    assert tried > (1 if work.zero == 3 else 3)  # such ranks are those of dp alone, and of no pipeline
    assert (floor(mesh) > 0) == (work.offload == "none")  # what is offloaded needs no device


@pytest.mark.parametrize("budget", [60, 40, 24])
def test_what_is_ruled_out_quickly_would_not_have_fitted(budget):
    every = explorer(MODELS[-1], WORKS[0])
    asked = (8, every.law(), every.estimate)
    slow = search_meshes(*asked, space=every.build_search_space(), budget=budget << 30)
    quick = LowerBoundChecks(every.glances, every.floor(every.once(expert=False), every.once(expert=True)))
    found = search_meshes(*asked, space=every.build_search_space(), budget=budget << 30, quick=quick)
    assert [one.mesh for one in found.ranked] == [one.mesh for one in slow.ranked]
    assert sorted((one.what, one.why) for one in found.rejected) == sorted((one.what, one.why) for one in slow.rejected)
    assert found.estimated < slow.estimated or budget > 24
    assert all("at least" in one.reason or "needs" in one.reason for one in found.rejected if one.why == "memory")


@pytest.mark.parametrize("profile", ["fsdp2", "deepspeed", "megatron", "hf"])
def test_with_zero_3_ranks_of_fsdp_would_be_ranks_of_dp_by_another_name(profile):
    every = explorer(MODELS[0], TrainingWorkload(sequence=64, zero=3, profile=profile))
    assert all(mesh.degree("fsdp") == 1 for mesh in list_meshes(8, every.law(), every.build_search_space()))
    other = explorer(MODELS[0], TrainingWorkload(sequence=64, zero=2, profile=profile))
    assert any(mesh.degree("fsdp") > 1 for mesh in list_meshes(8, other.law(), other.build_search_space()))
    for pair in ({"dp": 4, "tp": 2}, {"dp": 8, "ep": 4, "etp": 1}):
        same = [Mesh.of(**pair), Mesh.of(fsdp=pair["dp"], **{k: v for k, v in pair.items() if k != "dp"})]
        found = [every.estimate(mesh, (every.about.inventory.layers,)).binding.total() for mesh in same]
        assert found[0].nbytes == pytest.approx(found[1].nbytes, rel=0.01), profile


def test_meshes_whose_settings_are_chosen_are_ordered_by_their_fastest():
    """By the leaner ZeRO stage alone, which reduces gradients in every microbatch, Llama-405B lost its fastest mesh."""
    every = explorer("configs_public/llama-3.1-405b.json", TrainingWorkload(sequence=8192, profile="megatron"))
    every = replace(every, global_batch=2048)
    mesh, stages = Mesh.of(pp=32, dp=32, cp=2, tp=8), (3, *[4] * 30, 3)
    tried = SettingsChooser(every, VariedSettings(zero=True), None)
    first = every.heaviest.hold(mesh, stages, most=1)[0]
    times = [
        tried._time((*group, *levels[0]), mesh, stages, first) for group, levels in tried._list_groups(mesh, stages)
    ]
    assert len(set(times)) == 2
    assert tried._time_fastest(mesh, stages) == min(times)
