"""Judges the numbers: which output is compared, which distances are too large, and how to report that."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import UnsupportedError
from shardctl.verify.finding import CheckFinding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.verify.forward_result import ForwardResult

Torch = Any
_MASKED: Final = -1e38
"""Logits below are those of tokens that a bias forbids with the lowest number of fp32 or bf16."""


def select_output(output: Torch) -> tuple[str, Torch]:
    """Select the output that is compared, and its name."""
    import torch

    for name in ("logits", "logits_per_image", "last_hidden_state"):
        found = output.get(name)
        if found is not None:
            return name, found
    for name, found in output.items():
        if isinstance(found, torch.Tensor) and found.is_floating_point():
            return name, found
    raise UnsupportedError("the model gives nothing that could be compared")


def count_flips(expected: Torch, found: Torch | None) -> tuple[int, int]:
    """Count at how many positions the likeliest token is another or cannot be told for NaN, and of how many."""
    if found is None or found.shape != expected.shape:
        return 0, 0
    ours, theirs = found.argmax(-1), expected.argmax(-1)
    lost = found.isnan().any(-1) | expected.isnan().any(-1)
    return int(((ours != theirs) | lost).sum()), ours.numel()


def find_lost_outputs(name: str, exact: Torch, found: Torch | None, *, allowed: bool) -> Iterator[CheckFinding]:
    """Yield an error for outputs of the shards that are not finite though those of the unrounded source are.

    A NaN is an error whatever the source has. If the record says that overflow was `allowed`, infinities are not, nor
    are they where the source has about the lowest number of fp32, which masks add to logits.
    """
    if found is None or found.shape != exact.shape:
        return
    nans = found.isnan()
    infinite = found.isinf() & exact.isfinite() & (exact.float() > _MASKED)
    lost = nans if allowed else nans | infinite
    if bool(lost.any()):
        kind = "not a number" if bool(nans.any()) else "infinite"
        message = f"{name} of the shards are {kind} in {int(lost.sum()):,} of {lost.numel():,} places"
        if bool(exact.isfinite().all()):
            message += "; those of the source before any cast are finite"
        yield CheckFinding("error", "forward", message)


def judge_result(result: ForwardResult, findings: list[CheckFinding], notes: list[str]) -> ForwardResult:
    """Return the result with its verdict: every part and the output against the tolerance."""
    bounds = result.tolerance
    assert bounds is not None  # noqa: S101 - set just now
    for block in result.blocks:
        if block.error > bounds.block:
            severe = block.error > bounds.warn
            most = (
                "bits must be equal, because no axis changes the order of sums"
                if bounds.exact
                else (f"at most {bounds.warn if severe else bounds.block:g}")
            )
            if block.miscut:
                message = (
                    f"{block.name} is cut so that its ranks do not compute what the source computes: "
                    f"{block.error:.2e}, {most}; a cut separates rows or columns that belong together"
                )
            else:
                where = f" on {block.rank}" if block.rank else ""
                message = f"{block.name} computes something else{where} than the source's: {block.error:.2e}, {most}"
            findings.append(CheckFinding("error" if severe else "warning", "forward", message, block.name))
    if result.output_error > bounds.logits:
        message = (
            f"{result.output} of the shards are {result.output_error:.2e} from the source's, at most {bounds.logits:g}"
        )
        findings.append(CheckFinding("error", "forward", message))
    failed = any(finding.severity == "error" for finding in findings)
    return replace(
        result, status="failed" if failed else "passed", findings=tuple(findings), notes=tuple(dict.fromkeys(notes))
    )
