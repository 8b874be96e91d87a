"""Estimates what a training rank holds briefly: gathered weights, gradients being sent, copies for a step.

All of it is modelled: buckets and limits are options of the runtimes, whose defaults are taken here, and what is
prefetched depends on timing.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from shardctl.estimate.scheme import F32
from shardctl.estimate.term import MemoryTerm

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardctl.estimate.holding import HeldPart, RankHolding
    from shardctl.estimate.scheme import TrainingScheme

_REDUCE: Final = 500_000_000
"""Elements of a bucket that gradients are reduced in (DeepSpeed, `reduce_bucket_size`); transformers' "auto" sets
the hidden size squared instead."""
_LIVE: Final = 1_000_000_000
"""Elements that stay gathered (DeepSpeed, `stage3_max_live_parameters`)."""
_PERSISTENT: Final = 100_000
"""Tensors of at most so many elements are gathered once (DeepSpeed, `stage3_param_persistence_threshold`)."""
_SUB_GROUP: Final = 1_000_000_000
"""Elements that one step of the optimizer takes at once (DeepSpeed, `sub_group_size`)."""
_UNITS: Final = "torch 2.13, torch.distributed.fsdp.fully_shard, by FSDPMemTracker"
_DEEPSPEED: Final = "DeepSpeed, docs/code-docs/source/memory.rst and runtime/zero"


STEP: Final = "copies for the optimizer's step"
"""The name of what is held when activations and gathered weights are gone."""


def list_transient_terms(holding: RankHolding, shared: int, plan: TrainingScheme) -> Iterator[MemoryTerm]:
    """List what is held during passes and steps; `shared` are the trained elements whose states this rank updates."""
    if plan.runtime == "units":
        yield from _list_unit_terms(holding, plan)
    elif plan.runtime == "autocast":
        yield from _list_cast_terms(holding, plan)
    elif plan.runtime == "partitions" and plan.zero:
        yield from _list_partition_terms(holding, plan)
    if not plan.offloaded:
        yield from _list_step_terms(shared, plan)


def _list_unit_terms(holding: RankHolding, plan: TrainingScheme) -> Iterator[MemoryTerm]:
    """List what FSDP2 holds: it gathers one unit while another computes, and reduces gradients meanwhile."""
    parts_of = holding.units()
    units = {unit: _compute_gathered_bytes(parts, plan) for unit, parts in parts_of.items()}
    root = units.pop(None, 0)
    layers = [units[n] for n in sorted(units, key=lambda n: n or 0)]
    pair = max((a + b for a, b in pairwise(layers)), default=sum(layers))
    largest, total = max(layers, default=0), root + sum(layers)
    width, reduced = plan.compute.unit_bytes, plan.gradient.unit_bytes
    if plan.zero in {1, 2}:  # `reshard_after_forward=False`
        yield MemoryTerm(
            "gathered weights", "weights", total, f"{width} * gathered", {"gathered": total / width}, _UNITS
        )
    else:
        yield MemoryTerm(
            "gathered units",
            "weights",
            root + pair,
            f"{width} * (two units + root)",
            {"two units": pair / width, "root": root / width},
            _UNITS,
            interval=(min(root + largest, root + pair), min(root + pair + largest, total)),
        )
    unit, of_root = largest / width, _count_trained_elements(parts_of.get(None, ()))
    head = _count_trained_elements(
        p for p in parts_of.get(None, ()) if ("last", 0) in _list_end_places(p) and p.kind.matrix
    )
    middle, end = unit * (width + reduced) + head * width, of_root * (width + reduced) - pair
    if plan.zero == 1:  # `set_requires_gradient_sync(False)` until the last microbatch
        end = _count_trained_elements(holding.parts) * reduced
    yield MemoryTerm(
        "gradients before they are shared",
        "gradients",
        int(max(middle, end)),
        f"max({width + reduced} * unit + {width} * head, {width + reduced} * root - {width} * two units)",
        {"unit": unit, "head": head, "root": of_root, "two units": pair / width},
        _UNITS,
        interval=(int(unit * width), int(max(middle, end) + unit * reduced)),
    )


def _list_end_places(part: HeldPart) -> set[tuple[str, int]]:
    return {(where, 0) for where, _ in part.kind.spec.where}


def _compute_gathered_bytes(parts: Iterable[HeldPart], plan: TrainingScheme) -> int:
    return sum(
        part.count * plan.compute.nbytes((part.gathered,)) if part.kind.trainable else part.gathered_bytes
        for part in parts
    )


def _count_trained_elements(parts: Iterable[HeldPart]) -> int:
    return sum(part.count * part.gathered for part in parts if part.kind.trainable)


def _list_cast_terms(holding: RankHolding, plan: TrainingScheme) -> Iterator[MemoryTerm]:
    """List what autocast keeps: each matrix that it has cast, until the backward pass has used it."""
    cast = [p for p in holding.parts if p.kind.matrix and (p.kind.layers or ("last", 0) in _list_end_places(p))]
    elements = _count_trained_elements(cast) if plan.compute != plan.resident else 0
    nbytes = plan.compute.nbytes((elements,))
    yield MemoryTerm(
        f"{plan.compute} casts of the weights",
        "weights",
        nbytes,
        f"{plan.compute.unit_bytes} * matrices",
        {"matrices": elements},
        "torch 2.13, torch.autocast's cache of weights",
        interval=(0, nbytes),
    )


def _list_partition_terms(holding: RankHolding, plan: TrainingScheme) -> Iterator[MemoryTerm]:
    width, trained = plan.compute.unit_bytes, [p for p in holding.parts if p.kind.trainable]
    largest = max((p.gathered for p in trained), default=0)
    whole = _count_trained_elements(trained)
    if plan.zero == 3:  # noqa: PLR2004 - the stage that shares parameters
        yield MemoryTerm(
            "largest layer, gathered, and its gradients",
            "weights",
            2 * width * largest,
            f"{2 * width} * largest",
            {"largest": largest},
            _DEEPSPEED,
            interval=(2 * width * largest, width * (largest + max(largest, min(whole, _LIVE)))),
        )
        small = sum(p.count * p.gathered for p in trained if p.gathered <= _PERSISTENT)
        yield MemoryTerm(
            "small tensors, never shared",
            "weights",
            width * small,
            f"{width} * elements of tensors of at most {_PERSISTENT}",
            {"elements of tensors": small},
            _DEEPSPEED,
            interval=(0, width * small),
        )
    buckets = 1 if plan.zero == 3 else 2  # noqa: PLR2004 - as above
    yield MemoryTerm(
        "buckets that gradients are reduced in",
        "workspace",
        width * min(whole, _REDUCE),
        f"{width} * min(P, {_REDUCE})",
        {"P": whole},
        _DEEPSPEED,
        interval=(width * min(largest, _REDUCE), buckets * width * _REDUCE),
    )


def _list_step_terms(shared: int, plan: TrainingScheme) -> Iterator[MemoryTerm]:
    """List DeepSpeed makes fp32 copies of gradients.

    Torch's foreach kernels one temporary as large as the parameters.
    """
    if plan.runtime == "partitions" and plan.zero and plan.master and plan.gradient != F32:
        some = min(shared, _SUB_GROUP) if plan.zero == 3 else shared  # noqa: PLR2004 - the stage with groups
        flat, wide = plan.gradient.unit_bytes, F32.unit_bytes
        yield MemoryTerm(
            STEP,
            "workspace",
            (flat + wide) * some,
            f"{flat + wide} * elements",
            {"elements": some},
            "DeepSpeed, stage3.py, `_prepare_fp32_grad_for_sub_group`, and the same in stage_1_and_2.py",
            interval=(wide * some, (flat + wide) * some),
        )
    elif plan.runtime in {"units", "autocast"} and plan.optimizer.temporary:
        nbytes = plan.resident.nbytes((shared,))
        yield MemoryTerm(
            STEP,
            "workspace",
            nbytes,
            f"{plan.resident.unit_bytes} * elements",
            {"elements": shared},
            "torch 2.13, torch.optim, `foreach`: about the size of the parameters; none with `fused`",
            interval=(0, nbytes),
        )
