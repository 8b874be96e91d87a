"""Multiplies and adds as PyTorch does on a CPU of the x86-64 architecture, so that merged weights have PEFT's bits.

Whatever part of a matrix is worked out, each of its elements is the same: it is added up in an order that only the
extents of the whole matrix decide. What is said here of Intel's MKL and of PyTorch was found by comparing bits with
torch 2.13; `tests/models/test_adaptation.py` compares again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHAIN: Final = 192
"""Products that MKL adds up in one go; more are added up in stretches."""
_ALONE: Final = 1 << 18
"""Products up to which OpenBLAS works in the thread that calls it (interface/gemm.c)."""
_WIDE: Final = 256
_NARROW: Final = 64
"""Columns of a part."""
_LANES: Final = 8
"""Sums that PyTorch keeps of a row, one for every eighth element."""
_BLOCK: Final = 16
"""Rows and columns that OpenBLAS multiplies at once; the rest of a small matrix it adds up in another order."""


def multiply_low_rank(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply `[rows, rank]` by `[rank, columns]`, each element a chain of fused multiply-adds along the rank."""
    rows, rank = left.shape
    columns = right.shape[1]
    left = np.pad(left, ((0, -rows % _BLOCK), (0, 0)))
    right = np.pad(right, ((0, 0), (0, -columns % _BLOCK)))
    step = rank if rank <= _CHAIN else rank // 2 if rank <= 2 * _CHAIN else _CHAIN
    total = _multiply(left[:, :step], right[:step])
    for start in range(step, rank, step):
        total += _multiply(left[:, start : start + step], right[start : start + step])
    return total[:rows, :columns]


def _multiply(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply in parts so small that OpenBLAS starts no threads, which would only wait for each other's turn."""
    rows, rank = left.shape
    columns = right.shape[1]
    wide = _WIDE if rank * _WIDE * _BLOCK <= _ALONE else _NARROW
    high = max(_ALONE // (max(rank, 1) * wide) // _BLOCK, 1) * _BLOCK
    out = np.empty((rows, columns), np.float32)
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            part = np.s_[row : row + high, column : column + wide]
            np.matmul(left[row : row + high], right[:, column : column + wide], out=out[part])
    return out


def compute_row_norms(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute the Euclidean norm of each row, as `torch.linalg.norm(values, dim=1)` does where rows are contiguous."""
    rows, columns = values.shape
    whole = columns // _LANES * _LANES
    squares = np.square(values)
    lanes = np.add.reduce(squares[:, :whole].reshape(rows, -1, _LANES), axis=1)
    total = lanes[:, 0].copy()
    for lane in range(1, _LANES):
        total += lanes[:, lane]
    for column in range(whole, columns):
        total += squares[:, column]
    norms: NDArray[np.float32] = np.sqrt(total)
    return norms


def add_squares(total: NDArray[np.float32], values: NDArray[np.float32]) -> None:
    """Add the squares of each row in turn to `total`, in place, as the same does along the columns."""
    for row in values:
        total += np.square(row)
