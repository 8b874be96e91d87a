"""Estimates what a process holds on a device besides tensors: CUDA context, buffers, fragmentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.estimate.term import MemoryTerm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.estimate.workload import Profile
    from shardctl.tensors.mesh import Mesh

MIB: Final = 1 << 20
CONTEXT: Final = "CUDA context"
COMMUNICATORS: Final = "NCCL communicators"
_CUDA_CONTEXT_BYTES: Final = (416 * MIB, 576 * MIB, 1024 * MIB)
"""The least, the usual and the most bytes of a context with the kernels that PyTorch loads."""
_COMMUNICATOR_BYTES: Final = (64 * MIB, 256 * MIB, 512 * MIB)
"""Of one communicator that reduces and gathers: rings and trees of some channels, each with 10 MiB of buffers."""
_MIN_LARGE_GROUP_RANKS: Final = 5
"""Ranks from which an axis is taken to have the channels and the multicast of a whole node of NVSwitch."""
_LARGE_COMMUNICATOR: Final = 2176 * MIB
"""The most bytes for such an axis: what SGLang's start takes on eight H200, 1.77 to 2.01 GiB in all."""
_PEER_BUFFER_BYTES: Final = (16 * MIB, 160 * MIB, 448 * MIB)
"""Of each peer that a communicator sends to directly: up to 32 channels of up to 12 MiB."""
_MAX_DIRECT_PEERS: Final = 7
"""Direct peers beyond those of a node go through the network, whose buffers are shared."""
GRAPHS: Final = "CUDA graphs"
_CUDA_GRAPH_BYTES: Final = (0, 384 * MIB, 1792 * MIB)
"""Of CUDA graphs of decoding; the least is for engines that run eagerly."""
SLACK: Final = "allocator slack"
"""The name of the term for fragmentation: bytes that the allocator reserves in addition to those allocated."""
_FRAGMENTATION_PERCENT: Final = {True: (0, 5, 20), False: (1, 5, 10)}
"""Fragmentation, in hundredths of the allocated bytes; by whether the model is served."""
_EXPANDABLE_SLACK: Final = (0, 1, 8)
"""The same in training with expandable segments, whose free blocks join (torch, c10/cuda/CUDACachingAllocator.cpp)."""


def list_runtime_terms(
    mesh: Mesh, *, serving: bool, profile: Profile | None = None, allocated: int = 0, expandable: bool = False
) -> tuple[MemoryTerm, ...]:
    """List what one rank needs besides what is asked of the allocator, all of it modelled.

    `allocated` are the bytes that come and go through PyTorch's caching allocator, whose slack grows with them: in
    training all tensors, in serving only those of a forward pass, as weights and caches are allocated once. `profile`
    is the runtime that trains; DeepSpeed and Megatron have communicators of their own for the same ranks.
    """
    slack = _EXPANDABLE_SLACK if expandable else _FRAGMENTATION_PERCENT[serving]
    return tuple(_list_terms(mesh, serving=serving, profile=profile, allocated=allocated, slack=slack))


def list_communicators(mesh: Mesh) -> tuple[str, ...]:
    """List the axes of a mesh along which ranks reduce or gather, each with a communicator.

    Ep's ranks exchange instead.
    """
    axes = [axis for axis, degree in mesh.axes if degree > 1]
    if mesh.etp > 1 and (mesh.ep > 1 or mesh.etp != mesh.degree("tp")):
        axes.append("etp")
    return tuple(axes)


def _list_terms(
    mesh: Mesh, *, serving: bool, profile: Profile | None, allocated: int, slack: tuple[int, int, int]
) -> Iterator[MemoryTerm]:
    low, usual, high = _CUDA_CONTEXT_BYTES
    yield MemoryTerm(
        CONTEXT,
        "runtime",
        usual,
        "context",
        {"context": usual},
        "a process with one small tensor: 484 MiB (NVIDIA/nccl pull 2366) to 723 MiB (discuss.pytorch.org/t/73021)",
        interval=(low, high),
        counter="device",
    )
    axes = list_communicators(mesh)
    size_of = {**dict(mesh.axes), "etp": mesh.etp}
    if axes:
        low, usual, _ = (len(axes) * size for size in _COMMUNICATOR_BYTES)
        # Stages send to their neighbours alone.
        large = [axis for axis in axes if size_of[axis] >= _MIN_LARGE_GROUP_RANKS and axis != "pp"]
        high = _LARGE_COMMUNICATOR * len(large) + _COMMUNICATOR_BYTES[2] * (len(axes) - len(large))
        # A second set for the same ranks: Megatron's embedding and model-parallel groups, DeepSpeed's world group.
        more = profile in {"megatron", "deepspeed"}
        yield MemoryTerm(
            COMMUNICATORS,
            "runtime",
            usual,
            "axes * communicator",
            {"axes": " ".join(axes), "communicator": _COMMUNICATOR_BYTES[1]},
            "NVIDIA/nccl issues 864 and 986: linear in the communicators and their channels; SGLang's logs of what its "
            "start takes, its own reductions included: 0.19 GiB for two ranks, 0.13 for four by PCIe, 1.77 to 2.01 for "
            "eight H200 (sgl-project/sglang pull 11716). The usual size is derived: channels * 10 MiB",
            interval=(low, high * 2 if more else high),
            counter="device",
        )
    if mesh.ep > 1:
        peers = min(mesh.ep - 1, _MAX_DIRECT_PEERS)
        low, usual, high = (peers * size for size in _PEER_BUFFER_BYTES)
        yield MemoryTerm(
            "NCCL buffers of the exchange of tokens",
            "runtime",
            usual,
            "min(ep - 1, 7) * peer",
            {"ep": mesh.ep, "peer": _PEER_BUFFER_BYTES[1]},
            "NVIDIA/nccl issue 1685: 3.3 GB for an all-to-all of eight H100; less by PCIe, or with DeepEP",
            interval=(low, high),
            counter="device",
        )
    if serving:
        low, usual, high = _CUDA_GRAPH_BYTES
        yield MemoryTerm(
            GRAPHS,
            "runtime",
            usual,
            "graphs",
            {"graphs": usual},
            "vLLM's logs of graph capture: 0.21 GiB (pull 11349), 0.36 GiB, 26 MiB for each of 67 sizes (pull 22897)",
            interval=(low, high),
            counter="device",
        )
    low, usual, high = slack
    if allocated:
        yield MemoryTerm(
            SLACK,
            "runtime",
            allocated * usual // 100,
            "slack * allocated / 100",
            {"slack": usual, "allocated": allocated},
            "reserved over allocated: 1.017 to 1.093 in training, 1.00 to 1.02 with expandable segments, beyond "
            "what is free in other streams (docs/benchmarks/estimates.md)",
            interval=(allocated * low // 100, allocated * high // 100),
            counter="reserved",
        )
