"""Counts what engines add to stored MXFP4 experts (gpt-oss), because their kernels pad and copy what they read.

vLLM pads the hidden and the intermediate size of a rank to the tiles of the kernel that it chooses by device and
version (to 0.18 model_executor/layers/quantization/mxfp4.py, `get_mxfp4_backend` and `create_weights`; from 0.19 on
model_executor/layers/fused_moe/oracle/mxfp4.py, `mxfp4_round_up_hidden_size_and_intermediate_size`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class
from shardctl.estimate.term import MemoryTerm

if TYPE_CHECKING:
    from shardctl.estimate.model.layer_graph import LayerGraph
    from shardctl.estimate.model.rank_shards import RankShards
    from shardctl.estimate.workload import EngineBudget
    from shardctl.tensors.mesh import Mesh

_HOPPER, _BLACKWELL, _AFTER_BLACKWELL = 9.0, 10.0, 11.0
"""Compute capabilities of H100 and H200, of B200 and B300, and the first that Triton's kernels do not know."""
_SCALE_BLOCK_ELEMENTS: Final = 32
"""Elements that share a scale of one byte."""
_KERNEL_PADDING_TERM: Final = "padding of MXFP4 kernels"
_KERNEL_PADDING_SOURCE: Final = (
    "vLLM, quantization/mxfp4.py and fused_moe/oracle/mxfp4.py; logs of gpt-oss-120b on one H100: 65.97 GiB with "
    "Marlin (0.10.1, vllm-project/vllm issue 23278), 64.38 with Triton (0.14.1, issue 33155)"
)


@value_class
class ExpertKernel:
    """A kernel that computes with MXFP4 experts, and how it lays them out."""

    name: str
    intermediate: int
    """What the intermediate size of a rank is rounded up to."""
    hidden: int = 1
    """What the hidden size is rounded up to."""
    bias: int = 2
    """Bytes of an element of the biases."""
    scale_rows: int = 1
    """What the rows of scales are rounded up to."""
    copied_scales: bool = False
    """Whether the scales that were loaded stay next to those that the kernel reads."""

    def count_bytes(self, hidden: int, intermediate: int) -> int:
        """Count the bytes of one expert: gate and up together, and down."""
        wide, narrow = _round_up(hidden, self.hidden), _round_up(intermediate, self.intermediate)
        values = 3 * wide * narrow // 2
        loaded = 3 * wide * narrow // _SCALE_BLOCK_ELEMENTS
        scales = _round_up(2 * narrow, self.scale_rows) * (wide // _SCALE_BLOCK_ELEMENTS) + _round_up(
            wide, self.scale_rows
        ) * (narrow // _SCALE_BLOCK_ELEMENTS)
        return values + scales + loaded * self.copied_scales + self.bias * (2 * narrow + wide)


_MARLIN_KERNEL: Final = ExpertKernel("Marlin", 128, 256)
_TRTLLM_KERNEL: Final = ExpertKernel("FlashInfer's TRTLLM kernel", 128, 256, bias=4)
_WIDE_TRTLLM: Final = ExpertKernel("FlashInfer's TRTLLM kernel", 256, 256, bias=4)
_TRITON_KERNEL: Final = ExpertKernel("Triton", 64, bias=4, scale_rows=256)
_COPYING_TRITON: Final = ExpertKernel("Triton", 64, bias=4, scale_rows=256, copied_scales=True)


def list_kernels(version: tuple[int, int] | None, compute_capability: float) -> tuple[ExpertKernel, ...]:
    """List the kernels that a version of vLLM may choose on a device, first the one that it chooses by default.

    Where nobody said the version, that is the one of old versions, which needs most on most devices.

    >>> [one.name for one in list_kernels((0, 10), 9.0)], [one.name for one in list_kernels((0, 32), 10.0)]
    (['Marlin', 'Triton'], ["FlashInfer's TRTLLM kernel"])
    """
    if version is None:
        old, new = (list_kernels(some, compute_capability) for some in ((0, 11), (0, 32)))
        return tuple(dict.fromkeys((*old, *new)))
    # Triton's kernels come with vLLM since 0.12; before, somebody had to install them.
    bundled = version >= (0, 12)
    triton = _COPYING_TRITON if version < (0, 24) else _TRITON_KERNEL
    flashinfer = _WIDE_TRTLLM if version < (0, 26) else _TRTLLM_KERNEL
    if not compute_capability:
        return _MARLIN_KERNEL, triton, flashinfer
    if compute_capability < _HOPPER or (compute_capability >= _AFTER_BLACKWELL and bundled):
        return (_MARLIN_KERNEL,)
    if compute_capability >= _AFTER_BLACKWELL:
        return _MARLIN_KERNEL, triton
    if compute_capability >= _BLACKWELL:
        return (flashinfer,) if bundled else (flashinfer, triton, _MARLIN_KERNEL)
    return (triton,) if bundled else (_MARLIN_KERNEL, triton)


def build_padding_term(anatomy: LayerGraph, holding: RankShards, mesh: Mesh, budget: EngineBudget) -> MemoryTerm | None:
    """Build the term of what the experts of a rank take beyond the bytes stored; None for a model without MXFP4."""
    stored = [part for part in holding.parts if "mlp.experts." in part.kind.example]
    blocks = [part for part in stored if part.kind.example.endswith("_blocks") and part.kind.dtype.name == "U8"]
    layers = [anatomy.layers[n] for n in holding.layers if anatomy.layers[n].experts is not None]
    if not blocks or not layers or layers[0].experts is None:
        return None
    experts, hidden = layers[0].experts, layers[0].hidden
    held = len(layers) * -(-experts.count // mesh.ep)
    intermediate = -(-experts.size // mesh.etp)
    nbytes = sum(part.nbytes for part in stored)
    kernels = list_kernels(budget.version, budget.compute_capability)
    sizes = [max(0, held * one.count_bytes(hidden, intermediate) - nbytes) for one in kernels]
    # What SGLang makes of them was not read: it may be nothing.
    usual, low = (sizes[0], min(sizes)) if budget.engine == "vllm" else (0, 0)
    return MemoryTerm(
        _KERNEL_PADDING_TERM,
        "weights",
        usual,
        "experts * kernel - stored",
        {
            "kernel": kernels[0].name if budget.engine == "vllm" else "not known",
            "experts": held,
            "hidden": hidden,
            "intermediate": intermediate,
            "stored": nbytes,
        },
        _KERNEL_PADDING_SOURCE,
        interval=(low, max(sizes)) if low < max(sizes) else None,
    )


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
