"""Estimates the time that a mesh takes, and why: a stated model of one optimizer step or generated token.

It ranks meshes; it is no benchmark. Every share of the time is kept with the formula it follows from.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, comb
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.value import value_class
from shardctl.estimate.model.operations import (
    compute_touched_share,
    count_attention_operations,
    count_matrix_operations,
)
from shardctl.estimate.term import sum_terms
from shardctl.estimate.training.activations import list_kept_layers
from shardctl.estimate.training.communication import list_traffic
from shardctl.estimate.training.recomputed_modules import count_module_operations
from shardctl.estimate.training.schedule import compute_bubble
from shardctl.estimate.training.scheme import choose_scheme
from shardctl.estimate.workload import TrainingWorkload
from shardctl.hardware.devices import get_device
from shardctl.tensors.mesh import EXPERT_AXES, EXPERT_FSDP

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardctl.estimate.model.layer_graph import LayerGraph
    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.estimate.rank_estimate import MeshEstimate, RankEstimate
    from shardctl.estimate.training.communication import RankTraffic
    from shardctl.estimate.workload import ServingWorkload
    from shardctl.hardware.devices import DeviceSpec
    from shardctl.tensors.mesh import Mesh

REFERENCE: Final = "h100-80gb"
"""Whose speed is taken where a device is nothing but a size."""
_ADAM_TRAFFIC_BYTES: Final = 30
"""Bytes that Adam moves per parameter: gradient, master and both moments read (16), the last three and the computing
copy written (14)."""
_UPDATED_GRADIENT: Final = 12
"""Bytes that a microbatch moves per weight: read twice in 16 bits, its fp32 gradient read and written."""
_OFFLOAD_TERM_NAME: Final = "states moved to the host and back"
_EXPERT_MEMORY: Final = "tokens of experts moved in memory"
_AMONG_EXPERTS: Final = (*EXPERT_AXES, EXPERT_FSDP, "replica")
_EXPERT_TO_DENSE_AXES: Final = {"replica": ("dp", "cp"), EXPERT_FSDP: ("fsdp",), "etp": ("tp",), "ep": ()}
"""The axes of experts that are cut as all else is."""


@value_class
class DevicePace:
    """What devices reach of what is marketed."""

    operations: float = 0.6
    """Of the dense peak, in the matrices of a large model, norms and other small kernels included: Megatron reached
    0.52 with all communication (Narayanan et al. 2021, table 1), Llama 3 0.38 to 0.43 (Grattafiori et al. 2024,
    table 4)."""
    memory: float = 0.8
    """Of the memory's bandwidth."""
    links: float = 0.8
    """Of a link's bandwidth, where rings level off (nccl-tests report about 360 of 450 GB/s on eight H100)."""
    near: float = 10e-6
    """Seconds before the first byte of a collective inside a node."""
    far: float = 30e-6
    """The same between nodes."""


@value_class
class TimeShare:
    """A part of the time, which adds up with the others to all of it."""

    name: str
    seconds: float
    formula: str
    nbytes: int = 0
    """Bytes that a rank sends or reads for it; 0 for operations."""


@value_class
class MeshCost:
    """What one optimizer step of a mesh takes, or one token of each sequence in serving."""

    shares: tuple[TimeShare, ...]
    tokens: float
    """Tokens that all ranks together get through in that time."""
    ranks: int
    device: str
    """Whose speed it is."""
    microbatches: int | None = None
    """Forward passes of each data-parallel rank in that time; None in serving."""
    operations: float = 0.0
    """Operations that the step needs on all devices, without those of recomputation; 0 in serving."""
    peak: float = 0.0
    """Dense operations per second of one device, as marketed."""
    first_token_seconds: float | None = None
    """Until the first token of a prompt as long as the context, without other requests; None in training, and for
    models whose prompt goes through an encoder."""

    @property
    def seconds(self) -> float:
        """The time of one step or token."""
        return sum(share.seconds for share in self.shares)

    @property
    def score(self) -> float:
        """Device-seconds per token: what meshes are ranked by, the least first."""
        return self.seconds * self.ranks / self.tokens

    @property
    def rate(self) -> float:
        """Tokens per second of all devices."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization (MFU; Chowdhery et al. 2022, appendix B); None in serving."""
        return self.operations / (self.seconds * self.ranks * self.peak) if self.operations else None

    def share(self, name: str) -> float:
        """Return seconds of the shares of that name."""
        return sum(share.seconds for share in self.shares if share.name == name)


