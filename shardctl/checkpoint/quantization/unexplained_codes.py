"""Finds quantized weights among tensors that nothing explains, so that no cast rounds the scales beside them.

What a format is called does not matter here: a tensor of small integers or 8-bit floats, with other arrays of numbers
beside it in its module, is quantized, whoever wrote it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import CASTABLE, SMALL_FLOATS
from shardctl.base.errors import UnsupportedError, format_first_few

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardctl.base.dtype import DType
    from shardctl.checkpoint.opened_checkpoint import OpenedCheckpoint
    from shardctl.tensors.manifest import Manifest, Tensor

_PACKED_WEIGHT_DTYPES: Final = SMALL_FLOATS | {"F4", "F6_E2M3", "F6_E3M2", "I8", "U8", "I16", "U16", "I32", "U32"}
"""Types of codes; integers of 64 bits, and booleans, are what they say."""
_SCALE_DTYPES: Final = CASTABLE | SMALL_FLOATS | {"F8_E8M0"}
_MATRIX_NDIM: Final = 2
_PLAIN_PARAMETER_NAMES: Final = ("weight", "bias")
_BIAS_SUFFIX: Final = "_bias"
_MIN_WEIGHTS_PER_SCALE: Final = 4
"""Codes for each number beside them, at least: a scale belongs to many, and another weight has about as many."""
_CODE_BITS: Final = 2
"""Bits of the smallest codes that share an integer."""


def find_quantized_arrays(tensors: Mapping[str, Tensor], explained: Collection[str]) -> Mapping[str, Tensor]:
    """Find arrays that belong to quantized weights, such as scales, each with the codes beside it, by the array's name.

    `explained` are tensors that are known not to be codes, or known to be decoded.
    """
    codes = [t for name, t in tensors.items() if is_code(t) and name not in explained]
    if not codes:
        return {}
    beside: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.dtype.name in _SCALE_DTYPES and name not in explained:
            beside[name.rpartition(".")[0]].append(tensor)
    return {array.name: tensor for tensor in codes for array in _list_beside(tensor, beside)}


def is_code(tensor: Tensor) -> bool:
    """Return whether a tensor has a type and a shape that codes of a quantized weight may have."""
    return tensor.dtype.name in _PACKED_WEIGHT_DTYPES and len(tensor.shape) >= _MATRIX_NDIM


def _list_beside(codes: Tensor, beside: Mapping[str, list[Tensor]]) -> Iterator[Tensor]:
    """List the numbers in the module of a tensor of codes that are no parameters of their own."""
    parent, _, own = codes.name.rpartition(".")
    modules = [codes.name, parent] if parent else [codes.name]
    if own.startswith("_") or parent.rpartition(".")[2] == "weight":  # what a parameter consists of (quanto)
        modules.append(parent.rpartition(".")[0])
    count = codes.size if codes.dtype.name in SMALL_FLOATS else codes.size * codes.dtype.bits // _CODE_BITS
    for module in dict.fromkeys(modules):
        for tensor in beside.get(module, ()):
            leaf = tensor.name.rpartition(".")[2]
            named = tensor.name.startswith((f"{codes.name}_", f"{codes.name}."))
            few = tensor.size * _MIN_WEIGHTS_PER_SCALE <= count or not tensor.shape
            if (
                tensor is not codes
                and leaf not in _PLAIN_PARAMETER_NAMES
                and not leaf.endswith(_BIAS_SUFFIX)
                and (named or few)
            ):
                yield tensor
    if not parent:
        yield from (t for t in beside.get("", ()) if t.name.startswith((f"{codes.name}_", f"{codes.name}.")))


def list_plain_floats(checkpoint: OpenedCheckpoint) -> frozenset[str]:
    """List the tensors of 8-bit floats that are numbers by themselves, because no scales lie beside them."""
    tensors = checkpoint.manifest.tensors
    small = [name for name, tensor in tensors.items() if tensor.dtype.name in SMALL_FLOATS]
    if not small or (checkpoint.model is not None and checkpoint.model.encodings):
        return frozenset()
    beside = _find_in_checkpoint(checkpoint, ())
    coded = {codes.name for codes in beside.values()}
    return frozenset(name for name in small if name not in beside and name not in coded)


def check_cast(checkpoint: OpenedCheckpoint, have: Manifest, coded: Collection[str], want: DType) -> tuple[str, ...]:
    """Raise UnsupportedError if a cast to `want` would round the scales of quantized weights among `have`.

    `coded` are arrays that are made by quantizing, after the cast. Returns warnings: of 8-bit floats that are taken for
    plain numbers, and of integers that stay as they are.
    """
    beside = _find_in_checkpoint(checkpoint, coded)
    found = next(((name, codes) for name, codes in beside.items() if name in have.tensors), None)
    if found is not None:
        raise UnsupportedError(
            f"{found[1].name} is {found[1].dtype} with {found[0]} beside it: it is quantized in a way that nothing "
            f"explains, and a cast to {want} would round what lies beside it",
            hint="name the quantized model's own config with --config PATH, or leave --dtype out to keep the "
            "quantized weights as they are",
        )
    plain = list_plain_floats(checkpoint)
    cast = [tensor for name, tensor in have.tensors.items() if name in plain]
    buffers = _list_buffers(checkpoint)
    kept = [t for n, t in have.tensors.items() if is_code(t) and n not in plain and n not in coded and n not in buffers]
    kinds = " and ".join(sorted({tensor.dtype.name for tensor in cast}))
    warnings = []
    if cast:
        warnings.append(
            f"{len(cast):,} tensors of {kinds} have no scales beside them, and are cast to {want} as plain numbers: "
            f"{format_first_few([tensor.name for tensor in cast])}"
        )
    if kept:
        kinds = " and ".join(sorted({tensor.dtype.name for tensor in kept}))
        warnings.append(
            f"{len(kept):,} tensors of {kinds} are not cast: {format_first_few([tensor.name for tensor in kept])}"
        )
    return tuple(warnings)


def _find_in_checkpoint(checkpoint: OpenedCheckpoint, coded: Collection[str]) -> Mapping[str, Tensor]:
    states = checkpoint.manifest.training.states if checkpoint.manifest.training is not None else {}
    return find_quantized_arrays(checkpoint.manifest.tensors, {*coded, *states, *_list_buffers(checkpoint)})


def _list_buffers(checkpoint: OpenedCheckpoint) -> frozenset[str]:
    """List the tensors that a table knows as buffers, such as masks."""
    known = checkpoint.model.tensors.values() if checkpoint.model is not None else ()
    return frozenset(tensor.name for tensor in known if tensor.row.buffer)
