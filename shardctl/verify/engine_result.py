"""Describes what an engine was asked, and what it said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAMES: Final = ("vllm", "transformers", "fsdp2")


Scores = Any
"""Log-probabilities by token: a dict of some tokens, or an array of all."""


@value_class
class TokenScores:
    """What a model says to one prompt: log-probabilities, natural, and the tokens that it continues with."""

    prompt: tuple[Scores, ...]
    """For each token of the prompt but the first: those of some tokens, its own among them."""
    tokens: tuple[int, ...]
    """The likeliest token each time."""
    following: tuple[Scores, ...]
    """For each of `tokens`: those of some tokens, its own among them."""

    @classmethod
    def read(cls, said: Mapping[str, Sequence[object]]) -> TokenScores:
        """Read what a program wrote, where JSON has made text of tokens."""

        def scores(name: str) -> tuple[Scores, ...]:
            return tuple({int(token): float(value) for token, value in each.items()} for each in said[name])  # type: ignore[attr-defined]

        return cls(scores("prompt"), tuple(int(token) for token in said["tokens"]), scores("following"))  # type: ignore[call-overload]


@value_class
class EngineQuestion:
    """What an engine is to load, and how."""

    engine: str
    """One of `NAMES`."""
    path: str
    """A local directory."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids, as many in each."""
    tokens: int
    """How many are to follow each prompt."""
    dtype: str = "fp32"
    """That it computes in, `fp32` or `bf16`."""
    tp: int = 1
    pp: int = 1
    ep: bool = False
    """Whether experts are divided whole over the ranks of tp."""
    sharded: bool = False
    """Whether the directory is cut for exactly these ranks, in the engine's own way."""
    empty: bool = False
    """Whether it makes up the weights, to see if it can hold such a model at all."""


@value_class
class EngineResult:
    """How an engine that has loaded a checkpoint compares with the source under transformers."""

    engine: str
    versions: Mapping[str, str]
    ranks: int
    """Processes among which the model was divided."""
    dtype: str
    prompts: int
    compared: int
    """Log-probabilities that were compared."""
    apart: float
    """The largest difference of two log-probabilities, absolute, natural; infinite for one that is no number."""
    allowed: float
    tokens: int
    """Tokens that the engine continued with and that were compared."""
    same: int
    """Those of them that are the source's."""
