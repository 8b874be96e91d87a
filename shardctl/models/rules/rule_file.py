"""Reads rule files, in which users say how tensors of models are cut that shardctl does not know."""

from __future__ import annotations

import re
from dataclasses import field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from shardctl.base.errors import UsageError, format_first_few
from shardctl.base.value import value_class
from shardctl.models.names.binding import find_canonical_name
from shardctl.models.rules.rule_cuts import Rule, parse_rule
from shardctl.models.tables.family import Row
from shardctl.models.tables.layer_names import count_layers
from shardctl.models.tables.model import Model, ModelTensor
from shardctl.models.tables.name_pattern import ExpertPattern, LayerPattern, PatternList
from shardctl.storage.bounded_text import RULE_TEXT, parse_toml, read_file
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Region, Tensor
from shardctl.tensors.placement import GroupMember, PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardctl.tensors.manifest import Manifest
    from shardctl.tensors.placement import Where

_RULE_FIELD_NAMES: Final = ("to", "stacked", "shape", "transposed")
_PLACEHOLDER_PATTERN: Final = re.compile(r"\{([a-z_]+)\}")
_MATRIX_NDIM: Final = 2


@value_class
class _NamingLine:
    """One line of `[names]`."""

    pattern: str
    """Stored names: `{word}` is a number, `*` one part of a name, `**` any number of parts."""
    to: str
    """The tensor's name, with the numbers of the pattern; empty for arrays that are left behind."""
    stacked: int | None = None
    """The dim whose indices are tensors of their own, numbered by the one `{word}` that only `to` has."""
    shape: tuple[int, ...] | None = None
    """The shape in which the array, or an index of it, is seen; one extent may be -1."""
    transposed: bool = False

    def build_expression(self) -> re.Pattern[str]:
        """Return the pattern, its numbers as groups."""
        text = re.escape(self.pattern).replace(r"\*\*", ".*").replace(r"\*", "[^.]+")
        return re.compile(re.sub(r"\\\{([a-z_]+)\\\}", r"(?P<\1>[0-9]+)", text))

    def tensors(self, stored: Tensor, numbers: Mapping[str, str]) -> Iterator[Tensor]:
        """Yield the tensors that lie in an array.

        Raises UsageError if the array has no such dim or shape, or is not stored as one whole.
        """
        if len(stored.chunks) != 1 or not isinstance(stored.chunks[0].where, Region):
            raise UsageError(f"{stored.name} is stored in parts, and [names] is for arrays that are stored whole")
        chunk, where = stored.chunks[0], stored.chunks[0].where
        if self.stacked is None:
            yield self._view_tensor(self.to.format(**numbers), stored, chunk, stored.shape, where)
            return
        if not 0 <= self.stacked < len(stored.shape):
            raise UsageError(f"[names] says stacked = {self.stacked} of {stored.name}, which is {list(stored.shape)}")
        (counted,) = set(_PLACEHOLDER_PATTERN.findall(self.to)) - numbers.keys()
        rest = (*stored.shape[: self.stacked], *stored.shape[self.stacked + 1 :])
        strides = (*where.strides[: self.stacked], *where.strides[self.stacked + 1 :])
        for index in range(stored.shape[self.stacked]):
            at = Region(where.file, where.offset + index * where.strides[self.stacked], strides)
            yield self._view_tensor(self.to.format(**numbers, **{counted: index}), stored, chunk, rest, at)

    def _view_tensor(self, name: str, stored: Tensor, chunk: Chunk, shape: tuple[int, ...], where: Region) -> Tensor:
        views = [_RowView(0, shape, 0, where.strides)]
        if self.shape is not None:
            shape, views = _reshape_array(stored.name, shape, where.strides, self.shape)
        if self.transposed and len(shape) != _MATRIX_NDIM:
            raise UsageError(f"[names] transposes {stored.name}, but it is {list(shape)}")
        turn = -1 if self.transposed else 1
        chunks = []
        for view in views:
            origin = (view.row, *(0,) * (len(shape) - 1)) if shape else ()
            there = Region(where.file, where.offset + view.offset, view.strides[::turn])
            chunks.append(replace(chunk, box=Box(origin[::turn], view.shape[::turn]), where=there))
        return Tensor(name, stored.dtype, shape[::turn], tuple(chunks))


