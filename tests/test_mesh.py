"""Meshes, cuts and stages: who holds what."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import PartitionError, UsageError
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Tensor
from shardctl.tensors.mesh import AXES, MOST_RANKS, Mesh
from shardctl.tensors.pieces import PlacedCheckpoint, balance_stages, parse_stages
from shardctl.tensors.placement import (
    AxisPartition,
    GroupMember,
    PartitionSection,
    PartitionSpec,
    build_member_spec,
    check_cuts,
    compute_intervals,
    compute_rank_boxes,
)

BF16 = BY_NAME["BF16"]


def test_ranks_are_numbered_outermost_axis_first():
    mesh = Mesh.of(pp=2, fsdp=2, tp=3)
    assert mesh.world == 12
    assert [
        (mesh.coordinate(r)["pp"], mesh.coordinate(r)["fsdp"], mesh.coordinate(r)["tp"]) for r in range(12)
    ] == list(itertools.product(range(2), range(2), range(3)))
    assert Mesh.parse("tp=3,pp=2").coordinate(1)["pp"] == 1
    assert (mesh.label(7), str(mesh), str(Mesh.of())) == ("pp1 fsdp0 tp1", "pp2 x fsdp2 x tp3", "one device")


def test_expert_axes_renumber_the_ranks_of_a_stage_and_never_multiply_them():
    mesh = Mesh.of(pp=2, dp=2, tp=4, ep=4, etp=2)
    assert mesh.world == 16
    stage = [mesh.coordinate(r) for r in range(8)]
    assert [(at["ep"], at["etp"]) for at in stage] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    with pytest.raises(UsageError, match="does not divide the 4 ranks"):
        Mesh.of(tp=4, ep=3)


def test_experts_that_ep_does_not_divide_are_cut_by_tp_unless_someone_says_otherwise():
    assert (Mesh.of(tp=4).etp, Mesh.of(tp=4, etp=2).etp, Mesh.of(tp=4, ep=2).etp, Mesh.of().etp) == (4, 2, 1, 1)
    assert (Mesh.parse("tp=4").etp, Mesh.parse("tp=4,etp=1").etp, Mesh.parse("tp=4,ep=4").etp) == (4, 1, 1)
    assert [str(Mesh.of(tp=4)), str(Mesh.of(tp=4, etp=2)), str(Mesh.of(tp=4, ep=2))] == [
        "tp4",
        "tp4 x etp2",
        "tp4 x ep2",
    ]


@pytest.mark.parametrize("text", ["fsdp=2,cp=2,tp=2", "tp=2,fsdp=2", "tp=2,dp=2,fsdp=3,cp=2", "pp=2,tp=2,fsdp=2"])
def test_experts_that_are_cut_like_all_else_are_so_on_the_same_ranks(text):
    mesh = Mesh.parse(text)
    for at in map(mesh.coordinate, range(mesh.world)):
        assert (at["etp"], at["efsdp"]) == (at["tp"], at["fsdp"])
        assert at["replica"] == at["dp"] * mesh.degree("cp") + at["cp"]


@pytest.mark.parametrize("text", ["tp", "tp=x", "tp=2,tp=2", "zz=2", "tp=0", "", " ,"])
def test_meshes_that_make_no_sense_are_refused(text):
    with pytest.raises(UsageError):
        Mesh.parse(text)


def test_fsdp_parts_are_those_of_torch_chunk():
    mesh = Mesh.of(fsdp=4)
    held = [compute_intervals(10, [AxisPartition("fsdp")], mesh, mesh.coordinate(r)) for r in range(4)]
    assert held == [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 10)]]
    assert compute_intervals(5, [AxisPartition("fsdp")], mesh, mesh.coordinate(3)) == []


def test_fsdp_divides_what_tp_left_of_a_fused_dim():
    """tp keeps the halves of a fused gate and up together; fsdp then cuts their concatenation."""
    cuts = [AxisPartition("tp", (PartitionSection(6), PartitionSection(6))), AxisPartition("fsdp")]
    mesh = Mesh.of(fsdp=2, tp=2)
    held = {(at["fsdp"], at["tp"]): compute_intervals(12, cuts, mesh, at) for at in map(mesh.coordinate, range(4))}
    assert held == {(0, 0): [(0, 3)], (1, 0): [(6, 9)], (0, 1): [(3, 6)], (1, 1): [(9, 12)]}


def test_heads_that_are_fewer_than_ranks_are_shared_by_neighbours_only_if_asked():
    mesh = Mesh.of(tp=4)
    shared = PartitionSpec(((AxisPartition("tp", (PartitionSection(8, 4, shared=True, noun="key/value heads"),)),),))
    assert [str(compute_rank_boxes((8,), shared, mesh, mesh.coordinate(r))[0]) for r in range(4)] == [
        "[0:4]", "[0:4]", "[4:8]", "[4:8]"
    ]  # fmt: skip
    alone = PartitionSpec(((AxisPartition("tp", (PartitionSection(8, 4, noun="key/value heads"),)),),))
    with pytest.raises(PartitionError, match=r"cannot split k \[8\] over tp=4: 2 key/value heads") as raised:
        check_cuts("k", (8,), alone, mesh)
    assert raised.value.hint == "use --tp 1 or 2, or --kv-heads replicate to keep each head on several ranks"


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2),
    st.integers(1, 4), st.integers(1, 30),
)  # fmt: skip
def test_every_element_is_held_by_someone_and_replicas_are_whole(tp, fsdp, dp, pp, units, cols):
    mesh = Mesh.of(tp=tp, fsdp=fsdp, dp=dp, pp=pp)
    rows = units * tp * 2
    spec = PartitionSpec(
        ((AxisPartition("tp", (PartitionSection(rows, 2),)), AxisPartition("fsdp")), (AxisPartition("fsdp"),)[:0])
    )
    counts = np.zeros((rows, cols), int)
    for rank in range(mesh.world):
        for box in compute_rank_boxes((rows, cols), spec, mesh, mesh.coordinate(rank)):
            counts[box.slices()] += 1
    assert (counts == dp * pp).all()


def placed(tensors, specs, mesh, stages=(1,)):
    return PlacedCheckpoint(tuple(tensors), specs, mesh, stages)


def test_experts_are_divided_whole_and_dense_weights_replicated_once():
    """ep re-uses dp ranks: each holds other experts, while the dense weight has one writer."""
    names = [f"experts.{i}" for i in range(4)]
    specs = {n: PartitionSpec(((), ()), member=GroupMember("ep", i, 4)) for i, n in enumerate(names)} | {
        "dense": PartitionSpec(((), ()))
    }
    tensors = [Tensor(n, BF16, (2, 2), ()) for n in specs]
    mesh = Mesh.of(dp=4, ep=2)
    new = {rank: [h.tensor.name for h in held] for rank, held in placed(tensors, specs, mesh).ranks()}
    assert new == {0: ["experts.0", "experts.1", "dense"], 1: ["experts.2", "experts.3"], 2: [], 3: []}
    every = {r: [h.tensor.name for h in held] for r, held in placed(tensors, specs, mesh).ranks(replicas=True)}
    assert every[3] == ["experts.2", "experts.3", "dense"]
    with pytest.raises(PartitionError, match="over ep=8: 4 experts"):
        next(placed(tensors, specs, Mesh.of(dp=8, ep=8)).ranks())


def test_experts_of_one_rule_are_placed_as_those_that_are_known_one_by_one():
    """A spec that was changed is no longer that of its rule, so it is not cut as the others."""
    rule = PartitionSpec(((AxisPartition("fsdp"),), ()), member=GroupMember("ep", 0, 4))
    alike = {f"experts.{i}": build_member_spec(rule, GroupMember("ep", i, 4)) for i in range(4)}
    alike["experts.3"] = replace(alike["experts.3"], cuts=((), ()))
    apart = {name: PartitionSpec(spec.cuts, spec.where, spec.member) for name, spec in alike.items()}
    assert [spec.rule is rule for spec in alike.values()] == [True, True, True, False]
    assert all(spec.rule is spec for spec in apart.values())
    tensors = [Tensor(name, BF16, (4, 2), ()) for name in alike]
    mesh = Mesh.of(fsdp=2, dp=2, ep=2)
    held = [
        [(rank, [(h.tensor.name, h.boxes) for h in some]) for rank, some in placed(tensors, specs, mesh).ranks()]
        for specs in (alike, apart)
    ]
    assert held[0] == held[1]
    shapes = {name: {box.shape for box in found} for _, some in held[0] for name, found in some}
    assert shapes == {name: {(4, 2) if name == "experts.3" else (2, 2)} for name in alike}
    assert placed(tensors, alike, mesh).count_boxes() == sum(len(h[1]) for _, some in held[0] for h in some)


def test_fsdp_of_experts_is_what_ep_leaves_of_it():
    mesh = Mesh.of(fsdp=4, ep=2)
    assert (mesh.degree("efsdp"), Mesh.of(fsdp=4, ep=4).degree("efsdp"), Mesh.of(dp=2, tp=2).degree("efsdp")) == (
        2,
        1,
        1,
    )
    spec = PartitionSpec(((AxisPartition("ep", (PartitionSection(4),)), AxisPartition("efsdp")),))
    counts = np.zeros(4, int)
    for rank in range(4):
        for box in compute_rank_boxes((4,), spec, mesh, mesh.coordinate(rank)):
            counts[box.slices()] += 1
    assert counts.tolist() == [1, 1, 1, 1]


def test_a_tie_on_two_stages_gives_each_one_of_its_names():
    tied = Tensor("embed", BF16, (4, 2), (), ties=("head",))
    spec = {"embed": PartitionSpec(((), ()), (("first", 0), ("last", 0)))}
    names = {r: [h.names for h in held] for r, held in placed([tied], spec, Mesh.of(pp=2), (1, 1)).ranks()}
    assert names == {0: [("embed",)], 1: [("head",)]}
    assert [h.names for _, held in placed([tied], spec, Mesh.of()).ranks() for h in held] == [("embed", "head")]


def test_an_empty_tensor_is_held_whole():
    spec = PartitionSpec(((AxisPartition("fsdp"),), ()))
    assert compute_rank_boxes((0, 3), spec, Mesh.of(fsdp=2), Mesh.of(fsdp=2).coordinate(1)) == [Box((0, 0), (0, 3))]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(0, 80), st.integers(0, 80), st.data())
def test_balanced_stages_are_as_light_as_can_be(costs, first, last, data):
    count = data.draw(st.integers(1, len(costs)))

    def heaviest(stages):
        loads, start = [], 0
        for stage, layers in enumerate(stages):
            loads.append(sum(costs[start : start + layers]) + first * (stage == 0) + last * (stage == count - 1))
            start += layers
        return max(loads)

    found = balance_stages(costs, first, last, count)
    assert len(found) == count
    assert sum(found) == len(costs)
    assert min(found) >= 1
    cuts = itertools.combinations(range(1, len(costs)), count - 1)
    every = (tuple(np.diff([0, *cut, len(costs)]).tolist()) for cut in cuts)
    assert heaviest(found) == min(map(heaviest, every))


def test_stages_must_add_up():
    assert parse_stages("3,2", 5, 2) == (3, 2)
    for text in ("transformers", "transformers@5.23"):
        with pytest.raises(PartitionError, match="pp=3 needs at least 3 layers, but the model has 2"):
            parse_stages(text, 2, 3)
    with pytest.raises(UsageError, match="cannot read --stages 'transformers@4'") as error:
        parse_stages("transformers@4", 2, 2)
    assert "transformers@5.23" in (error.value.hint or "")
    for text, layers, count in [("3,3", 5, 2), ("5", 5, 2), ("5,0", 5, 2), ("a,b", 5, 2)]:
        with pytest.raises(UsageError):
            parse_stages(text, layers, count)
    with pytest.raises(UsageError, match="leaves a stage without layers"):
        parse_stages("0,5", 5, 2)
    with pytest.raises(UsageError, match="needs at least 3 layers"):
        balance_stages([1, 1], 0, 0, 3)


def test_axes_are_each_given_once():
    with pytest.raises(UsageError, match="not each given once"):
        Mesh((("tp", 2), ("tp", 2), ("pp", 1), ("dp", 1), ("cp", 1)))
    assert {name for name, _ in Mesh.of().axes} == set(AXES)


def test_a_mesh_larger_than_any_cluster_is_refused_before_its_ranks_are_listed():
    assert Mesh.of(fsdp=MOST_RANKS).world == MOST_RANKS
    with pytest.raises(UsageError, match=r"a mesh of 1,000,000,000 ranks is larger than any cluster"):
        Mesh.parse("dp=1000,fsdp=1000000")
