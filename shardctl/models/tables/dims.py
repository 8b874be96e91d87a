"""Names the logical dims that rows of a family's table use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.models.tables.family import ModelDims, Row


@value_class
class RowDims:
    """Those of some rows."""

    facts: ModelDims
    index: str
    rows: list[Row]

    def list_aliases(self, name: str) -> tuple[str, ...]:
        """Yield what a dim may be called: by itself, with a nested table's word, with an encoder-decoder's side."""
        return (f"{self.index.removesuffix('layer')}{name}", f"{self.index}_{name}", name)

    def known(self, name: str) -> str:
        """Return what the facts call it, or an empty string."""
        return next((one for one in self.list_aliases(name) if one in self.facts.dims), "")

    def has(self, name: str) -> bool:
        """Return whether a row has it."""
        called = self.known(name)
        return bool(called) and any(called in self.words(row) for row in self.rows)

    def size(self, name: str) -> int:
        """Return its elements."""
        return self.facts.size(self.known(name))

    def unit(self, name: str) -> int:
        """Return its elements that stay together."""
        dims = self.facts.dims[self.known(name)]
        return (dims[0] if isinstance(dims, tuple) else dims).unit

    def is_divided(self, name: str) -> bool:
        """Return whether tp divides it."""
        dims = self.facts.dims[self.known(name)]
        return (dims[0] if isinstance(dims, tuple) else dims).axis == "tp"

    def count_matrices(self, name: str) -> int:
        """Return how many matrices between it and what layers or experts read the rows hold, fused ones apart."""
        wide, size = {self.known("hidden"), self.known("routed") or self.known("hidden")}, self.size(name)
        called = [self.known(one) for one in (name, "pairs") if self.known(one)]
        return sum(
            self.facts.size(word) // size
            for row in self.rows
            if not wide.isdisjoint(row.dims.split())
            for word in self.words(row)
            if word in called
        )

    @staticmethod
    def words(row: Row) -> Iterator[str]:
        """Yield the names in a row's dims."""
        return (part for word in row.dims.split() for part in word.split("+"))
