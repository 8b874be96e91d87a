"""Lists what Megatron-LM allocates once for passes and never frees: dummy gradients, a buffer, workspaces.

With gradient accumulation fusion, a kernel adds a weight's gradient to its fp32 sum, and autograd gets a tensor in
its place that nobody reads. Transformer Engine has one for each shape of a weight and never frees it
(`pytorch/module/base.py`, `_dummy_wgrads`; the same in 2.11 and 2.20), and the head takes its own from there
(megatron-core 0.14 to 0.20, `tensor_parallel/layers.py`, `get_dummy_wgrad`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.estimate.serving.kv_cache import count_units_per_rank
from shardctl.estimate.term import MemoryTerm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.estimate.model.layer_graph import LayerAttention, LayerExperts, LayerGraph, ModelLayer
    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.estimate.workload import TrainingWorkload
    from shardctl.tensors.mesh import Mesh

MIB: Final = 1 << 20
_CUBLAS_WORKSPACE_BYTES: Final = (20 * MIB, 96 * MIB, 384 * MIB)
"""The least, the usual and the most bytes of workspaces: torch has one of cuBLAS for each thread that multiplies, of
the forward and of the backward pass, and Transformer Engine has one. Since Hopper each has 32 MiB; on an A100, torch's
have 8 MiB unless `CUBLAS_WORKSPACE_CONFIG` says 32, and Transformer Engine's has 4."""
_GROUPED_WORKSPACE_BYTES: Final = (16 * MIB, 128 * MIB, 128 * MIB)
"""The same of the four streams that matrices of experts run in."""
_DUMMY_GRADIENTS_SOURCE: Final = (
    "Transformer Engine 2.11 to 2.20, pytorch/module/base.py, _dummy_wgrads; megatron-core 0.14 to 0.20, "
    "tensor_parallel/layers.py, get_dummy_wgrad; none with --no-gradient-accumulation-fusion"
)
_GATHER_BUFFER_SOURCE: Final = "megatron-core 0.14 to 0.20, tensor_parallel/layers.py, get_global_memory_buffer"
_CUBLAS_WORKSPACE_SOURCE: Final = (
    "Transformer Engine 2.11, pytorch/cpp_extensions/gemm.py, get_cublas_workspace; torch 2.13, "
    "aten/src/ATen/cuda/CublasHandlePool.cpp: one for each handle, of which a thread has its own"
)


def list_lasting_buffers(
    anatomy: LayerGraph, holding: RankShards, mesh: Mesh, work: TrainingWorkload, *, stages: Sequence[int]
) -> Iterator[MemoryTerm]:
    """List what Megatron-LM's passes allocate once and keep, on each rank of `holding`."""
    tp = mesh.degree("tp")
    width = BY_NAME[work.dtype].bits // 8
    last = holding.stage == len(stages) - 1 and anatomy.generates
    layers = anatomy.layers[holding.layers.start : holding.layers.stop]
    shapes = {shape for layer in dict.fromkeys(layers) for shape in _list_weight_shapes(layer, tp, mesh.etp)}
    if last:
        shapes.add((count_units_per_rank(anatomy.vocabulary, tp), anatomy.hidden))
    largest = max((rows * columns for rows, columns in shapes), default=0)
    every = sum(rows * columns for rows, columns in shapes)
    if work.fused_gradients:
        yield MemoryTerm(
            "gradients that nobody reads",
            "gradients",
            width * every,
            f"{width} * elements of each shape of a weight",
            {"shapes": len(shapes), "elements": every},
            _DUMMY_GRADIENTS_SOURCE,
            # Before Transformer Engine had them, one was alive at a time.
            interval=(0, width * every),
        )
    else:
        yield MemoryTerm(
            "gradient of one weight, until it is added",
            "gradients",
            0,
            "0: freed before most is alive",
            {"largest": largest},
            _DUMMY_GRADIENTS_SOURCE,
            interval=(0, width * largest),
        )
    if last and tp > 1 and work.sequence_parallel:
        tokens = work.micro_batch * -(-work.sequence // mesh.degree("cp"))
        nbytes = width * tokens * anatomy.hidden
        yield MemoryTerm(
            "buffer that the head's input is gathered in",
            "workspace",
            nbytes,
            f"{width} * n * h",
            {"n": tokens, "h": anatomy.hidden},
            _GATHER_BUFFER_SOURCE,
            interval=(nbytes, nbytes),
        )
    grouped = any(layer.experts is not None for layer in layers)
    low, usual, high = (
        some + grouped * more for some, more in zip(_CUBLAS_WORKSPACE_BYTES, _GROUPED_WORKSPACE_BYTES, strict=True)
    )
    yield MemoryTerm(
        "workspaces of matrix kernels",
        "workspace",
        usual,
        "workspaces",
        {"workspaces": usual},
        _CUBLAS_WORKSPACE_SOURCE,
        interval=(low, high),
    )


def _list_weight_shapes(layer: ModelLayer, tp: int, etp: int) -> Iterator[tuple[int, int]]:
    """List the shapes of the weights as Megatron-LM has them: queries, keys and values in one, gate and up in one."""
    doubled = 2 if layer.gated else 1
    if layer.attention is not None:
        yield from _list_attention_shapes(layer.attention, layer.hidden, tp)
    if layer.mlp:
        yield from _list_pair(doubled, count_units_per_rank(layer.mlp, tp), layer.hidden)
    if layer.experts is not None:
        yield from _list_expert_shapes(layer.experts, doubled, layer.hidden, tp, etp)


def _list_pair(doubled: int, size: int, hidden: int) -> Iterator[tuple[int, int]]:
    yield doubled * size, hidden
    yield hidden, size


def _list_expert_shapes(
    experts: LayerExperts, doubled: int, hidden: int, tp: int, etp: int
) -> Iterator[tuple[int, int]]:
    yield from _list_pair(doubled, count_units_per_rank(experts.size, etp), experts.width or hidden)
    if experts.shared:
        yield from _list_pair(doubled, count_units_per_rank(experts.shared, tp), hidden)


def _list_attention_shapes(attention: LayerAttention, hidden: int, tp: int) -> Iterator[tuple[int, int]]:
    heads = count_units_per_rank(attention.heads, tp)
    queries, results = heads * attention.head_dim, heads * attention.value_dim
    yield hidden, results
    if attention.kind == "latent":
        rotary = attention.latent - attention.key_rank
        yield queries, attention.query_rank or hidden
        if attention.query_rank:
            yield attention.query_rank, hidden
        yield attention.latent, hidden
        yield heads * (attention.head_dim - rotary) + results, attention.key_rank
        return
    kv_heads = count_units_per_rank(attention.kv_heads, tp)
    gate = results if attention.gated else 0
    yield queries + gate + kv_heads * (attention.head_dim + attention.value_dim), hidden
    if attention.cross:
        yield queries, hidden
        yield kv_heads * (attention.head_dim + attention.value_dim), hidden
