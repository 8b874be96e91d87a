"""A search tries every mesh people would, ranks what fits, and says of each other mesh why not."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from known_models import (
    DEEPSEEK_V3,
    LLAMA_3_8B,
    LLAMA_3_70B,
    LLAMA_3_405B,
    MIXTRAL_8X7B,
    QWEN2_7B,
    deepseek_v3,
    llama_405b,
    stock,
)

from shardctl.base.errors import UsageError
from shardctl.estimate.model.allowed_degrees import AllowedDegrees
from shardctl.estimate.model.heaviest import HeaviestRanks
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.rank_estimate import build_estimate
from shardctl.estimate.search.cost import price_mesh
from shardctl.estimate.search.mesh_comparison import (
    SERVING,
    TRAINING,
    LowerBoundChecks,
    SearchSpace,
    WeightTotals,
    find_fewest_devices,
    find_first_fit,
    list_meshes,
    search_meshes,
    set_equal_tokens,
)
from shardctl.estimate.term import MemoryTerm
from shardctl.estimate.training.rank_training import list_training_terms
from shardctl.estimate.workload import ServingWorkload, TrainingWorkload
from shardctl.hardware.devices import GIB, get_device
from shardctl.tensors.mesh import Mesh

H100 = get_device("h100")
SERVE, TRAIN = SearchSpace(SERVING, stored=True), SearchSpace(TRAINING)


def estimator(inventory, factor=1):
    """Each rank needs `factor` times its weights."""
    heaviest = HeaviestRanks(inventory)

    def estimate(mesh, stages):
        holdings = heaviest.hold(mesh, stages)
        return build_estimate(
            holdings, [(MemoryTerm("states", "weights", round(one.nbytes * factor)),) for one in holdings]
        )

    return estimate


@cache
def few_layers():
    return stock({**DEEPSEEK_V3, "num_hidden_layers": 8})


def pricer(config, work):
    parts = build_layer_graph(config)
    return lambda mesh, _stages, estimate: price_mesh(parts, estimate, mesh, work, H100)


def test_every_mesh_of_the_devices_is_there_once_and_is_allowed():
    law = AllowedDegrees(stock(LLAMA_3_8B), 32768)
    found = list(list_meshes(16, law, TRAIN))
    assert len(set(found)) == len(found)
    assert all(mesh.world == 16 for mesh in found)
    assert all(law.refuse(mesh) is None for mesh in found)
    degrees = [1, 2, 4, 8, 16]
    for pp, shared, cp, tp in product(degrees, degrees, [1, 2, 4, 8], [1, 2, 4, 8]):
        if pp * shared * cp * tp == 16:
            assert Mesh.of(pp=pp, dp=shared, cp=cp, tp=tp) in found
            assert Mesh.of(pp=pp, fsdp=shared, cp=cp, tp=tp) in found
    assert Mesh.of(dp=2, fsdp=8) in found
    assert Mesh.of(dp=2, fsdp=4, tp=2) in found


def test_experts_are_divided_over_tp_a_node_or_a_stage():
    found = {
        str(mesh) for mesh in list_meshes(32, AllowedDegrees(deepseek_v3()), SERVE) if str(mesh).startswith("dp8 x tp4")
    }
    assert found == {
        "dp8 x tp4",
        "dp8 x tp4 x ep4",
        "dp8 x tp4 x ep8",
        "dp8 x tp4 x ep32",
        "dp8 x tp4 x ep2 x etp4",
        "dp8 x tp4 x ep8 x etp4",
    }


def test_only_what_a_space_has_is_tried():
    law = AllowedDegrees(stock(LLAMA_3_8B), 32768)
    assert {str(mesh) for mesh in list_meshes(4, law, SearchSpace(frozenset({"tp"})))} == {"tp4"}
    assert not list(list_meshes(16, law, SearchSpace(frozenset({"tp"}))))
    assert {str(mesh) for mesh in list_meshes(4, law, SearchSpace(frozenset({"tp", "dp"})))} == {
        "dp4",
        "dp2 x tp2",
        "tp4",
    }
    assert all(mesh.degree("tp") <= 2 for mesh in list_meshes(16, law, replace(SERVE, per_node=2)))
    short = [mesh for mesh in list_meshes(16, AllowedDegrees(stock(LLAMA_3_8B), 4096), TRAIN) if mesh.degree("cp") > 1]
    assert short == []


def test_what_does_not_fit_says_by_how_much():
    inventory = stock(LLAMA_3_70B)
    found = search_meshes(2, AllowedDegrees(inventory), estimator(inventory), space=SERVE, budget=H100.usable_bytes)
    assert [str(one.mesh) for one in found.ranked] == ["pp2", "tp2"]
    (rejected,) = found.rejected
    assert (rejected.what, rejected.why) == ("dp2", "memory")
    assert rejected.reason == "its weights alone take at least 131.4 GiB of 79.2 GiB on some rank"
    assert rejected.over == inventory.nbytes - H100.usable_bytes
    tight = search_meshes(2, AllowedDegrees(inventory), estimator(inventory, 2), space=SERVE, budget=H100.usable_bytes)
    assert tight.ranked == ()
    by_name = {one.what: one for one in tight.rejected}
    heaviest = max(one.nbytes for one in HeaviestRanks(inventory).hold(Mesh.of(tp=2), (80,)))
    assert by_name["tp2"].over == 2 * heaviest - H100.usable_bytes
    assert by_name["tp2"].reason == "rank tp0 needs 131.4 GiB, 52.2 GiB more than there are"
    closest, *others = tight.rejected  # of dp2 only the least that it needs is known, which is less
    assert closest.what == "pp2"
    assert [one.over for one in others] == sorted(one.over for one in others)


def test_what_is_not_possible_says_why():
    inventory = stock(QWEN2_7B)
    found = search_meshes(32, AllowedDegrees(inventory), estimator(inventory), space=SERVE)
    impossible = {one.what: one for one in found.rejected}
    assert impossible["tp=8"].why == "illegal"
    assert "28 attention heads; tp can be 1, 2, 4" in impossible["tp=8"].reason
    assert impossible["tp=16"].why == impossible["tp=32"].why == "node"
    assert impossible["tp=16"].reason == "tp=16 would leave the node of 8 devices"
    assert "needs at least 32 layers" in impossible["pp=32"].reason
    assert all(one.mesh.degree("tp") <= 4 for one in found.ranked)


def test_what_the_estimate_refuses_is_a_reason():
    inventory = stock(LLAMA_3_8B)

    def refusing(mesh, stages):
        if mesh.degree("pp") > 1:
            raise UsageError("no pipelines today")
        return estimator(inventory)(mesh, stages)

    found = search_meshes(2, AllowedDegrees(inventory), refusing, space=SERVE)
    assert [(one.what, one.reason) for one in found.rejected] == [("pp2", "no pipelines today")]
    assert {str(one.mesh) for one in found.ranked} == {"tp2", "dp2"}
    assert (
        find_first_fit(2, AllowedDegrees(inventory), refusing, space=SearchSpace(frozenset({"pp"})), budget=1 << 50)
        is None
    )


def test_the_cheapest_comes_first_and_says_why():
    inventory = stock(LLAMA_3_70B)
    work = ServingWorkload(context=4096)
    found = search_meshes(
        8,
        AllowedDegrees(inventory),
        estimator(inventory),
        pricer(LLAMA_3_70B, work),
        space=SERVE,
        budget=H100.usable_bytes,
    )
    scores = [one.cost.score for one in found.ranked]
    assert scores == sorted(scores)
    assert len(set(scores)) > 1
    assert str(found.ranked[0].mesh) == "dp4 x tp2"
    assert {"weights read", "activations between tp ranks"} <= {share.name for share in found.ranked[0].cost.shares}
    assert all(0 <= one.slack == H100.usable_bytes - one.peak for one in found.ranked)


def test_llama_405b_trains_on_the_mesh_that_is_known_to_work():
    inventory = llama_405b()
    # 128 devices hold 18 bytes per parameter of a 128th each, and little more: uneven stages must not break it.
    found = search_meshes(
        128, AllowedDegrees(inventory, 8192), estimator(inventory, 9), space=TRAIN, budget=H100.usable_bytes
    )
    known = next(one for one in found.ranked if one.mesh == Mesh.of(pp=16, tp=8))
    assert known.stages == (7, *[8] * 14, 7)
    assert known.slack > 0


def test_the_fewest_devices_are_found_between_those_that_fail_and_fit():
    inventory = stock(LLAMA_3_70B)
    law = AllowedDegrees(inventory)
    budget = H100.usable_bytes
    few = find_fewest_devices(law, estimator(inventory), space=SERVE, budget=budget)
    assert (few.devices, few.candidate.mesh) == (2, Mesh.of(tp=2))
    assert (few.refused, few.every) == (1, True)
    spare = inventory.nbytes * 100 // 94
    assert find_fewest_devices(law, estimator(inventory), space=SERVE, budget=spare).devices == 1
    large = AllowedDegrees(llama_405b()), estimator(llama_405b(), 9)
    few = find_fewest_devices(*large, space=TRAIN, budget=budget)
    assert (few.devices, few.candidate.mesh.world) == (88, 88)
    assert (few.refused, few.least, few.every) == (80, 0, False)
    assert find_first_fit(few.refused, *large, space=TRAIN, budget=budget) is None
    assert find_first_fit(few.devices, *large, space=TRAIN, budget=budget).mesh == few.candidate.mesh
    for devices, every in ((80, False), (81, True)):  # as many hold what all must hold together
        few = find_fewest_devices(*large, space=TRAIN, budget=budget, together=devices * budget)
        assert (few.devices, few.least, few.every) == (88, devices, every)
    assert find_fewest_devices(law, estimator(inventory, 1000), space=SERVE, budget=GIB, most=64) is None


def test_within_a_node_every_number_of_devices_is_tried():
    inventory = stock(LLAMA_3_70B)
    for devices in (3, 5, 7):
        budget = 1.1 * inventory.nbytes / devices
        few = find_fewest_devices(AllowedDegrees(inventory), estimator(inventory), space=SERVE, budget=budget)
        assert (few.devices, few.candidate.mesh) == (devices, Mesh.of(pp=devices))
        assert (few.refused, few.every) == (devices - 1, True)


def test_experts_may_each_be_alone():
    found = set(list_meshes(32, AllowedDegrees(stock(MIXTRAL_8X7B)), TRAIN))
    assert Mesh.of(dp=16, tp=2, ep=8, etp=2) in found
    assert Mesh.of(fsdp=32, ep=8) in found


def test_meshes_are_compared_at_equal_tokens():
    work = TrainingWorkload(sequence=4096, micro_batch=2)
    for mesh in (Mesh.of(dp=8), Mesh.of(fsdp=8), Mesh.of(pp=8), Mesh.of(pp=2, dp=2, tp=2)):
        each = set_equal_tokens(work, mesh, 128)
        replicas = mesh.degree("dp") * mesh.degree("fsdp")
        assert each.microbatches * each.micro_batch * replicas == 128
    with pytest.raises(UsageError, match="12 sequences cannot be divided into microbatches of 2 for each of 4"):
        set_equal_tokens(work, Mesh.of(dp=4), 12)
    with pytest.raises(UsageError, match="cannot be divided"):
        set_equal_tokens(work, Mesh.of(dp=4), 0)


def test_stages_are_balanced_by_bytes():
    inventory = stock(LLAMA_3_8B)
    stages = WeightTotals(inventory).stages(Mesh.of(pp=4))
    assert sum(stages) == 32
    # The head weighs more than two layers, and so does the embedding.
    assert stages[0] < stages[1]
    assert stages[-1] < stages[1]


@pytest.mark.parametrize("text", ["tp=8", "pp=4,tp=2", "fsdp=8", "dp=8,ep=8", "dp=4,tp=2,ep=4,etp=2", "fsdp=8,ep=4"])
def test_some_rank_has_at_least_the_least(text):
    mesh, inventory = Mesh.parse(text), few_layers()
    bulk = WeightTotals(inventory)
    most = max(one.nbytes for one in HeaviestRanks(inventory).hold(mesh, bulk.stages(mesh)))
    assert 0.6 * most < bulk.least(mesh) <= most


def test_64_devices_for_405b_are_searched_in_two_seconds():
    inventory = llama_405b()
    work = TrainingWorkload(sequence=8192, profile="megatron")
    started = time.process_time()
    found = search_meshes(
        64,
        AllowedDegrees(inventory, 8192),
        estimator(inventory, 4),
        pricer(LLAMA_3_405B, work),
        space=TRAIN,
        budget=H100.usable_bytes,
    )
    assert found.ranked
    assert time.process_time() - started < 2


def test_training_may_share_what_serving_keeps():
    inventory = stock(LLAMA_3_70B)
    law, budget = AllowedDegrees(inventory), H100.usable_bytes
    tenth = estimator(inventory, 0.1)
    shared = search_meshes(2, law, tenth, space=TRAIN, budget=budget)
    assert Mesh.of(dp=2) in [one.mesh for one in shared.ranked]
    assert find_fewest_devices(law, tenth, space=TRAIN, budget=budget).devices == 1
    assert find_fewest_devices(law, tenth, space=SERVE, budget=budget).devices == 2


def test_a_search_over_experts_stays_bounded():
    law = AllowedDegrees(deepseek_v3(), 8192)
    assert len(list(list_meshes(64, law, TRAIN))) < 400
    assert len(list(list_meshes(2048, law, TRAIN))) < 1000
    found = search_meshes(64, law, estimator(deepseek_v3(), 1), space=SERVE, budget=H100.usable_bytes)
    assert 0 < found.estimated < len(list(list_meshes(64, law, SERVE)))


def test_where_nothing_fits_the_mesh_that_is_named_is_the_closest():
    """What rules most meshes out is the least that they need, which is alike for many; the best has them compared."""
    config = json.loads((Path(__file__).parents[2] / "fixtures" / "configs_public" / "llama-3.1-405b.json").read_text())
    inventory, anatomy = stock(config), build_layer_graph(config)
    work = TrainingWorkload(8192, recompute="full")
    heaviest = HeaviestRanks(inventory)

    def estimate(mesh, stages):
        held = heaviest.hold(mesh, stages)
        return build_estimate(held, [list_training_terms(anatomy, one, mesh, work, stages=stages) for one in held])

    space = SearchSpace(("pp", "tp", "fsdp"), 8)
    law = AllowedDegrees(inventory, 8192)
    found = search_meshes(
        8, law, estimate, space=space, budget=1 << 30, quick=LowerBoundChecks(floor=lambda _: 700 << 30)
    )
    assert not found.ranked
    peaks = {}
    for mesh in list_meshes(8, law, space):
        with suppress(UsageError):
            peaks[mesh] = estimate(mesh, WeightTotals(inventory).stages(mesh)).binding.total().nbytes
    assert len(peaks) > 5
    assert peaks[found.best.mesh] == min(peaks.values())
    assert found.best.over == min(peaks.values()) - (1 << 30)
