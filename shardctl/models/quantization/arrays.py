"""Describes the arrays of one kind of quantized weight: their shapes, cuts and rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import SourceError
from shardctl.models.quantization.encoding import WeightArray
from shardctl.models.quantization.following import compute_blocks, follow_cuts, refuse_cuts
from shardctl.models.quantization.storage import AlongDim, OpenDim

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardctl.models.quantization.storage import Form, QuantizedArray, WeightStorage
    from shardctl.models.tables.family import Row
    from shardctl.models.tables.model import ModelTensor
    from shardctl.tensors.manifest import Tensor


def list_stored_arrays(
    weight: ModelTensor, storage: WeightStorage, stored: Mapping[str, Tensor] | None, tabled: Collection[str]
) -> tuple[WeightArray, ...]:
    """List the arrays that are stored instead of `weight`.

    `stored` is what there is of them, by the names that follow the module's; None if nothing is known. Optional arrays
    are only those that are there. `tabled` are those names of which the family's table has a tensor (a bias).
    Raises SourceError for an array of another type than its method has.
    """
    there = stored or {}
    chosen: list[tuple[QuantizedArray, str, Form]] = []
    for array in storage.arrays:
        name = next((n for n in array.names if n in there), array.names[0])
        if array.optional and (name in tabled or name not in there):
            continue
        chosen.append((array, name, _choose_form(array, weight.shape, there.get(name))))
    together = compute_blocks(form for _, _, form in chosen)
    found = []
    for array, name, form in chosen:
        shape = _compute_shape(form, weight.shape, there.get(name))
        if not storage.whole:
            cuts = follow_cuts(weight.spec.cuts, weight.shape, form, together, storage.uncut)
        elif array is storage.arrays[0]:
            cuts = refuse_cuts(weight.spec.cuts, shape, storage.whole)
        else:
            cuts = ((),) * len(shape)
        part = WeightArray(
            suffix=name,
            usual=array.names[0],
            form=form,
            shape=shape,
            dtype=BY_NAME[array.dtypes[0]] if array.dtypes and not array.plain else weight.dtype,
            cuts=cuts,
            row=_build_row(weight.row, name, form),
            optional=array.optional and name not in there,
            free=tuple(dim for dim, extent in enumerate(form) if isinstance(extent, OpenDim)),
        )
        found.append(part)
    return tuple(found)


def _choose_form(array: QuantizedArray, weight: tuple[int, ...], stored: Tensor | None) -> Form:
    """Choose the form that is stored, else the usual one."""
    if stored is not None:
        if array.dtypes and stored.dtype.name not in array.dtypes:
            raise SourceError(
                f"{stored.name} is {stored.dtype}, but its quantization_config has {array.dtypes[0]} there",
                hint="the config may belong to another checkpoint, or a program has cast codes as if they were numbers",
            )
        for form in array.forms:
            if len(form) == len(stored.shape) and _compute_shape(form, weight, stored) == stored.shape:
                return form
    return array.forms[0]


def _compute_shape(form: Form, weight: tuple[int, ...], stored: Tensor | None) -> tuple[int, ...]:
    """Compute the extents of a form; what it leaves open is as stored, or as usual."""
    known = stored.shape if stored is not None and len(stored.shape) == len(form) else None

    def size(dim: int, extent: AlongDim | OpenDim | int) -> int:
        if isinstance(extent, AlongDim):
            return extent.extent(weight[extent.dim])
        if isinstance(extent, OpenDim):
            return known[dim] if known is not None else extent.usual(weight)
        return extent

    return tuple(size(dim, extent) for dim, extent in enumerate(form))


def _build_row(row: Row, name: str, form: Form) -> Row:
    """Build the row of an array, for the table of rules: its dims are those of the weight, divided."""
    words = row.dims.split() or ["*", "*"]

    def word(extent: AlongDim | OpenDim | int) -> str:
        if isinstance(extent, AlongDim):
            return f"{words[extent.dim]}/{extent.block}" if extent.block > 1 else words[extent.dim]
        return "*" if isinstance(extent, OpenDim) else str(extent)

    return replace(row, name=f"{row.name.removesuffix('weight')}{name}", dims=" ".join(map(word, form)))
