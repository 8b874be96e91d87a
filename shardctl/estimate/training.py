"""Estimates what a training rank needs in total: its states, activations and runtime overhead."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.errors import UsageError
from shardctl.estimate.activations import estimate_activations
from shardctl.estimate.fused_gradients import list_lasting_buffers
from shardctl.estimate.runtime import list_runtime_terms
from shardctl.estimate.states import list_state_terms
from shardctl.estimate.term import MemorySum, MemoryTerm, sum_terms
from shardctl.estimate.transients import STEP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.estimate.holding import RankHolding
    from shardctl.estimate.workload import TrainingWorkload
    from shardctl.mesh import Mesh
    from shardctl.models.anatomy import ModelAnatomy


def list_training_terms(
    anatomy: ModelAnatomy | None, holding: RankHolding, mesh: Mesh, work: TrainingWorkload, *, stages: Sequence[int]
) -> tuple[MemoryTerm, ...]:
    """List every term of each rank of `holding`; `stages` are the layers of each pipeline stage.

    Without an anatomy, all but what passes forward and backward keep: that is known of any model.
    The optimizer's step comes when activations are gone, so its copies count only for what they need beyond those.

    Raises UsageError if nothing can be trained, or for what the profile's runtime cannot do, and UnsupportedError for
    layers whose activations are not known.
    """
    _check_chunks(work, stages)
    held = estimate_activations(anatomy, holding, mesh, work, stages=stages) if anatomy is not None else ()
    lasting = (
        tuple(list_lasting_buffers(anatomy, holding, mesh, work, stages=stages))
        if anatomy is not None and work.profile == "megatron"
        else ()
    )
    freed = sum_terms(held)
    kept = tuple(
        _subtract_freed(term, freed) if term.name == STEP else term for term in list_state_terms(holding, mesh, work)
    )
    allocated = sum_terms((*kept, *lasting, *held)).nbytes
    found = (
        *kept,
        *lasting,
        *held,
        *list_runtime_terms(mesh, serving=False, profile=work.profile, allocated=allocated),
    )
    return tuple(term for term in found if term.high)


def _check_chunks(work: TrainingWorkload, stages: Sequence[int]) -> None:
    """Raise UsageError if an interleaved schedule has more model chunks than some stage has layers."""
    if work.schedule == "interleaved" and len(stages) > 1 and work.virtual_stages > min(stages):
        raise UsageError(
            f"{work.virtual_stages} model chunks per stage need at least as many layers, but a stage has {min(stages)}",
            hint=f"use --vp {min(stages)} at most" if min(stages) > 1 else "use fewer stages",
        )


def _subtract_freed(step: MemoryTerm, freed: MemorySum) -> MemoryTerm:
    """Return what the step needs beyond what was freed before it."""
    return replace(
        step,
        nbytes=max(0, step.nbytes - freed.nbytes),
        formula=f"max(0, {step.formula} - activations)",
        inputs={**step.inputs, "activations": freed.nbytes},
        interval=(max(0, step.low - freed.high), max(0, step.high - freed.low)),
    )
