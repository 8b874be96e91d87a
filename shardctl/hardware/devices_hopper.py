"""Lists NVIDIA's devices for servers from Hopper on."""

from __future__ import annotations

from typing import Final

from shardctl.hardware.device_spec import GB, GIB, MIB, PCIE5, TERA, DeviceSpec

NEWER_SERVERS: Final = (
    DeviceSpec(
        name="H20",
        memory_bytes=96 * GIB,
        usable_bytes=97871 * MIB,
        flops_bf16=148 * TERA,
        memory_bandwidth=4000 * GB,
        link_bandwidth=450 * GB,
        network_bandwidth=50 * GB,
        pcie=PCIE5,
        measured_by="nvidia-smi",
        source="NVIDIA HGX H20 datasheet (without sparsity); usable: nvidia-smi; network: eight adapters of 400 Gb/s",
        spellings=("h20",),
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
        measured_by="torch",
        source="NVIDIA H100 Tensor Core GPU datasheet (SXM; without sparsity); usable: torch's total_memory; "
        "network: DGX H100, eight NDR adapters of 400 Gb/s",
        spellings=("h100",),
    ),
    DeviceSpec(
        name="H100 PCIe",
        memory_bytes=80 * GIB,
        usable_bytes=81559 * MIB,
        flops_bf16=756 * TERA,
        memory_bandwidth=2000 * GB,
        link_bandwidth=PCIE5,
        network_bandwidth=50 * GB,
        pcie=PCIE5,
        measured_by="nvidia-smi",
        source="NVIDIA H100 Tensor Core GPU datasheet (PCIe; without sparsity; its NVLink bridge joins pairs "
        "only); usable: nvidia-smi; network: one 400 Gb/s port each",
        spellings=("h100pcie",),
    ),
    DeviceSpec(
        name="H100 NVL",
        memory_bytes=94 * GIB,
        usable_bytes=round(93.1 * GIB),
        flops_bf16=835 * TERA,
        memory_bandwidth=3900 * GB,
        link_bandwidth=PCIE5,
        network_bandwidth=50 * GB,
        pcie=PCIE5,
        measured_by="torch",
        source="NVIDIA H100 Tensor Core GPU datasheet (NVL; without sparsity; its NVLink bridge joins pairs "
        "only); usable: torch's total_memory; network: one 400 Gb/s port each",
        spellings=("h100nvl",),
    ),
    DeviceSpec(
        name="H800-80GB",
        memory_bytes=80 * GIB,
        usable_bytes=81559 * MIB,
        flops_bf16=989 * TERA,
        memory_bandwidth=3350 * GB,
        link_bandwidth=200 * GB,
        network_bandwidth=50 * GB,
        pcie=PCIE5,
        measured_by="nvidia-smi",
        source="NVIDIA H100 datasheet, whose chip it is, with NVLink of 400 GB/s both ways; usable: nvidia-smi; "
        "network: eight adapters of 400 Gb/s",
        spellings=("h800",),
    ),
    DeviceSpec(
        name="GH200",
        memory_bytes=96 * GIB,
        usable_bytes=97871 * MIB,
        flops_bf16=989 * TERA,
        memory_bandwidth=4000 * GB,
        link_bandwidth=450 * GB,
        network_bandwidth=50 * GB,
        pcie=450 * GB,
        per_node=1,
        measured_by="nvidia-smi",
        source="NVIDIA GH200 Grace Hopper Superchip datasheet (96 GB of HBM3; without sparsity; to its Grace by "
        "NVLink-C2C); usable: nvidia-smi; network: one adapter of 400 Gb/s",
        spellings=("gh200",),
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
        measured_by="torch",
        source="NVIDIA H200 Tensor Core GPU datasheet (SXM; without sparsity); usable: torch's total_memory; "
        "network: DGX H200, eight NDR adapters of 400 Gb/s",
        spellings=("h200",),
    ),
    DeviceSpec(
        name="B100",
        memory_bytes=192 * GIB,
        usable_bytes=192 * GIB,
        flops_bf16=1750 * TERA,
        memory_bandwidth=8000 * GB,
        link_bandwidth=900 * GB,
        network_bandwidth=50 * GB,
        pcie=PCIE5,
        source="NVIDIA Blackwell Architecture technical brief (HGX B100, one of eight; without sparsity); "
        "usable: not measured; network: eight adapters of 400 Gb/s",
        spellings=("b100",),
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
        measured_by="torch",
        source="NVIDIA DGX B200 and HGX B200 datasheets (one of eight; without sparsity); usable: torch's "
        "total_memory; network: DGX B200, eight adapters of 400 Gb/s",
        spellings=("b200",),
    ),
    DeviceSpec(
        name="B300",
        memory_bytes=270 * GIB,
        usable_bytes=round(267.69 * GIB),
        flops_bf16=2250 * TERA,
        memory_bandwidth=8000 * GB,
        link_bandwidth=900 * GB,
        network_bandwidth=100 * GB,
        pcie=PCIE5,
        measured_by="torch",
        source="NVIDIA HGX B300 specifications (one of eight, 2.1 TB together; without sparsity); usable: "
        "torch's total_memory (nvidia-smi: 275,040 MiB); network: eight adapters of 800 Gb/s",
        spellings=("b300",),
    ),
    DeviceSpec(
        name="GB200",
        memory_bytes=186 * GIB,
        usable_bytes=round(184.31 * GIB),
        flops_bf16=2500 * TERA,
        memory_bandwidth=8000 * GB,
        link_bandwidth=900 * GB,
        network_bandwidth=50 * GB,
        pcie=225 * GB,
        per_node=72,
        measured_by="torch",
        source="NVIDIA GB200 NVL72 specifications (one of 72, 13.4 TB together; without sparsity; a Grace serves "
        "two by NVLink-C2C); usable: torch's total_memory (nvidia-smi: 189,471 MiB); network: one adapter "
        "of 400 Gb/s each",
        spellings=("gb200",),
    ),
    DeviceSpec(
        name="GB300",
        memory_bytes=279 * GIB,
        usable_bytes=round(276.5 * GIB),
        flops_bf16=2500 * TERA,
        memory_bandwidth=8000 * GB,
        link_bandwidth=900 * GB,
        network_bandwidth=100 * GB,
        pcie=225 * GB,
        per_node=72,
        measured_by="torch",
        source="NVIDIA GB300 NVL72 specifications (one of 72, 20 TB together; without sparsity; a Grace serves "
        "two by NVLink-C2C); usable: torch's total_memory (nvidia-smi: 284,208 MiB); network: one adapter "
        "of 800 Gb/s each",
        spellings=("gb300",),
    ),
)
"""For servers, of Hopper and Blackwell."""
