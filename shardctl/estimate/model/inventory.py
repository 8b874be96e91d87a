"""Counts a model's tensors by kind, so that what a mesh makes of them can be computed in milliseconds."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class
from shardctl.tensors.placement import GroupMember, PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from shardctl.base.dtype import DType
    from shardctl.tensors.manifest import Tensor

_LAYER_INDEX_PATTERN: Final = re.compile(r"\.\d+(?=\.)")
FLOATING: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""The stored types that an optimizer can train; others are codes of quantized weights, positions or masks."""


@value_class
class TensorKind:
    """Tensors that every mesh treats alike: of one shape, type, rule and layer; experts of a layer differ in number."""

    example: str
    """The canonical name of the first of them."""
    shape: tuple[int, ...]
    dtype: DType
    spec: PartitionSpec
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


@value_class
class TensorInventory:
    """All tensors of a model."""

    kinds: tuple[TensorKind, ...]
    layers: int
    """Pipeline layers."""
    unknown: tuple[str, ...] = ()
    """The mesh axes of which nobody knows how they would cut this model; they have degree 1."""

    @property
    def elements(self) -> int:
        """Elements as stored, ties counted once, buffers included; of a quantized weight those of its codes."""
        return sum(kind.count * prod(kind.shape) for kind in self.kinds)

    @property
    def nbytes(self) -> int:
        """Bytes as stored, ties counted once."""
        return sum(kind.count * kind.dtype.nbytes(kind.shape) for kind in self.kinds)


def build_inventory(
    tensors: Iterable[Tensor],
    specs: Mapping[str, PartitionSpec],
    layers: int,
    *,
    dtypes: Mapping[str, DType] | None = None,
    buffers: Collection[str] = (),
    apart: bool = False,
) -> TensorInventory:
    """Count `tensors` by kind, in model order; `dtypes` by name are those that will be written, if not the stored ones.

    `specs` says by name how each is cut; `buffers` are the names of what is never trained. Those of different modules
    are kept `apart`, though all else is the same.
    """
    rules = _SharedSpecs()
    found: dict[tuple[object, ...], tuple[Tensor, DType, PartitionSpec, bool, list[int]]] = {}
    alike: dict[tuple[object, ...], list[int]] = {}
    for tensor in tensors:
        name = tensor.name
        spec = specs[name]
        dtype = dtypes[name] if dtypes is not None else tensor.dtype
        buffer = name in buffers
        module = _LAYER_INDEX_PATTERN.sub("", name) if apart else ""
        quick = (id(spec.rule), tensor.shape, dtype, buffer, module)
        members = alike.get(quick)
        if members is None:
            rule = rules.find(spec)
            trainable = dtype.name in FLOATING and not buffer
            new = tensor, dtype, rule, trainable, [0] * (rule.member.count if rule.member else 1)
            members = alike[quick] = found.setdefault((id(rule), tensor.shape, dtype.name, trainable, module), new)[-1]
        members[spec.member.index if spec.member else 0] += 1
    return TensorInventory(
        tuple(
            TensorKind(first.name, first.shape, dtype, rule, tuple(members), trainable)
            for first, dtype, rule, trainable, members in found.values()
        ),
        layers,
    )


class _SharedSpecs:
    """Specs that are equal but for which expert they speak of, as one.

    Specs share their cuts, which take long to hash and are known again by object.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[PartitionSpec, PartitionSpec]] = {}
        self._rules: dict[PartitionSpec, PartitionSpec] = {}

    def find(self, spec: PartitionSpec) -> PartitionSpec:
        """Find the spec as if it were of the first expert."""
        member = spec.member
        key = (id(spec.cuts), spec.where, member.axis, member.count) if member else (id(spec.cuts), spec.where)
        known = self._known.get(key)
        if known is None:
            first = GroupMember(member.axis, 0, member.count) if member else None
            rule = PartitionSpec(spec.cuts, spec.where, first)
            known = self._known[key] = spec, self._rules.setdefault(rule, rule)
        return known[1]
