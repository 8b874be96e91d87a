"""The device table has what it must, and devices are found by the names people and drivers give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardctl.base.errors import UsageError
from shardctl.estimate.local_device import _match_device
from shardctl.hardware.devices import GB, GIB, PCIE3, TERA, get_device, list_devices
from shardctl.options.plan_options import find_device


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
        ("rtx-4070-ti", "RTX 4070 Ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("a10", "A10"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe-40GB"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("h100-nvl", "H100 NVL"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Gaudi 3", "Gaudi 3"),
        ("v6e", "TPU v6e"),
        ("trn2", "Trainium 2"),
        ("M4 Max", "M4 Max-128GB"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_device_is_found_by_the_names_it_is_given(named, name):
    assert get_device(named).name == name


@pytest.mark.parametrize("one", list_devices(), ids=lambda one: one.name)
def test_every_device_has_every_figure_and_its_source(one):
    assert one.timed or "does not publish operations" in one.source
    assert one.usable_bytes <= one.memory_bytes
    assert one.usable_bytes > 0.9 * one.memory_bytes or one.measured_by == "Metal"
    assert one.measured or one.usable_bytes == one.memory_bytes
    assert one.measured or "usable: not measured" in one.source
    assert one.pcie >= PCIE3
    assert one.link_bandwidth >= one.pcie
    assert 0 < one.network_bandwidth <= one.link_bandwidth <= one.memory_bandwidth
    assert one.flops_bf16 > one.memory_bandwidth or not one.timed
    assert "usable" in one.source
    assert "network" in one.source
    assert get_device(one.name) == one
    assert find_device(one.name.lower().replace(" ", "-")) == one


def test_there_are_the_devices_that_people_rent_and_buy():
    names = {one.name for one in list_devices()}
    assert len(list_devices()) == len(names) >= 40
    assert f"one of {len(list_devices())} [devices]" in (Path(__file__).parents[2] / "docs/planning.md").read_text()
    for name in ("RTX 3060", "RTX 5090", "A40", "L4", "H20", "H100 NVL", "GB300", "MI355X", "TPU7x", "Trainium 3"):
        assert name in names


def test_the_page_has_every_device_as_the_table_has_it():
    page = (Path(__file__).parents[2] / "docs/devices.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")][1:]
    assert rows == [
        [
            one.name,
            f"{one.memory_bytes // GIB} GB",
            f"{one.usable_bytes / GIB:.2f} GiB",
            one.measured_by or "nobody",
            f"{one.flops_bf16 / TERA:,.6g}" if one.timed else "not published",
            *(f"{rate / GB:,.6g}" for rate in (one.memory_bandwidth, one.link_bandwidth, one.network_bandwidth)),
            str(one.per_node),
        ]
        for one in list_devices()
    ]


def test_the_memory_that_torch_reports():
    usable = {one.name: round(one.usable_bytes / GIB, 2) for one in list_devices()}
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


@pytest.mark.parametrize("named", ["h100-40g", "gtx 1080", "", "h1000"])
def test_an_unknown_name_says_what_is_near(named):
    with pytest.raises(UsageError, match="unknown device") as error:
        get_device(named)
    assert "docs/devices.md lists all" in error.value.hint
    assert named != "h1000" or "h100-80g" in error.value.hint


def test_a_number_suggests_a_size_and_the_devices_that_have_as_much():
    with pytest.raises(UsageError, match="no unit") as error:
        find_device("80")
    assert error.value.hint == "did you mean 80GB or a100-80g, a100-pcie-80g, a800-80g, h100-80g?"


def test_makers_count_a_gb_as_2_to_the_30_bytes():
    assert find_device("24GB").usable_bytes == find_device("24GiB").usable_bytes == 24 * GIB
    assert find_device("512MiB").usable_bytes == GIB // 2
    assert find_device("4070 ti").name == "RTX 4070 Ti"


@pytest.mark.parametrize(
    ("reported", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80GB"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA GB200 Grace", 184, "GB200"),
        ("NVIDIA H200 NVL", 139.8, "H200"),
        ("NVIDIA GeForce RTX 4090 D", 23.6, "RTX 4090"),
    ],
)
def test_the_device_here_is_the_one_whose_name_it_has_most_of(reported, gib, name):
    found = _match_device(reported, round(gib * GIB))
    assert found.source == get_device(name).source
    assert (found.name, found.measured_by) == (reported, "torch")


OWN = """
[[device]]
name = "Own 48"
memory_gib = 48
usable_gib = 47.5
measured_by = "torch"
bf16_tflops = 200
memory_gb_per_s = 1000
link_gb_per_s = 64
network_gb_per_s = 12.5
host_gb_per_s = 31.5
per_node = 4
source = "a datasheet"
"""


def test_a_file_describes_a_device(tmp_path):
    (tmp_path / "own.toml").write_text(OWN)
    found = find_device(str(tmp_path / "own.toml"))
    assert (found.name, found.memory_bytes, found.usable_bytes) == ("Own 48", 48 * GIB, round(47.5 * GIB))
    assert (found.flops_bf16, found.memory_bandwidth, found.per_node) == (200 * TERA, 1000 * GB, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "describes no device"),
        ("[[device]]", "missing required field `name`"),
        ('[[device]]\nname = "x"\nmemory_gib = 0', "Expected `float` > 0"),
        ('[[device]]\nname = "x"\nmemory_gib = inf', "Expected `float` <= "),
        ('[[device]]\nname = "x"\nmemory_gib = nan', "describes no device"),
        ('[[device]]\nname = "x"\nmemory_gib = 8\nmemory = 8', "unknown field `memory`"),
        ('[[device]]\nname = "x"\nmemory_gib = 8\nusable_gib = 9', "more usable memory"),
        (OWN + OWN, "describes 2 devices"),
        ("[[device", "describes no device"),
    ],
)
def test_a_file_that_describes_no_device_is_refused(tmp_path, text, message):
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(UsageError) as error:
        find_device(str(tmp_path / "own.toml"))
    assert message in error.value.message
    with pytest.raises(UsageError, match="cannot be read"):
        find_device(str(tmp_path / "none.toml"))
