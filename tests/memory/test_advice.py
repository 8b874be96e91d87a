"""Advice is tried before it is given: each change stands with what the estimator says that it reaches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from known_models import LLAMA_3_8B, LLAMA_3_70B, QWEN2_7B, stock

from shardctl.base.errors import UsageError
from shardctl.cli.program import run
from shardctl.estimate.model.allowed_degrees import AllowedDegrees
from shardctl.estimate.model.heaviest import HeaviestRanks
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.narrower_types import narrow_inventory
from shardctl.estimate.model.rank_shards import RankShards
from shardctl.estimate.rank_estimate import build_estimate
from shardctl.estimate.search.advice import EstimateRequest, advise_changes, find_fewest_by_type
from shardctl.estimate.search.forecast import estimate_ranks
from shardctl.estimate.search.mesh_comparison import SERVING, SearchSpace, WeightTotals
from shardctl.estimate.term import MemoryTerm
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.hardware.devices import GIB, get_device
from shardctl.tensors.mesh import Mesh

H100 = get_device("h100").usable_bytes
NOBODY = RankShards(0, "only", {}, 1, 0, range(0), ())


def needs(nbytes):
    return build_estimate([NOBODY], [[MemoryTerm("all", "weights", round(nbytes))]])


def real(config):
    """The estimator itself."""
    inventory = stock(config)
    parts = build_layer_graph(config)

    def attempt(ask):
        other = narrow_inventory(inventory, ask.dtype) if ask.dtype else inventory
        stages = WeightTotals(other).stages(ask.mesh)
        holdings = HeaviestRanks(other).hold(ask.mesh, stages)
        return estimate_ranks(holdings, parts, ask.mesh, stages, ask.work, dtype="BF16")

    return attempt, AllowedDegrees(inventory)


def made(ask):
    """Bytes as a simple law: 16 of states, which ZeRO shares, and 8 of activations."""
    work, ranks = ask.work, ask.mesh.degree("dp")
    states = {0: 16, 1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}[work.zero]
    if work.offload != "none":
        if not work.zero:
            raise UsageError("offloading needs sharded states")
        states = 2
    kept = 0.5 if work.recompute == "full" else 8
    return needs((states + kept * work.micro_batch * work.sequence / 4096) * GIB / ask.mesh.degree("tp"))


def test_nothing_is_advised_where_all_is_well():
    ask = EstimateRequest(Mesh.of(dp=8), TrainingWorkload(sequence=4096))
    assert advise_changes(ask, made, 24 * GIB) == ()


def test_each_change_says_what_it_reaches_and_the_mildest_comes_first():
    ask = EstimateRequest(Mesh.of(dp=8), TrainingWorkload(sequence=4096, micro_batch=2))
    found = {one.options: one for one in advise_changes(ask, made, 20 * GIB)}
    assert list(found) == ["--recompute full", "--zero 2", "--seq-len 1024", "--batch 1"]
    assert found["--recompute full"].nbytes == 17 * GIB
    assert found["--recompute full"].saved == 15 * GIB
    assert found["--recompute full"].fits
    # ZeRO-1 would still need 21.5 GiB.
    assert found["--zero 2"].nbytes == 19.75 * GIB
    assert not found["--batch 1"].fits
    assert str(found["--batch 1"]) == "take 1 instead of 2 sequences at a time (--batch 1): 24.0 GiB, too much"
    for one in found.values():
        assert made(one.ask).binding.total().nbytes == one.nbytes
        assert one.fits == (one.nbytes <= 20 * GIB)


def test_several_changes_are_made_where_no_single_one_is_enough():
    ask = EstimateRequest(Mesh.of(dp=8), TrainingWorkload(sequence=4096))
    first, *rest = advise_changes(ask, made, 3 * GIB)
    assert first.fits
    assert first.options == "--recompute full --zero 3"
    assert first.change == "recompute all activations and share model states by ZeRO-3"
    assert first.nbytes == 2.5 * GIB
    assert not any(one.fits for one in rest)
    # On its own, offloading is refused, for the states are not shared; it is not advised.
    assert not any("offload" in one.options for one in rest)
    alone = advise_changes(ask, made, GIB)
    assert not any(one.fits for one in alone)


def test_offloading_is_advised_where_it_is_possible():
    ask = EstimateRequest(Mesh.of(dp=2), TrainingWorkload(sequence=4096, zero=1, recompute="full"))
    assert [one.options for one in advise_changes(ask, made, 3 * GIB) if one.fits] == ["--offload cpu"]


def test_more_devices_are_advised_as_the_model_allows():
    law = AllowedDegrees(stock(QWEN2_7B))
    ask = EstimateRequest(Mesh.of(), TrainingWorkload(sequence=4096, recompute="full"))
    (first, *_rest) = advise_changes(ask, made, 5 * GIB, law=law)
    assert (first.change, first.options) == ("use 4 devices instead of 1", "--tp 4")
    assert first.ask.mesh == Mesh.of(tp=4)
    # 28 heads are not cut in 8.
    assert not any(one.fits for one in advise_changes(ask, made, 3 * GIB, law=law) if "--tp" in one.options)
    far = advise_changes(ask, made, 5 * GIB, law=law, per_node=2)
    assert not any(one.ask.mesh.degree("tp") > 2 for one in far)


def test_serving_grows_along_both_axes_where_neither_is_enough_alone():
    """16 sequences of 131,072 tokens: their caches fit 16 devices as two stages of 8, but not 16 stages."""
    attempt, law = real(LLAMA_3_8B)
    ask = EstimateRequest(Mesh.of(), ServingWorkload(context=131_072, batch=16))
    found = {one.change: one for one in advise_changes(ask, attempt, 24 * GIB, law=law)}
    first = found["use 16 devices instead of 1"]
    assert first.options == "--tp 8 --pp 2"
    assert first.ask.mesh == Mesh.of(tp=8, pp=2)
    assert attempt(first.ask).binding.total().nbytes == first.nbytes <= 24 * GIB


def test_stages_of_a_pipeline_share_no_gradients():
    ask = EstimateRequest(Mesh.of(pp=2, dp=8), TrainingWorkload(sequence=4096))
    assert "--zero 1" in [one.options for one in advise_changes(ask, made, 3 * GIB)]
    assert not any("--zero 3" in one.options for one in advise_changes(ask, made, 3 * GIB))


def test_a_model_that_serving_has_no_room_for():
    attempt, law = real(LLAMA_3_70B)
    ask = EstimateRequest(Mesh.of(), ServingWorkload(context=8192))
    found = advise_changes(ask, attempt, H100, law=law)
    options = {one.options: one for one in found if one.fits}
    assert list(options) == ["--dtype fp8", "--tp 2"]
    assert all(one.nbytes <= H100 for one in options.values())


def test_a_cache_that_is_too_large():
    attempt, law = real(LLAMA_3_8B)
    ask = EstimateRequest(Mesh.of(), ServingWorkload(context=32768, batch=32))
    before = attempt(ask).binding.total().nbytes
    assert before > H100
    found = {one.options: one for one in advise_changes(ask, attempt, H100, law=law)}
    halved = found["--batch 8"]
    assert halved.fits
    assert halved.saved == before - halved.nbytes
    assert found["--seq-len 8192"].fits
    narrow = found["--kv-dtype fp8"]
    assert narrow.nbytes == attempt(replace(ask, work=replace(ask.work, kv_dtype="F8_E4M3"))).binding.total().nbytes


def test_training_what_does_not_fit():
    attempt, law = real(LLAMA_3_8B)
    ask = EstimateRequest(Mesh.of(dp=8), TrainingWorkload(sequence=8192, profile="deepspeed"))
    found = advise_changes(ask, attempt, H100, law=law)
    assert found[0].fits
    for one in found:
        assert attempt(one.ask).binding.total().nbytes == one.nbytes


def test_bf16_needs_two_devices_and_int4_one():
    inventory = stock(LLAMA_3_70B)

    def estimator(other):
        heaviest = HeaviestRanks(other)

        def estimate(mesh, stages):
            holdings = heaviest.hold(mesh, stages)
            return build_estimate(holdings, [(MemoryTerm("weights", "weights", one.nbytes),) for one in holdings])

        return estimate

    found = find_fewest_by_type(inventory, estimator, ["bf16", "fp8", "int4"], space=SearchSpace(SERVING), budget=H100)
    assert [(one.dtype, one.devices) for one in found] == [("bf16", 2), ("fp8", 1), ("int4", 1)]
    assert found[2].weights == narrow_inventory(inventory, "int4").nbytes
    tiny = find_fewest_by_type(inventory, estimator, ["bf16"], space=SearchSpace(frozenset({"tp"})), budget=GIB)
    assert (tiny[0].devices, tiny[0].candidate) == (None, None)
    with pytest.raises(UsageError, match="unknown type"):
        find_fewest_by_type(inventory, estimator, ["int3"], space=SearchSpace(SERVING), budget=H100)


def test_a_mesh_that_cannot_grow_is_advised_of_what_else_helps(capfd):
    """Eight times the ranks of its makers' own mesh are more than any cluster has."""
    config = str(Path(__file__).parents[2] / "fixtures" / "configs_public" / "llama-3.1-405b.json")
    assert run(["plan", config, "--for", "train", "--mesh", "pp=16,fsdp=128,tp=8", "--gpu", "h100", "--json"]) == 3
    advice = json.loads(capfd.readouterr().out)["advice"]
    assert any(each["options"] == "--recompute full" and each["fits"] for each in advice)