@value_class
class _NamingTable:
    """All of `[names]`."""

    lines: tuple[_NamingLine, ...]

    def apply_names(self, stored: Manifest) -> Manifest:
        """Return the checkpoint under the names that the file gives.

        Raises UsageError for a name that no line matches, or that two arrays would have.
        """
        expressions = [line.build_expression() for line in self.lines]
        tensors: dict[str, Tensor] = {}
        unmatched = []
        for name, tensor in stored.tensors.items():
            found = next(((n, match) for n, e in enumerate(expressions) if (match := e.fullmatch(name))), None)
            if found is None:
                unmatched.append(name)
                continue
            line = self.lines[found[0]]
            for made in line.tensors(tensor, found[1].groupdict()) if line.to else ():
                if made.name in tensors:
                    raise UsageError(f"[names] calls two arrays {made.name}: {name} is the second")
                tensors[made.name] = made
        if unmatched:
            raise UsageError(
                f"no line of [names] matches {format_first_few(unmatched)}",
                hint='give each a name, or leave it behind: "opt_state.**" = ""',
            )
        return replace(stored, tensors=tensors)


class _RowView(NamedTuple):
    """Rows of an array that is seen in another shape."""

    row: int
    """The first of them."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from where the array begins."""
    strides: tuple[int, ...]
    """Bytes."""


@value_class
class RuleFile:
    """A rule file, read and checked."""

    path: str
    """Where it was read from, for messages."""
    rules: tuple[Rule, ...]
    """In order; the first that matches a name is the one."""
    layers: tuple[LayerPattern, ...] = ()
    """Where layers stand in names; those of a second pattern follow those of the first."""
    last: PatternList = field(default_factory=lambda: PatternList(()))
    """The tensors of the last stage."""
    experts: tuple[ExpertPattern, ...] = ()
    """Where experts stand that have tensors of their own, which ep divides."""
    names: _NamingTable | None = None
    """Which tensors lie in which stored arrays, where the names of files are not the model's."""

    @property
    def cuts(self) -> bool:
        """Whether it says how tensors are cut; one that only names them leaves that to the family."""
        return bool(self.rules or self.layers or self.experts)

    def model(self, stored: Manifest, architecture: str = "") -> Model:
        """Return a model known from this file alone: canonical names are the stored ones.

        Raises UsageError naming the tensors that no rule matches.
        """
        matches = self._match_rules(stored)
        unmatched = [name for name in stored.tensors if name not in matches]
        if unmatched:
            raise UsageError(
                f"no rule of {self.path} matches {format_first_few(unmatched)}",
                hint='add a rule for them; "**" = [] as the last one leaves all others whole',
            )
        stages, counted = self._assign_stages(stored.tensors), ""
        if not stages:  # then names say where the layers are, as without rules
            places = count_layers({name: tensor.shape for name, tensor in stored.tensors.items()})
            stages, counted = {name: places.find_stage(name) for name in stored.tensors}, str(places)
        members = self._find_members(stored.tensors)
        tensors = {
            name: self._tensor(t, matches[name], stages.get(name), members.get(name))
            for name, t in stored.tensors.items()
        }
        return Model(
            family="",
            architecture=architecture,
            layers=max((n + 1 for where, n in stages.values() if where == "layer"), default=0),
            tensors=tensors,
            warnings=self._list_unused_rules(set(matches.values())),
            counted=counted,
        )

    def over(self, model: Model, stored: Manifest) -> Model:
        """Return `model` with the cuts and stages of this file, and with the tensors that only it knows."""
        tensors = dict(model.tensors)
        names = [*tensors, *(n for n in stored.tensors if find_canonical_name(model, n) is None)]
        stages, members = self._assign_stages(dict.fromkeys(names)), self._find_members(names)
        order = PatternList([rule.pattern for rule in self.rules])
        used: set[int] = set()
        for name in names:
            mine = tensors.get(name)
            found = next((n for n in map(order.first, (name, *(mine.ties if mine else ()))) if n is not None), None)
            if found is not None:
                used.add(found)
            where = stages.get(name)
            if mine is None:
                if found is not None:
                    tensors[name] = self._tensor(stored.tensors[name], found, where, members.get(name))
            elif found is not None or where is not None:
                tensors[name] = self._apply_rule(mine, found, where, members.get(name))
        layers = max([model.layers, *(n + 1 for where, n in stages.values() if where == "layer")])
        return replace(
            model, layers=layers, tensors=tensors, warnings=(*model.warnings, *self._list_unused_rules(used))
        )

    def _match_rules(self, stored: Manifest) -> dict[str, int]:
        order = PatternList([rule.pattern for rule in self.rules])
        return {name: found for name in stored.tensors if (found := order.first(name)) is not None}

    def _assign_stages(self, names: Mapping[str, object]) -> dict[str, tuple[Where, int]]:
        """Return the stages of the names that `[layers]` speaks of; layers count from 0 whatever their numbers."""
        stages: dict[str, tuple[Where, int]] = {}
        below = 0
        for pattern in self.layers:
            numbers = {name: n for name in names if name not in stages and (n := pattern.number(name)) is not None}
            layers = {n: below + place for place, n in enumerate(sorted(set(numbers.values())))}
            stages.update({name: ("layer", layers[n]) for name, n in numbers.items()})
            below += len(layers)
        for name in names:
            if name not in stages and self.last.first(name) is not None:
                stages[name] = ("last", 0)
        return stages

    def _find_members(self, names: Iterable[str]) -> dict[str, GroupMember]:
        """Find which of the experts each name below a pattern of `[experts]` is of."""
        found = {name: part for name in names for each in self.experts if (part := each.split(name)) is not None}
        numbers: dict[str, set[int]] = {}
        for group, number in found.values():
            numbers.setdefault(group, set()).add(number)
        for group, counted in numbers.items():
            if counted != set(range(len(counted))):
                raise UsageError(f"the experts of {group} are not numbered from 0, as {self.path} says")
        return {name: GroupMember("ep", number, len(numbers[group])) for name, (group, number) in found.items()}

    def _tensor(
        self, stored: Tensor, rule: int, where: tuple[Where, int] | None, member: GroupMember | None
    ) -> ModelTensor:
        chosen = self.rules[rule]
        cuts = chosen.cuts(stored.name, stored.shape, expert=member is not None)
        spec = PartitionSpec(cuts, (where or ("first", 0),), member)
        return ModelTensor(stored.name, stored.shape, stored.dtype, spec, Row(chosen.pattern, ""))

    def _apply_rule(
        self, tensor: ModelTensor, rule: int | None, where: tuple[Where, int] | None, member: GroupMember | None
    ) -> ModelTensor:
        row, spec = tensor.row, tensor.spec
        if rule is not None:
            chosen = self.rules[rule]
            row = Row(chosen.pattern, row.dims)
            member = member or spec.member
            spec = replace(spec, cuts=chosen.cuts(tensor.name, tensor.shape, expert=member is not None), member=member)
        if where is not None:
            spec = replace(spec, where=(where,))
        return replace(tensor, row=row, spec=spec)

    def _list_unused_rules(self, used: set[int]) -> tuple[str, ...]:
        return tuple(
            f"the rule {rule.pattern!r} of {self.path} matches no tensor"
            for place, rule in enumerate(self.rules)
            if place not in used
        )


