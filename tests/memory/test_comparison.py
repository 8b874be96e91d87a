"""The comparison table is ZeRO's, with the numbers of the model at hand."""

from __future__ import annotations

import pytest

from shardctl.base.errors import UsageError
from shardctl.estimate.training.comparison import list_strategies


# Rajbhandari et al. 2020, figure 1: 7.5B parameters, 64 devices, mixed-precision Adam.
def test_the_figure_that_everybody_knows():
    found = list_strategies(7_500_000_000, 64)
    assert [one.name for one in found] == ["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert [one.nbytes / 1e9 for one in found] == pytest.approx([120, 31.4, 16.6, 1.88], abs=0.05)
    # Sec. 1: fourfold, eightfold, and as many times as there are devices, if those are many.
    assert [one.reduction for one in list_strategies(7_500_000_000, 4096)] == pytest.approx([1, 4, 8, 4096], rel=0.01)
    assert found[3].reduction == pytest.approx(64)


# Table 1, in GB: rows are numbers of devices, columns ZeRO-1 to 3 of 7.5B, 128B and 1T parameters.
TABLE = {
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}


@pytest.mark.parametrize("devices", TABLE)
def test_table_1(devices):
    for parameters, expected in zip((7.5e9, 128e9, 1e12), TABLE[devices], strict=True):
        found = list_strategies(int(parameters), devices)[1:]
        # The table rounds some cells and cuts others off.
        for one, cell in zip(found, expected, strict=True):
            assert one.nbytes / 1e9 == pytest.approx(cell, rel=0.003, abs=0.01)


# Sec. 7: ZeRO-1 and ZeRO-2 send what data parallelism sends, ZeRO-3 half as much again.
def test_what_each_sends():
    found = list_strategies(1_000_000, 8)
    assert [one.relative for one in found] == pytest.approx([1, 1, 1, 1.5])
    assert [one.sent_bytes for one in found] == [3_500_000, 3_500_000, 3_500_000, 5_250_000]


def test_gradients_in_fp32_make_sharing_cheaper():
    found = list_strategies(1_000_000, 8, gradient=4)
    assert found[0].nbytes == 18_000_000
    assert [one.relative for one in found] == pytest.approx([1, 0.75, 0.75, 1])


def test_one_device_shares_and_sends_nothing():
    found = list_strategies(100, 1)
    assert {one.nbytes for one in found} == {1600}
    assert {(one.reduction, one.sent_bytes, one.relative) for one in found} == {(1, 0, 1)}
    with pytest.raises(UsageError, match="at least one device"):
        list_strategies(100, 0)


def test_parts_that_do_not_divide_are_rounded_up():
    assert list_strategies(10, 3)[3].nbytes == 4 * 16
