"""The digest against a slow implementation written from docs/design/digest.md, and the guarantees that page gives."""

from __future__ import annotations

import hashlib
import importlib
import re
import threading
import time
from functools import cache
from hashlib import blake2b, shake_128
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardctl.base.dtype import BY_NAME, DTYPES
from shardctl.base.errors import UnsupportedError
from shardctl.tensors.box import Box, list_flat_boxes
from shardctl.tensors.digest import DigestSums, compute_box_sums, compute_checkpoint_digest, compute_tensor_digest

digest = importlib.import_module("shardctl.tensors.digest")  # `from shardctl import digest` is the verb
BF16, F32 = BY_NAME["BF16"], BY_NAME["F32"]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# --- the page, word for word


def words(label):
    stream = shake_128(f"shardctl1 {label}".encode()).digest(8 * 80_000)
    return [int.from_bytes(stream[i : i + 8], "little") for i in range(0, len(stream), 8)]


def distinct(candidates, bits):
    seen, kept = {0}, []
    for word in candidates:
        if word % 2**bits not in seen:
            seen.add(word % 2**bits)
            kept.append(word)
    return kept[:65536]


@cache
def column_keys(lane):
    return [word % 2**20 for word in distinct(words(f"column {lane}"), 20)]


@cache
def row_keys(lane):
    return distinct([word | 1 for word in words(f"row {lane}")], 29)


@cache
def tile_keys(row_tile, column_tile):
    return [word | 1 for word in words(f"tile {row_tile} {column_tile}")[:2]]


def key(row, column, lane):
    tile = tile_keys(row // 65536, column // 65536)[lane]
    return column_keys(lane)[column % 65536] * row_keys(lane)[row % 65536] * tile


def elements(data, dtype):
    """The codes of dense elements: one little-endian number, low bits first."""
    units = (data[i : i + dtype.unit_bytes] for i in range(0, len(data), dtype.unit_bytes))
    shifts = [dtype.bits * i for i in range(dtype.unit_elements)]
    return [int.from_bytes(unit, "little") >> shift & (2**dtype.bits - 1) for unit in units for shift in shifts]


def slow(data, dtype, box, shape):
    """The sums of `box` of a tensor of `shape`, element by element in Python's integers."""
    n_parts = max(1, dtype.bits // 16)
    sums = [0] * (n_parts * 2)
    indices = product(*(range(o, o + n) for o, n in zip(box.origin, box.shape, strict=True)))
    for index, bits in zip(indices, elements(bytes(data), dtype), strict=True):
        row = 0
        for i, size in zip(index[:-1], shape[:-1], strict=True):
            row = row * size + i
        column = index[-1] if index else 0
        for lane in range(2):
            factor = key(row, column, lane)
            for part in range(n_parts):
                sums[part * 2 + lane] += ((bits >> 16 * part & 0xFFFF) + 1) * factor
    return DigestSums(tuple(s % 2**64 for s in sums))


# --- helpers


def random_bytes(dtype, shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, dtype.nbytes(shape), np.uint8)


def whole(data, dtype, shape):
    return compute_box_sums(np.ascontiguousarray(data).view(np.uint8).ravel(), dtype, Box.whole(shape), shape)


def cut(data, dtype, box, shape):
    """The row-major bytes of a box of a whole tensor's bytes."""
    if not shape:
        return data
    units = data.reshape(*dtype.unit_shape(shape), dtype.unit_bytes)
    lows, extents = dtype.unit_shape(box.origin), dtype.unit_shape(box.shape)
    return np.ascontiguousarray(units[Box(lows, extents).slices()]).ravel()


@st.composite
def tensors(draw, dtypes=DTYPES, max_dim=6, max_rank=4):
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, max_dim), max_size=max_rank))
    if shape:
        shape[-1] *= dtype.unit_elements
    elif dtype.unit_elements > 1:
        shape = [dtype.unit_elements]
    return dtype, tuple(shape), random_bytes(dtype, shape, draw(st.integers(0, 2**32)))