def load_rules(path: str | Path) -> RuleFile:
    """Read a rule file (TOML); raises UsageError if it is unreadable or says anything that is not understood.

    ```toml
    [rules]
    "model.layers.*.mlp.up_proj.weight" = ["tp", "fsdp"]  # dim 0 over tp, dim 1 over fsdp
    "model.embed_tokens.weight" = [["tp", "fsdp"]]        # dim 0 over tp, what is left over fsdp; dim 1 whole
    "**" = []                                             # all others whole

    [layers]
    pattern = "model.layers.*"
    last = ["model.norm.**", "lm_head.**"]

    [experts]
    pattern = "model.layers.*.mlp.experts.*"  # each has tensors of its own; ep divides what the last * counts

    [names]
    "params.embed.embedding" = "model.embed_tokens.weight"
    "params.layers.up.kernel" = { to = "model.layers.{n}.mlp.up_proj.weight", stacked = 0, transposed = true }
    "opt_state.**" = ""  # left behind
    ```
    """
    try:
        data = read_file(Path(path), RULE_TEXT, UsageError)
    except OSError as error:
        raise UsageError(f"cannot read the rule file {path}: {error}") from error
    tables = parse_toml(data, f"the rule file {path}", RULE_TEXT, UsageError)
    _check_keys(tables, ("rules", "layers", "experts", "names"), str(path))
    rules, layers, experts = (_get_table(tables, key, path) for key in ("rules", "layers", "experts"))
    _check_keys(layers, ("pattern", "last"), f"[layers] of {path}")
    _check_keys(experts, ("pattern",), f"[experts] of {path}")
    return RuleFile(
        path=str(path),
        rules=_check_rules([parse_rule(p, dims, str(path)) for p, dims in rules.items()]),
        layers=tuple(LayerPattern(p) for p in _parse_words(layers.get("pattern", []), f"layers.pattern of {path}")),
        last=PatternList(_parse_words(layers.get("last", []), f"layers.last of {path}")),
        experts=tuple(ExpertPattern(p) for p in _parse_words(experts.get("pattern", []), f"experts.pattern of {path}")),
        names=_parse_names(_get_table(tables, "names", path), str(path)),
    )


def _check_rules(rules: list[Rule]) -> tuple[Rule, ...]:
    PatternList([rule.pattern for rule in rules])
    return tuple(rules)


