"""Describes a device: its memory, speed and links, with the source of each figure."""

from __future__ import annotations

from typing import Final

from shardctl.base.value import value_class

GB: Final = 10**9
GIB: Final = 1 << 30
MIB: Final = 1 << 20
TERA: Final = 10**12
PCIE3: Final = 15.75 * GB
"""Sixteen lanes, one way: 8 GT/s each, 128 of 130 bits (PCI Express Base Specification 3.0)."""
PCIE4: Final = 31.5 * GB
PCIE5: Final = 63.0 * GB


@value_class
class DeviceSpec:
    """One device.

    Bandwidths are bytes per second in one direction, as marketed; what collectives reach of them is the estimator's
    matter. Zero stands for what nobody said, as for a device that is only a size.
    """

    name: str
    memory_bytes: int
    """As marketed; makers' GB of device memory are 2^30 bytes."""
    usable_bytes: int
    """What `measured_by` reported, else the marketed bytes."""
    compute_capability: float = 0.0
    """NVIDIA's, such as 9.0 for Hopper, by which engines choose kernels; 0 for other makers' and where nobody said."""
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
    """Devices that the links join."""
    measured_by: str = ""
    """What reported `usable_bytes` on a device; empty if nobody measured them. `torch` is `total_memory` of its device
    properties, which is what a process finds; `nvidia-smi` reports 0.4 to 0.9 GiB more, which the driver keeps."""
    source: str = ""
    spellings: tuple[str, ...] = ()
    """What people call it, without maker and memory, in small letters and digits; the usual first."""
    count: int = 0
    """How many of them `--gpu 2xNAME` says; 0 if it names one device."""

    @property
    def timed(self) -> bool:
        """Whether its speed is known."""
        return self.flops_bf16 > 0

    @property
    def measured(self) -> bool:
        """Whether `usable_bytes` was read from a device."""
        return bool(self.measured_by)
