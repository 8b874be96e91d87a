"""Makes of a checkpoint whose stored names show how it is quantized one whose weights are floating-point numbers.

The weights are decoded under their stored names, and bound to the model of the config afterwards, so that a format
needs no table, and every layout takes the result.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardctl import models
from shardctl.base.errors import ShardctlError, UnsupportedError, format_first_few
from shardctl.models.quantization.settings import KEEP_HINT, VALUES_PLACE
from shardctl.models.quantization.stored_weight import WeightListing
from shardctl.storage import read_bytes
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Region, Tensor, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.models.dequantization.tile import LocatedArray
    from shardctl.models.dequantization.weight import QuantizedWeight
    from shardctl.models.quantization.stored_weight import PackedArray, PackedWeight, StoredQuantization


def decode_stored_weights(checkpoint: OpenedCheckpoint, dtype: DType, threads: int) -> OpenedCheckpoint:
    """Return `checkpoint` with every quantized weight as its values in `dtype`, bound to its model.

    Raises UnsupportedError for a format that is not decoded, or whose arrays only a table can name, and SourceError for
    arrays that are missing or do not fit each other.
    """
    from shardctl.checkpoint.computed_source import ComputedSource
    from shardctl.models.dequantization.weight import DECODING_BYTES

    found, stored = checkpoint.stored_quantization, checkpoint.stored.tensors
    assert found is not None  # noqa: S101 - asked before
    assert checkpoint.rebind is not None  # noqa: S101 - asked before
    if found.list_weights is None:
        raise UnsupportedError(f"shardctl does not decode {found.title}", hint=KEEP_HINT)
    config = checkpoint.config
    listing = WeightListing(partial(_read_array, checkpoint), _list_plain_shapes(config or {}))
    weights = found.list_weights(listing)
    decoded: dict[str, list[tuple[QuantizedWeight, Tensor]]] = {
        name: list(_decode_weight(name, weight, stored, dtype)) for name, weight in weights.items()
    }
    first = {next(iter(weight.arrays.values())).name: name for name, weight in weights.items()}
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():  # a weight takes the place of its codes
        if name in first:
            tensors |= {each.name: each for _, each in decoded[first[name]]}
        elif name not in found.arrays:
            tensors |= {each.name: each for each in _list_plain_parts(found, tensor)}
    parts = {VALUES_PLACE.format(each.name): each for pairs in decoded.values() for each, _ in pairs}
    used = {array.name for weight in weights.values() for array in weight.arrays.values()}
    left = sorted(found.arrays - used - found.markers)
    warnings = checkpoint.stored.warnings
    if left:
        warnings += (f"the result leaves out {format_first_few(left)}: no weight is decoded from them",)
    note = f"{len(parts):,} quantized weights ({found.title}) were decoded to {dtype}"
    rebound = checkpoint.rebind(
        ComputedSource(checkpoint.source, parts, thread_bytes=threads * DECODING_BYTES, note=note),
        replace(
            checkpoint.stored,
            tensors=tensors,
            warnings=warnings,
            metadata={k: v for k, v in checkpoint.stored.metadata.items() if k not in found.metadata_keys},
        ),
        _drop_settings(config, found),
    )
    if found.renamed and config is not None and rebound.model is None:
        why = f": {rebound.model_error.message}" if rebound.model_error is not None else ""
        raise UnsupportedError(
            f"the weights of {found.title} are decoded only for models of which shardctl knows every tensor, because "
            f"the library changes names and arrays of some{why}",
            hint=KEEP_HINT,
        )
    return replace(
        rebound,
        remade_config=config is not None,
        encoded=tuple(tensor for name, tensor in stored.items() if name in used),
    )


def _read_array(checkpoint: OpenedCheckpoint, name: str) -> bytes:
    """Read a small array, by its stored name."""
    tensor = checkpoint.stored.tensors[name]
    where = tensor.chunks[0].where
    if not isinstance(where, Region) or len(tensor.chunks) > 1:
        raise UnsupportedError(f"{name} is stored in pieces, and nobody writes it so")
    return read_bytes(checkpoint.source, where.file, where.offset, tensor.nbytes)


def _list_plain_shapes(config: Mapping[str, object]) -> Mapping[str, tuple[int, ...]]:
    """List the shapes of a model's tensors without quantization; empty if no table has it."""
    try:
        described = models.describe_model(models.drop_quantization_config(config))
    except ShardctlError:
        return {}
    return {tensor.name: tensor.shape for tensor in described.own()}