def _check_keys(table: Mapping[str, object], keys: tuple[str, ...], where: str) -> None:
    unknown = [key for key in table if key not in keys]
    if unknown:
        raise UsageError(f"{where} has an unknown key {unknown[0]!r}", hint=f"the keys are {', '.join(keys)}")


def _get_table(tables: Mapping[str, object], key: str, path: str | Path) -> Mapping[str, object]:
    value = tables.get(key, {})
    if not isinstance(value, dict):
        raise UsageError(f"{key} of {path} is not a table", hint=f"begin it with the line [{key}]")
    return value


def _parse_words(value: object, where: str) -> list[str]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UsageError(f"{where} is not a pattern or a list of patterns")
    return words


def _parse_names(table: Mapping[str, object], path: str) -> _NamingTable | None:
    """Parse the lines of `[names]`; None if there are none. Raises UsageError for one that is not understood."""
    return _NamingTable(tuple(_parse_line(pattern, said, path) for pattern, said in table.items())) if table else None


def _parse_line(pattern: str, said: object, path: str) -> _NamingLine:
    where = f"the name {pattern!r} of {path}"
    fields: dict[str, object] = {"to": said} if isinstance(said, str) else dict(said) if isinstance(said, dict) else {}
    if "to" not in fields or not fields.keys() <= set(_RULE_FIELD_NAMES):
        raise UsageError(
            f"{where} is not understood", hint=f"write a name, or a table of {', '.join(_RULE_FIELD_NAMES)}"
        )
    to, stacked = fields["to"], fields.get("stacked")
    shape, transposed = fields.get("shape"), fields.get("transposed", False)
    if not isinstance(to, str) or not isinstance(transposed, bool):
        raise UsageError(f"{where} has to or transposed of the wrong kind")
    if stacked is not None and (not isinstance(stacked, int) or isinstance(stacked, bool)):
        raise UsageError(f"{where} has stacked = {stacked!r}, which is not a dim")
    if shape is not None and (
        not isinstance(shape, list)
        or not all(isinstance(extent, int) and not isinstance(extent, bool) and extent >= -1 for extent in shape)
        or shape.count(-1) > 1
    ):
        raise UsageError(f"{where} has shape = {shape!r}, which is not a shape")
    words = _PLACEHOLDER_PATTERN.findall(pattern)
    if len(set(words)) < len(words):
        raise UsageError(f"{where} has one number twice", hint="call each differently; the new name need not have all")
    if not set("{}").isdisjoint(_PLACEHOLDER_PATTERN.sub("", to)):
        raise UsageError(
            f"{where} has braces in {to!r} that do not name a number", hint="numbers are called {n} or {layer}"
        )
    extra = set(_PLACEHOLDER_PATTERN.findall(to)) - set(words)
    if len(extra) != (stacked is not None):
        raise UsageError(
            f"{where} has {len(extra)} numbers that its pattern does not have",
            hint="the indices of a stacked dim are numbered by the one number that only the new name has",
        )
    return _NamingLine(pattern, to, stacked, tuple(shape) if shape is not None else None, transposed)


def _reshape_array(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]
) -> tuple[tuple[int, ...], list[_RowView]]:
    """Return the shape in full, and the same elements seen in it without moving any.

    They are one view, or one for each index of dim 0: of heads between which those of other layers lie, as MaxText
    stacks layers. Raises UsageError if neither is possible.
    """
    size = prod(shape)
    known = prod(extent for extent in wanted if extent != -1)
    full = tuple(size // known if extent == -1 and known else extent for extent in wanted)
    if prod(full) != size:
        raise UsageError(f"[names] sees {name} as {list(wanted)}, but its shape is {list(shape)}")
    if not size:
        return full, [_RowView(0, full, 0, (0,) * len(full))]
    whole = _reshape_strides(shape, strides, full)
    if whole is not None:
        return full, [_RowView(0, full, 0, whole)]
    if full and full[0] % shape[0] == 0:
        each = (full[0] // shape[0], *full[1:])
        part = _reshape_strides(shape[1:], strides[1:], each)
        if part is not None:
            return full, [_RowView(n * each[0], each, n * strides[0], part) for n in range(shape[0])]
    raise UsageError(f"[names] sees {name} as {list(wanted)}, which its stacked dim does not allow")


def _reshape_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the strides of an array seen in another shape; None if its elements do not lie so."""
    import numpy as np

    seen = np.lib.stride_tricks.as_strided(np.empty(1, np.uint8), shape, strides, writeable=False)
    try:
        return seen.reshape(wanted, copy=False).strides
    except ValueError:
        return None
