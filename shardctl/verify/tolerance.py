"""Computes how far two computations may differ, from measurements.

Over random models of 4 to 24 layers and tp 2 to 8, fp32 blocks that are fed the same inputs differed by at most 8e-7
and logits by at most 6.5e-6, relative to the norm; the smallest fault tried, one wrong row in one layer, by 4.6e-3.

In bf16 and fp16 rounding grows with depth and width, so it is measured in each run. The source computes three times: in
the narrow type, in fp32, and in the narrow type with its weights cut as the mesh has them, which adds in the order in
which sound ranks add. Logits of sound ranks are no farther from the source's than both are from fp32 together, and
may be `MARGIN` times as far; a block may be `MARGIN` times as far as the worst block is for another order of sums, and
no farther than `_MAX_TOLERANCES_BY_DTYPE`, so that a cut through what belongs together is not taken for rounding. As
sound ranks do the same sums as the source's weights in their place, bits must be equal to those: that finds what is
smaller than rounding.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Final, Literal

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterator

Torch = Any
FLOORS: Final = {"fp32": 6.5e-6, "bf16": 9e-3, "fp16": 1.2e-3}
"""The largest rounding that was measured without a fault, by type; fp16 keeps three bits more than bf16."""
MARGIN: Final = 4.0
"""How many times the rounding that was measured is allowed in narrow types."""
_MAX_TOLERANCES_BY_DTYPE: Final = {"bf16": MARGIN * FLOORS["bf16"], "fp16": MARGIN * FLOORS["fp16"]}
"""What is allowed to a block at most."""


ChangeKind = Literal["equal", "rounding", "cast", "quantization"]
"""What may change outputs: nothing, another order of sums, a cast of weights, or their quantization."""
KL_LIMITS: Final[dict[ChangeKind, float]] = {"cast": 1.5e-2, "quantization": 2e-1}
"""Mean KL divergence from the source before the change, in nats, beyond which a warning says so; in equal and rounded
outputs the relative L2 distance is the judge. Both are choices, not measurements of shardctl: MaxText's tests of
converted checkpoints pass `--max_kl_div=0.015`, and llama.cpp's table for Llama 3 8B (tools/perplexity/README.md) has
0.028 to 0.072 for types of four bits and 0.073 to 0.228 for types of three."""
LOG_PERPLEXITY_LIMIT: Final = 1e-3
"""Difference of the logarithms of two perplexities that rounding may cause in fp32, as of two log-probabilities."""


@value_class
class DistanceTolerance:
    """Bounds on relative L2 distances, `||shards - source|| / ||source||`."""

    block: float
    """Of a block fed the source's inputs."""
    warn: float
    """Of a block: up to here it is a warning, beyond an error."""
    logits: float
    """Of the free-running outputs."""
    floor: float
    """What rounding alone was measured to do."""

    @property
    def exact(self) -> bool:
        """Whether the bits must be equal."""
        return self.warn == 0


@value_class
class MeasuredRounding:
    """What rounding in a narrow type does to the source, as relative L2 distances."""

    output: float = 0.0
    """Of its output from that in fp32, and of the output in the ranks' order of sums from that in fp32, added."""
    block: float = inf
    """Of the worst block, of the two orders of sums; infinite if that is not known."""


def choose_tolerance(
    dtype: str, *, summed: bool, rounding: MeasuredRounding | None = None, stable: bool = True
) -> DistanceTolerance:
    """Choose the bounds.

    Unless ranks have `summed` what they compute, no sum changes its order: bits must be equal, if kernels are `stable`
    and give the same each time.

    In narrow types they follow from `rounding`; without it, those of blocks are the most that is ever allowed.
    """
    if not summed and stable:
        return DistanceTolerance(0.0, 0.0, 0.0, 0.0)
    if dtype in _MAX_TOLERANCES_BY_DTYPE:
        measured = rounding or MeasuredRounding()
        block = min(MARGIN * measured.block, _MAX_TOLERANCES_BY_DTYPE[dtype])
        return DistanceTolerance(block, block, MARGIN * measured.output, min(measured.block, FLOORS[dtype]))
    return DistanceTolerance(1e-5, 1e-4, 1e-4, FLOORS["fp32"])


def measure_distance(reference: object, candidate: object) -> float:
    """Measure the largest relative L2 distance among the tensors of two outputs of the same form.

    Infinite if forms differ, or if either has a NaN.
    """
    ours, theirs = list(list_float_tensors(candidate)), list(list_float_tensors(reference))
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        return inf
    return max((_measure_tensor_distance(a, b) for a, b in zip(theirs, ours, strict=True)), default=0.0)


def has_nan(output: object) -> bool:
    """Return whether some float of an output is not a number."""
    return any(bool(tensor.isnan().any()) for tensor in list_float_tensors(output))


def _measure_tensor_distance(reference: Torch, candidate: Torch) -> float:
    import torch

    same = reference == candidate  # which two NaNs are not
    if bool(same.all()):
        return 0.0
    zero = torch.zeros((), dtype=torch.float64, device=reference.device)
    difference = torch.where(same, zero, candidate.double() - reference.double())
    base = torch.where(reference.isfinite(), reference.double(), zero).norm()
    found = float(difference.norm() / base) if base else float(difference.norm())
    return inf if found != found else found  # noqa: PLR0124 - NaN


def list_float_tensors(output: object) -> Iterator[Torch]:
    """List the tensors of floats in an output."""
    import torch

    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from list_float_tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from list_float_tensors(value)
