"""Describes the arrays that are stored in place of one quantized weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from shardctl.base.dtype import DType
    from shardctl.models.quantization.storage import Form, WeightDecoder
    from shardctl.models.tables.family import Row
    from shardctl.tensors.placement import AxisPartition


@value_class
class WeightArray:
    """One array of a kind of weight."""

    suffix: str
    """What stands after the module's name."""
    usual: str
    """What usually stands there."""
    form: Form
    """How its dims follow those of the weight."""
    shape: tuple[int, ...]
    dtype: DType
    cuts: tuple[tuple[AxisPartition, ...], ...]
    row: Row
    optional: bool
    """Whether a checkpoint may lack it."""
    free: tuple[int, ...]
    """Dims whose extent the config does not determine."""


@value_class
class WeightEncoding:
    """How one weight is stored, and how its values follow from that."""

    module: str
    """The name of its module."""
    decoder: WeightDecoder | None
    """None where nobody here knows."""
    arrays: tuple[WeightArray, ...]
    transposed: bool = False
    """Whether the values are `[in, out]` where they are not quantized, as in stacks of gpt-oss's experts."""

    def name(self, array: WeightArray) -> str:
        """Return the name of one of the arrays."""
        return f"{self.module}.{array.suffix}"
