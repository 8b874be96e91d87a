"""Describes the mesh of devices: named axes, ranks, and how expert axes divide the ranks of a stage.

>>> mesh = Mesh.parse("pp=2,tp=4")
>>> mesh.world, mesh.coordinate(5)["pp"], mesh.coordinate(5)["tp"]
(8, 1, 1)
"""

from __future__ import annotations

import re
from math import gcd, prod
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UsageError
from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Mapping

AXES: Final = ("pp", "dp", "fsdp", "cp", "tp")
"""The axes that multiply the world, in the default order, outermost first."""
EXPERT_AXES: Final = ("ep", "etp")
"""The axes that re-factor the ranks of one stage and never multiply the world."""
REPLICATING: Final = ("dp", "cp")
"""Axes whose members hold the same weights."""
EXPERT_FSDP: Final = "efsdp"
"""What is left of fsdp for the experts, which ep and etp have already divided over some of its ranks."""
MOST_RANKS: Final = 1 << 17
"""Of a mesh; clusters have up to about 100,000 devices, and plans and layouts speak of every rank."""
_DEGREE_PATTERN: Final = re.compile(r"[0-9]{1,9}")
"""Of an axis, as text: no machine has a thousand million ranks."""
_WEIGHT_SHARDING_AXES: Final = ("pp", "fsdp", "tp", *EXPERT_AXES, EXPERT_FSDP)
"""The axes on which two ranks must agree to hold the same weights."""


