"""Tiers, buffers and bandwidths of offloading are those of the ZeRO-Infinity paper and of DeepSpeed's documentation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from known_models import MIXTRAL_8X7B, stock

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UsageError
from shardctl.estimate.model.inventory import build_inventory
from shardctl.estimate.model.layer_graph import build_layer_graph
from shardctl.estimate.model.operations import compute_used_share
from shardctl.estimate.model.rank_shards import list_rank_shards
from shardctl.estimate.rank_estimate import build_estimate
from shardctl.estimate.term import sum_terms
from shardctl.estimate.training.activations import estimate_activations
from shardctl.estimate.training.offload import compute_bandwidth, compute_intensity, list_link_needs, sum_heaviest_node
from shardctl.estimate.training.scheme import choose_scheme
from shardctl.estimate.training.states import list_state_terms
from shardctl.estimate.training.step_phase import StepPosition
from shardctl.estimate.training.transients import build_passing_hold
from shardctl.estimate.workload import TrainingWorkload
from shardctl.tensors.manifest import Tensor
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import AxisPartition, PartitionSpec

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
GIB, TIB = 1 << 30, 1 << 40
V100 = 70e12
"""Operations per second that the paper takes for the peak of a V100 in sec. 4.2."""

FIGURE_2A = [
    (0.10, 80, 10, 128, 1.83, 0.05, 1.95),
    (0.50, 100, 20, 160, 9.16, 0.12, 6.25),
    (1.01, 128, 25, 256, 18.31, 0.20, 9.77),
    (10.05, 195, 64, 512, 182.81, 0.76, 64.00),
    (101.47, 315, 160, 1024, 1845.70, 3.08, 400.00),
]
"""Rajbhandari et al. 2021 (ZeRO-Infinity), Figure 2a: parameters in 1e12, layers, hidden size in 1024, heads, model
states in TiB, activation checkpoints in TiB per node of 16 devices with 32 sequences of 1024 tokens, and the working
memory for model states in GiB per device."""
EVERYTHING = {"profile": "deepspeed", "zero": 3, "offload": "nvme", "offload_parameters": True}


def gpt(layers, hidden, heads):
    config = json.loads((CONFIGS / "gpt2.json").read_text()) | {
        "n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": 51200, "n_positions": 1024,
    }  # fmt: skip
    return build_layer_graph(config), stock(config)


@pytest.mark.parametrize(("size", "layers", "hidden", "heads", "kept", "checkpoints", "working"), FIGURE_2A)
def test_zero_infinity_figure_2a(size, layers, hidden, heads, kept, checkpoints, working):
    """Rajbhandari et al. 2021, Figure 2a and sec. 3: 20 bytes per parameter of the layers are 240 L h^2.

    The paper's parameters are those of matrices in layers; embeddings and vectors are the rest here. Of its 20 bytes,
    two are 16-bit gradients, which leave the device as fp32 here.
    """
    described, inventory = gpt(layers, hidden * 1024, heads)
    mesh, stages = Mesh.of(dp=16), [layers]
    work = TrainingWorkload(1024, micro_batch=2, recompute="full", **EVERYTHING)
    (holding,) = list_rank_shards(inventory, mesh, stages)
    found = list_state_terms(holding, mesh, work)
    matrices = sum(p.count * p.elements for p in holding.parts if p.kind.matrix and p.kind.layers)
    assert matrices == 12 * layers * (hidden * 1024) ** 2
    assert round(matrices / 1e12, 2) == size
    assert round(20 * matrices / TIB, 2) == kept
    share = matrices / inventory.elements
    assert 16 * sum_terms(found, "nvme").nbytes * share == pytest.approx(kept * TIB * 18 / 20, rel=1e-3)
    hold = build_passing_hold(holding, mesh, work, choose_scheme(mesh, work))
    gathered = next(t for t in hold.list_terms(StepPosition("layer")) if t.name.startswith("gathered weights"))
    assert round(gathered.low / GIB, 2) == working  # the paper has nothing that stays for a while
    kept_inputs = sum_terms(estimate_activations(described, holding, mesh, work, stages=stages), category="activations")
    of_layers = 2 * 2 * 1024 * hidden * 1024 * layers
    assert round(16 * of_layers / TIB, 2) == checkpoints
    assert of_layers <= kept_inputs.nbytes <= of_layers * 1.2


def compute_efficiency(ait, bandwidth, peak):
    """Rajbhandari et al. 2021, sec. 4, equation 6: the part of the time that a device computes."""
    return ait * bandwidth / (ait * bandwidth + peak)


@pytest.mark.parametrize(("ait", "rate", "least"), [
    (compute_intensity("parameters", tokens=1024), 70e9, 0.5),
    (compute_intensity("optimizer", tokens=2 * 1024), 1.5e12, 0.9),
])  # fmt: skip
def test_efficiencies_that_the_paper_reads_off_its_figure_3(ait, rate, least):
    """Rajbhandari et al. 2021, sec. 4.2: 70 GB/s for over 50 % with one sequence, 1.5 TB/s for 90 % with two."""
    assert least <= compute_efficiency(ait, rate, V100) <= least + 0.02


def test_optimizer_states_need_four_times_the_bandwidth():
    """Rajbhandari et al. 2021, sec. 4.2."""
    rates = [compute_bandwidth(compute_intensity(what, tokens=4096), V100, 0.5) for what in ("parameters", "optimizer")]
    assert rates[1] == 4 * rates[0]
    assert compute_intensity("checkpoints", tokens=1, hidden=2048, interval=2) == 24 * 2048 * 2


@pytest.mark.parametrize("target", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("ait", [1, 256, 1e5])
def test_bandwidth_gives_the_efficiency_it_was_solved_for(ait, target):
    assert compute_efficiency(ait, compute_bandwidth(ait, V100, target), V100) == pytest.approx(target)


def test_a_device_always_waits():
    with pytest.raises(UsageError, match=r"efficiency of 1.0"):
        compute_bandwidth(1, V100, 1.0)


def test_needs_are_of_what_is_moved():
    work = TrainingWorkload(2048, microbatches=8, **EVERYTHING)
    parameters, optimizer = list_link_needs(Mesh.of(dp=4), work, peak=V100, target=0.5)
    assert (parameters.tier, parameters.intensity, optimizer.intensity) == ("nvme", 2048, 2048 * 8 / 4)
    assert parameters.bandwidth == V100 / 2048
    assert parameters.link == parameters.bandwidth / 4
    mesh = Mesh.of(dp=4, pp=2)
    (only,) = list_link_needs(mesh, TrainingWorkload(2048, profile="megatron", zero=1, offload="cpu"), peak=V100)
    assert (only.what, only.tier, only.intensity) == ("optimizer states", "host", 2048 * 2 / 4)
    assert list_link_needs(mesh, TrainingWorkload(2048), peak=V100) == ()


def test_experts_are_moved_for_the_few_tokens_that_choose_them():
    """Of Mixtral-8x7B's 46.7B parameters each token uses 12.9B (Jiang et al. 2024, sec. 2)."""
    described, inventory = build_layer_graph(MIXTRAL_8X7B), stock(MIXTRAL_8X7B)
    shares = []
    for mesh in (Mesh.of(dp=8), Mesh.of(dp=8, ep=8)):
        holding = list_rank_shards(inventory, mesh, [32])[0]
        shares.append(compute_used_share(described, holding, mesh))
    assert shares[0] == pytest.approx(12.88 / 46.7, rel=1e-3)
    assert shares[1] > 1  # an eighth of the experts with the tokens of eight ranks, each of which goes to two
    work = TrainingWorkload(2048, **EVERYTHING)
    dense, sparse = (list_link_needs(Mesh.of(dp=8), work, peak=V100, used=share) for share in (1.0, shares[0]))
    assert [b.bandwidth / a.bandwidth for a, b in zip(dense, sparse, strict=True)] == [pytest.approx(1 / shares[0])] * 2
    plain, weights = gpt(2, 256, 4)
    assert compute_used_share(plain, list_rank_shards(weights, Mesh.of(), [2])[0], Mesh.of()) == 1


