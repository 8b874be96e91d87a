"""Computes what a training rank keeps between steps: weights, gradients, fp32 copies, optimizer states.

Bytes are counted for the tensors a rank holds. A term is exact where the runtime's own rule for sharing is known to
the byte: FSDP2 gives each rank `ceil(rows / N)` rows of storage (`FSDPParam._init_sharded_param` pads dim 0), ZeRO-3
`ceil(n / N)` elements of each tensor (DeepSpeed, `partition_parameters.py`), ZeRO-1 and 2 one partition of all
trained parameters, aligned to two elements per rank (`stage_1_and_2.py`, `nccl_start_alignment_factor`), counted here
for one parameter group. Megatron's distributed optimizer pads tensors to 64 elements and buckets to a multiple of
128 (`optimizer/param_layout.py`), which depends on the order of the tensors: there, the term carries an interval. Of
ranks that share unevenly by ZeRO, the one that has most is counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache
from math import ceil, lcm, prod
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.estimate.model.rank_shards import SHARDING
from shardctl.estimate.term import MemoryTerm, sum_terms
from shardctl.estimate.training.offload import list_buffer_terms
from shardctl.estimate.training.optimizers import OptimizedTensor
from shardctl.estimate.training.preconditioner_blocks import count_blocks, count_gathered_bytes, spread_blocks
from shardctl.estimate.training.scheme import F32, choose_scheme
from shardctl.estimate.training.transients import list_step_terms
from shardctl.tensors.placement import compute_intervals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardctl.base.dtype import DType
    from shardctl.estimate.model.rank_shards import HeldPart, RankShards
    from shardctl.estimate.term import Category, Tier
    from shardctl.estimate.training.preconditioner_blocks import Block
    from shardctl.estimate.training.scheme import TrainingScheme
    from shardctl.estimate.workload import TrainingWorkload
    from shardctl.tensors.mesh import Mesh
    from shardctl.tensors.placement import AxisPartition, PartitionSpec

_MIN_BUCKET_PARAMETERS: Final = 40_000_000
"""The fewest parameters of a gradient bucket (Megatron-LM, `distributed_data_parallel.py`)."""
_ZERO_PAPER_SOURCE: Final = "Rajbhandari et al. 2020, sec. 3 and 5"
_DISTRIBUTED_SHAMPOO_SOURCE: Final = (
    "facebookresearch/optimizers f606606, distributed_shampoo/distributor: DDPDistributor, HybridShardDistributor"
)
_STATE_SOURCES: Final = {
    "units": "torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py",
    "partitions": f"{_ZERO_PAPER_SOURCE}; DeepSpeed, runtime/zero",
    "buffers": "Megatron-LM, docs/user-guide/features/dist_optimizer.md",
    "autocast": "torch 2.13, torch.autocast and DistributedDataParallel",
}


FROZEN: Final = "weights that are not trained"
"""The name of the term that has them."""


@value_class
class TrainedPart:
    """A trained part as the rank stores it."""

    part: HeldPart
    stored: int
    """Elements of one tensor that the rank has storage for: its part by fsdp, padded as the runtime does."""
    share: int
    """Elements of one tensor that ZeRO-3, or what FSDP2 does with dp, leaves the rank."""
    kept: tuple[int, ...]
    """The shape of the part that the optimizer updates, if it goes tensor by tensor."""


@value_class
class StateGroup:
    """Trained tensors that are shared together: those of experts apart, and for Muon the matrices of layers."""

    expert: bool
    hidden: bool
    whole: int
    """Elements of the rank by pp, tp, ep and fsdp."""
    shared: int
    """Elements of them that ZeRO leaves the rank."""
    spare: int = 0
    """Elements of padding that may be added to `whole`."""


def list_state_terms(holding: RankShards, mesh: Mesh, work: TrainingWorkload) -> tuple[MemoryTerm, ...]:
    """List the weights, gradients and optimizer states of each rank of `holding`, and the copies of a step.

    Raises UsageError if nothing can be trained, or for what the profile's runtime cannot do.
    """
    plan = choose_scheme(mesh, work)
    parts = [part for part in holding.merged() if part.kind.trainable]
    if holding.parts and not parts:
        _refuse_untrainable(holding)
    trained = tuple(_build_trained_part(part, mesh, holding.coordinate, plan) for part in parts)
    groups = _group_trained(trained, plan)
    spread = tuple(_spread_group(trained, g, plan) for g in groups) if plan.spread else ()
    shared = sum(one.elements for one, _ in spread) if spread else sum(g.shared for g in groups)
    lasting = (
        *_list_weight_terms(holding, groups, mesh, plan),
        *_list_gradient_terms(holding, groups, plan),
        *_list_optimizer_terms(trained, groups, spread, plan),
    )
    passing = (
        *list_step_terms(shared, max((t.stored for t in trained), default=0), plan),
        *list_buffer_terms(sum_terms(lasting, "host").nbytes, shared, plan),
    )
    return tuple(term for term in (*lasting, *passing) if term.high)


def _refuse_untrainable(holding: RankShards) -> None:
    kinds = {part.kind.dtype.name for part in holding.parts}
    raise UsageError(
        f"nothing on rank {holding.rank} ({holding.label}) can be trained: its tensors are {', '.join(sorted(kinds))}",
        hint="codes of quantized weights have no gradients; plan the training of the unquantized model",
    )


def _build_trained_part(part: HeldPart, mesh: Mesh, at: Mapping[str, int], plan: TrainingScheme) -> TrainedPart:
    spec, shape = part.kind.spec, part.kind.shape
    place = tuple((axis, at[axis]) for axis in spec.axes)
    among = plan.count_sharing_ranks(expert=spec.of_expert)
    if plan.flat:
        return TrainedPart(part, part.elements, ceil(part.elements / among), ())
    kept = _compute_extents(shape, spec.cuts, mesh, place, together=False)
    if plan.runtime != "units":
        return TrainedPart(part, part.elements, part.elements, kept)
    whole = _compute_extents(shape, spec.cuts, mesh, place, together=True)
    row = _find_sharded_dim(spec)
    degree = prod(mesh.degree(axis) for axis in SHARDING if axis in spec.axes)
    if plan.zero and among > 1:
        degree *= among
        kept = _divide_dim(whole, row, degree)
    stored = prod(_divide_dim(whole, row, degree))
    return TrainedPart(part, stored, stored, kept)


def _find_sharded_dim(spec: PartitionSpec) -> int:
    """Find the dim that fsdp cuts: the first, unless a rule says otherwise."""
    cut = [any(c.axis in SHARDING for c in cuts) for cuts in spec.cuts]
    return cut.index(True) if True in cut else 0


def _divide_dim(shape: tuple[int, ...], dim: int, degree: int) -> tuple[int, ...]:
    return tuple(ceil(n / degree) if i == dim else n for i, n in enumerate(shape))


@lru_cache(maxsize=4096)
def _compute_extents(
    shape: tuple[int, ...],
    cuts: tuple[tuple[AxisPartition, ...], ...],
    mesh: Mesh,
    at: tuple[tuple[str, int], ...],
    *,
    together: bool,
) -> tuple[int, ...]:
    """Compute the shape of a rank's part; `together` with the parts of the ranks that share it by fsdp."""
    if not cuts:
        return shape
    place = dict(at)
    return tuple(
        sum(
            b - a
            for a, b in compute_intervals(n, [c for c in some if not (together and c.axis in SHARDING)], mesh, place)
        )
        for n, some in zip(shape, cuts, strict=True)
    )


