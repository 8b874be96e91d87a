"""Converts the FP4 experts of a checkpoint of FP8 to FP8 with a scale for each block, if that holds every value.

FP8 has two more bits in its exponent than FP4, so that it holds values of FP4 whose scales differ by up to 2^14 within
a block. The weights that are FP8 already keep their bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl import models
from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UnsupportedError
from shardctl.checkpoint.computed_source import ComputedSource
from shardctl.checkpoint.quantization.dequantizing import decode_weights, require_plain_model
from shardctl.models.quantization import quantize_model
from shardctl.models.quantization.fp8 import parse_block_size
from shardctl.models.quantization.settings import replace_quantization_settings
from shardctl.models.quantization.storage import PackedFloats
from shardctl.models.rounding.recipes import RoundingRecipe
from shardctl.models.rounding.rounded_weight import (
    REMEMBERED,
    ROUNDING_BYTES,
    RoundedIntegers,
    RoundedScales,
    RoundedWeight,
    ScaleMemory,
)
from shardctl.models.rounding.scales import ScaleRule
from shardctl.models.rounding.stored_matrix import StoredMatrix
from shardctl.tensors.bands import ChunkIndex
from shardctl.tensors.box import Box
from shardctl.tensors.copyplan import cover_tensor
from shardctl.tensors.manifest import Chunk, Manifest, Region, Tensor, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from shardctl.checkpoint.computed_source import ComputedArray
    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.models.quantization.encoding import WeightEncoding

_QUANTIZED_ARRAY_LABEL: Final = "{} (quantized)"
"""What the place of an array is called in messages."""
_BLOCK_SIZE_KEY: Final = "weight_block_size"
_EXPERT_DTYPE_KEY: Final = "expert_dtype"


def convert_experts(checkpoint: OpenedCheckpoint, threads: int) -> OpenedCheckpoint:
    """Return `checkpoint` with its FP4 experts as FP8 in the blocks of its other weights, computed when they are read.

    Reading raises UnsupportedError for a weight with a value that FP8 does not hold exactly.
    """
    model, plain, config = require_plain_model(checkpoint)
    settings = models.find_quantization_config(config)
    block = parse_block_size(settings, _BLOCK_SIZE_KEY) if settings is not None else None
    experts = {n: e for n, e in model.encodings.items() if isinstance(e.decoder, PackedFloats)}
    if block is None or not experts:
        raise UnsupportedError(f"config.json says no {_BLOCK_SIZE_KEY} for the experts", hint="leave --quantize out")
    decoded = decode_weights(checkpoint, plain, experts, BY_NAME["F32"], threads)
    rule = ScaleRule(RoundingRecipe("fp8-block", "", "fp8", block, {}, None, "exact"), "F32")
    memory = ScaleMemory()
    first = {encoding.name(encoding.arrays[0]): name for name, encoding in experts.items()}
    gone = {encoding.name(array) for encoding in experts.values() for array in encoding.arrays}
    tensors: dict[str, Tensor] = {}
    arrays: dict[str, ComputedArray] = {}
    for name, tensor in checkpoint.manifest.tensors.items():
        if name in first:
            weight = first[name]
            made = _build_arrays(decoded.values[weight], experts[weight], rule, memory)
            for each, array in made:
                tensors[each.name] = each
                arrays[_QUANTIZED_ARRAY_LABEL.format(each.name)] = array
        elif name not in gone:
            tensors[name] = tensor
    found = replace_quantization_settings(config, _change_expert_type)
    if _EXPERT_DTYPE_KEY in config:
        found = {**found, _EXPERT_DTYPE_KEY: "fp8"}
    note = f"{len(experts):,} weights of experts are FP8 with the values that they had in FP4"
    thread_bytes = threads * ROUNDING_BYTES + REMEMBERED
    return replace(
        checkpoint,
        source=ComputedSource(decoded.source, arrays, thread_bytes=thread_bytes, note=note),
        manifest=replace(checkpoint.manifest, tensors=tensors),
        model=quantize_model(plain, found, Manifest("", tensors, {})),
        config=found,
        remade_config=True,
        adapted=(*checkpoint.adapted, *decoded.arrays),
    )


def _change_expert_type(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**settings, _EXPERT_DTYPE_KEY: "fp8"} if _EXPERT_DTYPE_KEY in settings else settings


def _build_arrays(
    values: Tensor, encoding: WeightEncoding, rule: ScaleRule, memory: ScaleMemory
) -> Iterator[tuple[Tensor, RoundedIntegers | RoundedScales]]:
    """Yield the codes and the scales of a weight, each as a tensor and what computes it."""
    rows, columns = values.shape
    matrix = StoredMatrix(encoding.module, (rows, columns), ChunkIndex(cover_tensor(values)), values.dtype)
    weight = RoundedWeight(matrix, rule, memory, None)
    scale = next(array for array in encoding.arrays if array.usual in ("scale", "weight_scale"))
    stem = values.spelling[0].removesuffix("weight") if values.spelling else ""
    for array in (RoundedIntegers(weight), RoundedScales(weight, scale.suffix)):
        where = Region(_QUANTIZED_ARRAY_LABEL.format(array.name), 0, compute_dense_strides(array.dtype, array.shape))
        chunk = Chunk(Box.whole(array.shape), array.dtype, where, array.name)
        spelling = (f"{stem}{array.name.removeprefix(f'{encoding.module}.')}",) if stem else ()
        read = values.encoded_bytes if isinstance(array, RoundedIntegers) else 0
        yield Tensor(array.name, array.dtype, array.shape, (chunk,), spelling=spelling, encoded_bytes=read), array