def price_mesh(
    anatomy: LayerGraph,
    estimate: MeshEstimate,
    mesh: Mesh,
    work: ServingWorkload | TrainingWorkload,
    on: DeviceSpec,
    *,
    dtype: str = "BF16",
    pace: DevicePace | None = None,
) -> MeshCost:
    """Return what `mesh` costs on devices `on`, at the pace of its slowest stage.

    `dtype` is that of activations in serving.

    A stage's time is what it computes, what it sends and cannot hide behind that, and what waits for it. Of traffic
    that runtimes hide (parameters, gradients, keys and values of a ring) the excess over the computation counts.
    """
    runs = on if on.timed else replace(get_device(REFERENCE), name=get_device(REFERENCE).name)
    pacer = _StagePacer(anatomy, mesh, runs, pace or DevicePace(), dtype)
    stages = {rank.holding.stage: rank for rank in reversed(estimate.ranks)}
    ranks = [stages[number] for number in sorted(stages)]
    if isinstance(work, TrainingWorkload):
        replicas = mesh.degree("dp") * mesh.degree("fsdp")
        times = work.count_passes(mesh.degree("pp"))
        tokens = work.sequence * work.micro_batch * times * replicas
        slowest = max((pacer.training(rank, work, times) for rank in ranks), key=_sum_seconds)
        needed = sum(pacer.operations(rank, work).needed for rank in ranks) * times * mesh.world / mesh.degree("pp")
        return MeshCost(tuple(slowest), tokens, mesh.world, runs.name, times, needed, runs.flops_bf16)
    return MeshCost(
        tuple(pacer.serving(ranks, work)),
        work.batch * mesh.degree("dp") * mesh.degree("fsdp"),
        mesh.world,
        runs.name,
        first_token_seconds=pacer.compute_first_token_time(ranks, work),
    )


@value_class
class _PassOperations:
    """The operations of one microbatch on one rank."""

    needed: float
    """Forward and backward."""
    again: float
    """Of recomputation."""


