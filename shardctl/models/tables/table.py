"""Turns a family's table and the facts of a config into the tensors of a model.

>>> from shardctl.models import describe_model
>>> model = describe_model({"architectures": ["GPT2LMHeadModel"], "n_layer": 1})
>>> model.tensors["transformer.h.0.attn.c_attn.weight"].shape
(768, 2304)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from itertools import groupby, product
from sys import intern
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import SourceError
from shardctl.base.value import state_class, value_class
from shardctl.models.tables.family import INDEX, LogicalDim
from shardctl.models.tables.fusion import TensorFusion, join_tensors, stack_tensors, transpose_tensor
from shardctl.models.tables.model import Model, ModelTensor
from shardctl.tensors.mesh import EXPERT_AXES, EXPERT_FSDP
from shardctl.tensors.placement import AxisPartition, GroupMember, PartitionSection, PartitionSpec, build_member_spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardctl.base.dtype import DType
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import Family, FusedArray, ModelClass, ModelDims, Row
    from shardctl.tensors.placement import Where

FSDP: Final = AxisPartition("fsdp")
"""FSDP cuts dim 0 of whatever tp left, in the ceil-sized parts of `torch.chunk`."""
_FIRST_AND_LAST_STAGES: Final[tuple[tuple[Where, int], ...]] = (("first", 0), ("last", 0))
_EXPERT_FSDP: Final = AxisPartition(EXPERT_FSDP)
"""The same for what ep and etp left of experts."""
MOST_TENSORS: Final = 500_000
"""Beyond this a config is damaged or hostile; the largest known models have about 100,000."""


@value_class
class _RowPlan:
    """A row with all that does not depend on its indices."""

    row: Row
    name: str
    """To be formatted with the values of the indices by `%`."""
    indices: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: DType
    cuts: tuple[tuple[AxisPartition, ...], ...]
    free: tuple[int, ...]
    only: tuple[tuple[frozenset[int], bool], ...]
    """Conditions on the outermost index: its values, and whether it must be one of them."""
    mine: bool
    """Whether the class has it; else it is known from other classes."""
    tied: bool | Mapping[int, int]
    """Whether it is one more name of another tensor; or for which values of the outermost index, and of which value."""
    optional: bool
    needed: frozenset[int] | None
    """The values of the outermost index for which it is not optional; None for all."""
    spare: bool
    whole: int | None
    """Which of the indices counts experts, if one does."""

    def holds_at(self, outermost: int) -> bool:
        """Return whether its conditions hold for this value of the outermost index."""
        return all((outermost in values) == wanted for values, wanted in self.only)


@state_class
class _ModelBuilder:
    """The tensors of one model, while they are made."""

    facts: ModelDims
    member: ModelClass
    dtype: DType
    share: bool
    cut_towers: bool
    parts: frozenset[str] = frozenset()
    spares: frozenset[str] = frozenset()
    tensors: dict[str, ModelTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    cuts: dict[tuple[tuple[AxisPartition, ...], ...], tuple[tuple[AxisPartition, ...], ...]] = field(
        default_factory=dict
    )
    """Cuts that are equal as one object, so that tensors that are cut alike share their specs, too."""
    specs: dict[tuple[object, ...], PartitionSpec] = field(default_factory=dict)
    members: dict[tuple[str, int], GroupMember] = field(default_factory=dict)
    layers: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        words = self.member.parts.split()
        self.parts = frozenset(word.removesuffix("?") for word in words)
        self.spares = frozenset(word.removesuffix("?") for word in words if word.endswith("?"))
        if self.member.labels is not None:
            labels = LogicalDim(self.member.labels, loose=True)
            self.facts = replace(self.facts, dims={**self.facts.dims, "labels": labels})

    def plan(self, row: Row, every_part: frozenset[str]) -> _RowPlan | None:
        """Return the row made ready, or None if a condition of the config excludes it."""
        only: list[tuple[frozenset[int], bool]] = []
        mine, spare = True, False
        for word in row.when.split():
            wanted, flag = not word.startswith("!"), word.removeprefix("!")
            if flag in every_part:
                mine &= (flag in self.parts) == wanted
                spare |= flag in self.spares
                continue
            value = self.facts.flags[flag]
            if not isinstance(value, bool):
                only.append((frozenset(value), wanted))
            elif value != wanted:
                return None
        needed = self.facts.flags[row.needed] if row.needed else True
        pieces = INDEX.split(self.full(row.name))
        counting = [place for place, name in enumerate(pieces[1::2]) if self.facts.indices[name].axis]
        shape, cuts, free = self.resolve_extents(row.dims, mine=mine, expert=bool(counting))
        if row.buffer:
            cuts = ((),) * len(shape)
        cuts = self.cuts.setdefault(cuts, cuts)
        dtype = BY_NAME[row.buffer or row.dtype] if row.buffer or row.dtype else self.dtype
        name, indices = "%d".join(piece.replace("%", "%%") for piece in pieces[::2]), tuple(pieces[1::2])
        return _RowPlan(
            row=row,
            name=name,
            indices=indices,
            shape=shape,
            dtype=dtype,
            cuts=cuts,
            free=free,
            only=tuple(only),
            mine=mine,
            tied=self.read_tie(row),
            optional=bool(row.buffer) or row.optional or not mine,
            needed=None if isinstance(needed, bool) else frozenset(needed),
            spare=spare and mine,
            whole=counting[0] if counting else None,
        )

    def read_tie(self, row: Row) -> bool | Mapping[int, int]:
        """Return whether the row's tensors are names of others, or which of them are, and of which layers' they are."""
        if not row.tie or row.tied == "always":
            return bool(row.tie)
        flag = self.facts.flags[row.tied]
        return flag if isinstance(flag, Mapping) else bool(flag)

    def full(self, name: str) -> str:
        """Return a row's name with the base model's prefix of this class."""
        if not name.startswith("."):
            return name
        return f"{self.member.prefix}{name}" if self.member.prefix else name[1:]

    def resolve_extents(
        self, dims: str, *, mine: bool, expert: bool
    ) -> tuple[tuple[int, ...], tuple[tuple[AxisPartition, ...], ...], tuple[int, ...]]:
        """Return shape, cuts and undetermined dims of `dims`; `expert` says that the tensor is one expert's."""
        shape: list[int] = []
        cuts: list[tuple[AxisPartition, ...]] = []
        free: list[int] = []
        for place, word in enumerate(dims.split()):
            if word == "*":
                free.append(place)
                word = "1"  # noqa: PLW2901 - a nominal extent, which the stored one replaces
            fused = [dim for name in word.split("+") for dim in self.list_fused_dims(name)]
            if any(dim.loose for dim in fused) and not mine:
                free.append(place)
            shape.append(sum(dim.size for dim in fused))
            cuts.append(self.cut(fused))
        if cuts:
            expert = expert or any(cut.axis in EXPERT_AXES for dim in cuts for cut in dim)
            cuts[0] = (*cuts[0], _EXPERT_FSDP if expert else FSDP)
        return tuple(shape), tuple(cuts), tuple(free)

    def list_fused_dims(self, name: str) -> tuple[LogicalDim, ...]:
        """Return the logical dims that a literal or a name in `dims` stands for."""
        if name.isdecimal():
            return (LogicalDim(int(name)),)
        dims = self.facts.dims[name]
        return dims if isinstance(dims, tuple) else (dims,)

    def cut(self, fused: Sequence[LogicalDim]) -> tuple[AxisPartition, ...]:
        """Return the cut that the logical dims fused along one dim ask for, if any."""
        axis, *others = {dim.axis or (dim.tower_axis if self.cut_towers else "") for dim in fused}
        if others:
            raise AssertionError(f"one axis must cut all of a fused dim: {fused}")
        if not axis:
            return ()
        if any(not dim.even and not dim.noun for dim in fused):
            return (AxisPartition(axis),)
        sections = (PartitionSection(d.size, d.unit, d.shared and self.share, d.noun, d.even) for d in fused)
        return (AxisPartition(axis, tuple(sections)),)

    def expand(self, plans: Sequence[_RowPlan], at: tuple[int, ...] = ()) -> None:
        """Add every tensor of `plans`, whose first ``len(at)`` indices are `at`."""
        depth = len(at)
        for name, some in groupby(plans, key=lambda p: p.indices[depth] if len(p.indices) > depth else ""):
            group = list(some)
            if not name:
                for plan in group:
                    self.add(plan, at)
                continue
            values = self.facts.indices[name].values
            if len(values) > MOST_TENSORS:
                raise SourceError(f"config.json describes more than {MOST_TENSORS} tensors")
            innermost = all(len(plan.indices) == depth + 1 for plan in group)
            within = self.facts.indices[name].within if at else None
            for value in values if within is None else (value for value in values if value in within[at[0]]):
                held = group if at else [plan for plan in group if plan.holds_at(value)]
                here = (*at, value)
                if innermost:
                    for plan in held:
                        self.add(plan, here)
                else:
                    self.expand(held, here)
                if len(self.tensors) > MOST_TENSORS:
                    raise SourceError(f"config.json describes more than {MOST_TENSORS} tensors")

    def add(self, plan: _RowPlan, at: tuple[int, ...]) -> None:
        """Add the tensor of `plan` whose indices are `at`."""
        name = intern(plan.name % at)
        where = self.stage(plan, at)
        if plan.tied is True:
            self.tie(name, self.full(plan.row.tie), plan, where)
            return
        if plan.tied and at[0] in plan.tied:
            self.tie(name, plan.name % (plan.tied[at[0]], *at[1:]), plan, where)
            return
        whole = plan.whole
        on = plan.row.on
        stages = self.list_stages() if on == "all" else _FIRST_AND_LAST_STAGES if on == "ends" else (where,)
        key = (id(plan.cuts), stages) if whole is None else (id(plan.cuts), stages, plan.indices[whole], at[whole])
        spec = self.specs.get(key)
        if spec is None:
            spec = self.specs[key] = self.build_spec(plan, stages, at)
        assert name not in self.tensors, name  # noqa: S101 - two rows with one name are our own bug
        optional = plan.optional or (plan.needed is not None and at[0] not in plan.needed)
        self.tensors[name] = ModelTensor(
            name, plan.shape, plan.dtype, spec, plan.row, (), optional, plan.spare, plan.free
        )

    def tie(self, name: str, first: str, plan: _RowPlan, where: tuple[Where, int]) -> None:
        """Make `name` one more name of the tensor `first` that it is tied to, or of the one that this is tied to."""
        first = self.aliases[name] = self.aliases.get(first, first)
        if not plan.mine:
            return
        tensor = self.tensors[first]
        stages = tensor.spec.where if where in tensor.spec.where else (*tensor.spec.where, where)
        self.tensors[first] = replace(tensor, ties=(*tensor.ties, name), spec=PartitionSpec(tensor.spec.cuts, stages))

    def build_spec(self, plan: _RowPlan, stages: tuple[tuple[Where, int], ...], at: tuple[int, ...]) -> PartitionSpec:
        """Build how a tensor is cut, and on which stages it lives; those of a layer's experts share a rule."""
        if plan.whole is None:
            return PartitionSpec(plan.cuts, stages)
        index = plan.indices[plan.whole]
        member = self.find_member(index, at[plan.whole])
        key = (id(plan.cuts), stages, index)
        rule = self.specs.get(key)
        if rule is None:
            rule = self.specs[key] = PartitionSpec(plan.cuts, stages, GroupMember(member.axis, 0, member.count))
        return build_member_spec(rule, member)

    def find_member(self, name: str, number: int) -> GroupMember:
        """Find which of the experts has this number, one object for each."""
        member = self.members.get((name, number))
        if member is None:
            index = self.facts.indices[name]
            member = self.members[name, number] = GroupMember(index.axis, index.values.index(number), len(index.values))
        return member

    def fusions(self, fused: FusedArray) -> Iterator[TensorFusion]:
        """Yield the arrays of `fused`, for all values of the indices of its name, of which all parts exist."""
        counted, index = INDEX.findall(fused.name), fused.stacked
        stack = self.facts.indices[index].values if index else (None,)
        full = [self.full(part) for part in fused.parts]
        for at in product(*(self.facts.indices[name].values for name in counted)):
            values = dict(zip(counted, at, strict=True))
            halves = [part.format(**values, **{index: "%"}).split("%") for part in full]
            groups = [[intern(str(n).join(half)) for half in halves] for n in stack]
            if groups[0][0] not in self.tensors:
                continue  # a layer without experts
            shapes = tuple(self.tensors[name].shape for name in groups[0])
            if fused.transposed:
                places = transpose_tensor(shapes[0])
            elif fused.joined:
                places = join_tensors(shapes * len(groups))
            else:
                places = stack_tensors(shapes, len(groups)) if index else join_tensors(shapes)
            names = tuple(name for group in groups for name in group)
            yield TensorFusion(self.full(fused.name).format(**values), names, places, fused.stored)

    def list_stages(self) -> tuple[tuple[Where, int], ...]:
        """List the stages of all layers of the decoder."""
        return tuple(("layer", n) for n in self.facts.indices["layer"].values)

    def stage(self, plan: _RowPlan, at: tuple[int, ...]) -> tuple[Where, int]:
        """Return where a tensor lives: where its row says, else with its layer."""
        on = plan.row.on
        if on:
            if on in ("first", "last", "all", "ends"):
                return ("last", 0) if on == "last" else ("first", 0)
            return self.facts.stages[on]
        layer = self.facts.indices[plan.indices[0]].layer
        assert layer is not None, plan.row  # noqa: S101 - a table that names no stage is our own bug
        if not plan.mine and layer + at[0] not in self.layers:
            return ("last", 0)
        self.layers.add(layer + at[0])
        return ("layer", layer + at[0])


def build_model(
    family: Family, architecture: str, config: ModelConfig, *, share_kv: bool, cut_towers: bool = False
) -> Model:
    """Build the model of a class of `family`, from its config alone.

    `share_kv` lets neighbouring tp ranks hold the same key/value head where there are fewer heads than ranks;
    `cut_towers` cuts models that see or hear over tp, too, where their tables say how.
    """
    facts = family.facts(family.complete_config(config))
    builder = _ModelBuilder(facts, family.classes[architecture], config.dtype(), share_kv, cut_towers)
    every_part = frozenset(w.removesuffix("?") for member in family.classes.values() for w in member.parts.split())
    plans = [plan for row in family.rows if (plan := builder.plan(row, every_part))]
    builder.expand(plans)
    return Model(
        family=family.name,
        transposed=family.transposed,
        architecture=architecture,
        layers=len(builder.layers),
        tensors=builder.tensors,
        aliases=builder.aliases,
        prefix=builder.member.prefix,
        prefixes=family.prefixes,
        legacy=family.legacy,
        fusions={fusion.name: fusion for fused in family.fused for fusion in builder.fusions(fused)},
    )
