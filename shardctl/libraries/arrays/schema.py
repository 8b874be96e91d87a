"""Describes a schema: a table that says which arrays every rank has, and what they are made of."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Literal

from shardctl.base.errors import UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.arrays.composite import CompositeArray, SchemaEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shardctl.models import Model
    from shardctl.tensors.naming_scheme import NamingScheme

_PARAMETER_NAMES: Final = ("weight", "bias")
_NORM_WEIGHT_PATTERN: Final = re.compile(r"(?:.*\.)?(?:[a-z_]*norm|ln_[12f])\.weight")


@value_class
class Schema:
    """The naming scheme of another library."""

    name: str
    title: str
    """As messages say it."""
    check: Callable[[Model], None]
    """Raises UnsupportedError for a model whose arrays are not known, whatever the mesh."""
    entries: Callable[[Model, NamingScheme, int], Iterator[SchemaEntry]]
    """The arrays of one rank of `Dialect.ranks`, of a model that passes the check.

    Raises UnsupportedError, by name, for a variant or a tensor that has no place in it, and PartitionError for a mesh
    does not fit.
    """
    further: str = ""
    """Why it has no place for layers that predict further tokens, and where they are to be taken from."""
    left_behind: re.Pattern[str] | None = None
    """Names of arrays of such layers, which are left behind where the model has no place for them."""
    strangers: str = ""
    """Who else may have saved files that look alike, and what to do then."""
    reduction: Callable[[Mapping[str, Any], str], Literal["", "sum", "mean"]] | None = None
    """How the arrays that ranks have under one name become one, by the model's config and that name without what stands
    before it for a rank; empty for those that ranks divide, or share as they are."""

    def arrays(self, model: Model, dialect: NamingScheme) -> Iterator[tuple[int, SchemaEntry]]:
        """Yield the arrays of all ranks, each with its rank.

        Raises as `check` and `entries`, and at last UnsupportedError, by name, if a tensor of the model is in none.
        """
        self.check(model)
        placed: set[str] = set()
        for rank in dialect.ranks:
            for entry in self.entries(model, dialect, rank):
                placed.update(piece.tensor for piece in entry.content.pieces)
                yield rank, entry
        for tensor in model.own():
            if tensor.name not in placed:
                raise UnsupportedError(
                    f"{self.title} has no place for {tensor.name} of {model.architecture or 'this model'}"
                )


@value_class
class ModelParts:
    """A model's tensors as composites, by name."""

    model: Model
    title: str
    """Of the schema, for messages."""
    norms: str = ""
    """A *named* change of the weights of norms, as `Chunk.affine`; empty if they are stored as they are meant."""
    inner: str = ""
    """What stands before the names of a text model inside another, where its own names begin with ``model``."""

    def __contains__(self, name: str) -> bool:
        return self.resolve(name) in self.model.tensors

    def resolve(self, name: str) -> str:
        """Return the canonical name of a tensor that a table calls `name`."""
        if self.inner and name.startswith("model."):
            name = f"{self.inner}{name.removeprefix('model')}"
        return self.model.aliases.get(name, name)

    def __getitem__(self, name: str) -> CompositeArray:
        """Return a tensor, whole; raises UnsupportedError if the model has none of that name."""
        known = self.model.tensors.get(self.resolve(name))
        if known is None:
            raise UnsupportedError(f"{self.title} needs {name}, which {self.model.architecture or 'the model'} lacks")
        affine = self.norms if self.norms and _NORM_WEIGHT_PATTERN.fullmatch(known.name) else ""
        return CompositeArray.whole(known.name, known.shape, affine)

    def is_optional(self, name: str) -> bool:
        """Return whether a tensor that the model may have is not in the state dict of its class."""
        return self.model.tensors[self.resolve(name)].optional

    def unit(self, name: str, dim: int = 0) -> int:
        """Return elements along a dim of a tensor that stay together when it is cut: those of a head."""
        cuts = self.model.tensors[self.resolve(name)].spec.cuts
        return cuts[dim][0].sections[0].unit if cuts and cuts[dim] and cuts[dim][0].sections else 1

    def divide(self, name: str) -> list[CompositeArray]:
        """Divide a tensor along dim 0 into what its table says is one behind another, such as q, k and v."""
        cuts, found, start = self.model.tensors[self.resolve(name)].spec.cuts, [], 0
        for section in cuts[0][0].sections:
            found.append(self[name].part(0, start, start + section.size))
            start += section.size
        return found


@value_class
class SchemaRank:
    """One tensor-parallel rank, while its arrays are named."""

    parts: ModelParts
    tp: int
    """How many ranks share a layer."""
    index: int
    """Which of them this is."""

    def __contains__(self, name: str) -> bool:
        return name in self.parts

    def __getitem__(self, name: str) -> CompositeArray:
        """Return a tensor, whole."""
        return self.parts[name]

    def rows(self, name: str) -> CompositeArray:
        """Return this rank's rows of a projection whose outputs are cut."""
        return self[name].share(0, self.index, self.tp)

    def columns(self, name: str) -> CompositeArray:
        """Return this rank's columns of a projection whose inputs are cut."""
        return self[name].share(1, self.index, self.tp)

    def column_layer(self, name: str, new: str = "") -> Iterator[SchemaEntry]:
        """Yield a layer whose outputs are cut, its bias with them."""
        for kind in _PARAMETER_NAMES:
            if f"{name}.{kind}" in self:
                yield SchemaEntry(f"{new or name}.{kind}", self.rows(f"{name}.{kind}"))

    def row_layer(self, name: str, new: str = "") -> Iterator[SchemaEntry]:
        """Yield a layer whose inputs are cut; its bias is whole everywhere, and added by the first rank only."""
        yield SchemaEntry(f"{new or name}.weight", self.columns(f"{name}.weight"))
        if f"{name}.bias" in self:
            yield SchemaEntry(f"{new or name}.bias", self[f"{name}.bias"])