def _drop_settings(config: Mapping[str, object] | None, found: StoredQuantization) -> Mapping[str, object] | None:
    if config is None:
        return None
    dropped = models.drop_quantization_config(config)
    return {key: value for key, value in dropped.items() if key not in found.config_keys}


def _list_plain_parts(found: StoredQuantization, tensor: Tensor) -> Iterator[Tensor]:
    """List a tensor that is not quantized, or the matrices of a stack, as the format's weights are listed."""
    names = found.list_stacked_names(tensor.name, tensor.shape) if found.list_stacked_names is not None else ()
    if not names:
        yield tensor
        return
    from shardctl.models.dequantization.tile import LocatedArray

    for name, part in zip(names, LocatedArray.of_stack(tensor, ()), strict=True):
        yield replace(part.tensor, name=name)


def _decode_weight(
    name: str, weight: PackedWeight, stored: Mapping[str, Tensor], dtype: DType
) -> Iterator[tuple[QuantizedWeight, Tensor]]:
    """Yield what decodes a weight, and the weight as a tensor; of a stack, each matrix."""
    from shardctl.models.dequantization.tile import LocatedArray
    from shardctl.models.dequantization.weight import QuantizedWeight

    nbytes = sum(stored[array.name].nbytes for array in weight.arrays.values())
    arrays: list[dict[str, LocatedArray]]
    if weight.stack:
        names = weight.stack
        stacks = (
            LocatedArray.of_stack(_reinterpret(stored[array.name], array), array.form)
            for array in weight.arrays.values()
        )
        arrays = [dict(zip(weight.arrays, each, strict=True)) for each in zip(*stacks, strict=True)]
    else:
        names = (name,)
        located = {
            own: LocatedArray.of(_reinterpret(stored[array.name], array), array.form)
            for own, array in weight.arrays.items()
        }
        arrays = [located]
    outputs = weight.shape[0]
    width = Box.whole(weight.shape[1:]).size
    for each, own in zip(names, arrays, strict=True):
        part = QuantizedWeight(each, (outputs, width), own, weight.decoder, dtype)
        where = Region(VALUES_PLACE.format(each), 0, compute_dense_strides(dtype, weight.shape))
        chunk = Chunk(Box.whole(weight.shape), dtype, where, each)
        yield part, Tensor(each, dtype, weight.shape, (chunk,), encoded_bytes=nbytes // len(names))


def _reinterpret(tensor: Tensor, array: PackedArray) -> Tensor:
    """Return an array with the shape and the type that its format reads its bytes with.

    Raises UnsupportedError if it is stored in pieces, of which another shape cannot be told.
    """
    from shardctl.base.dtype import BY_NAME

    dtype = BY_NAME[array.dtype] if array.dtype else tensor.dtype
    shape = array.shape if array.shape is not None else tensor.shape
    if dtype is tensor.dtype and shape == tensor.shape:
        return tensor
    chunk = tensor.chunks[0] if len(tensor.chunks) == 1 else None
    where = chunk.where if chunk is not None else None
    if not isinstance(where, Region) or where.strides != compute_dense_strides(tensor.dtype, tensor.shape):
        raise UnsupportedError(
            f"{tensor.name} is stored in pieces, in which its quantized weights cannot be decoded",
            hint="convert it to one device first, with --to hf and without --dtype",
        )
    assert chunk is not None  # noqa: S101 - its place is known
    strides = compute_dense_strides(dtype, shape)
    whole = replace(chunk, box=Box.whole(shape), dtype=dtype, where=replace(where, strides=strides))
    return replace(tensor, dtype=dtype, shape=shape, chunks=(whole,))
