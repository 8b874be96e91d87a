"""Compares data parallelism and the ZeRO stages by what each leaves of a model's states on a device.

Rajbhandari et al. 2020 (ZeRO), sec. 3 and 5, figure 1 and table 1; what they send: sec. 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UsageError
from shardctl.base.value import value_class
from shardctl.estimate.training.communication import compute_sent_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCE: Final = "Rajbhandari et al. 2020, sec. 5 and 7"
USUAL_GRADIENT: Final = 2
"""Bytes of a gradient in mixed precision."""
_OPTIMIZER, _GRADIENTS, _PARAMETERS = 1, 2, 3
"""The ZeRO stage from which on each is shared."""
_ZERO_STAGE_FORMULAS: Final = (
    ("data parallel", "(w + g + k) * P"),
    ("ZeRO-1", "(w + g) * P + k * P / N"),
    ("ZeRO-2", "w * P + (g + k) * P / N"),
    ("ZeRO-3", "(w + g + k) * P / N"),
)


@value_class
class ShardingStrategy:
    """One way to share model states among data-parallel devices."""

    name: str
    zero: int
    """Its stage; 0 for plain data parallelism."""
    nbytes: int
    """Bytes of model states on each device: parameters, gradients and optimizer states."""
    reduction: float
    """How many times less that is than without sharing."""
    sent_bytes: int
    """Bytes that each device sends in a step."""
    relative: float
    """Those over what plain data parallelism sends; 1 on one device, which sends nothing."""
    formula: str
    inputs: Mapping[str, float]
    source: str = SOURCE


def list_strategies(
    parameters: int, devices: int, *, parameter: float = 2, gradient: float = USUAL_GRADIENT, optimizer: float = 12
) -> tuple[ShardingStrategy, ...]:
    """List plain data parallelism and ZeRO-1 to 3 for so many trainable parameters on `devices`.

    `parameter`, `gradient` and `optimizer` are bytes per parameter, by default those of mixed-precision Adam: fp32
    master, momentum and variance. Activations come on top, and no axis but data parallelism divides anything.
    Raises UsageError for fewer than one device.

    >>> [round(one.nbytes / 1e9, 2) for one in list_strategies(7_500_000_000, 64)]
    [120.0, 31.41, 16.64, 1.88]
    """
    if devices < 1:
        raise UsageError(f"a comparison needs at least one device, and there are {devices}")
    own = -(-parameters // devices)
    whole = parameters * (parameter + gradient + optimizer)
    plain = compute_sent_bytes("all-reduce", parameters * gradient, devices)
    found = []
    for zero, (name, formula) in enumerate(_ZERO_STAGE_FORMULAS):
        held = (
            (own if zero >= _PARAMETERS else parameters) * parameter
            + (own if zero >= _GRADIENTS else parameters) * gradient
            + (own if zero >= _OPTIMIZER else parameters) * optimizer
        )
        volume = _compute_strategy_volume(zero, parameters * parameter, parameters * gradient, devices)
        found.append(
            ShardingStrategy(
                name,
                zero,
                round(held),
                whole / held if held else 1.0,
                round(volume),
                volume / plain if plain else 1.0,
                formula,
                {"P": parameters, "N": devices, "w": parameter, "g": gradient, "k": optimizer},
            )
        )
    return tuple(found)


def _compute_strategy_volume(zero: int, weights: float, gradients: float, devices: int) -> float:
    """Compute gradients are reduced.

    Where states are shared, they are scattered and parameters gathered: once, or twice.
    """
    if zero == 0:
        return compute_sent_bytes("all-reduce", gradients, devices)
    gathers = 2 if zero >= _PARAMETERS else 1
    return compute_sent_bytes("reduce-scatter", gradients, devices) + gathers * compute_sent_bytes(
        "all-gather", weights, devices
    )
