"""Makes of an opened checkpoint with quantised weights one whose weights are floating-point numbers.

What follows, from the plan of a conversion to the comparison of its result, takes it for any other checkpoint.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final

from shardctl import models
from shardctl.box import Box
from shardctl.dtype import FLOATS
from shardctl.errors import SourceError, UnsupportedError, UsageError, format_first_few
from shardctl.manifest import Chunk, Region, Tensor
from shardctl.models.quantisation.settings import KEEP_HINT, SIDECAR, VALUES_PLACE
from shardctl.models.quantisation.storage import QuantisedArray

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.dtype import DType
    from shardctl.models.dequantisation.weight import QuantisedWeight
    from shardctl.models.model import Model, ModelTensor
    from shardctl.models.quantisation.encoding import WeightArray, WeightEncoding

QUANTISED: Final = "quantize"
"""The option of a record that says to which format weights of its checkpoint were quantised, after all else."""
DEQUANTISED: Final = "dequantised"
"""The option of a record that says that weights of its checkpoint were worked out of quantised ones."""
QUANTISATION_FILES: Final = frozenset({SIDECAR, "quant_config.json", "quantize_config.json", "quanto_qmap.json"})
"""Files beside a config that say how weights are quantized: ModelOpt's, AutoAWQ's, AutoGPTQ's, optimum-quanto's."""
_MATRIX: Final = 2
_SHAPE: Final = "weight_shape"
"""What compressed-tensors calls an array that says the shape of the weight."""


def dequantise_checkpoint(checkpoint: OpenedCheckpoint, dtype: DType, threads: int) -> OpenedCheckpoint:
    """Return `checkpoint` with every quantised weight as its values in `dtype`, worked out when they are read.

    What only the quantisation needs (scales of activations and of the cache) is left behind, which a warning says.
    Raises UsageError where the model is not known, UnsupportedError for a method whose values nobody here can work out
    and for what kept the model from being known, SourceError for a weight of which some arrays are missing.
    """
    from shardctl.checkpoint.computed_source import ComputedSource
    from shardctl.models.dequantisation.weight import DECODING_BYTES

    if checkpoint.stored_quantization is not None:
        from shardctl.checkpoint.decoding_stored import decode_stored_weights  # which few checkpoints need

        return decode_stored_weights(checkpoint, dtype, threads)
    model, config = checkpoint.model, checkpoint.config
    if model is None and checkpoint.model_error is not None:
        raise checkpoint.model_error
    if model is None or config is None or model.plain is None:
        raise UsageError("quantised weights can be decoded only for a model that shardctl knows", hint=KEEP_HINT)
    encodings = _list_encodings(model)
    unknown = [name for name, encoding in encodings.items() if encoding.decoder is None]
    if unknown or not encodings:
        raise UnsupportedError(
            f"shardctl does not know how to decode {format_first_few(unknown) or 'these quantised weights'}",
            hint=KEEP_HINT,
        )
    stored, plain = checkpoint.manifest.tensors, model.plain
    values: dict[str, Tensor] = {}
    weights: dict[str, QuantisedWeight] = {}
    used = {encoding.name(array) for encoding in encodings.values() for array in encoding.arrays}
    for name, encoding in encodings.items():
        if plain.tensors[name].optional and not any(encoding.name(array) in stored for array in encoding.arrays):
            continue
        parts = _build_weights(plain.tensors[name], encoding, stored, dtype)
        weights |= {VALUES_PLACE.format(weight.name): weight for weight in parts}
        values[name] = _build_tensor(plain.tensors[name], encoding, parts, stored)
    tensors = {name: values.get(name) or stored[name] for name in plain.tensors if name in values or name in stored}
    needed = {encoding.name(array) for encoding in encodings.values() for array in _list_needed_arrays(encoding)}
    left = [name for name in stored if name not in tensors and name not in needed]
    warnings = checkpoint.manifest.warnings
    if left:
        warnings += (f"the result leaves out {format_first_few(left)}: no weight is decoded from them",)
    note = f"{len(values):,} quantised weights were decoded to {dtype}"
    return replace(
        checkpoint,
        source=ComputedSource(checkpoint.source, weights, thread_bytes=threads * DECODING_BYTES, note=note),
        manifest=replace(
            checkpoint.manifest,
            tensors=tensors,
            warnings=warnings,
            metadata=models.drop_torchao_metadata(checkpoint.manifest.metadata),
        ),
        model=plain,
        config=models.drop_quantisation_config(config),
        remade_config=True,
        encoded=tuple(tensor for name, tensor in stored.items() if name in used),
    )


def dequantise_as(result: OpenedCheckpoint, source: OpenedCheckpoint, threads: int) -> OpenedCheckpoint:
    """Return `source` with the values of its quantised weights, if those are what `result` has in their place."""
    if source.stored_quantization is not None:
        return _decode_stored_as(result, source, threads)
    if result.config is None or source.config is None or source.model is None or source.model.plain is None:
        return source
    said = result.record.options if result.record is not None else {}
    if models.find_quantisation_config(result.config) is not None and not said.keys() >= {DEQUANTISED, QUANTISED}:
        return source
    encodings = _list_encodings(source.model)
    found = (tensor.dtype for name, tensor in result.manifest.tensors.items() if name in encodings)
    dtype = next((dtype for dtype in found if dtype in FLOATS.values()), None)
    if dtype is None and DEQUANTISED in said:  # a half has other names, and what was quantised again other types
        dtype = FLOATS.get(said.get("dtype", ""))
    return source if dtype is None else dequantise_checkpoint(source, dtype, threads)


def _decode_stored_as(result: OpenedCheckpoint, source: OpenedCheckpoint, threads: int) -> OpenedCheckpoint:
    """Return `source` with the values of the weights that its stored names show, if `result` has no such weights."""
    found = source.stored_quantization
    if result.stored_quantization is not None or found is None or found.list_weights is None:
        return source
    said = result.record.options if result.record is not None else {}
    wide = [tensor for tensor in result.manifest.tensors.values() if len(tensor.shape) >= _MATRIX]
    types = Counter(tensor.dtype for tensor in wide if tensor.dtype in FLOATS.values())
    dtype = FLOATS.get(said.get("dtype", "")) or next((each for each, _ in types.most_common(1)), None)
    return source if dtype is None else dequantise_checkpoint(source, dtype, threads)


def _list_encodings(model: Model) -> Mapping[str, WeightEncoding]:
    """List how each quantised weight is stored, by name, whether the method or the family's own table says so."""
    return model.encodings or models.list_block_encodings(model)


