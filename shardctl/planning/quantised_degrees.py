"""Finds which degrees of tp and ep leave the blocks, groups and packed integers of quantized weights whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class
from shardctl.estimate.model.allowed_degrees import AllowedDegrees, list_sections
from shardctl.tensors.placement import can_divide

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.estimate.model.inventory import TensorInventory
    from shardctl.models import Model

_PARALLEL_AXES: Final = ("tp", "ep")
_MAX_TRIED_DEGREE: Final = 128
"""Degrees up to which all are tried."""


@value_class
class QuantizedDegrees:
    """The degrees of one axis for a quantized checkpoint."""

    allowed: tuple[int, ...]
    """Those up to 128 that work."""
    blocked: tuple[int, ...]
    """Those that would work if the weights were not quantized."""


def find_quantized_degrees(model: Model | None, inventory: TensorInventory) -> Mapping[str, QuantizedDegrees]:
    """Find them by axis; empty for a model that is not quantized or whose cuts are not known."""
    if model is None or model.plain is None or not model.encodings:
        return {}
    law = AllowedDegrees(inventory)
    sections = list_sections(tensor.spec for tensor in model.plain.tensors.values())
    found = {}
    for axis in _PARALLEL_AXES:
        if axis not in sections or axis in inventory.unknown:
            continue
        allowed = law.degrees(axis, _MAX_TRIED_DEGREE)
        plain = [
            n for n in range(1, _MAX_TRIED_DEGREE + 1) if all(can_divide(section, n) for section in sections[axis])
        ]
        found[axis] = QuantizedDegrees(allowed, tuple(n for n in plain if n not in allowed))
    return found
