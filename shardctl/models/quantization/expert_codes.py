"""Describes stacks of quantized experts: of each array that a weight is stored in, those of a layer's experts in one.

The Hub has Step-3.5 and 3.7 so: `moe.gate_proj.weight` with `moe.gate_proj.weight_scale_inv` beside it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.tables.fusion import FusionPlaces, TensorFusion, stack_tensors
from shardctl.tensors.views import ArrayView

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardctl.models.quantization.encoding import WeightEncoding
    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Tensor

_WEIGHT_SUFFIX: Final = ".weight"


def list_weight_stacks(model: Model, weights: Collection[str]) -> Iterator[tuple[str, TensorFusion]]:
    """List the stacks of `weights` that files have, each with the name of its module."""
    for name, fusion in model.fusions.items():
        if (
            not fusion.stored
            or not name.endswith(_WEIGHT_SUFFIX)
            or any(part not in weights for part in fusion.tensors)
        ):
            continue
        places = fusion.places
        whole = all(box.shape == shape for box, shape in zip(places.boxes, places.shapes, strict=True))
        if whole and places.shape == (len(fusion.tensors), *places.shapes[0]):
            yield name.removesuffix(_WEIGHT_SUFFIX), fusion


def list_stacked_parts(stack: TensorFusion, own: str, stored: Tensor) -> Iterator[tuple[str, Tensor]]:
    """List what a stored stack holds of each expert, by its name; `own` is what follows the module's name."""
    part = replace(stored, shape=stored.shape[1:], chunks=())
    for name in stack.tensors:
        yield f"{name.removesuffix(_WEIGHT_SUFFIX)}.{own}", part


def stack_arrays_alike(
    stacks: Mapping[str, TensorFusion], encodings: Mapping[str, WeightEncoding]
) -> Iterator[TensorFusion]:
    """List the stacks of the arrays of quantized weights whose stack files have, where all have the same arrays."""
    for module, stack in stacks.items():
        found = [encodings.get(name) for name in stack.tensors]
        first = found[0]
        if first is None:
            continue
        alike = [(part.suffix, part.shape) for part in first.arrays]
        if any(each is None or [(part.suffix, part.shape) for part in each.arrays] != alike for each in found):
            continue
        for suffix, shape in alike:
            names = tuple(f"{name.removesuffix(_WEIGHT_SUFFIX)}.{suffix}" for name in stack.tensors)
            yield TensorFusion(f"{module}.{suffix}", names, _stack_shapes(shape, len(names)), stored=True)


def _stack_shapes(shape: tuple[int, ...], count: int) -> FusionPlaces:
    if shape:
        return stack_tensors((shape,), count)
    return FusionPlaces.of([ArrayView((number,), ()) for number in range(count)], (shape,) * count)