def _is_hidden_matrix(part: HeldPart) -> bool:
    """Return whether it is a matrix inside a layer: neither a vector nor embedding or head."""
    return part.kind.matrix and bool(part.kind.layers)


def _group_trained(trained: Sequence[TrainedPart], plan: TrainingScheme) -> tuple[StateGroup, ...]:
    found: dict[tuple[bool, bool], list[TrainedPart]] = defaultdict(list)
    for each in trained:
        apart = plan.optimizer.splits and _is_hidden_matrix(each.part)
        found[each.part.kind.spec.of_expert, apart].append(each)
    return tuple(_build_group(expert, hidden, some, plan) for (expert, hidden), some in found.items())


def _build_group(expert: bool, hidden: bool, some: Sequence[TrainedPart], plan: TrainingScheme) -> StateGroup:  # noqa: FBT001 - a key's parts
    whole = sum(each.part.count * each.stored for each in some)
    ranks = plan.count_sharing_ranks(expert=expert)
    if not plan.flat:
        return StateGroup(expert, hidden, whole, whole)
    if plan.runtime == "buffers":
        # The last bucket may be short, and a tied embedding on two stages has one of its own.
        tensors, buckets = sum(each.part.count for each in some), 2 + whole // _MIN_BUCKET_PARAMETERS
        spare = 63 * tensors + buckets * (lcm(ranks, 128) - 1)
        return StateGroup(expert, hidden, whole, ceil(whole / ranks), spare)
    if plan.zero < 3:  # noqa: PLR2004 - the stage that goes tensor by tensor
        return StateGroup(expert, hidden, whole, 2 * ceil(whole / (2 * ranks)))
    return StateGroup(expert, hidden, whole, sum(each.part.count * each.share for each in some))


