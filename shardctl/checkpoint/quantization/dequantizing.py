"""Makes of an opened checkpoint with quantized weights one whose weights are floating-point numbers.

What follows, from the plan of a conversion to the comparison of its result, takes it for any other checkpoint.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final

from shardctl import models
from shardctl.base.dtype import FLOATS
from shardctl.base.errors import SourceError, UnsupportedError, UsageError, format_first_few
from shardctl.base.value import value_class
from shardctl.models.quantization import quantize_model
from shardctl.models.quantization.module_list import match_exact_names
from shardctl.models.quantization.settings import KEEP_HINT, VALUES_PLACE
from shardctl.models.quantization.storage import QuantizedArray
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Manifest, Region, Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.opening import OpenedCheckpoint
    from shardctl.models.dequantization.weight import QuantizedWeight
    from shardctl.models.quantization.encoding import WeightArray, WeightEncoding
    from shardctl.models.tables.model import Model, ModelTensor
    from shardctl.storage import Source

QUANTIZED: Final = "quantize"
"""The option of a record that says to which format weights of its checkpoint were quantized, after all else."""
DEQUANTIZED_MODULES: Final = "dequantize"
"""The option of a record that names the modules that were decoded, if not all were."""
DEQUANTIZED: Final = "dequantised"
"""The option of a record that says that weights of its checkpoint were worked out of quantized ones."""
_WEIGHT_SUFFIX: Final = ".weight"
_MATRIX_NDIM: Final = 2
_WEIGHT_SHAPE_ARRAY: Final = "weight_shape"
"""What compressed-tensors calls an array that says the shape of the weight."""


def dequantize_checkpoint(checkpoint: OpenedCheckpoint, dtype: DType, threads: int) -> OpenedCheckpoint:
    """Return `checkpoint` with every quantized weight as its values in `dtype`, worked out when they are read.

    What only the quantization needs (scales of activations and of the cache) is left behind, which a warning says.
    Raises UsageError where the model is not known, UnsupportedError for a method whose values nobody here can work out
    and for what kept the model from being known, SourceError for a weight of which some arrays are missing.
    """
    if checkpoint.stored_quantization is not None:
        from shardctl.checkpoint.quantization.decoding_stored import decode_stored_weights

        return decode_stored_weights(checkpoint, dtype, threads)
    model, plain, config = require_plain_model(checkpoint)
    encodings = _list_encodings(model)
    decoded = decode_weights(checkpoint, plain, encodings, dtype, threads)
    stored, values = checkpoint.manifest.tensors, decoded.values
    tensors = {name: values.get(name) or stored[name] for name in plain.tensors if name in values or name in stored}
    left = [name for name in stored if name not in tensors and name not in decoded.needed]
    return replace(
        checkpoint,
        source=decoded.source,
        manifest=replace(
            checkpoint.manifest,
            tensors=tensors,
            warnings=(*checkpoint.manifest.warnings, *_note_left_arrays(left)),
            metadata=models.drop_torchao_metadata(checkpoint.manifest.metadata),
        ),
        model=plain,
        config=models.drop_quantization_config(config),
        remade_config=True,
        encoded=decoded.arrays,
    )


def dequantize_modules(
    checkpoint: OpenedCheckpoint, entries: Sequence[str], dtype: DType, threads: int
) -> OpenedCheckpoint:
    """Return `checkpoint` with the quantized weights of some modules as their values in `dtype`, and the others as is.

    `entries` are names of modules, or `re:` and an expression. Raises UsageError for an entry that no quantized module
    has, and otherwise as `dequantize_checkpoint`.
    """
    if checkpoint.stored_quantization is not None:
        raise UnsupportedError(
            f"{checkpoint.stored_quantization.title} has no list of modules that are left as they are",
            hint="leave --dequantize out, and --dtype decodes all of them",
        )
    model, _, _ = require_plain_model(checkpoint)
    return _decode_some_weights(checkpoint, _choose_weights(checkpoint, model, entries), dtype, threads)


def describe_decoded(checkpoint: OpenedCheckpoint, entries: Sequence[str], dtype: DType) -> OpenedCheckpoint:
    """Return `checkpoint` with the weights that `--dtype` decodes as tensors of `dtype` that are stored nowhere.

    That is enough to count them, also where there is only a config. `entries` are as for `dequantize_modules`, empty
    for all. Returns the checkpoint itself if its weights are not quantized, or if nobody here decodes them.
    """
    model, config = checkpoint.model, checkpoint.config
    if model is None or config is None or model.plain is None:
        return checkpoint
    encodings = _list_encodings(model)
    if any(encoding.decoder is None for encoding in encodings.values()):
        return checkpoint
    chosen = _choose_weights(checkpoint, model, entries) if entries else encodings.keys()
    names = {encoding.name(array): name for name, encoding in encodings.items() for array in encoding.arrays}
    tensors: dict[str, Tensor] = {}
    for array, tensor in checkpoint.manifest.tensors.items():
        name = names.get(array)
        if name in chosen:
            assert name is not None  # noqa: S101 - it is in `chosen`
            tensors[name] = Tensor(name, dtype, model.plain.tensors[name].shape, ())
        elif entries or array in model.plain.tensors:
            tensors[array] = tensor
    manifest = replace(checkpoint.manifest, tensors=tensors)
    if not entries:
        return replace(checkpoint, manifest=manifest, model=model.plain, config=models.drop_quantization_config(config))
    described = quantize_model(model.plain, config, Manifest("", tensors, {}))
    return replace(checkpoint, manifest=manifest, model=described)


def _choose_weights(checkpoint: OpenedCheckpoint, model: Model, entries: Sequence[str]) -> Collection[str]:
    """Choose the weights of the modules that `entries` name; raises UsageError for an entry that names none."""
    stored = checkpoint.manifest.tensors
    modules = {name: _list_module_names(name, encoding, stored) for name, encoding in _list_encodings(model).items()}
    for entry in entries:
        if not any(map(match_exact_names((entry,)), modules.values())):
            raise UsageError(
                f"--dequantize {entry!r} is no quantized module of this model",
                hint="modules are named as in the ignore list of compressed-tensors: a whole name, or re: and an "
                "expression",
            )
    named = match_exact_names(entries)
    return {name for name, names in modules.items() if named(names)}


def _decode_some_weights(
    checkpoint: OpenedCheckpoint, chosen: Collection[str], dtype: DType, threads: int
) -> OpenedCheckpoint:
    """Return `checkpoint` with some weights decoded, which the settings of its config leave as they are."""
    from shardctl.checkpoint.quantization.spared_modules import spare_modules

    model, plain, config = require_plain_model(checkpoint)
    if not model.encodings:
        raise UnsupportedError(
            f"which modules of {model.architecture} are quantized, no list of its config says",
            hint="leave --dequantize out, and --dtype decodes all of them",
        )
    encodings = {name: encoding for name, encoding in model.encodings.items() if name in chosen}
    decoded = decode_weights(checkpoint, plain, encodings, dtype, threads)
    stored = checkpoint.manifest.tensors
    first = {encoding.name(encoding.arrays[0]): name for name, encoding in encodings.items()}
    gone = {encoding.name(array) for encoding in encodings.values() for array in encoding.arrays}
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name in first:
            tensors[first[name]] = decoded.values[first[name]]
        elif name not in gone:
            tensors[name] = tensor
    left = [name for name in stored if name in gone and name not in decoded.needed and name not in tensors]
    spared = spare_modules(checkpoint, config, tensors, decoded.values)
    return replace(
        checkpoint,
        source=decoded.source,
        manifest=replace(
            checkpoint.manifest,
            tensors=tensors,
            warnings=(*checkpoint.manifest.warnings, *_note_left_arrays(left), *spared.warnings),
            metadata=spared.metadata,
        ),
        model=spared.model,
        config=spared.config,
        remade_config=True,
        remade_files=spared.files,
        encoded=decoded.arrays,
    )


@value_class
class DecodedWeights:
    """Weights that are decoded, and where from."""

    source: Source
    values: Mapping[str, Tensor]
    """By the names of the weights."""
    needed: Collection[str]
    """The stored arrays that the values follow from, by name."""
    arrays: tuple[Tensor, ...]
    """All stored arrays of these weights."""


def require_plain_model(checkpoint: OpenedCheckpoint) -> tuple[Model, Model, Mapping[str, Any]]:
    """Return the model, the same without quantization, and the config; raises where any is not known."""
    model, config = checkpoint.model, checkpoint.config
    if model is None and checkpoint.model_error is not None:
        raise checkpoint.model_error
    if model is None or config is None or model.plain is None:
        raise UsageError("quantized weights can be decoded only for a model that shardctl knows", hint=KEEP_HINT)
    return model, model.plain, config


def decode_weights(
    checkpoint: OpenedCheckpoint, plain: Model, encodings: Mapping[str, WeightEncoding], dtype: DType, threads: int
) -> DecodedWeights:
    """Decode some weights of a checkpoint to `dtype` when they are read.

    Raises UnsupportedError for a method whose values nobody here can work out, SourceError for a weight of which some
    arrays are missing.
    """
    from shardctl.checkpoint.computed_source import ComputedSource
    from shardctl.models.dequantization.weight import DECODING_BYTES

    unknown = [name for name, encoding in encodings.items() if encoding.decoder is None]
    if unknown or not encodings:
        raise UnsupportedError(
            f"shardctl does not know how to decode {format_first_few(unknown) or 'these quantized weights'}",
            hint=KEEP_HINT,
        )
    stored = checkpoint.manifest.tensors
    values: dict[str, Tensor] = {}
    weights: dict[str, QuantizedWeight] = {}
    used = {encoding.name(array) for encoding in encodings.values() for array in encoding.arrays}
    for name, encoding in encodings.items():
        if plain.tensors[name].optional and not any(encoding.name(array) in stored for array in encoding.arrays):
            continue
        parts = _build_weights(plain.tensors[name], encoding, stored, dtype)
        weights |= {VALUES_PLACE.format(weight.name): weight for weight in parts}
        values[name] = _build_tensor(plain.tensors[name], encoding, parts, stored)
    note = f"{len(values):,} quantized weights were decoded to {dtype}"
    if checkpoint.model is not None and 0 < len(encodings) < len(checkpoint.model.encodings):
        note += f", and {len(checkpoint.model.encodings) - len(encodings):,} stay quantized"
    return DecodedWeights(
        ComputedSource(checkpoint.source, weights, thread_bytes=threads * DECODING_BYTES, note=note),
        values,
        {encoding.name(array) for encoding in encodings.values() for array in _list_needed_arrays(encoding)},
        tuple(tensor for name, tensor in stored.items() if name in used),
    )


def _note_left_arrays(names: Sequence[str]) -> tuple[str, ...]:
    """Warn of arrays that a result leaves out."""
    if not names:
        return ()
    return (f"the result leaves out {format_first_few(names)}: no weight is decoded from them",)


def _list_module_names(name: str, encoding: WeightEncoding, stored: Mapping[str, Tensor]) -> tuple[str, ...]:
    """List what a quantized module is called: by the table, and by the source."""
    codes = encoding.arrays[0]
    held = stored.get(encoding.name(codes))
    spelled = [each.removesuffix(f".{codes.suffix}") for each in held.spelling] if held is not None else []
    return tuple(dict.fromkeys([encoding.module, name.removesuffix(_WEIGHT_SUFFIX), *spelled]))


def dequantize_as(result: OpenedCheckpoint, source: OpenedCheckpoint, threads: int) -> OpenedCheckpoint:
    """Return `source` with the values of its quantized weights, if those are what `result` has in their place."""
    if source.stored_quantization is not None:
        return _decode_stored_as(result, source, threads)
    if result.config is None or source.config is None or source.model is None or source.model.plain is None:
        return source
    said = result.record.options if result.record is not None else {}
    encodings = _list_encodings(source.model)
    found = {name: tensor.dtype for name, tensor in result.manifest.tensors.items() if name in encodings}
    numbers = {name: dtype for name, dtype in found.items() if dtype in FLOATS.values()}
    dtype = next(iter(numbers.values()), None)
    if models.find_quantization_config(result.config) is not None and not said.keys() >= {DEQUANTIZED, QUANTIZED}:
        some = dtype is not None and len(numbers) < len(encodings) and bool(source.model.encodings)
        return _decode_some_weights(source, numbers, dtype, threads) if some and dtype is not None else source
    if dtype is None and DEQUANTIZED in said:  # a half has other names, and what was quantized again other types
        dtype = FLOATS.get(said.get("dtype", ""))
    return source if dtype is None else dequantize_checkpoint(source, dtype, threads)


def _decode_stored_as(result: OpenedCheckpoint, source: OpenedCheckpoint, threads: int) -> OpenedCheckpoint:
    """Return `source` with the values of the weights that its stored names show, if `result` has no such weights."""
    found = source.stored_quantization
    if result.stored_quantization is not None or found is None or found.list_weights is None:
        return source
    said = result.record.options if result.record is not None else {}
    wide = [tensor for tensor in result.manifest.tensors.values() if len(tensor.shape) >= _MATRIX_NDIM]
    types = Counter(tensor.dtype for tensor in wide if tensor.dtype in FLOATS.values())
    dtype = FLOATS.get(said.get("dtype", "")) or next((each for each, _ in types.most_common(1)), None)
    return source if dtype is None else dequantize_checkpoint(source, dtype, threads)


def _list_encodings(model: Model) -> Mapping[str, WeightEncoding]:
    """List how each quantized weight is stored, by name, whether the method or the family's own table says so."""
    return model.encodings or models.list_block_encodings(model)


