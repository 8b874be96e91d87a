"""What adapters add is computed exactly and rounded once, so that every processor gets the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from math import fsum, sqrt
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from shardctl.models.adaptation.arithmetic import add_squares, compute_row_norms, multiply_low_rank, round_norms

KERNELS = ("Haswell", "Zen", "SkylakeX", "Prescott")
"""Kernels of OpenBLAS for processors with AVX2, with AVX-512 and with neither; it takes another if one cannot run."""


def round_once(exact: Fraction) -> np.float32:
    """The number of float32 nearest to a fraction, ties to even."""
    near = np.float32(float(exact))
    around = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    return min(around, key=lambda each: (abs(Fraction(float(each)) - exact), int(each.view(np.int32)) & 1))


def draw_matrices(kind: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Two small matrices: of any values, of bfloat16, of integers whose products tie, or of exponents far apart."""
    random = np.random.default_rng(rank)
    left, right = random.standard_normal((18, rank), np.float32), random.standard_normal((rank, 20), np.float32)
    if kind == "bfloat16":
        return tuple(each.astype(ml_dtypes.bfloat16).astype(np.float32) for each in (left, right))
    if kind == "ties":
        return tuple(np.round(each * 4096) for each in (left, right))
    if kind == "wide":
        return np.ldexp(left.astype(ml_dtypes.bfloat16).astype(np.float32), random.integers(-60, 60, left.shape)), right
    left[0], right[:, 0] = 0, 0
    return left, right


@pytest.mark.parametrize("kind", ["any", "bfloat16", "ties", "wide"])
@pytest.mark.parametrize("rank", [1, 3, 16, 100])
def test_each_element_of_a_product_is_exact_and_rounded_once(kind, rank):
    left, right = draw_matrices(kind, rank)
    for scaling in (2.0, 1.5, 10 / 24, -1e-30, 0.0, 1e-300):
        product = multiply_low_rank(left, right, scaling)
        for i, j in np.ndindex(6, 20):
            terms = (Fraction(float(a)) * Fraction(float(b)) for a, b in zip(left[i], right[:, j], strict=True))
            assert product[i, j] == round_once(sum(terms, Fraction(0)) * Fraction(scaling)), (scaling, i, j)
        assert not np.signbit(product[product == 0]).any()


@pytest.mark.parametrize("rank", [3, 16, 200, 400])
def test_a_part_of_a_product_is_that_part(rank):
    random = np.random.default_rng(rank)
    left = random.standard_normal((70, rank), np.float32)
    right = random.standard_normal((rank, 300), np.float32)
    whole = multiply_low_rank(left, right, 0.3)
    for rows, columns in (((0, 1), (0, 90)), ((3, 5), (5, 23)), ((8, 70), (289, 300)), ((1, 69), (2, 275))):
        part = multiply_low_rank(left[slice(*rows)], right[:, slice(*columns)], 0.3)
        assert np.array_equal(part, whole[slice(*rows), slice(*columns)])


def test_a_product_that_float32_does_not_hold_is_infinite():
    large = np.float32([[3e38, 1]])
    assert np.array_equal(multiply_low_rank(large.T, large, 2.0), np.float32([[np.inf, np.inf], [np.inf, 2]]))


@pytest.mark.parametrize("columns", [1, 8, 100, 1000])
def test_norms_are_rounded_once_and_follow_no_bands(columns):
    values = np.random.default_rng(columns).standard_normal((50, columns), np.float32)
    norms = compute_row_norms(values)
    assert np.array_equal(norms, np.float32([sqrt(fsum(float(x) ** 2 for x in row)) for row in values]))
    assert np.array_equal(norms[7:9], compute_row_norms(values[7:9]))
    total = np.zeros(50)
    for start in range(0, columns, 30):
        add_squares(total, np.ascontiguousarray(values.T[start : start + 30]))
    np.testing.assert_array_max_ulp(round_norms(total), norms, 1)


