"""The order in which products and norms are added up, against torch."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch

from shardctl.models.adaptation.arithmetic import add_squares, compute_row_norms, multiply_low_rank

INTEL = pytest.mark.skipif(platform.machine() != "x86_64", reason="torch multiplies with another library here")


@INTEL
@pytest.mark.parametrize("rank", [1, 2, 7, 16, 64, 192, 193, 200, 255, 256, 384, 400, 512])
def test_products_are_those_of_torch(rank):
    torch.manual_seed(rank)
    left, right = torch.randn(96, rank), torch.randn(rank, 320)
    assert np.array_equal(multiply_low_rank(left.numpy(), right.numpy()), (left @ right).numpy())


@pytest.mark.parametrize("rank", [3, 16, 200, 400])
def test_a_part_of_a_product_is_that_part(rank):
    random = np.random.default_rng(rank)
    left = random.standard_normal((70, rank), np.float32)
    right = random.standard_normal((rank, 90), np.float32)
    whole = multiply_low_rank(left, right)
    for rows, columns in (
        ((0, 1), (0, 90)),
        ((3, 4), (5, 6)),
        ((3, 5), (5, 23)),
        ((8, 70), (89, 90)),
        ((1, 69), (2, 55)),
    ):
        part = multiply_low_rank(left[slice(*rows)], right[:, slice(*columns)])
        assert np.array_equal(part, whole[slice(*rows), slice(*columns)])


@pytest.mark.parametrize("columns", [8, 100, 512, 1000, 4096])
def test_norms_are_those_of_torch(columns):
    torch.manual_seed(columns)
    values = torch.randn(50, columns)
    assert np.array_equal(compute_row_norms(values.numpy()), torch.linalg.norm(values, dim=1).numpy())
    total = np.zeros(50, np.float32)
    add_squares(total, values.T.contiguous().numpy())
    assert np.array_equal(np.sqrt(total), torch.linalg.norm(values.T.contiguous().T, dim=1).numpy())
