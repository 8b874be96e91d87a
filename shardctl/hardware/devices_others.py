"""Lists devices of AMD, Intel, Google, Amazon and Apple."""

from __future__ import annotations

from typing import Final

from shardctl.hardware.device_spec import GB, GIB, MIB, PCIE3, PCIE4, PCIE5, TERA, DeviceSpec

OTHERS: Final = (
    DeviceSpec(
        name="MI210",
        memory_bytes=64 * GIB,
        usable_bytes=round(63.98 * GIB),
        flops_bf16=181 * TERA,
        memory_bandwidth=1638 * GB,
        link_bandwidth=150 * GB,
        network_bandwidth=25 * GB,
        pcie=PCIE4,
        per_node=4,
        measured_by="torch",
        source="AMD Instinct MI210 datasheet (three Infinity Fabric links of 50 GB/s each way, which join four); "
        "usable: torch's total_memory; network: one 200 Gb/s port each",
        spellings=("mi210",),
    ),
    DeviceSpec(
        name="MI250",
        memory_bytes=64 * GIB,
        usable_bytes=round(63.98 * GIB),
        flops_bf16=181 * TERA,
        memory_bandwidth=1638 * GB,
        link_bandwidth=200 * GB,
        network_bandwidth=12.5 * GB,
        pcie=PCIE4,
        measured_by="torch",
        source="AMD Instinct MI250 datasheet, of which each of the two dies is a device (half of its figures; "
        "Infinity Fabric links to other dies of 200 GB/s each way together); usable: torch's "
        "total_memory; network: four adapters of 200 Gb/s for eight",
        spellings=("mi250",),
    ),
    DeviceSpec(
        name="MI250X",
        memory_bytes=64 * GIB,
        usable_bytes=round(63.98 * GIB),
        flops_bf16=191.5 * TERA,
        memory_bandwidth=1638 * GB,
        link_bandwidth=200 * GB,
        network_bandwidth=12.5 * GB,
        pcie=PCIE4,
        measured_by="torch",
        source="AMD Instinct MI250X datasheet, of which each of the two dies is a device (half of its figures; "
        "Infinity Fabric links to other dies of 200 GB/s each way together); usable: torch's "
        "total_memory; network: Frontier, four adapters of 200 Gb/s for eight",
        spellings=("mi250x",),
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
        measured_by="torch",
        source="AMD Instinct MI300X datasheet (without sparsity; seven Infinity Fabric links of 64 GB/s each way); "
        "usable: torch's total_memory under ROCm 7, 191.98 GiB under older ones; network: eight adapters of 400 Gb/s",
        spellings=("mi300x",),
    ),
    DeviceSpec(
        name="MI325X",
        memory_bytes=256 * GIB,
        usable_bytes=round(255.98 * GIB),
        flops_bf16=1307.4 * TERA,
        memory_bandwidth=6000 * GB,
        link_bandwidth=448 * GB,
        network_bandwidth=50 * GB,
        pcie=PCIE5,
        measured_by="torch",
        source="AMD Instinct MI325X datasheet (without sparsity; seven Infinity Fabric links of 64 GB/s each "
        "way); usable: torch's total_memory; network: eight adapters of 400 Gb/s",
        spellings=("mi325x",),
    ),
    DeviceSpec(
        name="MI350X",
        memory_bytes=288 * GIB,
        usable_bytes=round(287.98 * GIB),
        flops_bf16=2306.9 * TERA,
        memory_bandwidth=8000 * GB,
        link_bandwidth=537.6 * GB,
        network_bandwidth=50 * GB,
        pcie=PCIE5,
        measured_by="torch",
        source="AMD Instinct MI350X datasheet (without sparsity; seven Infinity Fabric links of 76.8 GB/s each "
        "way); usable: torch's total_memory, of an MI355X, which has the same memory; network: eight "
        "adapters of 400 Gb/s",
        spellings=("mi350x",),
    ),
    DeviceSpec(
        name="MI355X",
        memory_bytes=288 * GIB,
        usable_bytes=round(287.98 * GIB),
        flops_bf16=2516.6 * TERA,
        memory_bandwidth=8000 * GB,
        link_bandwidth=537.6 * GB,
        network_bandwidth=50 * GB,
        pcie=PCIE5,
        measured_by="torch",
        source="AMD Instinct MI355X datasheet (without sparsity; seven Infinity Fabric links of 76.8 GB/s each "
        "way); usable: torch's total_memory; network: eight adapters of 400 Gb/s",
        spellings=("mi355x",),
    ),
    DeviceSpec(
        name="Gaudi 2",
        memory_bytes=96 * GIB,
        usable_bytes=98304 * MIB,
        flops_bf16=432 * TERA,
        memory_bandwidth=2450 * GB,
        link_bandwidth=262.5 * GB,
        network_bandwidth=37.5 * GB,
        pcie=PCIE4,
        measured_by="hl-smi",
        source="Intel Gaudi 2 product brief (HL-225H; of 24 Ethernet ports of 100 Gb/s, 21 inside a node of "
        "eight and 3 outside, the network); usable: hl-smi",
        spellings=("gaudi2", "hl225"),
    ),
    DeviceSpec(
        name="Gaudi 3",
        memory_bytes=128 * GIB,
        usable_bytes=131072 * MIB,
        flops_bf16=1835 * TERA,
        memory_bandwidth=3700 * GB,
        link_bandwidth=525 * GB,
        network_bandwidth=75 * GB,
        pcie=PCIE5,
        measured_by="hl-smi",
        source="Intel Gaudi 3 product brief (HL-325L; of 24 Ethernet ports of 200 Gb/s, 21 inside a node of "
        "eight and 3 outside, the network); usable: hl-smi",
        spellings=("gaudi3", "hl325l"),
    ),
    DeviceSpec(
        name="TPU v4",
        memory_bytes=32 * GIB,
        usable_bytes=round(30.75 * GIB),
        flops_bf16=275 * TERA,
        memory_bandwidth=1228 * GB,
        link_bandwidth=300 * GB,
        network_bandwidth=300 * GB,
        pcie=PCIE3,
        per_node=4,
        measured_by="XLA",
        source="Google Cloud TPU v4 documentation (interconnect, which also joins hosts: network); usable: what "
        "XLA says of its HBM; pcie: not published, 16 lanes of PCIe 3 assumed",
        spellings=("tpuv4", "v4"),
    ),
    DeviceSpec(
        name="TPU v5e",
        memory_bytes=16 * GIB,
        usable_bytes=round(15.75 * GIB),
        flops_bf16=197 * TERA,
        memory_bandwidth=819 * GB,
        link_bandwidth=200 * GB,
        network_bandwidth=200 * GB,
        pcie=PCIE3,
        measured_by="XLA",
        source="Google Cloud TPU v5e documentation (interconnect of 400 GB/s both ways, which also joins hosts: "
        "network); usable: what XLA says of its HBM; pcie: not published, 16 lanes of PCIe 3 assumed",
        spellings=("tpuv5e", "v5e", "v5litepod"),
    ),
    DeviceSpec(
        name="TPU v5p",
        memory_bytes=96 * GIB,
        usable_bytes=round(95.74 * GIB),
        flops_bf16=459 * TERA,
        memory_bandwidth=2765 * GB,
        link_bandwidth=600 * GB,
        network_bandwidth=600 * GB,
        pcie=PCIE3,
        per_node=4,
        measured_by="XLA",
        source="Google Cloud TPU v5p documentation (95 GiB of its 96 offered; interconnect of 1,200 GB/s both "
        "ways, which also joins hosts: network); usable: what XLA says of its HBM; pcie: not published, "
        "16 lanes of PCIe 3 assumed",
        spellings=("tpuv5p", "v5p"),
    ),
    DeviceSpec(
        name="TPU v6e",
        memory_bytes=32 * GIB,
        usable_bytes=round(31.25 * GIB),
        flops_bf16=918 * TERA,
        memory_bandwidth=1638 * GB,
        link_bandwidth=400 * GB,
        network_bandwidth=400 * GB,
        pcie=PCIE3,
        measured_by="XLA",
        source="Google Cloud TPU v6e documentation (interconnect of 800 GB/s both ways, which also joins hosts: "
        "network); usable: what XLA says of its HBM; pcie: not published, 16 lanes of PCIe 3 assumed",
        spellings=("tpuv6e", "v6e", "trillium"),
    ),
    DeviceSpec(
        name="TPU7x",
        memory_bytes=96 * GIB,
        usable_bytes=round(94.75 * GIB),
        flops_bf16=1153.5 * TERA,
        memory_bandwidth=3690 * GB,
        link_bandwidth=300 * GB,
        network_bandwidth=300 * GB,
        pcie=PCIE3,
        measured_by="XLA",
        source="Google Cloud TPU7x (Ironwood) documentation: each of the two chiplets of a chip is a device, "
        "with half of its figures (interconnect of 1,200 GB/s both ways, which also joins hosts: "
        "network); usable: what XLA says of its HBM; pcie: not published, 16 lanes of PCIe 3 assumed",
        spellings=("tpu7x", "tpuv7", "tpuv7x", "v7x", "ironwood"),
    ),
    DeviceSpec(
        name="Trainium 1",
        memory_bytes=32 * GIB,
        usable_bytes=32 * GIB,
        flops_bf16=190 * TERA,
        memory_bandwidth=820 * GB,
        link_bandwidth=192 * GB,
        network_bandwidth=6.25 * GB,
        pcie=PCIE3,
        per_node=16,
        source="AWS Neuron documentation, Trainium and Trn1 architecture (NeuronLink-v2 of 384 GB/s both ways, "
        "16 in a node); usable: not measured; network: Amazon EC2 trn1.32xlarge, 800 Gb/s for 16; pcie: "
        "not published, 16 lanes of PCIe 3 assumed",
        spellings=("trainium1", "trn1", "trainium"),
    ),
    DeviceSpec(
        name="Trainium 2",
        memory_bytes=96 * GIB,
        usable_bytes=96 * GIB,
        flops_bf16=667 * TERA,
        memory_bandwidth=2900 * GB,
        link_bandwidth=640 * GB,
        network_bandwidth=25 * GB,
        pcie=PCIE5,
        per_node=16,
        source="AWS Neuron documentation, Trainium2 architecture (NeuronLink-v3 of 1.28 TB/s both ways, 16 in a "
        "node); usable: not measured; network: Amazon EC2 trn2.48xlarge, 3.2 Tb/s for 16; pcie: not "
        "published, 16 lanes of PCIe 5 assumed",
        spellings=("trainium2", "trn2"),
    ),
    DeviceSpec(
        name="Trainium 3",
        memory_bytes=144 * GIB,
        usable_bytes=144 * GIB,
        flops_bf16=671 * TERA,
        memory_bandwidth=4900 * GB,
        link_bandwidth=1280 * GB,
        network_bandwidth=25 * GB,
        pcie=PCIE5,
        per_node=16,
        source="AWS Neuron documentation, Trainium3 architecture (NeuronLink-v4 of 2.56 TB/s both ways); usable: "
        "not measured; network: not published, that of trn2 assumed; pcie: not published, 16 lanes of "
        "PCIe 5 assumed",
        spellings=("trainium3", "trn3"),
    ),
    DeviceSpec(
        name="M3 Ultra-512GB",
        memory_bytes=512 * GIB,
        usable_bytes=464 * GIB,
        memory_bandwidth=819 * GB,
        link_bandwidth=819 * GB,
        network_bandwidth=10 * GB,
        pcie=819 * GB,
        per_node=1,
        measured_by="Metal",
        source="Apple, technical specifications of Mac Studio (2025) (Apple does not publish operations per "
        "second; CPU and GPU share the memory); usable: recommendedMaxWorkingSetSize of Metal; network: "
        "Thunderbolt, 80 Gb/s",
        spellings=("m3ultra",),
    ),
    DeviceSpec(
        name="M4 Max-128GB",
        memory_bytes=128 * GIB,
        usable_bytes=96 * GIB,
        memory_bandwidth=546 * GB,
        link_bandwidth=546 * GB,
        network_bandwidth=10 * GB,
        pcie=546 * GB,
        per_node=1,
        measured_by="Metal",
        source="Apple, technical specifications of MacBook Pro and Mac Studio (2025) (Apple does not publish "
        "operations per second; CPU and GPU share the memory); usable: recommendedMaxWorkingSetSize of "
        "Metal; network: Thunderbolt, 80 Gb/s",
        spellings=("m4max",),
    ),
)
"""By maker."""
