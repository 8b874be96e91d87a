"""Lists devices with their memory, speed and links, as data with the source of each figure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from shardctl.amounts import format_memory_size
from shardctl.errors import UsageError

GB: Final = 10**9
GIB: Final = 1 << 30
TERA: Final = 10**12
PCIE3: Final = 15.75 * GB
"""Sixteen lanes, one way: 8 GT/s each, 128 of 130 bits (PCI Express Base Specification 3.0)."""
PCIE4: Final = 31.5 * GB
PCIE5: Final = 63.0 * GB


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device.

    Bandwidths are bytes per second in one direction, as marketed; what collectives reach of them is the estimator's
    matter. Zero stands for what nobody said, as for a device that is only a size.
    """

    name: str
    memory_bytes: int
    """As marketed; makers' GB of device memory are 2^30 bytes."""
    usable_bytes: int
    """What a process finds: `total_memory` of torch's device properties where `measured`, else the marketed bytes."""
    flops_bf16: float = 0.0
    """Dense operations per second with bf16 inputs and fp32 sums; with fp16 inputs where there is no bf16."""
    memory_bandwidth: float = 0.0
    link_bandwidth: float = 0.0
    """Between devices of a node: NVLink or Infinity Fabric, all links of a device together, or else PCIe."""
    network_bandwidth: float = 0.0
    """Between nodes, the usual share of one device."""
    pcie: float = 0.0
    """To the host."""
    per_node: int = 8
    measured: bool = False
    """Whether `usable_bytes` was read from a device."""
    source: str = ""
    spellings: tuple[str, ...] = ()
    """What people call it, without maker and memory, in small letters and digits; the usual first."""

    @property
    def timed(self) -> bool:
        """Whether its speed is known."""
        return self.flops_bf16 > 0