@value_class
class _StagePacer:
    """Times the parts of a pass on one device."""

    anatomy: LayerGraph
    mesh: Mesh
    device: DeviceSpec
    pace: DevicePace
    dtype: str

    def training(self, rank: RankEstimate, work: TrainingWorkload, times: int) -> list[TimeShare]:
        """Return one optimizer step of a stage."""
        holding, mesh = rank.holding, self.mesh
        counted = self.operations(rank, work)
        rate = self.device.flops_bf16 * self.pace.operations
        compute = (counted.needed + counted.again) / rate
        formula = "(forward + backward behind the first trained + gradients of the trained) * m / (flops * pace)"
        shares = [TimeShare("compute", compute * times, formula)]
        moved = self.count_expert_bytes(rank, work)
        experts = moved / (self.device.memory_bandwidth * self.pace.memory)
        formula = "(copies of tokens * 3 (hidden + width) * bytes * passes + 12 P) * m / bandwidth"
        shares.append(TimeShare(_EXPERT_MEMORY, experts * times, formula, round(moved * times)))
        compute += experts
        sent = list_traffic(self.anatomy, holding, mesh, work)
        shares += self.compute_exposed_traffic(sent, compute, times)
        waits = compute_bubble(mesh.degree("pp"), times, work.schedule, work.virtual_stages)
        shares.append(TimeShare("bubble", waits * _sum_seconds(shares), "(p-1)/(m v) of compute and traffic within"))
        ends = [t for t in sent if t.hidden and t.times == 1 < times]
        shares += self.compute_excess(ends, 2 / 3 * compute, 1)
        plan = choose_scheme(mesh, work)
        updated = sum(
            holding.elements(expert=expert, trainable=True)
            // (plan.count_sharing_ranks(expert=expert) if work.zero else 1)
            for expert in (False, True)
        )
        if plan.offloaded:
            away = (plan.gradient.unit_bytes + plan.compute.unit_bytes) * updated
            formula = "gradients out and parameters back by PCIe; the host's own update is not counted"
            shares.append(TimeShare(_OFFLOAD_TERM_NAME, away / (self.device.pcie * self.pace.links), formula, away))
        else:
            moved = _ADAM_TRAFFIC_BYTES * updated
            seconds = moved / (self.device.memory_bandwidth * self.pace.memory)
            shares.append(TimeShare("update", seconds, "30 P / bandwidth", moved))
        return _merge_shares(shares)

    def operations(self, rank: RankEstimate, work: TrainingWorkload) -> _PassOperations:
        """Count the operations of a rank for one microbatch, forward and backward."""
        holding, mesh = rank.holding, self.mesh
        tokens = work.sequence * work.micro_batch / mesh.degree("cp")
        layers = self.anatomy.layers[holding.layers.start : holding.layers.stop]
        matrices = count_matrix_operations(self.anatomy, holding, mesh, tokens)
        looks = count_attention_operations(layers, mesh, tokens, work.sequence, masked=True)
        # torchtitan's list saves attention and every second product of matrices.
        selected = matrices / 2 if work.profile == "fsdp2" else looks * ("core_attn" in work.recompute_modules)
        selected += count_module_operations(layers, mesh, tokens, work.recompute_modules)
        again = {"none": 0.0, "selective": selected, "full": matrices + looks}[work.recompute] / work.recompute_every
        # Of weights that are not trained, there is no gradient to compute, but what goes through them has one, behind
        # the first layer that is.
        trained = holding.gathered(trainable=True) / (holding.gathered() or 1)
        behind = len(list_kept_layers(holding)) / (len(layers) or 1)
        return _PassOperations((1 + behind + trained) * matrices + (1 + 2 * behind) * looks, behind * again)

    def count_expert_bytes(self, rank: RankEstimate, work: TrainingWorkload) -> float:
        """Count the bytes that the experts of a rank move in one microbatch besides the operands of their products.

        Each copy of a token is permuted (read and written), activated (two widths read, one written) and returned
        (read): once forward, twice backward and once more if it is recomputed. Products of few tokens do not hide
        their weights, which are read forward and backward, nor the fp32 gradients that they are added to.
        """
        mesh, holding = self.mesh, rank.holding
        layers = self.anatomy.layers[holding.layers.start : holding.layers.stop]
        passes = 3 + (work.recompute == "full") / work.recompute_every
        copies = work.sequence * work.micro_batch / mesh.degree("cp") * mesh.etp / mesh.degree("tp")
        moved = sum(
            copies * one.chosen * 3 * ((one.width or layer.hidden) + one.size / mesh.etp)
            for layer in layers
            if (one := layer.experts)
        )
        weights = _UPDATED_GRADIENT * holding.gathered(expert=True, trainable=True)
        return moved * passes * BY_NAME[work.dtype].unit_bytes + weights

    def compute_exposed_traffic(self, sent: Sequence[RankTraffic], compute: float, times: int) -> list[TimeShare]:
        """Return the traffic of all microbatches that computation does not hide."""
        within = [t for t in sent if t.hidden and t.times == times]
        return [self.timed(t) for t in sent if not t.hidden] + self.compute_excess(within, compute, times)

    def timed(self, one: RankTraffic) -> TimeShare:
        """Return traffic that nothing hides."""
        where = _name_link(self.far(one))
        return TimeShare(one.name, self.seconds(one), f"{where}: bytes / bandwidth + messages * latency", one.nbytes)

    def compute_excess(self, sent: Iterable[RankTraffic], behind: float, times: int) -> list[TimeShare]:
        """Return what `behind` seconds in each of `times` microbatches do not hide, each in proportion."""
        each = [(t, self.seconds(t)) for t in sent]
        whole = sum(seconds for _, seconds in each)
        left = max(0.0, whole - behind * times)
        return [
            TimeShare(
                t.name,
                left * seconds / whole,
                f"{_name_link(self.far(t))}: what exceeds the computation it runs behind",
                t.nbytes,
            )
            for t, seconds in each
            if left
        ]

    def serving(self, ranks: Sequence[RankEstimate], work: ServingWorkload) -> list[TimeShare]:
        """Return one token of every sequence, through all stages in turn."""
        weights = cached = compute = 0.0
        read = kept = 0
        sent: list[RankTraffic] = []
        share = compute_touched_share(self.anatomy, self.mesh, work.batch)
        bandwidth = self.device.memory_bandwidth * self.pace.memory
        for rank in ranks:
            stage = _count_read_bytes(rank.holding, share)
            cache = sum_terms(rank.terms, category="kv cache").nbytes
            operations = count_matrix_operations(self.anatomy, rank.holding, self.mesh, work.batch)
            busy = operations / (self.device.flops_bf16 * self.pace.operations)
            weights += stage / bandwidth
            compute += max(0.0, busy - stage / bandwidth)
            cached += cache / bandwidth
            read, kept = read + stage, kept + cache
            sent += list_traffic(self.anatomy, rank.holding, self.mesh, work, dtype=self.dtype)
        shares = [
            TimeShare("weights read", weights, "bytes of dense weights and of experts in use / bandwidth", read),
            TimeShare("cache read", cached, "bytes of the full cache / bandwidth", kept),
            TimeShare("compute", compute, "what operations take beyond reading the weights"),
        ]
        return _merge_shares([*shares, *(self.timed(t) for t in sent)])

    def compute_first_token_time(self, ranks: Sequence[RankEstimate], work: ServingWorkload) -> float | None:
        """Compute the seconds in which a prompt of `context` tokens goes through all stages in turn.

        Its chunks of `batched_tokens` each read the weights that their tokens go to, which hides behind the operations
        or takes longer.
        """
        if any(layer.encoder for layer in self.anatomy.layers):
            return None
        chunks = ceil(work.context / work.batched_tokens)
        tokens = work.context / self.mesh.degree("cp")
        chunk = ceil(work.context / chunks)
        share = compute_touched_share(self.anatomy, self.mesh, chunk / self.mesh.degree("cp"))
        seconds = 0.0
        for rank in ranks:
            layers = self.anatomy.layers[rank.holding.layers.start : rank.holding.layers.stop]
            operations = count_matrix_operations(self.anatomy, rank.holding, self.mesh, tokens)
            operations += count_attention_operations(layers, self.mesh, tokens, work.context, masked=True)
            busy = operations / (self.device.flops_bf16 * self.pace.operations)
            weights = _count_read_bytes(rank.holding, share)
            seconds += max(busy, chunks * weights / (self.device.memory_bandwidth * self.pace.memory))
            sent = list_traffic(self.anatomy, rank.holding, self.mesh, work, dtype=self.dtype, tokens=chunk)
            seconds += chunks * sum(self.seconds(one) for one in sent)
        return seconds

    def far(self, one: RankTraffic) -> bool:
        """Return whether it leaves the node."""
        return _count_ranks_and_nodes(self.mesh, one.axes, self.device.per_node)[1] > 1

    def seconds(self, one: RankTraffic) -> float:
        """Return how long the messages take by themselves.

        Where n ranks are on k nodes, rings cross a node's border with the network of all n/k of them, so that the
        slower of link and network decides; of an all-to-all, what stays inside and what leaves go side by side, and a
        token is sent once to each node that has experts of it.
        """
        ranks, nodes = _count_ranks_and_nodes(self.mesh, one.axes, self.device.per_node)
        link = self.device.link_bandwidth * self.pace.links
        network = self.device.network_bandwidth * self.pace.links
        latency = one.messages * (self.pace.far if nodes > 1 else self.pace.near)
        if nodes == 1:
            once = self.sent_once(ranks) if one.collective == "all-to-all" else 1.0
            return one.nbytes * once / link + latency
        here = ranks / nodes
        if one.collective == "all-to-all":
            out = (ranks - here) / (ranks - 1) * self.sent_once(nodes)
            return max(one.nbytes * out / network, one.nbytes * (1 - out) / link) + latency
        if one.collective == "send":
            return one.nbytes / network + latency
        return one.nbytes / min(link, network * here) + latency

    def sent_once(self, places: int) -> float:
        """Return the part of a token's copies that is sent if each of `places` gets one for all of its experts.

        Dispatchers such as DeepEP send so between nodes, and between ranks of a node. Experts are chosen evenly, where
        routing is limited to groups of experts, among the places that the chosen groups are on.
        """
        experts = max(
            (layer.experts for layer in self.anatomy.layers if layer.experts),
            key=lambda one: one.chosen,
            default=None,
        )
        if experts is None:
            return 1.0
        reached = _count_reached_places(places, experts.groups, experts.chosen_groups)
        return reached * (1 - (1 - 1 / reached) ** experts.chosen) / experts.chosen


