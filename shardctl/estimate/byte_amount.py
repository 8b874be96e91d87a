"""Adds up bytes and keeps how they came about, so that a term of memory can show its formula."""

from __future__ import annotations

from shardctl.base.value import value_class


@value_class
class ByteAmount:
    """Bytes, and how they came about."""

    factors: tuple[tuple[str, float, float], ...] = ()
    """`(what is counted, bytes for each, how many)`"""

    @property
    def nbytes(self) -> float:
        """All of them together."""
        return sum(width * count for _, width, count in self.factors)

    def __add__(self, other: ByteAmount) -> ByteAmount:
        """Return both together; the same of several layers is added up."""
        found: dict[tuple[str, float], float] = {}
        for name, width, count in (*self.factors, *other.factors):
            found[name, width] = found.get((name, width), 0) + count
        return ByteAmount(tuple((name, width, count) for (name, width), count in found.items()))

    def times(self, layers: float) -> ByteAmount:
        """Return that of so many layers."""
        return ByteAmount(tuple((name, width, count * layers) for name, width, count in self.factors))

    def without(self) -> ByteAmount:
        """Return the same, to be taken away."""
        return ByteAmount(tuple((name, -width, count) for name, width, count in self.factors))

    def format_formula(self) -> str:
        """Return the sum as a formula, in which names stand for what is counted."""
        return " + ".join(f"{width:g} * {name}" for name, width, _ in self._merge_named_factors())

    def collect_inputs(self) -> dict[str, float]:
        """Return the numbers behind the names of the formula."""
        return {name: count for name, _, count in self._merge_named_factors()}

    def _merge_named_factors(self) -> tuple[tuple[str, float, float], ...]:
        """Return the factors with widths of the same things added up, and a number behind names of different things."""
        widths: dict[tuple[str, float], float] = {}
        for name, width, count in self.factors:
            widths[name, count] = widths.get((name, count), 0) + width
        seen: dict[str, int] = {}
        found = []
        for (name, count), width in widths.items():
            seen[name] = seen.get(name, 0) + 1
            found.append((name if seen[name] == 1 else f"{name}_{seen[name]}", width, count))
        return tuple(found)
