"""Keeps what the elements of tensors are: their digest sums, NaNs, infinities and zeros."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from shardctl.base.value import state_class
from shardctl.tensors.digest import LANES, DigestSums, compute_stacked_sums, count_element_parts, hash_tensor_sums
from shardctl.tensors.manifest import first_byte
from shardctl.tensors.small_tensors import stack_alike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardctl.base.dtype import DType
    from shardctl.tensors.manifest import Tensor
    from shardctl.tensors.small_tensors import TensorRun

_FIRST_NONFINITE: Final = {
    "F16": (0x7C00, 0x7C01),
    "BF16": (0x7F80, 0x7F81),
    "F32": (0x7F800000, 0x7F800001),
    "F64": (0x7FF0000000000000, 0x7FF0000000000001),
    "C64": (0x7F800000, 0x7F800001),
    "F8_E5M2": (0x7C, 0x7D),
    "F8_E4M3": (0x7F, 0x7F),
}
"""The lowest bits, less the sign, of an infinity and of a NaN of each float type with a sign.

Those above them are NaN too. The types of 8 bits are those of the OCP (OFP8, 2023); only E5M2 has infinities."""
_ONLY_NAN: Final = {"F8_E8M0": 0xFF, "F8_E4M3FNUZ": 0x80, "F8_E5M2FNUZ": 0x80}
"""The one NaN of the types that have one and no infinity: OCP's MX scales, and those without a negative zero."""
_WORD_WIDTHS_BYTES: Final = frozenset({1, 2, 4, 8})
_SLICE_BYTES: Final = 1 << 18
"""Bytes looked at while they are in the core's cache."""


@state_class
class TensorContent:
    """What the elements of one tensor are."""

    sums: DigestSums
    nans: int = 0
    infinities: int = 0
    zero: bool = True
    """Whether every byte is zero."""


class ContentTable:
    """What the elements of tensors are, by their place in a list, in few bytes each; shared by threads."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        words = [count_element_parts(tensor.dtype) * LANES for tensor in tensors]
        self._starts = np.zeros(len(tensors) + 1, np.int64)
        np.cumsum(words, out=self._starts[1:])
        self._words = np.zeros(int(self._starts[-1]), np.uint64)
        self._odd = np.zeros((2, len(tensors)), np.int64)
        self._zero = np.ones(len(tensors), np.bool_)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many tensors there are."""
        return len(self._zero)

    def __getitem__(self, number: int) -> TensorContent:
        """Return what one tensor is."""
        words = self._words[self._starts[number] : self._starts[number + 1]].tolist()
        nans, infinities = self._odd[:, number].tolist()
        return TensorContent(DigestSums(tuple(words)), nans, infinities, bool(self._zero[number]))

    def compute_digests(self) -> list[str]:
        """Compute the digest of every tensor."""
        text = self._words.astype(">u8").tobytes().hex()
        places = (16 * self._starts).tolist()
        return [
            hash_tensor_sums(text[start:stop], tensor.dtype, tensor.shape)
            for tensor, start, stop in zip(self._tensors, places[:-1], places[1:], strict=True)
        ]

    def add(self, number: int, part: TensorContent) -> None:
        """Add what some of a tensor's elements are."""
        with self._lock:
            self._words[self._starts[number] : self._starts[number + 1]] += np.array(part.sums.words, np.uint64)
            self._odd[:, number] += part.nans, part.infinities
            self._zero[number] &= part.zero

    def add_run(self, run: TensorRun, data: NDArray[np.uint8], *, values: bool) -> None:
        """Add what the small tensors of a run are, whose bytes `data` are; `values` as in `measure_content`."""
        tensors = self._tensors[run.numbers.start : run.numbers.stop]
        begins = [first_byte(tensor)[1] - run.offset for tensor in tensors]
        for places, dtype, shape, rows in stack_alike(data, list(zip(begins, tensors, strict=True))):
            numbers = np.array(places) + run.numbers.start
            sums = compute_stacked_sums(rows, dtype, shape)
            with self._lock:
                self._words[self._starts[numbers][:, None] + np.arange(sums.shape[1])] = sums
            self._zero[numbers] = ~rows.any(axis=1) if values else False
            if values and any(count_odd_values(rows.reshape(-1), dtype)[:2]):
                for number, row in zip(numbers, rows, strict=True):
                    self._odd[:, number] = count_odd_values(row, dtype)[:2]


def count_odd_values(data: NDArray[np.uint8], dtype: DType) -> tuple[int, int, bool]:
    """Count the NaNs and infinities, and tell whether every byte is zero.

    Of complex numbers each part counts; integers have neither. The largest word as an unsigned and as a signed number
    tells whether there is any, which takes a tenth of the time of counting.
    """
    width = 4 if dtype.name == "C64" else dtype.unit_bytes
    words = data.view(f"<u{width if width in _WORD_WIDTHS_BYTES else 1}")
    nans = infinities = largest = 0
    for start in range(0, words.size, _SLICE_BYTES // words.itemsize):
        part = words[start : start + _SLICE_BYTES // words.itemsize]
        top = int(part.max())
        largest = max(largest, top)
        if dtype.name in _ONLY_NAN:
            if top >= _ONLY_NAN[dtype.name]:
                nans += int(np.count_nonzero(part == _ONLY_NAN[dtype.name]))
        elif dtype.name in _FIRST_NONFINITE:
            infinity, nan = _FIRST_NONFINITE[dtype.name]
            sign = 1 << (8 * part.itemsize - 1)
            if top >= sign | infinity or int(part.view(f"<i{part.itemsize}").max()) >= infinity:
                size = part & (sign - 1)
                nans += int(np.count_nonzero(size >= nan))
                infinities += int(np.count_nonzero(size >= infinity))
    return nans, max(infinities - nans, 0), not largest