def _count_read_bytes(holding: RankShards, share: float) -> int:
    """Count the bytes of weights that a pass reads, of experts the share that its tokens go to."""
    experts = sum(part.gathered_bytes for part in holding.parts if part.kind.spec.of_expert)
    return round(sum(part.gathered_bytes for part in holding.parts) - experts * (1 - share))


def _count_reached_places(places: int, groups: int, chosen: int) -> float:
    """Count the places that have experts of `chosen` of `groups`, which are spread over all in order.

    >>> _count_reached_places(8, 8, 4), _count_reached_places(64, 8, 4), _count_reached_places(2, 8, 4)
    (4.0, 32.0, 1.9714285714285715)
    """
    if places >= groups:
        return places * chosen / groups
    here = groups // places
    return places * (1 - comb(groups - here, chosen) / comb(groups, chosen))


def _merge_shares(shares: Iterable[TimeShare]) -> list[TimeShare]:
    """Return shares of one name as one, without those that take no time."""
    found: dict[str, TimeShare] = {}
    for one in shares:
        other = found.get(one.name)
        if other is not None:
            found[one.name] = replace(one, seconds=one.seconds + other.seconds, nbytes=one.nbytes + other.nbytes)
        elif one.seconds:
            found[one.name] = one
    return list(found.values())