def _list_weight_terms(
    holding: RankShards, groups: Sequence[StateGroup], mesh: Mesh, plan: TrainingScheme
) -> Iterator[MemoryTerm]:
    if plan.runtime == "partitions" and plan.zero in {1, 2}:  # one buffer of all partitions, padding included
        groups = [replace(g, whole=g.shared * plan.count_sharing_ranks(expert=g.expert)) for g in groups]
    yield _build_state_term(
        f"{plan.resident} weights", "weights", plan.resident, groups, plan, plan.parameters, shared_from=3
    )
    yield _build_frozen_term(holding, mesh, plan)


def _build_frozen_term(holding: RankShards, mesh: Mesh, plan: TrainingScheme) -> MemoryTerm:
    """Build the term of weights that are not trained, which FSDP2 and ZeRO-3 share as they share the others."""
    frozen = [part for part in holding.parts if not part.kind.trainable]
    if plan.sharers > 1 and (plan.zero == 3 or (plan.zero and plan.runtime == "units")):  # noqa: PLR2004 - the last stage
        shares = [_build_trained_part(part, mesh, holding.coordinate, plan).share for part in frozen]
        nbytes = sum(p.count * p.kind.dtype.nbytes((n,)) for p, n in zip(frozen, shares, strict=True))
        return MemoryTerm(
            FROZEN,
            "weights",
            nbytes,
            "bytes / N",
            {"bytes": sum(part.nbytes for part in frozen), "N": plan.sharers},
            _STATE_SOURCES[plan.runtime],
            tier=plan.parameters,
        )
    nbytes = sum(part.nbytes for part in frozen)
    return MemoryTerm(FROZEN, "weights", nbytes, source="the headers", tier=plan.parameters)


def _list_gradient_terms(
    holding: RankShards, groups: Sequence[StateGroup], plan: TrainingScheme
) -> Iterator[MemoryTerm]:
    # FSDP2 keeps gradients as it keeps parameters; DeepSpeed's are copied to fp32 on the host as they are made.
    elsewhere = plan.gradients != "device" and plan.runtime == "partitions"
    dtype = F32 if elsewhere else plan.resident if plan.runtime == "units" else plan.gradient
    yield _build_state_term(f"{dtype} gradients", "gradients", dtype, groups, plan, plan.gradients, shared_from=2)
    if plan.runtime == "autocast" and plan.sharers > 1:
        nbytes = dtype.nbytes((holding.elements(trainable=True),))
        yield MemoryTerm(
            "buckets that gradients are reduced in",
            "gradients",
            nbytes,
            f"{dtype.unit_bytes} * P, or none with `gradient_as_bucket_view`",
            {"P": holding.elements(trainable=True)},
            _STATE_SOURCES["autocast"],
            interval=(0, nbytes),
        )


