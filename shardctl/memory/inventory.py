"""A model's tensors counted by kind, so that what any mesh makes of them is worked out in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.placement import Member, Spec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from shardctl.dtype import DType
    from shardctl.manifest import Tensor
    from shardctl.placement import Cut

FLOATING: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""The stored types that an optimizer can train; others are codes of quantised weights, positions or masks."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Tensors that every mesh treats alike: of one shape, type, rule and layer; experts of a layer differ in number."""

    example: str
    """The canonical name of the first of them."""
    shape: tuple[int, ...]
    dtype: DType
    spec: Spec
    """How they are cut; of experts, as if each were the first."""
    members: tuple[int, ...]
    """How many tensors there are of each expert's number; one entry for what is not one of many."""
    trainable: bool

    @property
    def count(self) -> int:
        """Tensors."""
        return sum(self.members)

    @property
    def layers(self) -> tuple[int, ...]:
        """The pipeline layers that have it; none for what only the first or the last stage has."""
        return tuple(n for where, n in self.spec.where if where == "layer")

    @property
    def matrix(self) -> bool:
        """Whether it has at least two dims that are longer than one."""
        return sum(extent > 1 for extent in self.shape) > 1


@dataclass(frozen=True, slots=True)
class Inventory:
    """All tensors of a model."""

    kinds: tuple[Kind, ...]
    layers: int
    """Pipeline layers."""

    @property
    def elements(self) -> int:
        """Elements as stored, ties counted once, buffers included; of a quantised weight those of its codes."""
        return sum(kind.count * prod(kind.shape) for kind in self.kinds)

    @property
    def nbytes(self) -> int:
        """Bytes as stored, ties counted once."""
        return sum(kind.count * kind.dtype.nbytes(kind.shape) for kind in self.kinds)


def take_stock(
    tensors: Iterable[Tensor],
    specs: Mapping[str, Spec],
    layers: int,
    *,
    dtypes: Mapping[str, DType] | None = None,
    buffers: Collection[str] = (),
) -> Inventory:
    """Count `tensors` by kind, in model order; `dtypes` by name are those that will be written, if not the stored ones.

    `specs` says by name how each is cut; `buffers` are the names of what is never trained.
    """
    counts: dict[tuple[object, ...], dict[int, int]] = {}
    cuts: dict[tuple[tuple[Cut, ...], ...], int] = {}
    known: dict[int, tuple[object, int]] = {}  # the same by object: rows share few, and to hash cuts takes long
    shared: list[tuple[tuple[Cut, ...], ...]] = []  # each of them once
    kinds: dict[tuple[object, ...], tuple[str, tuple[int, ...], DType, Spec, bool]] = {}
    for tensor in tensors:
        spec = specs[tensor.name]
        dtype = dtypes[tensor.name] if dtypes is not None else tensor.dtype
        trainable = dtype.name in FLOATING and tensor.name not in buffers
        member = spec.member
        alike = (member.axis, member.count) if member else None
        if id(spec.cuts) not in known:
            known[id(spec.cuts)] = spec.cuts, cuts.setdefault(spec.cuts, len(cuts))
            if len(cuts) > len(shared):
                shared.append(spec.cuts)
        key = (tensor.shape, dtype.name, known[id(spec.cuts)][1], spec.where, alike, trainable)
        number = member.index if member else 0
        if key in counts:
            counts[key][number] = counts[key].get(number, 0) + 1
            continue
        counts[key] = {number: 1}
        same = shared[known[id(spec.cuts)][1]]
        first = Spec(same, spec.where, Member(member.axis, 0, member.count) if member else None)
        kinds[key] = (tensor.name, tensor.shape, dtype, first, trainable)
    return Inventory(
        tuple(
            Kind(
                name,
                shape,
                dtype,
                spec,
                tuple(counts[key].get(n, 0) for n in range(spec.member.count if spec.member else 1)),
                trainable,
            )
            for key, (name, shape, dtype, spec, trainable) in kinds.items()
        ),
        layers,
    )