def one_tensor(elements):
    tensor = Tensor("w", BY_NAME["BF16"], (elements,), ())
    return build_inventory([tensor], {"w": PartitionSpec(((AxisPartition("fsdp"),),))}, 1)


@pytest.mark.parametrize(("profile", "zero", "offload", "device", "host", "nvme"), [
    ("deepspeed", 1, "cpu", 4, 16, 0),
    ("deepspeed", 2, "cpu", 2, 16, 0),
    ("deepspeed", 3, "cpu", 2, 16, 0),
    ("deepspeed", 3, "nvme", 2, 0, 16),
    ("megatron", 1, "cpu", 6, 16, 0),
    ("fsdp2", 3, "cpu", 0, 16, 0),
])  # fmt: skip
def test_where_the_bytes_of_a_parameter_are(profile, zero, offload, device, host, nvme):
    """DeepSpeed, memory.rst: fp32 parameters, gradients and moments on the host; of torch's policy all is there."""
    count = 8000
    mesh = Mesh.of(dp=1)
    (holding,) = list_rank_shards(one_tensor(count), mesh, [1])
    found = list_state_terms(holding, mesh, TrainingWorkload(128, profile=profile, zero=zero, offload=offload))
    lasting = [
        t for t in found if t.category in {"weights", "gradients", "optimizer"}
        and not t.name.startswith(("gathered", "largest", "small", "gradients before"))
    ]  # fmt: skip
    assert [sum_terms(lasting, tier).nbytes / count for tier in ("device", "host", "nvme")] == [device, host, nvme]


def test_buffers_of_nvme():
    """DeepSpeed, offload_config.py: four buffers of a sub-group; five of 1e8 parameters, and 1e9 that stay."""
    mesh = Mesh.of(dp=2)
    (holding,) = list_rank_shards(one_tensor(6_000_000_000), mesh, [1])
    found = {t.name: t for t in list_state_terms(holding, mesh, TrainingWorkload(128, **EVERYTHING))}
    assert found["buffers for optimizer states on NVMe"].nbytes == 4 * 4 * 10**9
    assert found["buffers for parameters on NVMe"].nbytes == 2 * (5 * 10**8 + 10**9)
    assert all(t.tier == "host" for t in found.values() if t.name.endswith("on NVMe"))


def test_a_node_is_the_sum_of_its_ranks():
    """Ranks of two stages of unequal size on nodes of two: the heavier node counts."""
    _, inventory = gpt(3, 64, 4)
    mesh = Mesh.of(pp=2, dp=2)
    work = TrainingWorkload(128, profile="deepspeed", zero=1, offload="cpu")
    holdings = list_rank_shards(inventory, mesh, [1, 2])
    estimate = build_estimate(holdings, [list_state_terms(h, mesh, work) for h in holdings])
    sizes = {rank.holding.stage: rank.total("host").nbytes for rank in estimate.ranks}
    assert sum_heaviest_node(estimate, mesh, per_node=2).nbytes == 2 * max(sizes.values())
    assert sum_heaviest_node(estimate, mesh, per_node=4).nbytes == 2 * sum(sizes.values())
    assert sum_heaviest_node(estimate, mesh, per_node=3).nbytes == 2 * sizes[0] + sizes[1]
    assert not sum_heaviest_node(estimate, mesh).exact
    assert sum_heaviest_node(estimate, mesh, "nvme").nbytes == 0
