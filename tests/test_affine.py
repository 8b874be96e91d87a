"""Norms that are stored less one: what is read, what is written, and what cannot be."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import UnsupportedError
from shardctl.tensors.bands import BandBuffer, ChunkIndex
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import GAMMA_LESS_ONE, Chunk, Region

KINDS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class Memory:
    """One file that is bytes in memory."""

    def __init__(self, data):
        self.data = np.frombuffer(data, np.uint8).copy()

    def read_at(self, path, offset, into):  # noqa: ARG002
        into[:] = self.data[offset : offset + len(into)].data

    def write_at(self, path, offset, data):  # noqa: ARG002
        self.data[offset : offset + len(data)] = np.frombuffer(data, np.uint8)


def chunk(name, count, affine=GAMMA_LESS_ONE):
    return Chunk(Box((0,), (count,)), BY_NAME[name], Region("f", 0, (BY_NAME[name].unit_bytes,)), "norm.weight", affine)


def read(stored, name):
    buffer = np.zeros(stored.nbytes, np.uint8)
    found = BandBuffer(64).read(
        Memory(stored.tobytes()), ChunkIndex([chunk(name, stored.size)]), Box((0,), stored.shape), buffer
    )
    assert found == stored.size
    return buffer.view(stored.dtype)


@pytest.mark.parametrize("name", KINDS)
def test_one_is_added_as_torch_adds_it(name):
    torch = pytest.importorskip("torch")
    stored = np.linspace(-1.5, 1.5, 200).astype(KINDS[name])
    expected = torch.from_numpy(stored.astype(np.float32)).to(getattr(torch, BY_NAME[name].torch)) + 1
    np.testing.assert_array_equal(read(stored, name).astype(np.float32), expected.float().numpy())


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_is_read_back_bit_for_bit(name):
    """From a half upwards the difference is exact in every type."""
    gamma = np.linspace(0.5, 9, 200).astype(KINDS[name])
    target = Memory(bytes(gamma.nbytes))
    BandBuffer(64).write(target, chunk(name, gamma.size), Box((0,), gamma.shape), gamma.view(np.uint8).copy())
    stored = target.data.view(KINDS[name])
    np.testing.assert_array_equal(stored.astype(np.float64), gamma.astype(np.float64) - 1)
    np.testing.assert_array_equal(read(stored, name).view(np.uint8), gamma.view(np.uint8))


def test_a_difference_that_would_be_rounded_is_refused_by_name():
    gamma = np.array([1.5, 0.001], ml_dtypes.bfloat16)
    with pytest.raises(UnsupportedError, match=r"norm.weight: 1 of its elements cannot be stored as gamma-1 in BF16"):
        BandBuffer(64).write(Memory(bytes(4)), chunk("BF16", 2), Box((0,), (2,)), gamma.view(np.uint8))


def test_no_other_change_is_known_and_no_other_type_is_changed():
    with pytest.raises(UnsupportedError, match="cannot be changed by 'sqrt'"):
        BandBuffer(64).read(
            Memory(bytes(8)), ChunkIndex([chunk("F32", 2, "sqrt")]), Box((0,), (2,)), np.zeros(8, np.uint8)
        )
    with pytest.raises(UnsupportedError, match="I32"):
        BandBuffer(64).read(Memory(bytes(8)), ChunkIndex([chunk("I32", 2)]), Box((0,), (2,)), np.zeros(8, np.uint8))
