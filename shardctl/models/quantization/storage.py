"""Describes in which arrays a quantized weight is stored, and how their dims follow those of the weight.

A weight is `[out, in]`, dim 0 and dim 1, whatever its arrays look like.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardctl.models.tables.config import ModelConfig

OUT: Final = 0
IN: Final = 1
BY_OUTPUT: Final = (OUT, IN)
BY_INPUT: Final = (IN, OUT)
"""The orders in which the values of a weight are worked out: rows of outputs, or rows of inputs."""
WORD: Final = 32
"""Bits of the integers that codes are packed into."""
FP8: Final = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
FLOAT: Final = ("F32", "F16", "BF16", "F64")
SCALE: Final = (*FLOAT, "F8_E8M0", "F8_E4M3", "U8")
"""What scales are: floats, or exponents alone, which some writers call bytes."""


@value_class
class AlongDim:
    """A dim of an array that follows a dim of the weight.

    >>> AlongDim(IN, 128).extent(300), AlongDim(IN, 8).extent(64), AlongDim(IN, 32, 3).extent(64)
    (3, 8, 6)
    """

    dim: int
    """The weight's dim."""
    block: int = 1
    """Elements of the weight that belong together."""
    stored: int = 1
    """Elements of the array for each block."""

    def extent(self, size: int) -> int:
        """Return elements of the array for `size` elements of the weight; a last block may be incomplete."""
        return -(-size * self.stored // self.block)


@value_class
class OpenDim:
    """A dim whose extent only the checkpoint tells, such as that of one flat array for the whole weight.

    >>> OpenDim(block=2).usual((300, 64)), OpenDim(16).usual((300, 64))
    (9600, 16)
    """

    extent: int = 1
    """What it usually is, where it does not grow with the weight."""
    block: int = 0
    """How many elements of the whole weight each usually stands for; 0 where it does not grow."""

    def usual(self, weight: Sequence[int]) -> int:
        """Return what it usually is for a weight of that shape."""
        return -(-prod(weight) // self.block) if self.block else self.extent


Form = tuple["AlongDim | OpenDim | int", ...]
"""The dims of an array: one that follows the weight, one that no config tells, or a fixed extent."""


def build_block_form(outputs: int, inputs: int) -> Form:
    """Build the form of what blocks of a weight share, such as their scales; a block of one element is the weight's.

    >>> build_block_form(1, 32)
    (AlongDim(dim=0, block=1, stored=1), AlongDim(dim=1, block=32, stored=1))
    """
    return AlongDim(OUT, outputs), AlongDim(IN, inputs)


MATRIX: Final = build_block_form(1, 1)
"""The form of the weight itself."""
PAIRS: Final = build_block_form(1, 2)
"""That of codes of four bits, two of neighbouring inputs to a byte."""
PER_TENSOR: Final[tuple[Form, ...]] = ((1,), ())
PER_ROW: Final[tuple[Form, ...]] = ((AlongDim(OUT), 1), (AlongDim(OUT),))


@value_class
class QuantizedArray:
    """One of the arrays that are stored in place of a weight."""

    name: str
    """What stands after the module's name, such as `qweight`; or several such names, separated by spaces, for what
    writers call differently, the usual one first."""
    dtypes: tuple[str, ...]
    """The safetensors dtypes it may have, the usual one first."""
    forms: tuple[Form, ...]
    """The shapes it may have, the usual one first."""
    optional: bool = False
    """Whether a checkpoint may lack it."""
    plain: bool = False
    """Whether its usual type is that of the model, not the first of `dtypes`."""

    @property
    def names(self) -> list[str]:
        """The names it may have."""
        return self.name.split()


def build_packed_dim(dim: int, bits: int) -> AlongDim:
    """Build a dim along which codes of `bits` are packed into integers of 32 bits.

    >>> build_packed_dim(IN, 4)
    AlongDim(dim=1, block=8, stored=1)
    >>> build_packed_dim(IN, 3)
    AlongDim(dim=1, block=32, stored=3)
    """
    return AlongDim(dim, WORD // bits) if WORD % bits == 0 else AlongDim(dim, WORD, bits)


@value_class
class ScaledFloats:
    """Codes of a byte each, and their scales."""

    codes: QuantizedArray
    scale: QuantizedArray
    by_scale: bool = False
    """Whether the owner computes in the type of the scales, rather than in F32."""
    rounded: str = "F32"
    """The type of the owner's result, if it does not compute in that of the scales."""
    blocked: int = 0
    """How many inputs share a scale, if scales are in the order of cuBLAS; else 0."""
    order: tuple[int, int] = BY_OUTPUT


@value_class
class PackedFloats:
    """Two codes of E2M1 in a byte, the first in its low half, with a scale a block, and perhaps one for them all."""

    codes: QuantizedArray
    scale: QuantizedArray
    whole: QuantizedArray | None = None
    """The scale of the blocks' scales."""
    divided: bool = False
    """Whether the blocks' scales are divided by it, rather than multiplied with it."""
    largest: float = 1.0
    """The number that `whole` stands for, if it is the largest magnitude of the weight (MLX); else 1."""
    rounded: str = "F32"
    """The type of the owner's result."""
    smoothing: QuantizedArray | None = None
    """What each input is multiplied with before the weight is used."""
    blocked: int = 0
    """How many inputs share a scale, if scales are in the order of cuBLAS; else 0."""
    high_first: bool = False
    """Whether the first code of a byte is in its high half (ComfyUI)."""
    order: tuple[int, int] = BY_OUTPUT


@value_class
class ScaledIntegers:
    """Integers in a byte each, in two halves of a byte, or packed along the inputs as compressed-tensors does."""

    codes: QuantizedArray
    scale: QuantizedArray
    zero: QuantizedArray | None = None
    groups: QuantizedArray | None = None
    """The group of each input, where act-order mixed them."""
    bits: int = 0
    """Of a packed code; 0 where each has a byte of its own."""
    halved: bool = False
    """Whether a byte has two codes, each in two's complement, the first in its low half."""
    added: bool = False
    """Whether zero points are numbers that are added to the product, rather than subtracted from the codes."""
    rounded: str = ""
    """The type of the owner's result; empty if it is that of the scales."""
    smoothing: QuantizedArray | None = None
    """What each input is multiplied with before the weight is used."""
    order: tuple[int, int] = BY_OUTPUT


@value_class
class PackedByInput:
    """GPTQ's integers, packed along the inputs, and AWQ's, packed along the outputs; both `[in, out]`."""

    codes: QuantizedArray
    scale: QuantizedArray
    zero: QuantizedArray
    bits: int
    group: int
    """Inputs that share a scale; -1 for all."""
    groups: QuantizedArray | None = None
    """The group of each input, if a checkpoint has it."""
    less_one: bool = False
    """Whether zero points are stored less one (GPTQ's first format)."""
    interleaved: bool = False
    """Whether the outputs in an integer are in AWQ's order."""
    order: tuple[int, int] = BY_INPUT


@value_class
class PackedRows:
    """AWQ's integers for its `gemv` kernel: packed along the inputs, and rows of zeros and scales with a padded end."""

    codes: QuantizedArray
    scale: QuantizedArray
    zero: QuantizedArray
    group: int
    """Inputs that share a scale; -1 for all."""
    order: tuple[int, int] = BY_OUTPUT


TILE_INPUTS: Final = 16
TILE_OUTPUTS: Final = 64
"""Inputs and outputs of the blocks in which Marlin stores codes."""


@value_class
class KernelTiles:
    """Marlin's integers of four bits, in the order in which a GPU's threads take them; the middle code is zero."""

    codes: QuantizedArray
    scale: QuantizedArray
    group: int
    """Inputs that share a scale; -1 for all."""
    order: tuple[int, int] = BY_INPUT


@value_class
class PackedIntegers:
    """bitsandbytes' codes of four bits, each an index of a table, in blocks that run on from row to row."""

    codes: QuantizedArray
    scale: QuantizedArray
    table: QuantizedArray
    """The sixteen numbers."""
    settings: QuantizedArray
    """A JSON text: the size of a block, the shape and the type of the weight."""
    second: QuantizedArray
    """The scales of the blocks' scales, if those are codes of a byte."""
    second_table: QuantizedArray
    """The 256 numbers that such a code may stand for."""
    order: tuple[int, int] = BY_OUTPUT


@value_class
class ByteRows:
    """bitsandbytes' integers of a byte, with the largest number of each row, which 127 stands for."""

    codes: QuantizedArray
    peak: QuantizedArray
    arrangement: QuantizedArray
    """Whether rows are stored as rows, or in the order of a kernel."""
    order: tuple[int, int] = BY_OUTPUT


@value_class
class StackedIntegers:
    """HQQ's integers: groups of the flattened weight as rows or columns, of which the first share bytes with later."""

    codes: QuantizedArray
    scale: QuantizedArray
    zero: QuantizedArray
    settings: tuple[QuantizedArray, ...]
    """Arrays of one number or text each, which say the rest."""
    order: tuple[int, int] = BY_OUTPUT


@value_class
class AffineWords:
    """MLX's integers, packed along the inputs: a code times the scale of its group, plus the bias of the group."""

    codes: QuantizedArray
    scale: QuantizedArray
    bias: QuantizedArray
    bits: int
    """Of a code: 1 to 6, or 8."""
    order: tuple[int, int] = BY_OUTPUT


@value_class
class PackedGroups:
    """quanto's integers of 2 or 4 bits: groups of the flattened weight as rows, of which distant ones share bytes."""

    codes: QuantizedArray
    scale: QuantizedArray
    shift: QuantizedArray
    """Zero points, which are subtracted from codes, or floats, which are subtracted from products."""
    bits: int
    inputs: int
    """Of the weight."""
    order: tuple[int, int] = BY_OUTPUT


WeightDecoder = (
    ScaledFloats
    | PackedFloats
    | ScaledIntegers
    | PackedByInput
    | PackedRows
    | KernelTiles
    | PackedIntegers
    | ByteRows
    | StackedIntegers
    | AffineWords
    | PackedGroups
)
"""How the values of a weight follow from its arrays; `models/dequantization` works them out."""


@dataclass(frozen=True)
class WeightStorage:
    """How one weight is stored."""

    arrays: tuple[QuantizedArray, ...]
    uncut: Mapping[int, str] = field(default_factory=dict)
    """Dims of the weight that no axis may cut, each with what it is then, in words that follow "1"."""
    whole: str = ""
    """Set if no axis at all may cut the weight, fsdp included: what it is, in words that follow "1"."""
    decoder: WeightDecoder | None = None
    """How the weight's values follow from the arrays; None where nobody here knows."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every name that an array may have, after the module's."""
        return tuple(name for array in self.arrays for name in array.names)


Names = tuple[str, ...]
"""What a config may call one module: its name with the base model's prefix, and without."""


@value_class
class QuantizationScheme:
    """What a `quantization_config` says."""

    storage: Callable[[Names], WeightStorage]
    """How the weight of a module is stored if it is quantized."""
    spares: Callable[[Names], bool]
    """Whether the config expressly leaves a module as it is."""
    heads: bool = False
    """Whether an output head is quantized unless the config says otherwise."""
    example: str = ""
    """A quantized module, if the config names each of them, so that a model without any is an error."""


@value_class
class QuantizationMethod:
    """A way to quantize."""

    names: tuple[str, ...]
    """What `quant_method` says."""
    read: Callable[[ModelConfig], QuantizationScheme | None]
    """What its settings mean; None if the family's own table has the arrays already."""
    spare: Callable[[Mapping[str, Any], Sequence[str], Sequence[str]], Mapping[str, Any]] | None = None
    """Returns settings that also leave modules as they are: those that were decoded, and those that no list names yet
    because they are left anyway. None where no settings leave single modules."""
