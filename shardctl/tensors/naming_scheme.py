"""Says which library's arrays a checkpoint holds, if they are not the model's own tensors."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from shardctl.base.value import value_class
from shardctl.tensors.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Mapping

Fact = str | int | bool | tuple[int, ...]
"""What decides between the variants of a schema: a version, a set of names, a padded extent."""


def format_rank_prefix(rank: int) -> str:
    """Format what stands before the names of a rank's arrays, where its files have its number and no more."""
    return f"rank{rank}/"


@value_class
class NamingScheme:
    """How another library spells a model: its naming scheme, and the variant of it that one checkpoint is in.

    Of a source, it stands beside the arrays that its files hold; of a target, beside those that are to be written.
    """

    schema: str
    """The naming scheme, by its name in `catalogue.SCHEMA_FILES`."""
    mesh: Mesh = field(default_factory=Mesh.of)
    """For which the arrays are cut; one device for arrays that are cut for none."""
    ranks: Mapping[int, str] = field(default_factory=lambda: {0: ""})
    """The ranks that have arrays of their own, and for each what stands before the arrays' names in the manifest.

    Ranks that only hold what another one holds, too, may be left out.
    """
    stages: tuple[int, ...] = ()
    """Layers per pipeline stage; empty if the files do not tell."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """What decides between variants; each schema says which facts it has."""

    def text(self, name: str, default: str = "") -> str:
        """Return a fact that is a word."""
        found = self.facts.get(name, default)
        return found if isinstance(found, str) else default

    def number(self, name: str, default: int = 0) -> int:
        """Return a fact that is a number."""
        found = self.facts.get(name, default)
        return int(found) if isinstance(found, int) else default

    def read_flag(self, name: str, *, default: bool = False) -> bool:
        """Return a fact that is true or false."""
        found = self.facts.get(name, default)
        return found if isinstance(found, bool) else default

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a fact that is several numbers; empty if there is none."""
        found = self.facts.get(name, ())
        return found if isinstance(found, tuple) else ()
