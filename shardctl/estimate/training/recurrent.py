"""Estimates what training keeps of layers with a recurrent state: Mamba, Mamba 2 and gated delta nets.

All of it is what the kernels save that such models are trained with: the arguments of `ctx.save_for_backward` in the
autograd functions that transformers calls if they are installed, and what its own modules keep around them. Without the
kernels transformers keeps what each step of its own loops makes, several times as much.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.estimate.training.saved_activations import PeakEvent, RecurrenceSupport, SavedActivation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.estimate.model.layer_graph import LayerScan, LayerState
    from shardctl.estimate.model.sizes import MicrobatchShare, Size

_SELECTIVE_CHUNK: Final = 2048
"""Tokens after which the kernel of the selective scan notes its state
(mamba-ssm, `csrc/selective_scan/selective_scan.cpp`, `n_chunks`)."""
_DELTA_CHUNK: Final = 64
"""Tokens that a gated delta rule takes at once (flash-linear-attention, `ops/gated_delta_rule/chunk.py`)."""
_H100_MULTIPROCESSOR_COUNT: Final = 132
"""Of an H100. The kernel of the scan in chunks adds up heads in as many parts as keep all of them busy
(mamba-ssm, `ops/triton/ssd_chunk_scan.py`, `_chunk_scan_bwd_dcb`, `nsplits`)."""
PLAN_HINT: Final = "a plan of one mesh shows weights, gradients and optimizer states, which are known"

TRANSFORMERS: Final = RecurrenceSupport(
    frozenset(("selective", "normed selective", "chunked", "delta", "channel delta", "short", "stepwise")),
    tp=False,
    why="transformers' kernels of recurrent layers run on whole layers",
)
"""A kernel of the selective scan holds the projections too, whose sums tp would have to share within it."""
MEGATRON: Final = RecurrenceSupport(
    frozenset(("chunked",)), tp=True, chunk=128, why="only Megatron-LM's layers of Mamba 2 are"
)
"""megatron-core 0.15, `core/ssm/mamba_mixer.py`: `chunk_size`, and groups that tp must divide."""


def compute_recurrent_sizes(
    state: LayerState, share: MicrobatchShare, number: int, has: RecurrenceSupport
) -> Mapping[Size, float]:
    """Compute the elements of each size in the recurrent part of layer `number`, in a runtime that `has` some of them.

    Raises UnsupportedError where the runtime is not known to train such a layer, or not with the mesh of `share`.
    """
    what = f"what training keeps of layer {number} is not known"
    if state.scan is None:
        raise UnsupportedError(f"{what}: it has a recurrent state (Mamba or linear attention)", hint=PLAN_HINT)
    if state.scan.kind not in has.scans:
        others = "that of transformers' layers is, with the profiles hf, fsdp2 and deepspeed"
        raise UnsupportedError(f"{what} with this profile: {has.why}", hint=others)
    if share.queries != share.keys:
        raise UnsupportedError(f"{what} with cp: states pass along whole sequences", hint=PLAN_HINT)
    if share.tp > 1 and not has.tp:
        raise UnsupportedError(f"{what} with tp: {has.why}", hint=PLAN_HINT)
    if state.groups % share.tp:
        raise UnsupportedError(
            f"{what} with tp={share.tp}: its {state.groups} groups are divided evenly or not at all", hint=PLAN_HINT
        )
    sizes = _SCAN_SIZE_FUNCTIONS[state.scan.kind](
        state, replace(state.scan, chunk=has.chunk or state.scan.chunk), share
    )
    return {name: count / share.tp for name, count in sizes.items()}


def _size_selective_scan(state: LayerState, scan: LayerScan, share: MicrobatchShare) -> dict[Size, float]:
    n, wide = share.tokens, state.recurrent // scan.inner
    return {
        "inner": n * scan.inner,
        "projected": n * 2 * scan.inner,
        "low": n * (scan.rank + 2 * wide),
        "low_rank": n * scan.rank,
        "low_states": n * 2 * wide,
        "noted_states": share.batch * 2 * state.recurrent * -(-share.keys // _SELECTIVE_CHUNK),
        "decays": state.recurrent,
        "channels": scan.inner,
    }


def _size_chunked_scan(state: LayerState, scan: LayerScan, share: MicrobatchShare) -> dict[Size, float]:
    n, chunks = share.tokens, -(-share.keys // scan.chunk)
    heads = scan.heads // state.groups
    programs = share.batch * chunks * scan.heads // share.tp
    split = -(-heads // max(1, min(heads, -(-programs // _H100_MULTIPROCESSOR_COUNT))))
    products = share.batch * state.groups * chunks * scan.chunk**2
    return {
        "inner": n * scan.inner,
        "projected": n * (scan.inner + state.channels + state.grouped + scan.heads),
        "convolved": n * (state.channels + state.grouped),
        "group_rows": n * state.groups,
        "state_heads": n * scan.heads,
        "decays": scan.heads,
        "final_states": share.batch * state.recurrent,
        "chunk_states": share.batch * state.recurrent * chunks,
        "chunk_products": products,
        "split_products": products * split,
        "grouped": n * state.grouped,
    }


def _size_delta_net(state: LayerState, scan: LayerScan, share: MicrobatchShare) -> dict[Size, float]:
    n, pairs = share.tokens, state.channels - scan.inner
    return {
        "inner": n * scan.inner,
        "projected": n * (pairs + 2 * scan.inner),
        "convolved": n * state.channels,
        "state_pairs": n * pairs,
        "pair_rows": n * 2 * scan.key_heads,
        "state_heads": n * scan.heads,
        "decays": scan.heads,
        "chunk_products": n * scan.heads * _DELTA_CHUNK,
    }


def _size_short_convolution(_: LayerState, scan: LayerScan, share: MicrobatchShare) -> dict[Size, float]:
    return {"inner": share.tokens * scan.inner, "projected": share.tokens * 3 * scan.inner}


def _size_stepwise_scan(state: LayerState, scan: LayerScan, share: MicrobatchShare) -> dict[Size, float]:
    return {
        "inner": share.tokens * scan.inner,
        "final_states": share.batch * state.recurrent,
        "padding": share.batch * state.convolution,
    }


_SCAN_SIZE_FUNCTIONS: Final = {
    "selective": _size_selective_scan,
    "normed selective": _size_selective_scan,
    "chunked": _size_chunked_scan,
    "delta": _size_delta_net,
    "channel delta": _size_delta_net,
    "short": _size_short_convolution,
    "stepwise": _size_stepwise_scan,
}

RECURRENT: Final = (
    SavedActivation("gate and input of the convolution, in the kernel's order", "projected", None, ("selective",)),
    SavedActivation("time steps, B and C, projected", "low", None, ("selective",)),
    SavedActivation("B and C, in the kernel's order", "low_states", None, ("selective",)),
    SavedActivation("results of the scan", "inner", None, ("selective",)),
    SavedActivation("states that the kernel notes", "noted_states", 4, ("selective",)),
    SavedActivation("exponentials, and their negatives", "decays", 8, ("selective",)),
    SavedActivation("fp32 biases of time steps and skips", "channels", 8, ("selective",)),
    # Jamba norms time steps, B and C, for which it calls one kernel after the other.
    SavedActivation("gate and input of the convolution", "projected", None, ("normed selective",)),
    SavedActivation("results of the convolution", "inner", None, ("normed selective",)),
    SavedActivation("the same, in the kernel's order", "inner", None, ("normed selective",)),
    SavedActivation("gate, in the kernel's order", "inner", None, ("normed selective",)),
    SavedActivation("time steps, in the kernel's order", "inner", None, ("normed selective",)),
    SavedActivation("results of the scan", "inner", None, ("normed selective",)),
    SavedActivation("the same gated, in the order of the projection's input", "inner", None, ("normed selective",)),
    SavedActivation("fp32 copies of time steps, B and C", "low", 4, ("normed selective",)),
    SavedActivation("time steps, B and C normed, before the weight", "low", None, ("normed selective",)),
    SavedActivation("time steps normed", "low_rank", None, ("normed selective",)),
    SavedActivation("B and C normed, in the kernel's order", "low_states", None, ("normed selective",)),
    SavedActivation("statistics of the norms of time steps, B and C", "tokens", 12, ("normed selective",)),
    SavedActivation("states that the kernel notes", "noted_states", 4, ("normed selective",)),
    SavedActivation("exponentials, and their negatives", "decays", 8, ("normed selective",)),
    SavedActivation("fp32 biases of time steps and skips", "channels", 8, ("normed selective",)),
    SavedActivation("gate, channels, B, C and time steps", "projected", None, ("chunked",)),
    SavedActivation("results of the scan", "inner", None, ("chunked",)),
    SavedActivation("statistics of the norm", "group_rows", 4, ("chunked",)),
    SavedActivation("exponentials, and their negatives", "decays", 8, ("chunked",)),
    SavedActivation("queries, keys and values, before the convolution", "convolved", None, ("delta",)),
    SavedActivation("queries and keys normed", "state_pairs", None, ("delta",)),
    SavedActivation("statistics of the norms of queries and keys", "pair_rows", 4, ("delta",)),
    SavedActivation("values", "inner", None, ("delta",)),
    SavedActivation("products of the keys in a chunk", "chunk_products", None, ("delta",)),
    SavedActivation("strengths", "state_heads", None, ("delta",)),
    SavedActivation("fp32 time steps, softplus and sums of decays", "state_heads", 12, ("delta",)),
    SavedActivation("fp32 copies of the result, and of the activation of the gate", "inner", 8, ("delta",)),
    SavedActivation("fp32 copies of the gate", "inner", 4, ("delta", "copied gate")),
    SavedActivation("result normed, before the weight", "inner", None, ("delta",)),
    SavedActivation("result normed", "inner", None, ("delta",)),
    SavedActivation("result gated", "inner", None, ("delta",)),
    SavedActivation("statistics of the norm", "state_heads", 4, ("delta",)),
    SavedActivation("exponentials, and their negatives", "decays", 8, ("delta",)),
    SavedActivation("queries, keys and values, before the convolution", "convolved", None, ("channel delta",)),
    SavedActivation("queries and keys normed", "state_pairs", None, ("channel delta",)),
    SavedActivation("statistics of the norms of queries and keys", "pair_rows", 4, ("channel delta",)),
    SavedActivation("values", "inner", None, ("channel delta",)),
    SavedActivation("products of the keys in a chunk", "chunk_products", None, ("channel delta",)),
    SavedActivation("products of queries and keys in a chunk", "chunk_products", None, ("channel delta",)),
    SavedActivation("strengths", "state_heads", None, ("channel delta",)),
    SavedActivation("fp32 sums of decays", "inner", 4, ("channel delta",)),
    SavedActivation("fp32 copies of the result, normed, weighted, and its gate", "inner", 16, ("channel delta",)),
    SavedActivation("result gated", "inner", None, ("channel delta",)),
    SavedActivation("statistics of the norm", "state_heads", 4, ("channel delta",)),
    SavedActivation("gates and input of the convolution", "projected", None, ("short",)),
    SavedActivation("input of the convolution, gated", "inner", None, ("short",)),
    SavedActivation("results of the convolution", "inner", None, ("short",)),
    SavedActivation("the same, gated", "inner", None, ("short",)),
    # RecurrentGemma's, which has no kernel: each step keeps the state before it and its decay, the first no decay.
    SavedActivation("gate and input of the convolution", "inner", 4, ("stepwise",)),
    SavedActivation("results of the convolution, also in the order of the blocks", "inner", 4, ("stepwise",)),
    SavedActivation("what the convolution is padded with", "padding", None, ("stepwise",)),
    SavedActivation("gates, decays, their squares and roots, and what they multiply", "inner", 16, ("stepwise",)),
    SavedActivation("fp32 states and decays of each step", "inner", 8, ("stepwise",)),
    SavedActivation("less the first decay", "final_states", -4, ("stepwise",)),
    SavedActivation("result, its gate activated, and both multiplied", "inner", 6, ("stepwise",)),
)
"""What such a layer keeps besides its norms and its input, by how it computes its states. mamba-ssm 2.3.2:
`MambaInnerFn` with its default `checkpoint_lvl` of 1 (Mamba, Falcon Mamba), `SelectiveScanFn` (Jamba) and
`MambaSplitConv1dScanCombinedFn` (Mamba 2); causal-conv1d 1.7: `CausalConv1dFn`; flash-linear-attention 0.6:
`ChunkGatedDeltaRuleFunction` and `ChunkKDAFunction`, whose decays families compute in other ways (`FurtherTensor`). A
short convolution is transformers' `Lfm2ShortConv`, around causal-conv1d's.
What is exponential is of parameters, so it does not grow with the tokens."""

_REST_OF_LAYER: Final = (
    SavedActivation("the norm before the MLP", "hidden", -8, ("rms", "then mlp")),
    SavedActivation("the norm before the MLP", "hidden", -10, ("rms32", "then mlp")),
)
"""What is not there, besides the MLP, while the recurrent part has its turn."""

_CHUNKED_ANYWAY: Final = (
    SavedActivation("gradients of all that was projected", "projected", None, ("chunked",)),
    SavedActivation("results of the convolution, computed again, and their gradients", "convolved", 4, ("chunked",)),
    SavedActivation("time steps and their sums, computed again", "state_heads", 10, ("chunked",)),
    SavedActivation("fp32 states behind the last token", "final_states", 4, ("chunked",)),
)
_CHUNKED_STATES: Final = (
    SavedActivation("states of the chunks and their gradients, also in fp32", "chunk_states", 12, ("chunked",)),
    SavedActivation("fp32 products of B and C in a chunk", "chunk_products", 4, ("chunked",)),
)
_CHUNKED_PRODUCTS: Final = (
    SavedActivation("states of the chunks and their gradients", "chunk_states", 4, ("chunked",)),
    SavedActivation("fp32 products of B and C in a chunk, and their gradients", "chunk_products", 8, ("chunked",)),
    SavedActivation("the latter in parts", "split_products", 4, ("chunked",)),
    SavedActivation("fp32 gradients of B and C", "grouped", 4, ("chunked",)),
)

RECURRENT_MOMENTS: Final = (
    PeakEvent(
        "backward pass of a selective scan",
        (
            SavedActivation("gradient of the layer's output", "hidden", None, ("selective",)),
            SavedActivation("the same in fp32", "hidden", 4, ("selective", "wide")),
            SavedActivation("gradients of gate and convolution's input", "projected", None, ("selective",)),
            SavedActivation("results of convolution, time steps and scan, computed again", "inner", 6, ("selective",)),
            SavedActivation("their gradients, and the last in another order", "inner", 8, ("selective",)),
            SavedActivation("gradients of time steps, B and C", "low", None, ("selective",)),
            SavedActivation("gradients of exponentials", "decays", 4, ("selective",)),
        ),
    ),
    PeakEvent(
        "backward pass of a selective scan between norms",
        (
            SavedActivation("gradient of the layer's output", "hidden", None, ("normed selective",)),
            SavedActivation(
                "gradients of the scan's results, and in the kernel's order", "inner", 4, ("normed selective",)
            ),
            SavedActivation("gradients of gate, time steps and channels", "inner", 6, ("normed selective",)),
            SavedActivation("input of the last projection, freed by then", "inner", -2, ("normed selective",)),
            SavedActivation("gradients of B and C, also in fp32", "low_states", 6, ("normed selective",)),
            SavedActivation("gradients of exponentials", "decays", 4, ("normed selective",)),
            *_REST_OF_LAYER,
        ),
        gone=("mlp", "experts"),
    ),
    PeakEvent(
        "backward pass of a scan in chunks, its states",
        (
            SavedActivation("gradient of the layer's output", "hidden", None, ("chunked",)),
            SavedActivation("the same in fp32", "hidden", 4, ("chunked", "wide")),
            SavedActivation("results of the norm, computed again, and gradients around it", "inner", 6, ("chunked",)),
            *_CHUNKED_ANYWAY,
            *_CHUNKED_STATES,
        ),
    ),
    PeakEvent(
        "backward pass of a scan in chunks, its products",
        (
            SavedActivation("gradient of the layer's output", "hidden", None, ("chunked",)),
            SavedActivation("the same in fp32", "hidden", 4, ("chunked", "wide")),
            SavedActivation("results of the norm, computed again, and gradients around it", "inner", 6, ("chunked",)),
            *_CHUNKED_ANYWAY,
            *_CHUNKED_PRODUCTS,
        ),
    ),
    PeakEvent(
        "backward pass of a short convolution",
        (
            SavedActivation("gradient of the layer's output", "hidden", None, ("short",)),
            SavedActivation("gradients of gates and input", "projected", None, ("short",)),
            SavedActivation("gradients of the convolution's results and input", "inner", 4, ("short",)),
            *_REST_OF_LAYER,
        ),
        gone=("mlp", "experts"),
    ),
    PeakEvent(
        "forward pass of linear attention's norm",
        (
            SavedActivation("the layer's input", "hidden", None, ("delta",)),
            SavedActivation("queries, keys, values and gate, projected", "projected", None, ("delta",)),
            SavedActivation("results of the convolution", "convolved", None, ("delta",)),
            SavedActivation("gate and result in order, and the result gated in fp32", "inner", 8, ("delta",)),
            SavedActivation("strengths and time steps", "state_heads", 12, ("delta",)),
            *_REST_OF_LAYER,
        ),
        gone=("mlp", "experts"),
    ),
)
"""When most is alive in a recurrent layer."""

MEGATRON_RECURRENT: Final = (
    SavedActivation("gate, channels, B, C and time steps", "projected", None, ("chunked",)),
    SavedActivation("results of the scan", "inner", None, ("chunked",)),
    SavedActivation("results of the scan, gated", "inner", None, ("chunked",)),
    SavedActivation("results of the norm", "inner", None, ("chunked",)),
    SavedActivation("statistics of the norm", "group_rows", 4, ("chunked",)),
    SavedActivation("exponentials, their negatives, and fp32 biases of time steps", "decays", 12, ("chunked",)),
)
"""The same of Megatron-LM's `MambaMixer` (megatron-core 0.15, `core/ssm/mamba_mixer.py`, `ssm_training`), whose norm
and last projection are outside the kernel."""
_MEGATRON_ANYWAY: Final = (
    SavedActivation("gradient of the layer's output", "hidden", None, ("chunked",), sequence=True),
    SavedActivation("gathered input of a layer, for which there is one buffer", "hidden", None, ("chunked", "gathers")),
)
MEGATRON_MOMENTS: Final = (
    PeakEvent("backward pass of a scan in chunks, its states", (*_MEGATRON_ANYWAY, *_CHUNKED_ANYWAY, *_CHUNKED_STATES)),
    PeakEvent(
        "backward pass of a scan in chunks, its products", (*_MEGATRON_ANYWAY, *_CHUNKED_ANYWAY, *_CHUNKED_PRODUCTS)
    ),
)
"""There, two results around the norm are freed by then, and two gradients of them are alive instead."""
