"""Casts, bit for bit against torch."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from shardctl.base.dtype import BY_NAME, DTYPES
from shardctl.base.errors import UsageError
from shardctl.tensors.cast import CastReport, cast_elements

TARGETS = ("F32", "F16", "BF16")
SOURCES = (*TARGETS, "F64", "F8_E4M3", "F8_E5M2")
QUIET = {"F32": 0x7FC00000, "F16": 0x7E00, "BF16": 0x7FC0}
BITS = {16: np.uint16, 32: np.uint32}


def patterns(name):
    """Every element of the narrow types; of F32 and F64 every exponent with the fractions where rounding turns."""
    rng = np.random.default_rng(0)
    bits = BY_NAME[name].bits
    if bits <= 16:
        return np.arange(2**bits).astype(f"<u{bits // 8}").view(np.uint8)
    if name == "F32":
        exponents = np.arange(512, dtype=np.uint32) << 23
        fractions = {0, 1, 2, 2**23 - 1, 2**22}
        for bit in range(23):  # ties, their neighbours, and ties above an odd and an even last place
            fractions |= {(base + (1 << bit) + d) % 2**23 for base in (0, 2 << bit) for d in (-1, 0, 1)}
        fractions |= set(rng.integers(0, 2**23, 2000).tolist())
        every = exponents[:, None] | np.array(sorted(fractions), np.uint32)
        return np.concatenate([every.ravel(), rng.integers(0, 2**32, 500_000, np.uint32)]).view(np.uint8)
    singles = patterns("F32").view(np.float32)
    with np.errstate(all="ignore"):
        doubles = singles.astype(np.float64)
    near = [np.nextafter(doubles, d) for d in (-np.inf, np.inf)]
    return np.concatenate([doubles, *near, rng.integers(0, 2**64, 500_000, np.uint64).view(np.float64)]).view(np.uint8)


def run(src, have, want):
    have, want = BY_NAME[have], BY_NAME[want]
    out = np.full(src.size * want.bits // have.bits, 0xA5, np.uint8)
    return cast_elements(src, have, want, out), out.view(BITS[want.bits])


def tensor(src, name):
    return torch.from_numpy(src.copy()).view(getattr(torch, BY_NAME[name].torch))


@pytest.mark.parametrize(("have", "want"), [p for p in product(SOURCES, TARGETS) if p[0] != p[1]])
def test_every_cast_is_torchs_bit_for_bit_and_nan_is_the_quiet_nan_of_its_sign(have, want):
    src = patterns(have)
    report, found = run(src, have, want)
    source = tensor(src, have)
    expected = source.to(getattr(torch, BY_NAME[want].torch))
    nan = source.to(torch.float64).isnan().numpy()
    assert nan.any()
    bits = expected.view(torch.uint8).numpy().view(found.dtype)
    np.testing.assert_array_equal(found[~nan], bits[~nan])
    sign = src.reshape(nan.size, -1)[:, -1] >> 7
    np.testing.assert_array_equal(found[nan], sign[nan].astype(found.dtype) << (BY_NAME[want].bits - 1) | QUIET[want])
    values = source.to(torch.float64)
    overflowed = expected.isinf() & values.isfinite()
    lowest = [torch.finfo(dtype).min for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    minima = overflowed & torch.isin(values, torch.tensor(lowest, dtype=torch.float64))
    assert report == CastReport(int(overflowed.sum()), int(minima.sum()))


def test_overflow_is_counted_across_blocks_and_infinity_is_not_overflow():
    x = np.ones(300_000, np.float32)
    x[::1000] = 70_000
    x[1::1000] = -np.inf
    report, found = run(x.view(np.uint8), "F32", "F16")
    assert report.overflowed == 300
    assert found[0] == 0x7C00
    assert found[1] == 0xFC00


@pytest.mark.parametrize(("value", "bits", "overflowed"), [(65519.996, 0x7BFF, 0), (65520.0, 0x7C00, 1)])
def test_overflow_begins_half_a_step_beyond_the_largest_half(value, bits, overflowed):
    report, found = run(np.array([value], np.float32).view(np.uint8), "F32", "F16")
    assert (report.overflowed, found[0]) == (overflowed, bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_equal_dtype_is_copied_bit_by_bit(dtype):
    src = np.arange(240, dtype=np.uint8)
    out = np.zeros_like(src)
    assert cast_elements(src, dtype, dtype, out) == CastReport(0)
    np.testing.assert_array_equal(out, src)


@pytest.mark.parametrize(("have", "want"), [("I32", "F32"), ("BOOL", "BF16"), ("F32", "F8_E4M3"), ("C64", "F32")])
def test_what_is_not_a_cast_between_floats_is_refused(have, want):
    with pytest.raises(UsageError, match=f"{have} cannot be cast to {want}"):
        run(np.zeros(8, np.uint8), have, want)


@pytest.mark.parametrize(("src", "out"), [(8, 8), (8, 2), (6, 3)])
def test_sizes_that_do_not_agree_are_refused(src, out):
    with pytest.raises(ValueError, match=f"{src} bytes of F32 do not fill {out} bytes of BF16"):
        cast_elements(np.zeros(src, np.uint8), BY_NAME["F32"], BY_NAME["BF16"], np.zeros(out, np.uint8))


def test_an_unaligned_buffer_and_nothing_at_all_will_do():
    x = np.arange(10, dtype=np.float32)
    shifted = np.frombuffer(b"x" + x.tobytes(), np.uint8)[1:]
    _, found = run(shifted, "F32", "F16")
    np.testing.assert_array_equal(found.view(np.float16), x)
    assert run(np.empty(0, np.uint8), "F32", "F16")[0] == CastReport(0)
