"""Bands against NumPy: any strided storage is read and written exactly, whatever the block size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardctl.base.dtype import BY_NAME
from shardctl.tensors.bands import PAGE, BandBuffer, ChunkIndex, find_fastest_dim, find_page_shift, split_bands
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, ConstantFill, Region, compute_dense_strides, narrow_chunk

U16 = BY_NAME["U16"]


class Memory:
    """Files in memory that count what is asked of them."""

    def __init__(self, **files):
        self.files = {name: np.frombuffer(bytes(data), np.uint8).copy() for name, data in files.items()}
        self.read_bytes = 0

    def read_at(self, path, offset, into):
        self.read_bytes += len(into)
        into[:] = self.files[path][offset : offset + len(into)].data

    def write_at(self, path, offset, data):
        self.files[path][offset : offset + len(data)] = np.frombuffer(data, np.uint8)


shapes = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


@given(shapes, st.sampled_from(["U8", "U16", "F32", "C64"]), st.integers(1, 200), st.data())
def test_bands_are_a_disjoint_cover_within_the_block(shape, name, block, data):
    dtype = BY_NAME[name]
    fastest = data.draw(st.sampled_from([None, *range(len(shape))]))
    seen = np.zeros(shape, int)
    for box in split_bands(shape, dtype, block, fastest=fastest):
        seen[(*box.slices(), ...)] += 1
        assert dtype.nbytes(box.shape) <= max(block, dtype.unit_bytes)
    assert (seen == 1).all()


@settings(max_examples=200)
@given(shapes, st.integers(2, 64), st.data())
def test_any_permuted_and_gapped_storage_is_read_and_written_exactly(shape, block, data):
    order = data.draw(st.permutations(range(len(shape))))
    gaps = [data.draw(st.sampled_from([1, 1, 2, 3])) for _ in shape]
    strides, step = [0] * len(shape), 2
    for dim in order:
        strides[dim] = step * gaps[dim]
        step = strides[dim] * shape[dim]
    values = np.arange(int(np.prod(shape)), dtype=np.uint16).reshape(shape)
    base = bytearray(step + 64)
    np.ndarray(shape, np.uint16, base, 6, strides)[...] = values
    chunk = Chunk(Box.whole(shape), U16, Region("f", 6, tuple(strides)))
    source, target = Memory(f=base), Memory(f=bytes(len(base)))
    band = BandBuffer(max(block, 2))
    buffer = np.zeros(max(block, 2), np.uint8)
    index = ChunkIndex([chunk])
    for box in split_bands(shape, U16, block, fastest=find_fastest_dim([chunk])):
        assert band.read(source, index, box, buffer) == box.size
        got = buffer[: 2 * box.size].view(np.uint16).reshape(box.shape)
        np.testing.assert_array_equal(got, values[(*box.slices(), ...)])
        assert band.write(target, narrow_chunk(chunk, box), box, buffer) == 2 * box.size
    np.testing.assert_array_equal(np.ndarray(shape, np.uint16, target.files["f"], 6, strides), values)
    assert source.read_bytes <= 2 * 2 * values.size  # over-read is bounded


def test_one_band_is_assembled_from_many_chunks_and_a_fill():
    left = Chunk(Box((0, 0), (2, 2)), U16, Region("a", 0, (4, 2)))
    right = Chunk(Box((0, 2), (2, 1)), U16, ConstantFill(b"\x07\x00"))
    source = Memory(a=np.arange(4, dtype=np.uint16).tobytes())
    buffer = np.zeros(64, np.uint8)
    assert BandBuffer(64).read(source, ChunkIndex([left, right]), Box.whole((2, 3)), buffer) == 6
    assert buffer[:12].view(np.uint16).reshape(2, 3).tolist() == [[0, 1, 7], [2, 3, 7]]


def test_a_whole_row_major_tensor_is_read_in_one_call_without_scratch():
    chunk = Chunk(Box.whole((8, 8)), U16, Region("a", 0, compute_dense_strides(U16, (8, 8))))
    source = Memory(a=bytes(128))
    assert BandBuffer(2).read(source, ChunkIndex([chunk]), Box.whole((8, 8)), np.zeros(128, np.uint8)) == 64
    assert source.read_bytes == 128


@pytest.mark.parametrize(
    ("box", "offset", "shift"),
    [
        (Box((0, 0), (4, 8)), 1000, 1000),
        (Box((2, 0), (2, 8)), 5000, (5000 - 2 * 16) % PAGE),
        (Box((0, 0), (4, 4)), 1000, 0),  # columns are gathered
        (Box((0, 0), (4, 8)), 1001, 0),  # numbers at odd addresses would be slow
    ],
)
def test_a_band_begins_where_it_lies_in_a_page_of_the_file(box, offset, shift):
    chunk = Chunk(box, U16, Region("f", offset, compute_dense_strides(U16, box.shape)))
    fill = Chunk(Box((0, 0), (4, 8)), U16, ConstantFill(b"ab"))
    assert find_page_shift([fill, chunk], Box((0, 0), (4, 8)), U16) == shift


def test_narrow_types_are_cut_on_whole_bytes_only():
    f4 = BY_NAME["F4"]
    chunk = Chunk(Box.whole((2, 8)), f4, Region("a", 0, compute_dense_strides(f4, (2, 8))), "w")
    assert narrow_chunk(chunk, Box((1, 2), (1, 4))).where == Region("a", 5, (4, 1))
    with pytest.raises(Exception, match="cannot be cut"):
        narrow_chunk(chunk, Box((0, 1), (1, 2)))
    source = Memory(a=bytes(range(8)))
    buffer = np.zeros(8, np.uint8)
    for box in split_bands((2, 8), f4, 3):
        BandBuffer(8).read(source, ChunkIndex([chunk]), box, buffer)
        assert buffer[0] == box.origin[0] * 4 + box.origin[1] // 2


@pytest.mark.parametrize("strides", [(6, 0), (0, 2), (2, 2), (4, 2)])
def test_overlapping_and_gapped_storage_of_an_equal_span_is_not_taken_for_dense(strides):
    data = np.arange(16, dtype=np.uint16)
    chunk = Chunk(Box.whole((2, 2)), U16, Region("a", 2, strides))
    buffer = np.zeros(64, np.uint8)
    BandBuffer(64).read(Memory(a=data.tobytes()), ChunkIndex([chunk]), Box.whole((2, 2)), buffer)
    expected = np.ndarray((2, 2), np.uint16, data.tobytes(), 2, strides)
    np.testing.assert_array_equal(buffer[:8].view(np.uint16).reshape(2, 2), expected)
