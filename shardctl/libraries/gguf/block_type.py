"""Lists the types of GGUF's tensors: how many elements a block has, and how many bytes.

The numbers are ggml's (`ggml-common.h`), as the package gguf 0.19 has them (`constants.py`, `GGML_QUANT_SIZES`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME, DType
from shardctl.base.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, eq=False)
class BlockType(DType):
    """An element type whose elements are stored in blocks, each with scales of its own."""

    elements: int = 1
    """Elements of a block, along the last dim: a unit."""
    block_bytes: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit_elements", self.elements)
        object.__setattr__(self, "unit_bytes", self.block_bytes)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return bytes of a tensor of `shape` elements, whose rows are whole blocks."""
        if shape and shape[-1] % self.elements:
            raise UnsupportedError(
                f"rows of {shape[-1]} elements are not a whole number of {self.name} blocks, "
                f"which have {self.elements} elements"
            )
        size = self.block_bytes
        for extent in self.unit_shape(shape):
            size *= extent
        return size


def _build_block_type(name: str, elements: int, nbytes: int) -> BlockType:
    return BlockType(name, -(-nbytes * 8 // elements), "", elements, nbytes)


BLOCK_TYPES: Final = {
    0: BY_NAME["F32"],
    1: BY_NAME["F16"],
    2: _build_block_type("Q4_0", 32, 18),
    3: _build_block_type("Q4_1", 32, 20),
    6: _build_block_type("Q5_0", 32, 22),
    7: _build_block_type("Q5_1", 32, 24),
    8: _build_block_type("Q8_0", 32, 34),
    9: _build_block_type("Q8_1", 32, 40),
    10: _build_block_type("Q2_K", 256, 84),
    11: _build_block_type("Q3_K", 256, 110),
    12: _build_block_type("Q4_K", 256, 144),
    13: _build_block_type("Q5_K", 256, 176),
    14: _build_block_type("Q6_K", 256, 210),
    15: _build_block_type("Q8_K", 256, 292),
    16: _build_block_type("IQ2_XXS", 256, 66),
    17: _build_block_type("IQ2_XS", 256, 74),
    18: _build_block_type("IQ3_XXS", 256, 98),
    19: _build_block_type("IQ1_S", 256, 50),
    20: _build_block_type("IQ4_NL", 32, 18),
    21: _build_block_type("IQ3_S", 256, 110),
    22: _build_block_type("IQ2_S", 256, 82),
    23: _build_block_type("IQ4_XS", 256, 136),
    24: BY_NAME["I8"],
    25: BY_NAME["I16"],
    26: BY_NAME["I32"],
    27: BY_NAME["I64"],
    28: BY_NAME["F64"],
    29: _build_block_type("IQ1_M", 256, 56),
    30: BY_NAME["BF16"],
    34: _build_block_type("TQ1_0", 256, 54),
    35: _build_block_type("TQ2_0", 256, 66),
    39: _build_block_type("MXFP4", 32, 17),
    40: _build_block_type("NVFP4", 64, 36),
    41: _build_block_type("Q1_0", 128, 18),
}
"""By the number that a header has."""