def _list_needed_arrays(encoding: WeightEncoding) -> list[WeightArray]:
    """List the arrays that the values follow from, and that which only repeats their shape."""
    assert encoding.decoder is not None  # noqa: S101 - asked before
    values = [getattr(encoding.decoder, each.name) for each in fields(encoding.decoder)]
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    needed = {_WEIGHT_SHAPE_ARRAY, *(part.names[0] for part in parts if isinstance(part, QuantizedArray))}
    return [array for array in encoding.arrays if array.usual in needed]


def _build_weights(
    tensor: ModelTensor, encoding: WeightEncoding, stored: Mapping[str, Tensor], dtype: DType
) -> list[QuantizedWeight]:
    """Build the matrix, or those of a stack of experts in order."""
    from shardctl.models.dequantization.tile import LocatedArray
    from shardctl.models.dequantization.weight import QuantizedWeight

    missing = [encoding.name(a) for a in encoding.arrays if not a.optional and encoding.name(a) not in stored]
    if missing:
        raise SourceError(
            f"{tensor.name} cannot be decoded without {format_first_few(missing)}",
            hint="a shard may be missing",
        )
    assert encoding.decoder is not None  # noqa: S101 - asked before
    there = [(array, stored[encoding.name(array)]) for array in encoding.arrays if encoding.name(array) in stored]
    shape = (tensor.shape[-2], tensor.shape[-1])
    if len(tensor.shape) == _MATRIX_NDIM:
        arrays = {array.usual: LocatedArray.of(held, array.form) for array, held in there}
        return [QuantizedWeight(tensor.name, shape, arrays, encoding.decoder, dtype)]
    stacks = zip(*(LocatedArray.of_stack(held, array.form) for array, held in there), strict=True)
    names = [array.usual for array, _ in there]
    return [
        QuantizedWeight(
            f"{tensor.name}, expert {expert}",
            shape[::-1] if encoding.transposed else shape,
            dict(zip(names, arrays, strict=True)),
            encoding.decoder,
            dtype,
        )
        for expert, arrays in enumerate(stacks)
    ]


def _build_tensor(
    tensor: ModelTensor, encoding: WeightEncoding, parts: Sequence[QuantizedWeight], stored: Mapping[str, Tensor]
) -> Tensor:
    """The weight as a tensor whose values lie in files of their own, under the name that the source gave its codes."""
    codes, ending = encoding.arrays[0], tensor.name.removeprefix(f"{encoding.module}.")
    spelled = stored[encoding.name(codes)].spelling
    name = f"{spelled[0].removesuffix(codes.suffix)}{ending}" if spelled else tensor.name
    lead = len(tensor.shape) - _MATRIX_NDIM
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