def partition(draw, dtype, box):
    """Random disjoint boxes that cover `box`, in random order."""
    step = [1] * len(box.shape)
    if step:
        step[-1] = dtype.unit_elements
    cuttable = [d for d, n in enumerate(box.shape) if n > step[d]]
    if not cuttable or not draw(st.integers(0, 3)):
        return [box]
    d = draw(st.sampled_from(cuttable))
    at = draw(st.integers(1, box.shape[d] // step[d] - 1)) * step[d]
    low = Box(box.origin, (*box.shape[:d], at, *box.shape[d + 1 :]))
    boxes = [half for part in (low, *box.subtract(low)) for half in partition(draw, dtype, part)]
    return draw(st.permutations(boxes))


# --- the definition


@settings(max_examples=150, deadline=None)
@given(tensors(), st.data())
def test_the_parts_of_any_partition_in_any_order_add_up_to_the_slow_sum_of_the_whole(tensor, data):
    dtype, shape, content = tensor
    total = DigestSums.zero(dtype)
    for box in partition(data.draw, dtype, Box.whole(shape)):
        piece = cut(content, dtype, box, shape)
        part = compute_box_sums(piece, dtype, box, shape)
        assert part == slow(piece, dtype, box, shape)
        total += part
    assert total == slow(content, dtype, Box.whole(shape), shape)


@every_dtype
@pytest.mark.parametrize("width", [1, 2, 3, 7, 100, 2048, 9300])
def test_every_width_takes_the_same_value_by_the_fast_way_as_by_the_slow_one(dtype, width):
    shape = (3 if width < 2048 else 1, width // dtype.unit_elements or 1)
    shape = (shape[0], shape[1] * dtype.unit_elements)
    data = random_bytes(dtype, shape)
    assert whole(data, dtype, shape) == slow(data, dtype, Box.whole(shape), shape)


@pytest.mark.parametrize(
    ("shape", "origin", "extent"),
    [
        ((140_000,), (65_000,), (75_000,)),
        ((3, 131_080), (1, 65_530), (2, 65_546)),
        ((70_000, 2), (65_530, 0), (12, 2)),
        ((70_000, 1), (0, 0), (70_000, 1)),
        ((9, 33_000, 2), (1, 32_990, 0), (8, 10, 2)),
        ((2**40, 2**20), (2**40 - 2, 2**20 - 3), (2, 3)),
        ((66_000, 2, 2), (32_000, 1, 0), (2_000, 1, 2)),
    ],
)
def test_tiles_of_65536_rows_and_columns_have_keys_of_their_own(shape, origin, extent):
    box = Box(origin, extent)
    data = random_bytes(BF16, extent)
    assert compute_box_sums(data, BF16, box, shape) == slow(data, BF16, box, shape)


@pytest.mark.parametrize("rows", [1, 2, 5, 33, 4100, 8200])
@pytest.mark.parametrize("width", [1, 3, 8, 300])
def test_rows_beyond_a_block_are_summed(rows, width):
    rows, width = (rows, width) if rows * width < 30_000 else (rows // 100, width)
    for dtype in (BY_NAME["U8"], BY_NAME["F6_E2M3"], BY_NAME["F64"]):
        shape = (rows, width * dtype.unit_elements)
        data = random_bytes(dtype, shape)
        assert whole(data, dtype, shape) == slow(data, dtype, Box.whole(shape), shape)


def test_the_flat_runs_that_zero_stores_add_up():
    shape = (5, 7, 6)
    data = random_bytes(F32, shape)
    total = DigestSums.zero(F32)
    for start, stop in ((0, 61), (61, 62), (62, 199), (199, 210)):
        for box in list_flat_boxes(shape, start, stop):
            total += compute_box_sums(cut(data, F32, box, shape), F32, box, shape)
    assert total == whole(data, F32, shape)


@pytest.mark.parametrize("name", ["U8", "BF16", "F32", "F64"])
def test_the_largest_elements_in_a_whole_tile_row_are_summed_exactly(name):
    dtype = BY_NAME[name]
    value = 0x100 if name == "U8" else 0x10000
    data = np.full(dtype.nbytes((2, 65536)), 255, np.uint8)
    expected = [
        value * sum(column_keys(lane)) * sum(row_keys(lane)[:2]) * tile_keys(0, 0)[lane] % 2**64 for lane in range(2)
    ]
    assert whole(data, dtype, (2, 65536)).words == tuple(expected * digest.count_element_parts(dtype))


def test_a_row_of_the_largest_elements_times_the_largest_keys_is_exact_in_float64():
    worst = 2**16 * (2**20 - 1) * 2**16
    assert worst < 2**53
    out = np.empty((2, 1, 1, 1))
    digest._multiply_keys(np.full((1, 2048, 1), 65535, np.uint16), 16, np.full((2, 2048), 2.0**20 - 1), out)
    out *= 32
    out += 65536 * (2**20 - 1)
    assert out.astype(int).ravel().tolist() == [worst, worst]


@pytest.mark.parametrize("name", ["U8", "F8_E4M3", "F4", "F6_E2M3"])
@pytest.mark.parametrize("content", ["least", "largest", "random"])
@pytest.mark.parametrize(("rows", "units"), [(16, 16), (17, 100), (16, 300), (70, 128)])
def test_narrow_elements_in_many_rows_take_the_same_value_by_the_fast_way(name, content, rows, units):
    dtype = BY_NAME[name]
    shape = (rows, units * dtype.unit_elements)
    fill = {"least": np.zeros, "largest": lambda n, kind: np.full(n, 255, kind)}.get(content)
    data = fill(dtype.nbytes(shape), np.uint8) if fill else random_bytes(dtype, shape)
    assert whole(data, dtype, shape) == slow(data, dtype, Box.whole(shape), shape)


@every_dtype
@pytest.mark.parametrize("shape", [(), (1,), (16, 16), (3, 5, 7), (1, 2048), (1000, 4)])
def test_small_tensors_take_the_same_value_at_once_as_in_blocks(dtype, shape, monkeypatch):
    shape = (*shape[:-1], shape[-1] * dtype.unit_elements) if shape and dtype.unit_elements > 1 else shape
    if dtype.unit_elements > 1 and not shape:
        pytest.skip("one element is no byte")
    data = random_bytes(dtype, shape)
    at_once = whole(data, dtype, shape)
    monkeypatch.setattr(digest, "_MAX_SMALL_TENSOR_ELEMENTS", 0)
    assert whole(data, dtype, shape) == at_once


@pytest.mark.parametrize(("bits", "code"), [(8, 0), (8, 255), (4, 15), (6, 63)])
def test_a_stretch_of_the_largest_narrow_elements_times_the_largest_keys_is_exact_in_float32(bits, code):
    planes, n_bytes = (4, 3) if bits == 6 else (8 // bits, 1)
    element = code - (128 if bits == 8 else 0)
    assert abs(element) * (2**10 - 1) * digest._NARROW_UNITS_PER_CALL < 2**24
    units = np.full((16, digest._NARROW_UNITS_PER_CALL, n_bytes), 255 if code else 0, np.uint8)
    keys = np.full((4, digest._NARROW_UNITS_PER_CALL * planes), 2.0**10 - 1, np.float32)
    out = np.empty((2, 16))
    digest._multiply_codes(units, bits, keys, out)
    assert set(out.astype(int).ravel().tolist()) == {element * (2**20 - 1) * digest._NARROW_UNITS_PER_CALL * planes}


# --- the keys


@pytest.mark.parametrize("lane", range(digest.LANES))
def test_the_keys_are_those_of_the_page(lane):
    columns, before = digest._draw_column_keys()
    assert columns[lane].astype(int).tolist() == column_keys(lane)
    assert before[lane, -1] == sum(column_keys(lane))
    assert digest._draw_row_keys()[lane].tolist() == row_keys(lane)
    assert int(digest._draw_tile_keys(3, 5)[lane, 0]) == tile_keys(3, 5)[lane]


@pytest.mark.parametrize("lane", range(digest.LANES))
def test_the_keys_have_the_properties_that_the_guarantees_need(lane):
    columns, rows = column_keys(lane), row_keys(lane)
    assert len(columns) == len(set(columns)) == 65536
    assert 0 < min(columns) < max(columns) < 2**20
    assert all(row % 2 for row in rows)
    assert len({row % 2**29 for row in rows}) == 65536


# --- the test vectors

PAGE = (Path(__file__).parents[1] / "docs/design/digest.md").read_text(encoding="utf-8")
VECTORS = re.findall(r"^\| (\w+) \| `\[(.*)\]` \| `(\w+)` \| `(\w{32})` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("name", "dims", "sums", "expected"), VECTORS)
def test_the_pages_vectors_hold_for_both_ways(name, dims, sums, expected):
    dtype, shape = BY_NAME[name], tuple(map(int, filter(None, dims.split(","))))
    data = (np.arange(dtype.nbytes(shape)) % 251).astype(np.uint8)
    found = whole(data, dtype, shape)
    assert str(found) == str(slow(data, dtype, Box.whole(shape), shape)) == sums
    assert compute_tensor_digest(found, dtype, shape) == expected


def test_the_pages_keys_and_checkpoints_hold():
    assert len(VECTORS) > 10
    assert column_keys(0)[:3] == [435726, 676074, 970128]
    assert column_keys(0)[-1] == 649640
    assert row_keys(0)[0] == 0x735011B5901A5F0B
    assert tile_keys(0, 0) == [0x2541686A0BE796ED, 0xEDCBF07A877605E3]
    two = [("b", BF16, (2, 3), "0" * 32), ("a.é", F32, (), "f" * 32)]
    assert re.findall(r"`(shardctl1:\w{32})`", PAGE) == [compute_checkpoint_digest(two), compute_checkpoint_digest([])]


# --- what is caught


@settings(max_examples=200, deadline=None)
@given(tensors(max_dim=5), st.data())
def test_any_change_of_one_element_changes_every_lane(tensor, data):
    dtype, shape, content = tensor
    if not content.size:
        return
    position = data.draw(st.integers(0, content.size - 1))
    changed = content.copy()
    changed[position] ^= data.draw(st.integers(1, 255))
    if dtype.bits < 8:  # a byte may hold two elements; change bits of one
        changed[position] = content[position] ^ 1
    before, after = whole(content, dtype, shape), whole(changed, dtype, shape)
    for lane in range(2):
        assert before.words[lane::2] != after.words[lane::2]


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 8), st.integers(2, 8), st.data())
def test_swapped_elements_rows_columns_and_halves_are_caught(rows, columns, data):
    x = np.random.default_rng(data.draw(st.integers(0, 2**32))).permutation(rows * columns).astype(np.uint16)
    x = x.reshape(rows, columns)
    original = whole(x, BF16, x.shape)
    r = data.draw(st.lists(st.integers(0, rows - 1), min_size=2, max_size=2, unique=True))
    c = data.draw(st.lists(st.integers(0, columns - 1), min_size=2, max_size=2, unique=True))
    for index in ((r, c), (r, slice(None)), (slice(None), c), (r, c[0]), (r[0], c)):
        y = x.copy()
        y[index] = y[index][::-1]
        if not np.array_equal(x, y):
            assert whole(y, BF16, x.shape) != original
    y = x.T.copy().reshape(x.shape)
    assert np.array_equal(x, y) or whole(y, BF16, x.shape) != original


def test_zeros_are_not_the_same_as_nothing():
    zeros = np.zeros((4, 4), np.uint16)
    assert whole(zeros, BF16, (4, 4)) != DigestSums.zero(BF16)
    assert compute_box_sums(zeros[:3], BF16, Box((0, 0), (3, 4)), (4, 4)) != whole(zeros, BF16, (4, 4))


def test_equal_rows_in_other_places_are_not_the_same():
    rows = [compute_box_sums(np.ones(4, np.uint16), BF16, Box((i, 0), (1, 4)), (5, 4)) for i in range(5)]
    assert len(set(rows)) == 5


def test_the_bits_count_and_not_the_value():
    quiet, payload = np.array([0x7FC00000], np.uint32), np.array([0x7FC00001], np.uint32)
    assert whole(quiet, F32, (1,)) != whole(payload, F32, (1,))
    zero, minus_zero = np.array([0], np.uint32), np.array([0x80000000], np.uint32)
    assert whole(zero, F32, (1,)) != whole(minus_zero, F32, (1,))


def test_changes_of_two_parts_cannot_cancel():
    low, high = np.array([0x00000001], np.uint32), np.array([0x00010000], np.uint32)
    assert whole(low, F32, (1,)) != whole(high, F32, (1,))


# --- how it is called


@every_dtype
def test_an_empty_box_sums_to_zero(dtype):
    assert compute_box_sums(b"", dtype, Box((0, 0), (0, 4)), (3, 4)) == DigestSums.zero(dtype)


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, np.asarray])
def test_any_buffer_of_contiguous_bytes_will_do(wrap):
    data = random_bytes(F32, (4, 5))
    assert compute_box_sums(wrap(data), F32, Box.whole((4, 5)), (4, 5)) == whole(data, F32, (4, 5))


def test_an_unaligned_buffer_will_do():
    data = random_bytes(F32, (4, 5))
    shifted = memoryview(b"x" + data.tobytes())[1:]
    assert compute_box_sums(shifted, F32, Box.whole((4, 5)), (4, 5)) == whole(data, F32, (4, 5))


def test_a_box_outside_the_tensor_is_refused():
    with pytest.raises(ValueError, match=r"\[0:3, 0:4\] is not inside a tensor of shape \(2, 4\)"):
        compute_box_sums(bytes(24), BF16, Box((0, 0), (3, 4)), (2, 4))


@pytest.mark.parametrize("size", [10, 11, 14])
def test_a_wrong_number_of_bytes_is_refused(size):
    with pytest.raises(ValueError, match=f"{size} bytes given for"):
        compute_box_sums(bytes(size), BF16, Box.whole((2, 3)), (2, 3))


def test_a_box_that_cuts_a_byte_is_refused():
    with pytest.raises(UnsupportedError, match="does not fill whole bytes"):
        compute_box_sums(bytes(1), BY_NAME["F4"], Box((1,), (2,)), (8,))


def test_threads_get_the_same_sums():
    data = random_bytes(BF16, (512, 1000))
    expected = whole(data, BF16, (512, 1000))
    found = []
    threads = [threading.Thread(target=lambda: found.append(whole(data, BF16, (512, 1000)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8


def test_a_blocks_products_are_so_many_that_numpy_releases_the_gil():
    # PyUFunc_GeneralizedFunctionInternal: NPY_BEGIN_THREADS_THRESHOLDED over the results, which asks for more than 500
    assert digest.LANES * digest._BLOCK_ELEMENTS // digest._COLUMNS_PER_CALL > 2 * 500


def test_blas_starts_no_threads_beside_the_callers():
    data = random_bytes(BF16, (1000, 4096))
    whole(data, BF16, (1000, 4096))
    process, thread = time.process_time(), time.thread_time()
    for _ in range(20):
        whole(data, BF16, (1000, 4096))
    process, thread = time.process_time() - process, time.thread_time() - thread
    assert process < 1.25 * thread


def test_sums_travel_as_text():
    sums = whole(random_bytes(F32, (3, 3)), F32, (3, 3))
    assert DigestSums.parse(str(sums)) == sums
    assert len(str(sums)) == 64
    for bad in ("", "12", "g" * 16, "+" + "0" * 15, " " + "0" * 15):
        with pytest.raises(ValueError, match="hexadecimal"):
            DigestSums.parse(bad)


def test_sums_of_different_dtypes_do_not_add():
    with pytest.raises(ValueError, match="2 and 4 words do not add"):
        DigestSums.zero(BF16) + DigestSums.zero(F32)


# --- digests


def test_a_tensors_digest_is_the_hash_of_the_page():
    sums = DigestSums((1, 2))
    text = b"BF16 [2,3] 00000000000000010000000000000002"
    expected = blake2b(text, digest_size=16, person=b"shardctl1 tensor").hexdigest()
    assert compute_tensor_digest(sums, BF16, (2, 3)) == expected


def test_a_tensors_digest_depends_on_dtype_and_shape():
    sums = DigestSums((1, 2))
    assert compute_tensor_digest(sums, BF16, (2, 3)) != compute_tensor_digest(sums, BY_NAME["F16"], (2, 3))
    assert len({compute_tensor_digest(sums, BF16, s) for s in ((2, 3), (3, 2), (6,), (2, 3, 1), (23,), ())}) == 6
    with pytest.raises(ValueError, match="takes 4 sums, not 2"):
        compute_tensor_digest(sums, F32, (2, 3))


def test_a_checkpoints_digest_is_the_hash_of_the_page():
    rows = [("é", BF16, (2, 3), "b" * 32), ("a", F32, (), "a" * 32)]
    text = f"{'a' * 32} F32 [] 1:a\n{'b' * 32} BF16 [2,3] 2:é\n".encode()
    expected = blake2b(text, digest_size=16, person=b"shardctl1 ckpt").hexdigest()
    assert compute_checkpoint_digest(rows) == compute_checkpoint_digest(reversed(rows)) == f"shardctl1:{expected}"


def test_a_checkpoints_digest_depends_on_names_and_on_nothing_missing():
    rows = [("a", BF16, (1,), "0" * 32), ("b", BF16, (1,), "1" * 32)]
    swapped = [("a", BF16, (1,), "1" * 32), ("b", BF16, (1,), "0" * 32)]
    assert len({compute_checkpoint_digest(r) for r in (rows, swapped, rows[:1], [])}) == 4
    with pytest.raises(ValueError, match="two tensors are named 'a'"):
        compute_checkpoint_digest([rows[0], ("a", F32, (1,), "2" * 32)])


def test_a_checkpoint_is_hashed_in_the_order_of_the_bytes_of_its_names():
    names = ["b", "a.10", "a.9", "a", "A", "é", "\u00ff", "\ud800", "\ue000", "\uffff", "\U0001f600", "", "\ud83d"]
    rows = [(name, BY_NAME["BF16"], (2, 3), f"{number:032x}") for number, name in enumerate(names)]
    lines = []
    for name, dtype, shape, digest in rows:
        encoded = name.encode("utf-8", "surrogatepass")
        lines.append((encoded, f"{digest} {dtype} [{shape[0]},{shape[1]}] {len(encoded)}:".encode() + encoded + b"\n"))
    text = b"".join(line for _, line in sorted(lines))
    expected = hashlib.blake2b(text, digest_size=16, person=b"shardctl1 ckpt").hexdigest()
    assert compute_checkpoint_digest(iter(rows)) == f"shardctl1:{expected}"
    assert compute_checkpoint_digest(reversed(rows)) == f"shardctl1:{expected}"