def _list_optimizer_terms(
    trained: Sequence[TrainedPart],
    groups: Sequence[StateGroup],
    spread: Sequence[tuple[OptimizedTensor, int]],
    plan: TrainingScheme,
) -> Iterator[MemoryTerm]:
    if plan.master:
        name = "F32 copies of the weights"
        term = _build_state_term(name, "optimizer", F32, groups, plan, plan.states, shared_from=1)
        if plan.decoupled and plan.resident.name == "BF16":
            name, dtype = "16 bits that F32 copies of the weights have more", plan.resident
            less = _build_state_term(name, "optimizer", dtype, groups, plan, plan.states, shared_from=1)
            term = replace(less, interval=(less.low, term.high))  # whole without `store_param_remainders`
        yield term
    copied = plan.runtime == "buffers" and (plan.offloaded or plan.gradient != F32) and not plan.decoupled
    if copied or (plan.runtime == "partitions" and plan.offloaded and plan.gradients == "device"):
        yield _build_state_term(
            "F32 copies of the gradients", "optimizer", F32, groups, plan, plan.states, shared_from=1
        )
    if plan.flat:
        seen = [(1, OptimizedTensor((g.shared,), g.shared, hidden=g.hidden)) for g in groups]
    elif spread:
        seen = [(1, one) for one, _ in spread]
        yield MemoryTerm(
            "updates gathered from the ranks that compute them",
            "optimizer",
            sum(nbytes for _, nbytes in spread),
            "N * the most that a rank computes, in F32",
            _collect_inputs(groups, plan),
            _DISTRIBUTED_SHAMPOO_SOURCE,
            tier=plan.states,
        )
    else:
        seen = [
            (
                t.part.count,
                OptimizedTensor(t.kept, _count_optimized_elements(t, plan), hidden=_is_hidden_matrix(t.part)),
            )
            for t in trained
        ]
    spare = ceil(sum(g.spare / plan.count_sharing_ranks(expert=g.expert) for g in groups))
    for slot in plan.optimizer.slots:
        dtype = BY_NAME[slot.dtype] if slot.dtype else F32 if plan.master else plan.resident
        nbytes = dtype.nbytes((sum(count * slot.elements(one) for count, one in seen),))
        more = dtype.nbytes((spare,)) if nbytes else 0
        yield MemoryTerm(
            slot.name,
            "optimizer",
            nbytes,
            f"{dtype.unit_bytes} * elements",
            {"elements": nbytes // dtype.unit_bytes, **_collect_inputs(groups, plan)},
            plan.optimizer.source,
            interval=(nbytes, nbytes + more) if more else None,
            tier="host" if slot.paged and plan.states == "device" else plan.states,
        )
    yield MemoryTerm("tables of 8-bit codes", "optimizer", plan.optimizer.constant, source=plan.optimizer.source)


def _spread_group(
    trained: Sequence[TrainedPart], group: StateGroup, plan: TrainingScheme
) -> tuple[OptimizedTensor, int]:
    """Return what the rank updates that has most to keep for it, and the bytes in which all updates are gathered."""
    blocks: Counter[Block] = Counter()
    for each in (t for t in trained if t.part.kind.spec.of_expert == group.expert):
        for block, count in count_blocks(each.kept).items():
            blocks[block] += each.part.count * count
    loads, ranks = spread_blocks(tuple(blocks.items()), plan.count_sharing_ranks(expert=group.expert))
    found = [OptimizedTensor((0,), 0, hidden=False, blocks=tuple(some.items())) for some in ranks]
    most = max(found, key=lambda one: sum(slot.elements(one) for slot in plan.optimizer.slots))
    return most, count_gathered_bytes(loads)


def _count_optimized_elements(trained: TrainedPart, plan: TrainingScheme) -> int:
    """Count elements that the optimizer takes for the tensor's: of a DTensor all that ranks share (bitsandbytes)."""
    return trained.part.gathered if plan.runtime == "units" else trained.part.elements


def _build_state_term(
    name: str,
    category: Category,
    dtype: DType,
    groups: Sequence[StateGroup],
    plan: TrainingScheme,
    tier: Tier,
    *,
    shared_from: int,
) -> MemoryTerm:
    """Build the term of trained elements, once in `dtype`, shared from ZeRO stage `shared_from` on."""
    shared = plan.flat and plan.zero >= shared_from
    elements = sum(g.shared if shared else g.whole for g in groups)
    spare = ceil(sum(g.spare / (plan.count_sharing_ranks(expert=g.expert) if shared else 1) for g in groups))
    nbytes, more = dtype.nbytes((elements,)), dtype.nbytes((spare,))
    return MemoryTerm(
        name,
        category,
        nbytes,
        f"{dtype.unit_bytes} * {_format_symbols(groups, shared=shared)}",
        _collect_inputs(groups, plan),
        _STATE_SOURCES[plan.runtime],
        interval=(nbytes, nbytes + more) if more else None,
        tier=tier,
    )


def _format_symbols(groups: Sequence[StateGroup], *, shared: bool) -> str:
    """Format the elements of the groups as a formula has them."""
    kinds = ["" if not expert else " of experts" for expert in sorted({g.expert for g in groups})]
    addends = [f"P{of} / N{of}" if shared else f"P{of}" for of in kinds]
    return f"({' + '.join(addends)})" if len(addends) > 1 else "".join(addends)


def _collect_inputs(groups: Sequence[StateGroup], plan: TrainingScheme) -> Mapping[str, float | str]:
    """Collect the symbols of the formulas: elements trained on the rank, and the ranks that share them.

    Experts apart.
    """
    found: dict[str, float | str] = {}
    for expert in (False, True):
        elements = sum(g.whole for g in groups if g.expert == expert)
        if elements:
            of = " of experts" if expert else ""
            found[f"P{of}"] = elements
            if plan.flat:
                found[f"N{of}"] = plan.count_sharing_ranks(expert=expert)
    return found