@pytest.mark.parametrize("rank", [8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_as_near_those_of_peft_as_the_guide_says(rank, dtype):
    """PEFT adds the product of torch, whose order of sums depends on the processor; no bits are compared."""
    torch.manual_seed(rank)
    weight = (torch.randn(512, 512) * 0.02).to(dtype)
    up, down = torch.randn(512, rank) * 0.01, (torch.rand(rank, 512) * 2 - 1) / 32
    scaling = 32 / rank
    theirs = weight.clone()
    theirs += (up @ down) * scaling
    product = torch.from_numpy(multiply_low_rank(up.numpy(), down.numpy(), scaling))
    ours = (weight.float() + product).to(dtype)
    larger = torch.maximum(weight.float().abs(), product.abs()).double()
    step = larger.log2().floor().exp2() * torch.finfo(dtype).eps
    apart = (ours.double() - theirs.double()).abs() / step
    assert (ours != theirs).double().mean() < (0.15 if dtype == torch.float32 else 1e-3)
    assert torch.quantile(apart.flatten(), 0.999) <= 7
    assert apart.max() <= (1000 if dtype == torch.float32 else 2)


PROGRAM = """
import hashlib, sys
from pathlib import Path
import numpy as np
sys.modules["transformers"] = None  # it knows defaults of configs, which are not compared here, and loads for seconds
from shardctl.api import ReshardOptions, diff, digest, reshard
from shardctl.models.adaptation.arithmetic import compute_row_norms, multiply_low_rank
random = np.random.default_rng(0)
product = multiply_low_rank(*(random.standard_normal(shape, np.float32) for shape in ((300, 200), (200, 500))), 1 / 3)
print(*(hashlib.sha256(each.data).hexdigest() for each in (product, compute_row_norms(product))))
fixtures, out = map(Path, sys.argv[1:])
bases = {"lora": "llama", "dora": "llama", "conv1d-dora": "gpt2", "experts": "qwen3_moe", "embedding-head": "llama"}
for number, (case, base) in enumerate(bases.items()):
    options = dict(merge=(fixtures / "peft" / case / "adapter",), threads=1 + number % 3, dtype="fp16")
    result = reshard(fixtures / "peft/hf" / base, out / case, ReshardOptions(**options))
    print(case, result.record.digest)
IGNORED = (r"re:.*down_proj$",)
for recipe in ("fp8-channel", "mxfp4", "int8", "nvfp4"):
    result = reshard(fixtures / "peft/hf/llama", out / recipe, ReshardOptions(quantize=recipe, quantize_ignore=IGNORED))
    print(recipe, result.record.digest)
    result = reshard(out / recipe, out / f"{recipe}-back", ReshardOptions(dtype="fp32"))
    print(recipe, "decoded", result.record.digest)
    found = diff(fixtures / "peft/hf/llama", out / recipe)
    print(*((each.distance.mean.hex(), each.distance.relative.hex()) for each in found.changes if each.distance))
print(digest(fixtures / "peft/hf/llama").digest)
"""


def test_every_verb_that_computes_has_the_same_results_with_every_kernel(tmp_path):
    """Merges, norms, quantization, decoding, digests and distances, in one process for each kernel."""
    simd = np.__config__.show(mode="dicts")["SIMD Extensions"]["found"]
    settings = [{"OPENBLAS_CORETYPE": kernel} for kernel in KERNELS]
    settings += [{"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": " ".join(simd)}] if simd else []
    fixtures = Path(__file__).parents[2] / "fixtures"
    programs = []
    for number, setting in enumerate(settings):
        command = [sys.executable, "-c", PROGRAM, str(fixtures), str(tmp_path / str(number))]
        env = {**os.environ, **setting, "OPENBLAS_NUM_THREADS": str(1 + number % 2)}
        programs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    said = [(program.communicate()[0], program.returncode) for program in programs]
    assert said[0][1] == 0
    assert len(said[0][0].splitlines()) == 19
    for setting, each in zip(settings[1:], said[1:], strict=True):
        assert each == said[0], json.dumps(setting)
