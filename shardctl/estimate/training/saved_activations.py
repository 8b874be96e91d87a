"""Lets a profile declare which tensors a runtime keeps, with sizes and widths, and when more are alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.estimate.model.sizes import Size

Group = Literal["norms", "attention", "recurrent", "mlp", "experts", "further", "dropout"]
GROUPS: Final[tuple[Group, ...]] = ("norms", "attention", "recurrent", "mlp", "experts", "further", "dropout")
"""The parts of a layer that terms are given for."""
Flag = Literal[
    "rms",
    "rms16",
    "rms32",
    "layer",
    "layer32",
    "bare32",
    "rms heads",
    "rms16 heads",
    "rms32 heads",
    "layer heads",
    "layer32 heads",
    "bare32 heads",
    "fused",
    "scores",
    "full",
    "latent",
    "gated",
    "plain",
    "drop",
    "drop scores",
    "drop within",
    "kernel",
    "wide softmax",
    "fp32 scores",
    "narrow softmax",
    "kept softmax",
    "shifted scores",
    "sinks",
    "normed product",
    "wide router",
    "rotated product",
    "by heads",
    "powered norms",
    "own values",
    "padded values",
    "shared keys",
    "copied keys",
    "cap scores",
    "cap logits",
    "fused loss",
    "eager loss",
    "sent",
    "autocast",
    "uncast",
    "exchanges",
    "norm behind",
    "wide",
    "gathers",
    "then mlp",
    "gated attention",
    "gated shared",
    "wide weights",
    "narrow weights",
    "selective",
    "normed selective",
    "chunked",
    "delta",
    "channel delta",
    "copied gate",
    "short",
    "stepwise",
    "eager layer",
    "compiled layer",
    "eager model",
    "compiled model",
    "wide products",
    "narrow products",
    "compiled loss",
    "shared loss",
    "relu",
    "norms trained",
    "head norms trained",
    "latents trained",
    "output trained",
    "result needed",
    "result read",
    "copied result",
    "cast adapters",
    "fp32 products",
    "wide experts",
    "joined experts",
    "looped experts",
    "dropped adapters",
    "copied adapters",
    "mlp trained",
    "down trained",
    "activation needed",
    "experts trained",
    "experts down trained",
    "router trained",
    "frozen head",
    "trained head",
]
"""What a tensor depends on: the kind of norm; whether attention is fused or holds its scores; whether its keys are
projected or latent; whether MLPs have a gate; where dropout is; what is bounded by a hyperbolic tangent (Gemma 2);
whether the loss is computed in place of the logits; whether tokens are sent to experts of other ranks; whether cp ranks
exchange heads; whether there is a norm behind the MLP; whether what flows between layers is wider than what computes;
whether sequence parallelism gathers it; whether there is an MLP at all; whether attention's result, or that of shared
experts, has a gate (Qwen3-Next); whether the results of experts are weighted in fp32; whether norms read and return
fp32, of which each matrix casts its own copy; how a recurrent layer computes its states, and whether
it keeps the argument of its gate's activation;
whether a layer, the model or the loss is compiled; whether compiled products are in float8; whether tp ranks share the
loss; which weights are trained, for whose gradients alone something is kept; whether products cast what they read,
and whether experts compute in fp32 all the same, or return it; whether they lie in one array or run one after
another."""


@value_class
class SavedActivation:
    """A tensor that is kept, or that is alive for a moment."""

    name: str
    """What it is, in words."""
    size: Size
    """What its elements are counted by."""
    width: float | None = None
    """Bytes of an element; None for those of the type that computes. Negative for what is freed by then."""
    when: tuple[Flag, ...] = ()
    """All of these must hold."""
    sequence: bool = False
    """Whether sequence parallelism divides it over tp."""
    core: bool = False
    """Whether selective recomputation drops it: attention between its projections (Korthikanti et al. 2022, sec. 5)."""


@value_class
class PeakEvent:
    """A time of a layer's passes when much is alive besides what the forward pass kept."""

    name: str
    alive: tuple[SavedActivation, ...]
    gone: tuple[Group, ...] = ()
    """Parts of the layer that keep nothing by then."""
    when: tuple[Flag, ...] = ()
    """All of these must hold, or there is no such moment."""


@value_class
class RecurrenceSupport:
    """Which layers with a recurrent state a runtime has."""

    scans: frozenset[str]
    """The kinds of their scans (`Scan.kind`)."""
    tp: bool
    """Whether it divides them by tp."""
    chunk: int | None = None
    """The tokens of a chunk where it does not ask the config."""
    why: str = ""
    """Why it has no others, or does not divide them."""


@value_class
class RuntimeProfile:
    """What one runtime keeps."""

    kept: Mapping[Group, tuple[SavedActivation, ...]]
    """Of one layer, after its forward pass."""
    checkpoint: tuple[SavedActivation, ...]
    """Of one layer that will be recomputed."""
    shared: tuple[SavedActivation, ...]
    """What such a layer, once recomputed, keeps of it too, and is not there twice."""
    selected: tuple[SavedActivation, ...]
    """Of one layer of which only some operations' results are kept; empty where a runtime has no such list."""
    selected_shared: tuple[SavedActivation, ...]
    """What of these such a layer keeps in its own pass too, and is not there twice once the rest is computed again."""
    layer: tuple[PeakEvent, ...]
    """While a layer's backward pass runs; the gradient of its output is part of it."""
    head: tuple[SavedActivation, ...]
    """Of the head and the loss, after the forward pass, besides the last norm, which is kept as in a layer."""
    loss: PeakEvent
    """While the loss's backward pass runs."""
    norm: PeakEvent
    """While the last norm's backward pass runs, all that is alive of the head and the norm."""
    embedding: tuple[SavedActivation, ...]
    """On the first stage, of the embedding."""
    sequence_parallel: bool
    """Whether it has sequence parallelism."""
    spread: tuple[float, float]
    """Where the truth is to be expected, as factors of the estimate."""
    source: str
    recurrence: RecurrenceSupport
    forward_end: PeakEvent = PeakEvent("end of the forward pass", ())
    """While the loss is computed, besides what it keeps."""
