"""Describes one addend of an estimate: its bytes, formula, source and interval."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Category = Literal["weights", "gradients", "optimizer", "activations", "kv cache", "workspace", "runtime"]
"""What memory is used for, in the order in which a bar shows it."""
CATEGORIES: Final[tuple[Category, ...]] = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "kv cache",
    "workspace",
    "runtime",
)
Tier = Literal["device", "host", "nvme"]
"""Where the bytes are."""
Counter = Literal["allocated", "reserved", "device"]
"""Who counts bytes of a device: `torch.cuda.memory_allocated`; `torch.cuda.memory_reserved`, which counts as well what
the allocator keeps for later; and the device itself (nvidia-smi), which also has what goes past the allocator."""
COUNTERS: Final[tuple[Counter, ...]] = ("allocated", "reserved", "device")
"""Each counts what those before it count."""


@value_class
class MemoryTerm:
    """An addend of what one rank needs.

    >>> MemoryTerm("weights", "weights", 10).exact, MemoryTerm("peak", "activations", 10, interval=(8, 12)).exact
    (True, False)
    """

    name: str
    """What it is, such as ``fp32 master weights``; unique within one estimate."""
    category: Category
    nbytes: int
    formula: str = ""
    """How it follows from `inputs`, such as ``12 * P / N``; empty for what headers say."""
    inputs: Mapping[str, float | str] = field(default_factory=dict)
    """The values of the formula's symbols."""
    source: str = ""
    """Where the formula is from: a paper and its section or table, a program and its version, or a measurement."""
    interval: tuple[int, int] | None = None
    """The least and the most bytes that are to be expected; None for what is exact."""
    tier: Tier = "device"
    counter: Counter = "allocated"
    """The first of `COUNTERS` that counts it."""
    spared: bool = False
    """Whether the allocator gives it back when memory runs out, so that counters see it and nobody needs it."""

    @property
    def exact(self) -> bool:
        """Whether it is counted, not modelled."""
        return self.interval is None

    @property
    def low(self) -> int:
        """The least bytes to be expected."""
        return self.nbytes if self.interval is None else self.interval[0]

    @property
    def high(self) -> int:
        """The most bytes to be expected."""
        return self.nbytes if self.interval is None else self.interval[1]


@value_class
class MemorySum:
    """Terms together."""

    nbytes: int
    low: int
    high: int
    exact: bool


def sum_terms(
    terms: Iterable[MemoryTerm],
    tier: Tier = "device",
    category: Category | None = None,
    counter: Counter | None = None,
) -> MemorySum:
    """Return the sum of those terms that are in `tier` and that `counter` counts, of one category or of all.

    Without a counter, it is the sum of what is needed.

    >>> some = MemoryTerm("weights", "weights", 10), MemoryTerm("context", "runtime", 3, counter="device")
    >>> sum_terms(some, counter="allocated").nbytes, sum_terms(some).nbytes
    (10, 13)
    """
    counted = COUNTERS if counter is None else COUNTERS[: COUNTERS.index(counter) + 1]
    some = [
        t
        for t in terms
        if t.tier == tier
        and category in {None, t.category}
        and t.counter in counted
        and not (counter is None and t.spared)
    ]
    return MemorySum(
        sum(t.nbytes for t in some),
        sum(t.low for t in some),
        sum(t.high for t in some),
        all(t.exact for t in some),
    )
