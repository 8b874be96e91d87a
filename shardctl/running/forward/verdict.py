"""Judges the numbers: which output is compared, which distances are too large, and how to report that."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite, log
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import UnsupportedError
from shardctl.verify.finding import CheckFinding
from shardctl.verify.forward_result import BlockDistance, OutputDistances
from shardctl.verify.tolerance import KL_LIMITS, LOG_PERPLEXITY_LIMIT, list_float_tensors, measure_distance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.verify.forward_result import ForwardResult
    from shardctl.verify.tolerance import ChangeKind

Torch = Any
_POSITIONS: Final = 64
"""Positions whose log-probabilities are computed at once: 64 of 256,000 tokens in fp64 are 125 MiB."""
_TOP: Final = 5
_MASKED_LOGIT_THRESHOLD: Final = -1e38
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


def measure_block(reference: Torch, candidate: Torch) -> BlockDistance:
    """Measure how far what a part computes is from the source's: the first of several outputs."""
    error = measure_distance(reference, candidate)
    ours, theirs = (next(list_float_tensors(each), None) for each in (candidate, reference))
    if not error or ours is None or theirs is None:
        return BlockDistance(error, 1.0, 0.0)
    if error == inf or ours.shape != theirs.shape or not ours.ndim:
        return BlockDistance(error, -1.0, inf)
    cosines, largest = _measure_vectors(theirs, ours)
    return BlockDistance(error, float(cosines.min()) if cosines.numel() else 1.0, largest)


def measure_outputs(name: str, reference: Torch, candidate: Torch | None) -> OutputDistances | None:
    """Measure how far outputs are apart; None where forms differ, or one is not finite."""
    if candidate is None or candidate.shape != reference.shape or not candidate.numel():
        return None
    if not bool(candidate.isfinite().all()) or not bool(reference.isfinite().all()):
        return None
    cosines, largest = _measure_vectors(reference, candidate)
    found = OutputDistances(cosines.numel(), float(cosines.min()), float(cosines.mean()), largest)
    if name != "logits":
        return found
    rows = zip(*(each.reshape(-1, each.shape[-1]).split(_POSITIONS) for each in (reference, candidate)), strict=True)
    kl, same, common, apart = [], 0, 0, 0.0
    best = min(_TOP, reference.shape[-1])
    for theirs, ours in rows:
        right, other = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
        kl += ((right.exp() * (right - other)).sum(-1)).clamp(min=0).tolist()
        apart = max(apart, float((right - other).abs().max()))
        same += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
        tops = theirs.topk(best, -1).indices, ours.topk(best, -1).indices
        common += int((tops[0].unsqueeze(-1) == tops[1].unsqueeze(-2)).sum())
    return replace(
        found,
        kl=sum(kl) / len(kl),
        largest_kl=max(kl),
        log_probability=apart,
        top1=same / len(kl),
        top5=common / (best * len(kl)),
    )


def _measure_vectors(reference: Torch, candidate: Torch) -> tuple[Torch, float]:
    """Measure the cosine similarity of each vector along the last dim, and the largest difference of an element.

    Elements that are infinite are the same in both, and count as zeros.
    """
    import torch

    theirs, ours = (
        each.reshape(-1, each.shape[-1] if each.ndim else 1).double().nan_to_num(0.0, 0.0, 0.0)
        for each in (reference, candidate)
    )
    products, norms = (theirs * ours).sum(-1), theirs.norm(dim=-1) * ours.norm(dim=-1)
    empty = (theirs.norm(dim=-1) == 0) & (ours.norm(dim=-1) == 0)
    cosines = torch.where(empty, 1.0, products / norms.where(norms > 0, 1.0)).clamp(-1, 1)
    return cosines, float((ours - theirs).abs().max()) if ours.numel() else 0.0


def find_large_divergence(change: ChangeKind, distances: OutputDistances | None) -> Iterator[CheckFinding]:
    """Yield a warning if outputs are farther from those before the change than the limit for such a change."""
    limit = KL_LIMITS.get(change)
    if limit is not None and distances is not None and distances.kl is not None and distances.kl > limit:
        message = (
            f"the mean KL divergence from the source before the {change} is {distances.kl:.2e} nats; the limit for a "
            f"{change}, which is a choice and not a measurement, is {limit:g}"
        )
        yield CheckFinding("warning", "forward", message)


def find_lost_outputs(name: str, exact: Torch, found: Torch | None, *, allowed: bool) -> Iterator[CheckFinding]:
    """Yield an error for outputs of the shards that are not finite though those of the unrounded source are.

    A NaN is an error whatever the source has. If the record says that overflow was `allowed`, infinities are not, nor
    are they where the source has about the lowest number of fp32, which masks add to logits.
    """
    if found is None or found.shape != exact.shape:
        return
    nans = found.isnan()
    infinite = found.isinf() & exact.isfinite() & (exact.float() > _MASKED_LOGIT_THRESHOLD)
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
    if result.decoding is not None and result.decoding.error > bounds.logits:
        message = (
            f"{result.output} of the shards with a KV cache are {result.decoding.error:.2e} from the source's, "
            f"at most {bounds.logits:g}"
        )
        findings.append(CheckFinding("error", "forward", message))
    if result.perplexity is not None and result.dtype != "fp32":
        notes.append(f"no bound on the perplexity of the text is known for {result.dtype}, so it was not judged")
    elif result.perplexity is not None:
        source, shards = result.perplexity.source, result.perplexity.shards
        limit = 0.0 if bounds.exact else LOG_PERPLEXITY_LIMIT
        if not isfinite(shards) or abs(log(shards / source)) > limit:
            message = f"the perplexity of the text is {shards:.6g} with the shards, and {source:.6g} with the source"
            findings.append(CheckFinding("error", "forward", message))
    failed = any(finding.severity == "error" for finding in findings)
    return replace(
        result, status="failed" if failed else "passed", findings=tuple(findings), notes=tuple(dict.fromkeys(notes))
    )
