"""Reads rule files, in which users say how tensors of models are cut that shardctl does not know."""

from __future__ import annotations

from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardctl.base.errors import UsageError, format_first_few
from shardctl.base.value import value_class
from shardctl.models.names.binding import find_canonical_name
from shardctl.models.rules.renaming import NamingTable, parse_names
from shardctl.models.rules.rule_cuts import Rule, parse_rule
from shardctl.models.tables.family import Row
from shardctl.models.tables.layer_names import count_layers
from shardctl.models.tables.model import Model, ModelTensor
from shardctl.models.tables.name_pattern import ExpertPattern, LayerPattern, PatternList
from shardctl.storage.bounded_text import RULE_TEXT, parse_toml, read_file
from shardctl.tensors.placement import GroupMember, PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardctl.tensors.manifest import Manifest, Tensor
    from shardctl.tensors.placement import Where


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
    names: NamingTable | None = None
    """Which tensors lie in which stored arrays, where the names of files are not the model's."""

    @property
    def cuts(self) -> bool:
        """Whether it says how tensors are cut; one that only names them leaves that to the family."""
        return bool(self.rules or self.layers or self.experts)

    def model(self, stored: Manifest, architecture: str = "") -> Model:
        """Return a model known from this file alone: canonical names are the stored ones.

        Raises UsageError naming the tensors that no rule matches.
        """
        matches = self._matches(stored)
        unmatched = [name for name in stored.tensors if name not in matches]
        if unmatched:
            raise UsageError(
                f"no rule of {self.path} matches {format_first_few(unmatched)}",
                hint='add a rule for them; "**" = [] as the last one leaves all others whole',
            )
        stages, counted = self._stages(stored.tensors), ""
        if not stages:  # then names say where the layers are, as without rules
            places = count_layers({name: tensor.shape for name, tensor in stored.tensors.items()})
            stages, counted = {name: places.find_stage(name) for name in stored.tensors}, str(places)
        members = self._members(stored.tensors)
        tensors = {
            name: self._tensor(t, matches[name], stages.get(name), members.get(name))
            for name, t in stored.tensors.items()
        }
        return Model(
            family="",
            architecture=architecture,
            layers=max((n + 1 for where, n in stages.values() if where == "layer"), default=0),
            tensors=tensors,
            warnings=self._unused(set(matches.values())),
            counted=counted,
        )

    def over(self, model: Model, stored: Manifest) -> Model:
        """Return `model` with the cuts and stages of this file, and with the tensors that only it knows."""
        tensors = dict(model.tensors)
        names = [*tensors, *(n for n in stored.tensors if find_canonical_name(model, n) is None)]
        stages, members = self._stages(dict.fromkeys(names)), self._members(names)
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
                tensors[name] = self._changed(mine, found, where, members.get(name))
        layers = max([model.layers, *(n + 1 for where, n in stages.values() if where == "layer")])
        return replace(model, layers=layers, tensors=tensors, warnings=(*model.warnings, *self._unused(used)))

    def _matches(self, stored: Manifest) -> dict[str, int]:
        order = PatternList([rule.pattern for rule in self.rules])
        return {name: found for name in stored.tensors if (found := order.first(name)) is not None}

    def _stages(self, names: Mapping[str, object]) -> dict[str, tuple[Where, int]]:
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

    def _members(self, names: Iterable[str]) -> dict[str, GroupMember]:
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

    def _changed(
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

    def _unused(self, used: set[int]) -> tuple[str, ...]:
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
        names=parse_names(_get_table(tables, "names", path), str(path)),
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
