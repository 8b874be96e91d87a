"""Lists what cross entropies keep that compute the logits, or their fp32 copies, for some tokens at a time.

Two kinds have to be told apart. torchtune and LitGPT leave each chunk to autograd: it keeps all logarithms of
probabilities, and only what passes between them is as small as a chunk. torchtitan, Liger and Unsloth compute a chunk's
gradient in the forward pass: nothing as large as the logits is ever there, but the head's gradient is from then on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class
from shardctl.estimate.training.saved_activations import PeakEvent, RuntimeProfile, SavedActivation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.estimate.workload import ChunkedLoss, TrainingWorkload

_CHUNKS: Final = 8
"""Chunks of the loss (torchtune, `num_output_chunks`; torchtitan, `ChunkedLossWrapper.Config.num_chunks`)."""
_LITGPT_TOKENS: Final = 128
"""Tokens of a sequence in a chunk (LitGPT, finetune/lora.py, `lm_head_chunk_size`)."""
_UNSLOTH_BYTES: Final = 16
"""Bytes that Unsloth takes an element of the logits to need."""
_UNSLOTH_TARGET: Final = 4 << 30
"""Bytes of the largest chunk (unsloth_zoo, `_CE_TARGET_GB_CAP`); half of the free memory if that is less."""


@value_class
class _LossTensors:
    """What a cross entropy in chunks has in the place of the runtime's."""

    head: tuple[SavedActivation, ...]
    """Kept after the forward pass."""
    alive: tuple[SavedActivation, ...]
    """While its largest chunk is computed, forward or backward."""
    after: tuple[SavedActivation, ...]
    """When the backward pass comes to the last norm."""


_LABELS: Final = SavedActivation("labels", "tokens", 16)
_HIDDEN: Final = SavedActivation("gradient of the norm's output", "hidden")
_HEAD: Final = SavedActivation("gradient of the head", "head_matrix", None, ("trained head",))
_LOSSES: Final[Mapping[ChunkedLoss, _LossTensors]] = {
    # torchtune 0.6.1, modules/loss/ce_chunked_output_loss.py: all logits are there, and chunk by chunk in fp32.
    "torchtune": _LossTensors(
        (
            SavedActivation("fp32 logarithms of probabilities", "logits", 4, ("eager loss",)),
            SavedActivation("logits", "logits", None, ("compiled loss",)),
            _LABELS,
        ),
        (
            SavedActivation("logits", "logits", None, ("eager loss",)),
            SavedActivation("fp32 copy of a chunk", "chunk_logits", 4, ("eager loss",)),
            SavedActivation("gradient of a chunk", "chunk_logits", None, ("compiled loss",)),
        ),
        # Each chunk of the head's input adds a gradient of the head to those before.
        (SavedActivation("gradient of the logits", "logits"), _HIDDEN, _HEAD),
    ),
    # litgpt 0.5.13, utils.py, `chunked_cross_entropy`: in the type that computes; the caller still has the logits.
    "litgpt": _LossTensors(
        (
            SavedActivation("logits", "logits"),
            SavedActivation("logarithms of probabilities", "logits", None, ("uncast",)),
            SavedActivation("fp32 logarithms of probabilities", "logits", 4, ("autocast",)),
            _LABELS,
        ),
        (
            SavedActivation("gradients of a chunk", "chunk_logits", 4, ("uncast",)),
            SavedActivation("fp32 gradients of a chunk", "chunk_logits", 8, ("autocast",)),
        ),
        (SavedActivation("logits and their gradient", "logits", 4), _HIDDEN, _HEAD),
    ),
    # torchtitan 0.3, components/loss.py, `ChunkedLossWrapper`: FSDP2 adds the head's gradients in fp32.
    "torchtitan": _LossTensors(
        (SavedActivation("fp32 sum of the gradients of the norm's output", "hidden", 4), _LABELS),
        (
            SavedActivation("fp32 logarithms of probabilities and gradients of a chunk", "chunk_logits", 12),
            SavedActivation("logits of a chunk", "chunk_logits", None),
            SavedActivation("gradient of the head", "head_matrix", None, ("trained head",)),
            SavedActivation("fp32 sum of the head's gradients", "head_matrix", 4, ("trained head",)),
        ),
        (_HIDDEN,),
    ),
    # Liger 0.8.5, ops/fused_linear_cross_entropy.py: a chunk's gradient takes the place of its logits.
    "liger": _LossTensors(
        (
            _HIDDEN,
            SavedActivation("what is wider of it", "hidden", 2, ("autocast",)),
            _HEAD,
            SavedActivation("what is wider of it", "head_matrix", 2, ("trained head", "autocast")),
            _LABELS,
        ),
        (SavedActivation("logits of a chunk, which their gradient replaces", "chunk_logits"),),
        (_HIDDEN, _HEAD),
    ),
    # unsloth_zoo 2026.10, fused_losses/cross_entropy_loss.py, `UnslothFusedLoss`, whose chunk is compiled.
    "unsloth": _LossTensors(
        (_HIDDEN, _HEAD, _LABELS),
        (
            SavedActivation("logits of a chunk and their gradient", "chunk_logits", 4),
            SavedActivation("gradient of the head by a chunk", "head_matrix", None, ("trained head",)),
        ),
        (_HIDDEN, _HEAD),
    ),
}


def replace_loss(runtime: RuntimeProfile, work: TrainingWorkload) -> RuntimeProfile:
    """Replace what a runtime keeps of its loss by what the chunked one does; the runtime itself if there is none."""
    if work.chunked_loss is None:
        return runtime
    loss = _LOSSES[work.chunked_loss]
    # transformers' last norm is a moment of its own, which needs its activations' gradients in fp32.
    norm = tuple(saved for saved in runtime.norm.alive if saved.size not in {"logits", "gathered_logits"})
    after = loss.after if norm == () or "head" in runtime.norm.name else (*norm, *_drop_hidden(loss.after))
    return replace(
        runtime,
        head=loss.head,
        loss=PeakEvent("loss of a chunk", loss.alive),
        forward_end=PeakEvent("end of the forward pass", loss.alive),
        norm=PeakEvent(runtime.norm.name, after),
    )


def _drop_hidden(tensors: tuple[SavedActivation, ...]) -> tuple[SavedActivation, ...]:
    return tuple(saved for saved in tensors if saved != _HIDDEN)


def count_chunk_tokens(work: TrainingWorkload, *, batch: int, queries: int, hidden: int, vocabulary: int) -> int:
    """Count the tokens of a chunk of the loss, of a rank's `batch` sequences of `queries` tokens.

    >>> from shardctl.estimate.workload import TrainingWorkload
    >>> work = TrainingWorkload(4096, chunked_loss="liger")
    >>> count_chunk_tokens(work, batch=4, queries=4096, hidden=4096, vocabulary=32000)
    2048
    """
    tokens = batch * queries
    match work.chunked_loss:
        case "torchtune" | "torchtitan":
            return batch * -(-queries // _CHUNKS)
        case "litgpt":
            return batch * min(_LITGPT_TOKENS, queries)
        case "liger":
            some = -(-tokens // -(-vocabulary // hidden))
            return min(1 << (some - 1).bit_length(), tokens)
        case "unsloth":
            needed = tokens * vocabulary * _UNSLOTH_BYTES / _UNSLOTH_TARGET
            return tokens if needed <= 1 else -(-tokens // (-int(-needed // 4) * 4))
    return tokens
