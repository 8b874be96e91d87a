"""Lists the element types that a checkpoint can hold: their names, widths, and what NumPy can do with each.

The names are those of the safetensors format (safetensors 0.8, `safetensors/src/tensor.rs`, enum `Dtype`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd, prod
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """An element type; there is one object of each, in `DTYPES`, so that types are compared by identity.

    Bytes are moved in *units*: one element, or for types narrower than a byte the smallest group of elements that
    fills whole bytes (two F4, four F6). Byte strides always step over units.

    >>> from copy import deepcopy
    >>> deepcopy(BY_NAME["F4"]) is BY_NAME["F4"]
    True
    """

    name: str
    """The safetensors name, such as ``BF16``."""
    bits: int
    """Width of one element in bits."""
    torch: str
    """The attribute of the torch module, such as ``bfloat16``; empty where torch has none."""

    unit_elements: int = field(init=False, repr=False)
    """Elements per unit: 1 unless the type is narrower than a byte."""
    unit_bytes: int = field(init=False, repr=False)
    """Bytes per unit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit_elements", 8 // gcd(self.bits, 8))
        object.__setattr__(self, "unit_bytes", self.bits * self.unit_elements // 8)

    def unit_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape in units of a tensor of `shape` elements; the last dim must hold whole units.

        >>> BY_NAME["F4"].unit_shape((3, 8))
        (3, 4)
        """
        if self.unit_elements == 1 or not shape:
            return tuple(shape)
        if shape[-1] % self.unit_elements:
            msg = (
                f"a last dim of {shape[-1]} {self.name} elements does not fill whole bytes; "
                f"it must be a multiple of {self.unit_elements}"
            )
            raise UnsupportedError(msg)
        return (*shape[:-1], shape[-1] // self.unit_elements)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return bytes of a dense tensor of `shape` elements.

        >>> BY_NAME["BF16"].nbytes((2, 3))
        12
        """
        bits = prod(shape) * self.bits
        if bits % 8:
            raise UnsupportedError(f"{prod(shape)} elements of {self.name} do not end on a byte")
        return bits // 8

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], DType], tuple[str]]:
        return _restore_dtype, (self.name,)  # another process has its own object


DTYPES: Final = (
    DType("BOOL", 8, "bool"),
    DType("F4", 4, "float4_e2m1fn_x2"),
    DType("F6_E2M3", 6, ""),
    DType("F6_E3M2", 6, ""),
    DType("U8", 8, "uint8"),
    DType("I8", 8, "int8"),
    DType("F8_E5M2", 8, "float8_e5m2"),
    DType("F8_E4M3", 8, "float8_e4m3fn"),
    DType("F8_E8M0", 8, "float8_e8m0fnu"),
    DType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
    DType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
    DType("I16", 16, "int16"),
    DType("U16", 16, "uint16"),
    DType("F16", 16, "float16"),
    DType("BF16", 16, "bfloat16"),
    DType("I32", 32, "int32"),
    DType("U32", 32, "uint32"),
    DType("F32", 32, "float32"),
    DType("C64", 64, "complex64"),
    DType("F64", 64, "float64"),
    DType("I64", 64, "int64"),
    DType("U64", 64, "uint64"),
)
BY_NAME: Final = {d.name: d for d in DTYPES}
BY_TORCH: Final = {d.torch: d for d in DTYPES if d.torch}
STORAGES: Final = {
    "BF16": "BFloat16Storage",
    "BOOL": "BoolStorage",
    "C64": "ComplexFloatStorage",
    "F16": "HalfStorage",
    "F32": "FloatStorage",
    "F64": "DoubleStorage",
    "I16": "ShortStorage",
    "I32": "IntStorage",
    "I64": "LongStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
}
"""By name, the classes of torch's typed storages; torch saves later types in untyped ones, which it reads since 2.3."""
FLOATS: Final = {"fp32": BY_NAME["F32"], "fp16": BY_NAME["F16"], "bf16": BY_NAME["BF16"]}
"""The dtypes that `--dtype` can cast to, by the name the command line uses."""
CASTABLE: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""The names of those that it changes; integers, booleans and scaled 8-bit floats mean something else."""
SMALL_FLOATS: Final = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
"""The names of 8-bit floats, which are numbers by themselves where no scales lie beside them."""


def _restore_dtype(name: str) -> DType:
    return BY_NAME[name]