def _sum_seconds(shares: Iterable[TimeShare]) -> float:
    return sum(share.seconds for share in shares)


def _name_link(far: bool) -> str:  # noqa: FBT001 - the one thing it is about
    return "network" if far else "link"


@lru_cache(maxsize=4096)
def _count_ranks_and_nodes(mesh: Mesh, axes: tuple[str, ...], per_node: int) -> tuple[int, int]:
    """Count how many ranks take part with rank 0 along `axes`, and on how many nodes they are.

    Ranks fill node after node.
    """
    strides: dict[str, int] = {}
    below = 1
    for axis, degree in reversed(mesh.axes):
        strides[axis], below = below, below * degree
    if mesh.ep == 1 and mesh.etp == mesh.degree("tp"):
        axes = tuple(dense for axis in axes for dense in _EXPERT_TO_DENSE_AXES.get(axis, (axis,)))
    if not axes:
        return 1, 1
    if axes[0] not in _AMONG_EXPERTS:
        together = _list_strided_numbers([(mesh.degree(axis), strides[axis]) for axis in axes])
        return len(together), len({rank // per_node for rank in together})
    shards = mesh.degree(EXPERT_FSDP)
    sizes = {"etp": mesh.etp, "ep": mesh.ep, EXPERT_FSDP: shards, "replica": 0}
    sizes["replica"] = mesh.world // mesh.degree("pp") // (mesh.etp * mesh.ep * shards)
    below = 1
    chosen = []
    for axis, degree in sizes.items():
        if axis in axes:
            chosen.append((degree, below))
        below *= degree
    nodes = {_find_rank(number, mesh, strides) // per_node for number in _list_strided_numbers(chosen)}
    return len(_list_strided_numbers(chosen)), len(nodes)


def _list_strided_numbers(axes: Iterable[tuple[int, int]]) -> list[int]:
    """List the numbers that degrees with strides make."""
    found = [0]
    for degree, stride in axes:
        found = [number + index * stride for number in found for index in range(degree)]
    return found


def _find_rank(number: int, mesh: Mesh, strides: Mapping[str, int]) -> int:
    """Find the rank that has `number` within the first stage."""
    rank = 0
    for axis, degree in reversed(mesh.axes):
        if axis != "pp":
            number, index = divmod(number, degree)
            rank += index * strides[axis]
    return rank