@value_class
class Mesh:
    """A product of named axes, of which the last one varies fastest from rank to rank.

    Raises UsageError for an unknown axis, a degree below 1, too many ranks, or an ep that the ranks of a stage do not
    hold.

    >>> mesh = Mesh.of(pp=2, tp=2)
    >>> mesh.world, mesh.coordinate(3)["pp"], str(mesh)
    (4, 1, 'pp2 x tp2')
    """

    axes: tuple[tuple[str, int], ...]
    """`(axis, degree)` of every axis of `AXES`, outermost first."""
    ep: int = 1
    """Expert parallelism: experts are divided over this many ranks of a stage."""
    etp: int = 1
    """Tensor parallelism inside one expert; `of` and `parse` make it tp where experts are not divided by ep."""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if sorted(names) != sorted(AXES):
            unknown = [n for n in names if n not in AXES]
            what = f"unknown mesh axis {unknown[0]!r}" if unknown else f"mesh axes {names} are not each given once"
            raise UsageError(what, hint=f"the axes are {', '.join(AXES)}, and {', '.join(EXPERT_AXES)} within a stage")
        for name, degree in (*self.axes, ("ep", self.ep), ("etp", self.etp)):
            if degree < 1:
                raise UsageError(f"mesh axis {name} has degree {degree}; it must be at least 1")
        if self.world > MOST_RANKS:
            raise UsageError(
                f"a mesh of {self.world:,} ranks is larger than any cluster", hint=f"use {MOST_RANKS:,} ranks or fewer"
            )
        stage = self.world // self.degree("pp")
        if stage % (self.ep * self.etp):
            raise UsageError(
                f"ep={self.ep} x etp={self.etp} does not divide the {stage} ranks of a stage",
                hint="ep and etp divide the ranks of dp, fsdp, cp and tp, and add none; "
                f"a stage has {self.ep * self.etp} ranks with --dp {self.ep * self.etp}, for example",
            )

    @classmethod
    def of(cls, *, ep: int = 1, etp: int | None = None, **degrees: int) -> Mesh:
        """Return a mesh in the default axis order; axes not named have degree 1, but etp that of tp if ep has 1."""
        unknown = [name for name in degrees if name not in AXES]
        if unknown:
            raise UsageError(
                f"unknown mesh axis {unknown[0]!r}", hint=f"the axes are {', '.join((*AXES, *EXPERT_AXES))}"
            )
        return cls(tuple((name, degrees.get(name, 1)) for name in AXES), ep, _choose_etp(ep, etp, degrees))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Return a mesh from text such as ``pp=2,fsdp=2,tp=4``, outermost first; the axes not named go outside.

        >>> Mesh.parse("tp=2,pp=3").coordinate(1)["pp"]
        1
        """
        if not text.strip(" ,"):
            raise UsageError("the mesh is empty", hint="write it as --mesh pp=2,fsdp=2,tp=4, or leave it out")
        named: dict[str, int] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, degree = part.partition("=")
            if name not in (*AXES, *EXPERT_AXES) or _DEGREE_PATTERN.fullmatch(degree) is None or name in named:
                raise UsageError(
                    f"cannot read mesh part {part!r}",
                    hint="write it as --mesh pp=2,fsdp=2,tp=4, each axis once, outermost first",
                )
            named[name] = int(degree)
        ep, etp = named.pop("ep", 1), named.pop("etp", None)
        rest = tuple((name, 1) for name in AXES if name not in named)
        return cls((*rest, *named.items()), ep, _choose_etp(ep, etp, named))

    def degree(self, axis: str) -> int:
        """Return how many ranks the axis has.

        `efsdp` is the part of fsdp that divides the ranks of a stage which ep and etp leave over.
        """
        if axis in EXPERT_AXES:
            return self.ep if axis == "ep" else self.etp
        if axis == EXPERT_FSDP:
            return gcd(self.degree("fsdp"), self._expert_replicas)
        for name, degree in self.axes:  # five of them: quicker than a dict, and a search asks a million times
            if name == axis:
                return degree
        raise KeyError(axis)

    @property
    def _expert_replicas(self) -> int:
        return self.world // self.degree("pp") // (self.ep * self.etp)

    @property
    def _experts_follow(self) -> bool:
        """Whether experts are cut as all else is: by tp and fsdp."""
        return self.ep == 1 and self.etp == self.degree("tp")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return prod(degree for _, degree in self.axes)

    def coordinate(self, rank: int) -> Mapping[str, int]:
        """Return the rank's index on every axis.

        The expert axes re-number the ranks of a stage: etp innermost, then ep, then efsdp; what is left over are
        replicas of the experts, counted by `replica`. Experts that are cut like all else are on the same ranks.
        """
        at: dict[str, int] = {}
        rest = rank
        for name, degree in reversed(self.axes):
            rest, at[name] = divmod(rest, degree)
        order = [name for name, _ in self.axes if name != "pp"]
        if self._experts_follow:
            order = [*(name for name in order if name not in {"fsdp", "tp"}), "fsdp", "tp"]
        within = 0
        for name in order:
            within = within * self.degree(name) + at[name]
        for name in ("etp", "ep", EXPERT_FSDP):
            within, at[name] = divmod(within, self.degree(name))
        at["replica"] = within
        return at

    def label(self, rank: int) -> str:
        """Return the rank's place in words, such as ``pp1 tp0``; axes of degree 1 are left out."""
        return self.place(self.coordinate(rank))

    def place(self, at: Mapping[str, int]) -> str:
        """Return the same of a coordinate."""
        return " ".join(f"{name}{at[name]}" for name, degree in self.axes if degree > 1) or "only"

    def __str__(self) -> str:
        sizes = [f"{name}{degree}" for name, degree in self.axes if degree > 1]
        if not self._experts_follow:
            sizes += [f"{name}{degree}" for name, degree in (("ep", self.ep), ("etp", self.etp)) if degree > 1]
        return " x ".join(sizes) or "one device"


def build_holding_key(at: Mapping[str, int]) -> tuple[int, ...]:
    """Build what a coordinate has in common with those of all ranks that hold the same parts of everything.

    >>> mesh = Mesh.of(dp=2, tp=2)
    >>> [build_holding_key(mesh.coordinate(rank))[2] for rank in range(4)]
    [0, 1, 0, 1]
    """
    return tuple(at[axis] for axis in _WEIGHT_SHARDING_AXES)


def _choose_etp(ep: int, etp: int | None, degrees: Mapping[str, int]) -> int:
    """Choose the degree of etp.

    By default, experts that ep does not divide are cut by tp, as vLLM and transformers do.
    """
    if etp is not None:
        return etp
    return degrees.get("tp", 1) if ep == 1 else 1
