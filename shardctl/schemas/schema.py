"""What a schema is: one table that says, for every rank, which arrays it has and of what they are made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardctl.errors import UnsupportedError
from shardctl.schemas.composite import Composite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardctl.dialect import Dialect
    from shardctl.models import Model
    from shardctl.schemas.composite import Entry


_NORM: Final = re.compile(r"(?:.*\.)?(?:[a-z_]*norm|ln_[12f])\.weight")


def _nothing(model: Model, dialect: Dialect) -> frozenset[str]:
    del model, dialect
    return frozenset()


@dataclass(frozen=True, slots=True)
class Schema:
    """The naming scheme of another library."""

    name: str
    title: str
    """As messages say it."""
    entries: Callable[[Model, Dialect, int], Iterator[Entry]]
    """The arrays of one rank of `Dialect.ranks`.

    Raises UnsupportedError, by name, for a model or a variant that it has no place for, and CutError for a mesh that
    does not fit.
    """
    left_out: Callable[[Model, Dialect], frozenset[str]] = _nothing
    """The model's tensors that it has no place for and does without; whoever writes says so."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A model's tensors as composites, by name."""

    model: Model
    title: str
    """Of the schema, for messages."""
    norms: str = ""
    """A *named* change of the weights of norms, as `Chunk.affine`; empty if they are stored as they are meant."""

    def __contains__(self, name: str) -> bool:
        return self.model.aliases.get(name, name) in self.model.tensors

    def __getitem__(self, name: str) -> Composite:
        """A tensor, whole; raises UnsupportedError if the model has none of that name."""
        known = self.model.tensors.get(self.model.aliases.get(name, name))
        if known is None:
            raise UnsupportedError(f"{self.title} needs {name}, which {self.model.architecture or 'the model'} lacks")
        affine = self.norms if self.norms and _NORM.fullmatch(known.name) else ""
        return Composite.whole(known.name, known.shape, affine)

    def unit(self, name: str, dim: int = 0) -> int:
        """Elements along a dim of a tensor that stay together when it is cut: those of a head."""
        cuts = self.model.tensors[self.model.aliases.get(name, name)].spec.cuts
        return cuts[dim][0].sections[0].unit if cuts and cuts[dim] and cuts[dim][0].sections else 1

    def refuse_others(self, known: frozenset[str] | set[str]) -> None:
        """Raise UnsupportedError, by name, if the model has a tensor of its own that is not among `known`."""
        for tensor in self.model.own():
            if tensor.name not in known:
                raise UnsupportedError(
                    f"{self.title} has no place for {tensor.name} of {self.model.architecture or 'this model'}"
                )
