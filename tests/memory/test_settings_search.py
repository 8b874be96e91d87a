"""Where no mesh fits, the search finds settings with which one does, and every mesh has its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardctl.api import Mesh, PlanOptions, ReshardOptions, plan
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.hardware.devices import GIB, get_device
from shardctl.planning import mesh_search
from shardctl.planning.mesh_search import count_step_sequences
from shardctl.planning.settings_search import _list_combinations

PUBLIC = Path(__file__).parents[2] / "fixtures/configs_public"


def searched(config, device, devices, **options):
    wish = PlanOptions(search=True, device=get_device(device), devices=devices, **options)
    return plan(PUBLIC / f"{config}.json", ReshardOptions(), plan_options=wish)


def test_405_billion_parameters_fit_64_devices_when_activations_are_recomputed():
    found = searched("llama-3.1-405b", "h200", 64, use="train", recompute="none").explored
    assert not found.found.ranked
    by_options = {one.options: one for one in found.settings}
    full = by_options["--recompute full"]
    assert full.candidate.mesh.world == 64
    assert full.candidate.peak <= get_device("h200").usable_bytes
    assert full.exact
    assert full.timed
    assert full.candidate.cost.seconds > 0
    again = plan(
        PUBLIC / "llama-3.1-405b.json",
        ReshardOptions(mesh=full.candidate.mesh),
        plan_options=PlanOptions(
            use="train",
            recompute="full",
            device=get_device("h200"),
            microbatches=full.candidate.mesh.degree("pp") * 64 // full.candidate.mesh.world,
        ),
    )
    assert again.fits


def test_settings_are_in_the_order_of_their_time_and_none_needs_more_than_it_must():
    found = searched("llama-3.1-70b", "h100", 16, use="train", seq_len=4096).explored
    assert found.settings
    timed = [one.candidate.cost.score for one in found.settings if one.timed]
    assert timed == sorted(timed)
    assert [one.timed for one in found.settings] == sorted((one.timed for one in found.settings), reverse=True)
    for one in found.settings:
        assert not any(set(other.changes) < set(one.changes) for other in found.settings)
        assert one.candidate.peak <= get_device("h100").usable_bytes


def test_serving_is_offered_narrower_types_and_smaller_batches():
    found = searched("llama-3.1-70b", "4090", 4, seq_len=32768, batch=4).explored
    assert {"--dtype int4"} <= {one.options for one in found.settings}
    assert all(not one.exact for one in found.settings if "--dtype" in one.options)


def test_a_search_varies_the_settings_of_training_that_nobody_gave():
    """Recomputation, interleaved stages, sharded gradients and overlapped all-to-alls, each as an option says it."""
    asked = {"use": "train", "profile": "megatron", "global_batch": 64}
    found = searched("llama-3.1-8b", "h100-80g", 8, **asked)
    ranked = found.explored.found.ranked
    settings = " ".join(one.settings for one in ranked)
    for flag in ("--zero 1", "--zero 2", "--vp 4"):
        assert flag in settings
    assert found.forecast.cost.seconds == pytest.approx(ranked[0].cost.seconds)
    assert found.forecast.estimate.binding.total().nbytes == ranked[0].peak
    assert found.verdict.endswith(f" a rank, with {ranked[0].settings} as the search chose")
    fixed = searched("llama-3.1-8b", "h100-80g", 8, **asked, recompute="none", zero=0, virtual_stages=1)
    given = {one.mesh: one for one in fixed.explored.found.ranked}
    assert {one.settings for one in given.values()} == {""}
    both = [one for one in ranked if one.mesh in given and one.estimate.certain and given[one.mesh].estimate.certain]
    assert both
    assert all(one.cost.score <= given[one.mesh].cost.score for one in both)


def test_recomputation_and_overlapped_all_to_alls_are_tried():
    asked = {"use": "train", "profile": "megatron", "seq_len": 4096}
    experts = searched("qwen3-30b-a3b", "b200", 8, **asked, recompute="none", virtual_stages=1, zero=1).explored.found
    assert any(one.settings == "--overlap-all-to-all" for one in experts.ranked)
    small = searched("llama-3.1-8b", "a100-40g", 4, **asked, virtual_stages=1).explored.found
    assert any("--recompute full" in one.settings for one in small.ranked)


def test_serving_is_recommended_with_a_twentieth_of_the_memory_to_spare():
    found = searched("llama-3.1-70b", "h100-80g", 8, seq_len=32768, batch=16).explored.found.ranked
    tight = [one.slack < 0.05 * one.estimate.budget for one in found]
    assert True in tight
    assert tight == sorted(tight), "meshes with less to spare come last"
    fewest = plan(
        PUBLIC / "llama-3.1-70b.json",
        ReshardOptions(),
        plan_options=PlanOptions(search=True, device=get_device("h100-80g"), use="serve", seq_len=32768),
    ).explored.fewest
    assert fewest.candidate.slack >= 0.05 * fewest.candidate.estimate.budget


def test_nothing_is_searched_where_something_fits():
    assert searched("llama-3.1-8b", "h100", 2).explored.settings == ()


def test_where_no_settings_are_enough_the_devices_that_recomputation_needs_are_named(monkeypatch):
    monkeypatch.setattr(mesh_search, "search_settings", lambda *_: ())
    found = searched("llama-3.1-405b", "h200", 64, use="train", recompute="none").explored
    assert found.recomputed.mesh.world <= 64 < found.fewest.devices


def test_what_is_offloaded_is_counted_for_the_host():
    found = searched("llama-3.1-405b", "h100", 8, use="train").explored
    away = next(one for one in found.settings if "--offload cpu" in one.options)
    assert away.host_bytes > 405e9 * 12 / 8
    assert not away.timed


def test_combinations_have_one_change_of_each_sort_the_mildest_first():
    work = TrainingWorkload(sequence=4096, micro_batch=4, profile="megatron")
    found = [" ".join(one.options for one in some) for some in _list_combinations(work)]
    assert sorted(found[:3]) == ["--batch 1", "--zero 1", "--zero 1 --batch 1"]
    assert "--optimizer adamw-8bit --offload cpu" in " ".join(found)
    assert not any(some.count("--optimizer") > 1 for some in found)
    served = [
        " ".join(one.options for one in some) for some in _list_combinations(ServingWorkload(4096, kv_dtype="F8_E4M3"))
    ]
    assert served == ["--dtype fp8", "--dtype int4"]


def test_microbatches_are_those_of_each_data_parallel_rank_whatever_is_planned():
    """A search without them gives all meshes equal steps; with them every mesh takes as many as it is told."""
    assert count_step_sequences(TrainingWorkload(sequence=1, micro_batch=2), 8) == 16
    assert count_step_sequences(TrainingWorkload(sequence=1, microbatches=4), 8) is None
    found = searched("llama-3.1-8b", "h200", 8, use="train", seq_len=4096, microbatches=4)
    assert found.forecast.work.microbatches == 4
    assert found.explored.sequences is None
    for one in found.explored.found.ranked:
        replicas = one.mesh.degree("dp") * one.mesh.degree("fsdp")
        assert one.cost.tokens == 4096 * 4 * replicas


@pytest.mark.parametrize("use", ["serve", "train"])
def test_a_mesh_of_ones_own_has_the_time_that_a_search_gives_it(use):
    best = searched("llama-3.1-8b", "h100", 8, use=use, seq_len=4096, recompute="full" if use == "train" else None)
    (first, *_) = best.explored.found.ranked
    assert best.forecast.cost.seconds == pytest.approx(first.cost.seconds)
    assert best.forecast.cost.tokens == first.cost.tokens


def test_nobody_knows_the_time_on_a_device_that_is_only_a_size():
    seen = plan(PUBLIC / "llama-3.1-8b.json", ReshardOptions(), plan_options=PlanOptions(device=get_device(24 * GIB)))
    assert seen.forecast.cost is None


def test_offloading_counts_what_is_moved_and_says_what_is_not():
    options = PlanOptions(use="train", offload="cpu", device=get_device("h100"))
    seen = plan(PUBLIC / "llama-3.1-8b.json", ReshardOptions(mesh=Mesh.of(fsdp=8)), plan_options=options)
    moved = next(share for share in seen.forecast.cost.shares if share.name == "states moved to the host and back")
    own = seen.forecast.estimate.binding.holding.elements(trainable=True)
    assert moved.nbytes == 6 * own  # fp32 gradients out, bf16 parameters back
    assert moved.seconds == pytest.approx(moved.nbytes / (get_device("h100").pcie * 0.8))
    assert "host's own update is not counted" in moved.formula
    assert not seen.forecast.cost.share("update")