DEVICES: Final = (
    DeviceSpec(
        name="A100-40GB",
        memory_bytes=40 * GIB,
        usable_bytes=round(39.50 * GIB),
        flops_bf16=312 * TERA,
        memory_bandwidth=1555 * GB,
        link_bandwidth=300 * GB,
        network_bandwidth=25 * GB,
        pcie=PCIE4,
        measured=True,
        source="NVIDIA A100 Tensor Core GPU datasheet (SXM); usable: github.com/TianheWu/CoSeR/issues/10; "
        "network: DGX A100, eight HDR adapters of 200 Gb/s",
        spellings=("a100",),
    ),
    DeviceSpec(
        name="A100-80GB",
        memory_bytes=80 * GIB,
        usable_bytes=round(79.15 * GIB),
        flops_bf16=312 * TERA,
        memory_bandwidth=2039 * GB,
        link_bandwidth=300 * GB,
        network_bandwidth=25 * GB,
        pcie=PCIE4,
        measured=True,
        source="NVIDIA A100 Tensor Core GPU datasheet (SXM); usable: torch's total_memory; "
        "network: DGX A100, eight HDR adapters of 200 Gb/s",
        spellings=("a100",),
    ),
    DeviceSpec(
        name="H100-80GB",
        memory_bytes=80 * GIB,
        usable_bytes=round(79.18 * GIB),
        flops_bf16=989 * TERA,
        memory_bandwidth=3350 * GB,
        link_bandwidth=450 * GB,
        network_bandwidth=50 * GB,
        pcie=PCIE5,
        measured=True,
        source="NVIDIA H100 Tensor Core GPU datasheet (SXM; without sparsity); usable: torch's total_memory; "
        "network: DGX H100, eight NDR adapters of 400 Gb/s",
        spellings=("h100",),
    ),
    DeviceSpec(
        name="H200",
        memory_bytes=141 * GIB,
        usable_bytes=round(139.81 * GIB),
        flops_bf16=989 * TERA,
        memory_bandwidth=4800 * GB,
        link_bandwidth=450 * GB,
        network_bandwidth=50 * GB,
        pcie=PCIE5,
        measured=True,
        source="NVIDIA H200 Tensor Core GPU datasheet (SXM; without sparsity); usable: torch's total_memory; "
        "network: DGX H200, eight NDR adapters of 400 Gb/s",
        spellings=("h200",),
    ),
    DeviceSpec(
        name="B200",
        memory_bytes=180 * GIB,
        usable_bytes=round(178.36 * GIB),
        flops_bf16=2250 * TERA,
        memory_bandwidth=8000 * GB,
        link_bandwidth=900 * GB,
        network_bandwidth=50 * GB,
        pcie=PCIE5,
        measured=True,
        source="NVIDIA DGX B200 and HGX B200 datasheets (one of eight; without sparsity); usable: torch's "
        "total_memory; network: DGX B200, eight adapters of 400 Gb/s",
        spellings=("b200",),
    ),
    DeviceSpec(
        name="L40S",
        memory_bytes=48 * GIB,
        usable_bytes=round(44.42 * GIB),
        flops_bf16=362 * TERA,
        memory_bandwidth=864 * GB,
        link_bandwidth=PCIE4,
        network_bandwidth=25 * GB,
        pcie=PCIE4,
        measured=True,
        source="NVIDIA L40S datasheet (without sparsity); usable, with ECC: github.com/stepfun-ai/Step-Video-T2V/"
        "issues/8; network: one 200 Gb/s port each, as in OVX servers",
        spellings=("l40s",),
    ),
    DeviceSpec(
        name="A10G",
        memory_bytes=24 * GIB,
        usable_bytes=round(22.06 * GIB),
        flops_bf16=70 * TERA,
        memory_bandwidth=600 * GB,
        link_bandwidth=PCIE4,
        network_bandwidth=1.5625 * GB,
        pcie=PCIE4,
        measured=True,
        source="NVIDIA A10G datasheet (without sparsity); usable, with ECC: torch's total_memory on "
        "Amazon EC2 g5; network: Amazon EC2 g5.48xlarge, 100 Gb/s for eight",
        spellings=("a10g",),
    ),
    DeviceSpec(
        name="T4",
        memory_bytes=16 * GIB,
        usable_bytes=round(14.56 * GIB),
        flops_bf16=65 * TERA,
        memory_bandwidth=320 * GB,
        link_bandwidth=PCIE3,
        network_bandwidth=1.5625 * GB,
        pcie=PCIE3,
        measured=True,
        source="NVIDIA T4 datasheet (fp16, because it has no bf16); usable, with ECC: github.com/AlphaGPU/"
        "leetgpu-challenges/issues/52; network: Amazon EC2 g4dn.metal, 100 Gb/s for eight",
        spellings=("t4",),
    ),
    DeviceSpec(
        name="RTX 4090",
        memory_bytes=24 * GIB,
        usable_bytes=round(23.64 * GIB),
        flops_bf16=165.2 * TERA,
        memory_bandwidth=1008 * GB,
        link_bandwidth=PCIE4,
        network_bandwidth=1.25 * GB,
        pcie=PCIE4,
        measured=True,
        source="NVIDIA Ada GPU Architecture whitepaper, appendix A (fp32 sums, without sparsity); usable: "
        "github.com/ali-vilab/VGen/issues/104; network: 10 Gb/s, a usual workstation's",
        spellings=("rtx4090", "4090"),
    ),
    DeviceSpec(
        name="MI300X",
        memory_bytes=192 * GIB,
        usable_bytes=round(191.69 * GIB),
        flops_bf16=1307.4 * TERA,
        memory_bandwidth=5300 * GB,
        link_bandwidth=448 * GB,
        network_bandwidth=50 * GB,
        pcie=PCIE5,
        measured=True,
        source="AMD Instinct MI300X datasheet (without sparsity; seven Infinity Fabric links of 64 GB/s each way); "
        "usable: torch's total_memory under ROCm 7, 191.98 GiB under older ones; network: eight adapters of 400 Gb/s",
        spellings=("mi300x",),
    ),
)
"""Every device; to add one, write its figures and their source here."""
_MAKERS: Final = frozenset({"nvidia", "amd", "tesla", "geforce", "instinct", "sxm", "sxm4", "sxm5", "hbm3", "hbm3e"})
"""What stands in a device's full name, and does not tell it from others of this table."""


def get_device(named: str | int) -> DeviceSpec:
    """Return the device of that name, such as ``h100`` or ``A100-80g``, or one that is nothing but so many bytes.

    Names are those people use and those that drivers report. Raises UsageError, with the names there are, for one that
    is not known, and for one that several devices have.

    >>> get_device("nvidia a100-sxm4-80gb").name, get_device(80 << 30).name
    ('A100-80GB', '80.0 GiB')
    """
    if isinstance(named, int):
        if named < 1:
            raise UsageError(f"a device of {named} bytes holds nothing", hint="write a size such as 80GiB")
        return DeviceSpec(format_memory_size(named), named, named, source="given")
    words = [word for word in re.findall(r"[a-z0-9]+", named.lower()) if word not in _MAKERS]
    wanted = "".join(words)
    found = [each for each in DEVICES if wanted in _list_spellings(each)]
    if len(found) == 1:
        return found[0]
    if found:
        names = [each.name.lower().removesuffix("b") for each in found]
        raise UsageError(f"{named!r} is several devices", hint=f"write {' or '.join(names)}")
    listed = ", ".join(each.name for each in DEVICES)
    if named.isdecimal():
        raise UsageError(f"device {named!r} has no unit", hint=f"did you mean {named}GB or {named}GiB?")
    raise UsageError(f"unknown device {named!r}", hint=f"use one of {listed}, or a size such as 80GiB")


def _list_spellings(one: DeviceSpec) -> set[str]:
    """List its name alone, and with its memory."""
    size = str(one.memory_bytes // GIB)
    return {name + memory for name in one.spellings for memory in ("", size, f"{size}g", f"{size}gb", f"{size}gib")}
