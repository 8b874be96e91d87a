"""Estimates what a training rank needs in total: its states, activations and runtime overhead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.base.errors import UsageError
from shardctl.estimate.runtime import list_runtime_terms
from shardctl.estimate.term import MemoryTerm, sum_terms
from shardctl.estimate.training.activations import RankActivations
from shardctl.estimate.training.fused_gradients import list_lasting_buffers
from shardctl.estimate.training.scheme import choose_scheme
from shardctl.estimate.training.states import list_state_terms
from shardctl.estimate.training.timeline import StepTimeline
from shardctl.estimate.training.transients import STEP, build_passing_hold

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.estimate.model.layer_graph import LayerGraph
    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.estimate.workload import TrainingWorkload
    from shardctl.tensors.mesh import Mesh


def list_training_terms(
    anatomy: LayerGraph | None, holding: RankShards, mesh: Mesh, work: TrainingWorkload, *, stages: Sequence[int]
) -> tuple[MemoryTerm, ...]:
    """List every term of each rank of `holding` in the moment of a step in which it needs most.

    `stages` are the layers of each pipeline stage. Without an anatomy, all but what passes forward and backward keep:
    that is known of any model.

    Raises UsageError if nothing can be trained, or for what the profile's runtime cannot do, and UnsupportedError for
    layers whose activations are not known.
    """
    return add_runtime_terms(build_timeline(anatomy, holding, mesh, work, stages=stages), mesh, work)


def add_runtime_terms(timeline: StepTimeline, mesh: Mesh, work: TrainingWorkload) -> tuple[MemoryTerm, ...]:
    """Add what the process holds besides to the terms of a timeline's worst moment."""
    found = timeline.list_worst_terms()
    allocated = sum_terms(found, counter="allocated").nbytes
    more = list_runtime_terms(
        mesh, serving=False, profile=work.profile, allocated=allocated, expandable=work.expandable
    )
    found = (*found, *more)
    return tuple(term for term in found if term.high)


def build_timeline(
    anatomy: LayerGraph | None, holding: RankShards, mesh: Mesh, work: TrainingWorkload, *, stages: Sequence[int]
) -> StepTimeline:
    """Build the moments of a step; arguments and errors are those of `list_training_terms`."""
    _check_chunks(work, stages)
    states = list(list_state_terms(holding, mesh, work))
    if anatomy is not None and work.profile == "megatron":
        states += list_lasting_buffers(anatomy, holding, mesh, work, stages=stages)
    return StepTimeline(
        [term for term in states if term.name != STEP],
        [term for term in states if term.name == STEP],
        build_passing_hold(holding, mesh, work, choose_scheme(mesh, work)),
        RankActivations(anatomy, holding, mesh, work, stages) if anatomy is not None else None,
        layers=holding.layers,
        microbatches=work.count_passes(len(stages)),
    )


def _check_chunks(work: TrainingWorkload, stages: Sequence[int]) -> None:
    """Raise UsageError if an interleaved schedule has more model chunks than some stage has layers."""
    if work.schedule == "interleaved" and len(stages) > 1 and work.virtual_stages > min(stages):
        raise UsageError(
            f"{work.virtual_stages} model chunks per stage need at least as many layers, but a stage has {min(stages)}",
            hint=f"use --vp {min(stages)} at most" if min(stages) > 1 else "use fewer stages",
        )
