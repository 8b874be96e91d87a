"""Judges what an engine says against what the source says, with bounds that follow from measured rounding.

In fp32, under vLLM 0.32 on the CPU, log-probabilities of small models of sixteen families were at most 1.8e-5 from
transformers', and BLOOM's 2.6e-4 (`docs/engines.md`). In bf16 the bound follows from how far bf16 takes the source.
"""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING, Final

from shardctl.base.value import state_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.verify.engine_result import Scores, TokenScores

_TOP_TOKEN_COUNT: Final = 5
BOUND: Final = 1e-3
"""Of the difference of two log-probabilities in fp32."""
MARGIN: Final = 4
"""In bf16: how often the source's own rounding an engine may differ."""


@state_class
class ScoreComparison:
    """How far two models are apart on the same tokens."""

    apart: float = 0.0
    """The largest difference of two log-probabilities."""
    compared: int = 0
    tokens: int = 0
    same: int = 0
    place: str = ""
    """Where they are furthest apart."""
    ties: int = 0
    """Prompts whose continuation was followed no further, since two tokens were as likely."""
    other: str = ""
    """The first token that is not the source's, and not as likely."""

    def compare(self, place: str, said: dict[int, float], wanted: Scores) -> None:
        """Note the log-probabilities of every token that both know."""
        for token, ours in said.items():
            theirs = _look_up(wanted, token)
            if theirs is None:
                continue
            self.compared += 1
            difference = abs(ours - theirs) if isfinite(ours) and isfinite(theirs) else 0.0 if ours == theirs else inf
            if difference > self.apart:
                self.apart, self.place = difference, place


def compare_scores(source: Sequence[TokenScores], engine: Sequence[TokenScores], bound: float) -> ScoreComparison:
    """Compare every log-probability that both know; a continuation only as far as its tokens are the same."""
    found = ScoreComparison()
    for number, (theirs, ours) in enumerate(zip(source, engine, strict=True)):
        for place, (wanted, said) in enumerate(zip(theirs.prompt, ours.prompt, strict=True)):
            found.compare(f"token {place + 1} of prompt {number}", said, wanted)
        for step, (wanted, said) in enumerate(zip(theirs.following, ours.following, strict=True)):
            found.compare(f"token {step} after prompt {number}", said, wanted)
            found.tokens += 1
            expected, chosen = theirs.tokens[step], ours.tokens[step]
            if expected == chosen:
                found.same += 1
                continue
            other = _look_up(wanted, chosen)
            if other is not None and wanted[expected] - other <= 2 * bound:
                found.ties += 1
            else:
                found.other = found.other or (
                    f"it continues prompt {number} with token {chosen} at step {step}, where the source has {expected}"
                )
            break
    return found


def measure_rounding(exact: Sequence[TokenScores], rounded: Sequence[TokenScores]) -> float:
    """Measure how far the source's likeliest tokens move when it computes in bf16."""
    found = ScoreComparison()
    for one, other in zip(exact, rounded, strict=True):
        for wanted, said in zip(one.prompt, other.prompt, strict=True):
            likeliest = sorted(range(len(wanted)), key=lambda token, row=wanted: -row[token])[:_TOP_TOKEN_COUNT]  # type: ignore[misc]
            found.compare("", {token: float(said[token]) for token in likeliest}, wanted)
    return found.apart


def _look_up(scores: Scores, token: int) -> float | None:
    """Return a token's log-probability if it is known."""
    if isinstance(scores, dict):
        return scores.get(token)
    return float(scores[token]) if token < len(scores) else None
