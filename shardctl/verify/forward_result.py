"""Describes the result of a forward pass: how far each block is from the source's, and what was replaced."""

from __future__ import annotations

from dataclasses import field
from math import inf
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardctl.base.errors import format_first_few
from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.verify.finding import CheckFinding
    from shardctl.verify.golden import GoldenComparison, GoldenInput, OutputSketch
    from shardctl.verify.tolerance import ChangeKind, DistanceTolerance


@value_class
class JoinedWeights:
    """Weights that ranks did not compute with as they hold them."""

    reason: str
    share: float
    """Of all weights of the model."""
    names: tuple[str, ...]
    """Of the tensors, in the model's order."""

    def __str__(self) -> str:
        return f"{self.share:.1%} of the weights, {format_first_few(list(self.names))}: {self.reason}"


@value_class
class ComputedShare:
    """What ranks computed with."""

    own: float
    """The share of the weights with which each rank computed as it holds them: a part, or a whole copy."""
    joined: tuple[JoinedWeights, ...] = ()


class BlockDistance(NamedTuple):
    """How far what a part computes is from the source's."""

    error: float
    """Relative L2 distance."""
    cosine: float
    """Smallest cosine similarity of the vectors along the last dim; -1 if they cannot be compared."""
    largest: float
    """Largest absolute difference of an element."""


@value_class
class OutputDistances:
    """How far the free-running outputs are from the source's, in the measures that papers and other tools give.

    Of outputs that are no logits, only the cosine similarity and the largest difference are measured.
    """

    positions: int
    cosine: float
    """Smallest cosine similarity of a position."""
    mean_cosine: float
    largest: float
    """Largest absolute difference of a logit."""
    kl: float | None = None
    """KL divergence of the shards' tokens from the source's, in nats, mean over positions."""
    largest_kl: float | None = None
    log_probability: float | None = None
    """Largest absolute difference of a log-probability."""
    top1: float | None = None
    """Share of positions whose likeliest token is the same."""
    top5: float | None = None
    """Share of the source's five likeliest tokens that are among the shards' five, mean over positions."""


@value_class
class TextPerplexity:
    """Perplexity of a text, in windows that do not overlap."""

    tokens: int
    """Tokens that were predicted."""
    window: int
    """Tokens of a window."""
    source: float
    """Of the source, cast as the shards are."""
    shards: float


@value_class
class CachedDecoding:
    """The end of each sequence decoded token by token with a KV cache, after a prefill of the beginning."""

    prefill: int
    decoded: int
    error: float
    """Relative L2 distance of the shards' outputs from the source's, both with a cache."""
    cache_error: float
    """The same of the source with a cache from the source without one, for information."""


@value_class
class BlockError:
    """One part of the model, fed the source's inputs."""

    name: str
    """The module, such as `model.layers.3`."""
    error: float
    """Relative L2 distance of its outputs; of several ranks, the farthest."""
    rank: str = ""
    """The rank that is meant, such as ``rank 1 (tp1)``, where ranks compute with parts."""
    miscut: bool = False
    """Whether its weights are right once joined, though ranks compute something else with their parts."""
    cosine: float = 1.0
    """Smallest cosine similarity of the vectors along the last dim."""
    largest: float = 0.0
    """Largest absolute difference of an element."""


@value_class
class PromptContinuation:
    """What one of the two makes of a prompt, always taking the likeliest token."""

    tokens: tuple[int, ...]
    text: str


@value_class
class GeneratedTexts:
    """The next tokens of a prompt, side by side."""

    prompt: str
    source: PromptContinuation
    shards: PromptContinuation

    @property
    def same(self) -> bool:
        """Whether the tokens are the same."""
        return self.source.tokens == self.shards.tokens


@value_class
class SecondOpinion:
    """What transformers' own tensor parallelism makes of the shards."""

    status: Literal["agrees", "differs", "skipped"]
    """Skipped also where its cuts are others than those of the shards, so that it proves nothing of them."""
    reason: str = ""
    error: float = inf
    """Relative L2 distance of the outputs of the farthest rank."""


@value_class
class ForwardResult:
    """The outcome; `status` is the verdict, and everything that was done otherwise than planned is in `notes`."""

    status: Literal["passed", "failed", "skipped"]
    reason: str = ""
    """Why it was skipped."""
    engine: str = ""
    """What ran, such as `4 virtual ranks in one process (pp2 x tp2)`."""
    share: ComputedShare | None = None
    """With which share of the weights ranks computed as they hold them; None if no rank computes with a part."""
    dtype: str = "fp32"
    device: str = "cpu"
    architecture: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    blocks: tuple[BlockError, ...] = ()
    """Every part of the model, in the order in which they ran."""
    output: str = ""
    """What the free-running outputs are, such as `logits` or `last_hidden_state`."""
    output_error: float = inf
    """Relative L2 distance of the free-running outputs."""
    unrounded_error: float | None = None
    """The same from the source as it was before it was cast to the shards' types, for information; None without a cast.
    """
    flips: int = 0
    """Positions whose likeliest token is another; reported, and not judged."""
    positions: int = 0
    tolerance: DistanceTolerance | None = None
    findings: tuple[CheckFinding, ...] = ()
    notes: tuple[str, ...] = ()
    """Every fallback, and what the pass did not reach."""
    generated: GeneratedTexts | None = None
    opinion: SecondOpinion | None = None
    """A second opinion, if one was asked for."""
    read_bytes: int = 0
    """Bytes read from both checkpoints."""
    golden: GoldenComparison | None = None
    """How far the output is from a golden one, if one was given."""
    sketch: OutputSketch | None = None
    """What a golden file keeps of the output, if one is to be written."""
    inputs: Mapping[str, GoldenInput] = field(default_factory=dict)
    """The arguments of the pass, if a golden file is to be written."""
    distances: OutputDistances | None = None
    """Of the shards from the source, cast as they are."""
    unrounded_distances: OutputDistances | None = None
    """Of the shards from the source as it is stored; None without a cast."""
    change: ChangeKind = "equal"
    """What changed the values between the source and the shards, by which bounds are chosen."""
    perplexity: TextPerplexity | None = None
    """Of `--text`."""
    decoding: CachedDecoding | None = None
    """Of `--decode`."""
    portable_bound: float = inf
    """The relative L2 distance that other kernels and another order of sums may cause on another machine."""

    @property
    def worst(self) -> BlockError | None:
        """The part that is farthest off."""
        return max(self.blocks, key=lambda block: block.error, default=None)
