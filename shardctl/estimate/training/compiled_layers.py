"""Tells of which layers it is known what torch.compile and float8 keep for the backward pass.

AOTAutograd divides the graph of forward and backward pass where least is kept, and computes again what is cheap
(`torch/_functorch/partitioners.py`, `min_cut_rematerialization_partition`). Of a layer such as Llama's that spares the
activation function's result. With float8, whose products have a cast before them, it also computes again what is
normed and what is gated, and keeps attention's result in float8 beside what the attention kernel keeps. Without a
compiler, torchao keeps what enters a product as it was before the cast (`torchao/float8/float8_linear.py`), and so
nothing less than in 16 bits. A compiled loss keeps the logits, and makes their gradient at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.estimate.training.selective import find_unselected_part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardctl.estimate.model.layer_graph import ModelLayer
    from shardctl.estimate.model.rank_shards import HeldPart
    from shardctl.estimate.workload import TrainingWorkload
    from shardctl.models.tables.layer_features import LayerStyle

COMPILING_HINT: Final = "leave out --compile, which gives an upper bound"
_NORMS_PER_LAYER: Final = 2
_INTERVAL_WIDENING_FACTORS: Final = (0.85, 1.05)
"""How much wider an interval is: buffers of compiled layers were followed on a CPU only, whose kernels are fused in
another way than those of GPUs."""


def find_uncompiled_part(
    layer: ModelLayer, parts: Iterable[HeldPart], style: LayerStyle, work: TrainingWorkload
) -> str:
    """Return why nobody knows what torch.compile keeps of a layer; an empty string if it is known."""
    if why := find_unselected_part(layer, parts):
        return why
    if layer.further:
        return f"it keeps {layer.further[0].name}"
    if not work.flash:
        return "its attention holds its scores"
    if not style.norm.startswith("rms") or layer.norms != _NORMS_PER_LAYER:
        return "its norms are not two that divide by the root of the mean square"
    return "" if layer.attention is None or not (layer.attention.gated or layer.attention.sinks) else "it has gates"


def widen_for_compiler(spread: tuple[float, float], work: TrainingWorkload) -> tuple[float, float]:
    """Return where the truth is to be expected, as factors of the estimate, if something is compiled or in float8."""
    if work.compiled == "none" and work.float8 == "none":
        return spread
    return spread[0] * _INTERVAL_WIDENING_FACTORS[0], spread[1] * _INTERVAL_WIDENING_FACTORS[1]
