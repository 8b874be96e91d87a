"""Computes what offloading needs: host buffers, a node's share of them, and links that are fast enough.

The model of bandwidth is that of ZeRO-Infinity (Rajbhandari et al. 2021, sec. 4): a device waits for what it moves, so
that its efficiency is `ait * bw / (ait * bw + peak)`, ait being the operations for each byte that is moved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.estimate.term import MemorySum, MemoryTerm
from shardctl.estimate.training.scheme import F32, choose_scheme
from shardctl.tensors.mesh import build_holding_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.estimate.rank_estimate import MeshEstimate
    from shardctl.estimate.term import Tier
    from shardctl.estimate.training.scheme import TrainingScheme
    from shardctl.estimate.workload import TrainingWorkload
    from shardctl.tensors.mesh import Mesh

Moved = Literal["parameters", "optimizer", "checkpoints"]
"""What is moved between a device and another tier."""
_OPTIMIZER_BUFFERS: Final = 4
"""Of one sub-group each (DeepSpeed, `offload_optimizer.buffer_count`)."""
_SUB_GROUP: Final = 1_000_000_000
"""Elements of one (DeepSpeed, `sub_group_size`)."""
_PARAMETER_BUFFERS: Final = 5 * 100_000_000
"""Elements of all (DeepSpeed, `offload_param.buffer_count` and `buffer_size`)."""
_ON_HOST: Final = 1_000_000_000
"""Elements of parameters on NVMe that stay on the host, too (DeepSpeed, `offload_param.max_in_cpu`)."""
_DEEPSPEED_OFFLOAD_SOURCE: Final = "DeepSpeed, runtime/zero/offload_config.py"
_ZERO_INFINITY: Final = "Rajbhandari et al. 2021, sec. 4"


@value_class
class LinkNeed:
    """What a link must carry, in bytes per second, so that a device is as busy as was asked."""

    what: str
    tier: Tier
    """Where it is moved from and to."""
    intensity: float
    """Operations of a device for each byte moved."""
    bandwidth: float
    """For one device, over all links that bring it data."""
    link: float
    """Over the device's own link to the tier: ranks that share a state move a part each, and gather."""
    source: str = _ZERO_INFINITY


def compute_intensity(what: Moved, *, tokens: int, hidden: int = 0, interval: int = 1) -> float:
    """Compute operations for each byte moved (Rajbhandari et al. 2021, sec. 4.1, equations 9 to 11).

    `tokens` are those of a device between two moves: of one pass for ``parameters`` and gradients, of a whole step for
    ``optimizer`` states. For ``checkpoints`` of activations `hidden` counts, and `interval`, the layers from one
    checkpoint to the next.

    >>> compute_intensity("parameters", tokens=1024), compute_intensity("optimizer", tokens=1024)
    (1024, 256.0)
    """
    if what == "parameters":
        return tokens
    if what == "optimizer":
        return tokens / 4
    return 24 * hidden * interval


def compute_bandwidth(ait: float, peak: float, target: float = 0.9) -> float:
    """Compute bytes per second with which a device of `peak` operations per second computes `target` of the time.

    It is equation 6 of sec. 4, solved for the bandwidth.

    Raises UsageError unless the target is between 0 and 1; nothing is so fast that a device never waits.
    """
    if not 0 < target < 1:
        raise UsageError(f"an efficiency of {target} is not between 0 and 1")
    return peak / ait * target / (1 - target)


def list_link_needs(
    mesh: Mesh, work: TrainingWorkload, *, peak: float, target: float = 0.9, used: float = 1.0
) -> tuple[LinkNeed, ...]:
    """List what must be moved how fast for each state that is not on the device.

    `peak` is a device's operations per second.

    With several microbatches, optimizer states move once for all of them. `used` is the part of the weights that a
    token is multiplied with: of a model with experts all are moved for the few that are. Nothing is needed without
    offloading.
    """
    plan = choose_scheme(mesh, work)
    microbatches = work.count_passes(mesh.degree("pp"))
    tokens = work.sequence * work.micro_batch // mesh.degree("cp")
    shared = mesh.degree("fsdp") * (plan.sharers if work.zero else 1)
    found = (
        ("parameters and gradients", plan.parameters, used * compute_intensity("parameters", tokens=tokens)),
        ("optimizer states", plan.states, used * compute_intensity("optimizer", tokens=tokens * microbatches)),
    )
    return tuple(
        LinkNeed(what, tier, ait, compute_bandwidth(ait, peak, target), compute_bandwidth(ait, peak, target) / shared)
        for what, tier, ait in found
        if tier != "device"
    )


def sum_heaviest_node(estimate: MeshEstimate, mesh: Mesh, tier: Tier = "host", *, per_node: int = 8) -> MemorySum:
    """Return bytes in `tier` of the node whose ranks need most there; nodes have `per_node` ranks each, in order."""
    alike = {build_holding_key(rank.holding.coordinate): rank.total(tier) for rank in estimate.ranks}
    nodes = [
        [alike[build_holding_key(mesh.coordinate(rank))] for rank in range(first, min(first + per_node, mesh.world))]
        for first in range(0, mesh.world, per_node)
    ]
    sums = [
        MemorySum(sum(r.nbytes for r in n), sum(r.low for r in n), sum(r.high for r in n), all(r.exact for r in n))
        for n in nodes
    ]
    return max(sums, key=lambda total: total.nbytes)


def list_buffer_terms(host: int, shared: int, plan: TrainingScheme) -> Iterator[MemoryTerm]:
    """List what DeepSpeed keeps on the host to move data through; `host` are the bytes of states there.

    `shared` are the trained elements whose states a rank updates.
    """
    if plan.runtime != "partitions" or not plan.offloaded:
        return
    if plan.states == "host":
        yield MemoryTerm(
            "buffers of the host",
            "workspace",
            0,
            "0 to 0.5 * states on the host",
            {"states on the host": host},
            "DeepSpeed, docs/code-docs/source/memory.rst, `additional_buffer_factor`",
            interval=(0, host // 2),
            tier="host",
        )
        return
    group = F32.nbytes((min(shared, _SUB_GROUP),))
    yield MemoryTerm(
        "buffers for optimizer states on NVMe",
        "workspace",
        _OPTIMIZER_BUFFERS * group,
        f"{_OPTIMIZER_BUFFERS} * {F32.unit_bytes} * min(elements, {_SUB_GROUP})",
        {"elements": shared},
        _DEEPSPEED_OFFLOAD_SOURCE,
        interval=(_OPTIMIZER_BUFFERS * group, 3 * _OPTIMIZER_BUFFERS * group),  # pipelined reads and writes
        tier="host",
    )
    if plan.parameters == "nvme":
        stay = min(shared, _ON_HOST)
        yield MemoryTerm(
            "buffers for parameters on NVMe",
            "workspace",
            plan.compute.nbytes((_PARAMETER_BUFFERS + stay,)),
            f"{plan.compute.unit_bytes} * ({_PARAMETER_BUFFERS} + min(elements, {_ON_HOST}))",
            {"elements": shared},
            _DEEPSPEED_OFFLOAD_SOURCE,
            interval=(
                plan.compute.nbytes((min(_PARAMETER_BUFFERS, stay),)),
                plan.compute.nbytes((_PARAMETER_BUFFERS + stay,)),
            ),
            tier="host",
        )
