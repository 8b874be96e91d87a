"""The device table has what it must, and devices are found by the names people and drivers give them."""

from __future__ import annotations

import pytest

from shardctl.errors import UsageError
from shardctl.estimate.devices import DEVICES, GIB, PCIE3, get_device


@pytest.mark.parametrize(
    ("named", "name"),
    [
        ("h100", "H100-80GB"),
        ("H100-80g", "H100-80GB"),
        ("h100-80gb", "H100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("a100-80g", "A100-80GB"),
        ("A100-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H200", "H200"),
        ("b200", "B200"),
        ("l40s", "L40S"),
        ("A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_device_is_found_by_the_names_it_is_given(named, name):
    assert get_device(named).name == name


@pytest.mark.parametrize("one", DEVICES, ids=lambda one: one.name)
def test_every_device_has_every_figure_and_its_source(one):
    assert one.timed
    assert 0.9 * one.memory_bytes < one.usable_bytes <= one.memory_bytes
    assert one.measured == (one.usable_bytes != one.memory_bytes)
    assert one.pcie >= PCIE3
    assert one.link_bandwidth >= one.pcie
    assert 0 < one.network_bandwidth < one.link_bandwidth < one.memory_bandwidth < one.flops_bf16
    assert "usable" in one.source
    assert "network" in one.source
    assert get_device(one.name) == one


def test_the_memory_that_torch_reports():
    usable = {one.name: round(one.usable_bytes / GIB, 2) for one in DEVICES}
    assert usable["A100-80GB"] == 79.15
    assert usable["H100-80GB"] == 79.18
    assert usable["H200"] == 139.81
    assert usable["B200"] == 178.36


def test_a_size_is_a_device_of_which_no_speed_is_known():
    one = get_device(80 * GIB)
    assert one.memory_bytes == one.usable_bytes == 80 * GIB
    assert not one.timed
    with pytest.raises(UsageError, match="0 bytes"):
        get_device(0)


def test_a_name_of_two_devices_asks_which():
    with pytest.raises(UsageError, match="'a100' is several devices") as error:
        get_device("a100")
    assert error.value.hint == "write a100-40g or a100-80g"


@pytest.mark.parametrize("named", ["h100-40g", "H100 PCIe", "v100", "", "a10"])
def test_an_unknown_name_lists_those_there_are(named):
    with pytest.raises(UsageError, match="unknown device") as error:
        get_device(named)
    assert "A100-40GB, A100-80GB, H100-80GB" in error.value.hint
