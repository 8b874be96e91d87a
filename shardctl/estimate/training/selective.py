"""Tells which layers selective recomputation is known for, and what it leaves as it is.

torchtitan's list (`torchtitan/models/llama3/infra/parallelize.py`, `_op_sac_save_list`) saves the results of attention
and of every second product of matrices (`aten.mm`), counted anew in each layer. Which these are follows from the order
of the products, known for layers of seven matrices without biases: q, k, v, o, gate, up, down. Products with a bias are
another operation (`aten.addmm`), and those of experts others still.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.estimate.training.recomputed_modules import list_idle_modules
from shardctl.estimate.workload import TrainingWorkload

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardctl.estimate.model.layer_graph import ModelLayer
    from shardctl.estimate.model.rank_shards import HeldPart
    from shardctl.estimate.workload import ServingWorkload

SELECTIVE_HINT: Final = "give --recompute full or none"
_MATRICES_PER_LAYER: Final = 7


def find_unselected_part(layer: ModelLayer, parts: Iterable[HeldPart]) -> str:
    """Return why nobody knows which products torchtitan's list saves of a layer; an empty string if it is known.

    `parts` are what a rank holds; without any, matrices are not counted.
    """
    if layer.experts is not None:
        return "it has experts"
    if layer.state is not None or layer.attention is None or layer.attention.kind != "full" or layer.attention.cross:
        return "its products are not those of full attention"
    if not layer.gated:
        return "its MLP has no gate"
    inside = [part.kind for part in parts if part.kind.layers]
    if any(kind.example.endswith(".bias") for kind in inside):
        return "it has biases"
    first = min((kind.layers[0] for kind in inside), default=None)
    count = sum(kind.count for kind in inside if kind.matrix and kind.layers[0] == first)
    return f"it has {count} matrices, not {_MATRICES_PER_LAYER}" if inside and count != _MATRICES_PER_LAYER else ""


def list_recomputation_remarks(
    work: ServingWorkload | TrainingWorkload | None, layers: Sequence[ModelLayer] = ()
) -> tuple[str, ...]:
    """List what to know of selective recomputation: what of it changes nothing, or nearly nothing, of `layers`."""
    if (
        not isinstance(work, TrainingWorkload)
        or work.recompute != "selective"
        or work.profile in {"fsdp2", "torchtune"}
    ):
        return ()
    idle = list_idle_modules(layers, work.recompute_modules)
    remarks = tuple(
        f"--recompute-modules {name} changes nothing: no layer of this model has what it drops" for name in idle
    )
    return (*remarks, *_list_core_remarks(work))


def _list_core_remarks(work: TrainingWorkload) -> tuple[str, ...]:
    if not work.flash or "core_attn" not in work.recompute_modules:
        return ()
    if len(work.recompute_modules) > 1:
        return ("--recompute-modules core_attn drops almost nothing with fused attention",)
    what = "drops what attention keeps between its projections, which is almost nothing with fused attention"
    return (f"with the profile {work.profile}, --recompute selective {what}; --recompute full drops all",)