def _list_needed_arrays(encoding: WeightEncoding) -> list[WeightArray]:
    """List the arrays that the values follow from, and that which only repeats their shape."""
    assert encoding.decoder is not None  # noqa: S101 - asked before
    values = [getattr(encoding.decoder, each.name) for each in fields(encoding.decoder)]
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    needed = {_SHAPE, *(part.names[0] for part in parts if isinstance(part, QuantisedArray))}
    return [array for array in encoding.arrays if array.usual in needed]


def _build_weights(
    tensor: ModelTensor, encoding: WeightEncoding, stored: Mapping[str, Tensor], dtype: DType
) -> list[QuantisedWeight]:
    """Build the matrix, or those of a stack of experts in order."""
    from shardctl.models.dequantisation.tile import LocatedArray
    from shardctl.models.dequantisation.weight import QuantisedWeight

    missing = [encoding.name(a) for a in encoding.arrays if not a.optional and encoding.name(a) not in stored]
    if missing:
        raise SourceError(
            f"{tensor.name} cannot be decoded without {format_first_few(missing)}",
            hint="a shard may be missing",
        )
    assert encoding.decoder is not None  # noqa: S101 - asked before
    there = [(array, stored[encoding.name(array)]) for array in encoding.arrays if encoding.name(array) in stored]
    shape = (tensor.shape[-2], tensor.shape[-1])
    if len(tensor.shape) == _MATRIX:
        arrays = {array.usual: LocatedArray.of(held, array.form) for array, held in there}
        return [QuantisedWeight(tensor.name, shape, arrays, encoding.decoder, dtype)]
    stacks = zip(*(LocatedArray.of_stack(held, array.form) for array, held in there), strict=True)
    names = [array.usual for array, _ in there]
    return [
        QuantisedWeight(
            f"{tensor.name}, expert {expert}",
            shape[::-1] if encoding.transposed else shape,
            dict(zip(names, arrays, strict=True)),
            encoding.decoder,
            dtype,
        )
        for expert, arrays in enumerate(stacks)
    ]


def _build_tensor(
    tensor: ModelTensor, encoding: WeightEncoding, parts: Sequence[QuantisedWeight], stored: Mapping[str, Tensor]
) -> Tensor:
    """The weight as a tensor whose values lie in files of their own, under the name that the source gave its codes."""
    codes, ending = encoding.arrays[0], tensor.name.removeprefix(f"{encoding.module}.")
    spelled = stored[encoding.name(codes)].spelling
    name = f"{spelled[0].removesuffix(codes.suffix)}{ending}" if spelled else tensor.name
    lead = len(tensor.shape) - _MATRIX
    chunks = []
    for number, weight in enumerate(parts):
        box = Box((*(number,) * lead, 0, 0), (*(1,) * lead, *tensor.shape[-2:]))
        strides = weight.strides[::-1] if encoding.transposed else weight.strides
        where = Region(VALUES_PLACE.format(weight.name), 0, (*(weight.nbytes,) * lead, *strides))
        chunks.append(Chunk(box, weight.dtype, where, name))
    return Tensor(
        tensor.name,
        parts[0].dtype,
        tensor.shape,
        tuple(chunks),
        spelling=(name,) if spelled else (),
        encoded_bytes=sum(stored[n].nbytes for array in encoding.arrays if (n := encoding.name(array)) in stored),
    )
