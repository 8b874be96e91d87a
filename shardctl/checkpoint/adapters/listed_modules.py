"""Finds the modules of a base that an adapter's config lists, and of which its file has no matrices."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_plural
from shardctl.base.errors import SourceError, format_first_few
from shardctl.base.value import value_class
from shardctl.libraries.files.impostors import ADAPTER_CONFIG
from shardctl.libraries.peft.target_modules import ALL_LINEAR
from shardctl.models.names.binding import find_weight_name
from shardctl.models.quantization.expressions import limit_matching
from shardctl.models.tables.predicting import list_predicting_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from typing import Any

    from shardctl.libraries.peft.settings import AdapterSettings
    from shardctl.libraries.peft.target_modules import TargetModules
    from shardctl.models import Model

_MATRIX_NDIM: Final = 2
_WEIGHT_SUFFIX: Final = ".weight"
_MODULE_INDEX_PATTERN: Final = re.compile(r"\.\d+(?=\.|$)")


@value_class
class AdapterGaps:
    """What an adapter lacks of what its config lists."""

    missing: tuple[str, ...] = ()
    """Modules and arrays, a line for those that are alike."""
    notes: tuple[str, ...] = ()
    """What may be meant so, or could not be checked."""

    def describe(self) -> str:
        """Say what is missing."""
        return f"the adapter has nothing for {format_first_few(self.missing)}, which {ADAPTER_CONFIG} lists"

    def require_none(self) -> None:
        """Raise SourceError for what is missing."""
        if self.missing:
            raise SourceError(
                self.describe(),
                hint="the file may be truncated; --allow-partial-adapter merges what it has",
            )


def find_gaps(
    settings: AdapterSettings,
    shapes: Mapping[str, tuple[int, ...]],
    changed: Collection[str],
    *,
    model: Model | None,
    config: Mapping[str, Any] | None,
) -> AdapterGaps:
    """Find what an adapter lacks.

    `shapes` are those of the base's tensors by canonical name, and `changed` the names of those that the adapter
    changes. Of modules of one kind, such as the queries of all layers, an adapter must have all or none; and none only
    if it has another kind that the same entry of the config lists, because towers and stacked experts may be left out.
    """
    unknown = [each.unknown for each in (settings.modules.targets, settings.modules.excluded) if each.unknown]
    if unknown:
        return AdapterGaps(notes=tuple(f"shardctl did not check which modules are listed: {why}" for why in unknown))
    stacked = {name for tensors in _list_stacks(model) for name in tensors}
    predicting = {*list_predicting_names(config, shapes)} if config is not None else set()
    groups: dict[str, dict[str, list[tuple[str, bool]]]] = defaultdict(lambda: defaultdict(list))
    for entry, name, found in _list_entries(settings, shapes, {*changed}, model):
        if found or name not in predicting | stacked:
            groups[entry][_MODULE_INDEX_PATTERN.sub(".*", name)].append((name, found))
    missing, notes = [], []
    for entry, kinds in groups.items():
        counts = {kind: sum(found for _, found in members) for kind, members in kinds.items()}
        if not any(counts.values()):
            missing.append(f"{entry} ({format_plural(sum(map(len, kinds.values())), 'module')})")
            continue
        for kind, members in kinds.items():
            lacking = [name for name, found in members if not found]
            if not counts[kind]:
                notes.append(f"the adapter has nothing for {kind}, which its config may mean with {entry!r:.100}")
            elif lacking:
                missing.append(f"{format_first_few(lacking)} ({len(lacking)} of {len(members)})")
    return AdapterGaps(tuple(missing), tuple(notes))


def _list_stacks(model: Model | None) -> Iterator[tuple[str, ...]]:
    """List the tensors of each array that holds several, of which PEFT adapts no single one."""
    for fusion in model.fusions.values() if model is not None else ():
        if not fusion.stored:
            yield fusion.tensors


def _list_entries(
    settings: AdapterSettings, shapes: Mapping[str, tuple[int, ...]], changed: set[str], model: Model | None
) -> Iterator[tuple[str, str, bool]]:
    """List the entries of the config with the tensors and arrays that each lists, and whether they are changed."""
    for entry, name in _list_tensors(settings.modules, shapes, changed, model):
        yield entry, name, name in changed
    arrays = {name: fusion.tensors for name, fusion in model.fusions.items()} if model is not None else {}
    arrays |= {name: (name,) for name in shapes}
    for entry in settings.parameters:
        for name, tensors in arrays.items():
            if name == entry or name.endswith(f".{entry}"):
                yield entry, name, not changed.isdisjoint(tensors)


def _list_tensors(
    modules: TargetModules, shapes: Mapping[str, tuple[int, ...]], changed: set[str], model: Model | None
) -> Iterator[tuple[str, str]]:
    """List the entries with the weights of modules that are adapted, and with the tensors of those that are whole."""
    adapted = {_MODULE_INDEX_PATTERN.sub(".*", name) for name in changed} if modules.every_linear else set()
    aliases: dict[str, list[str]] = defaultdict(list)
    for name, first in (model.aliases if model is not None else {}).items():
        aliases[first].append(name)
    with limit_matching():
        for name, shape in shapes.items():
            for known in (name, *aliases[name]):
                module = known.removesuffix(_WEIGHT_SUFFIX)
                if module != known and len(shape) == _MATRIX_NDIM:
                    listed = modules.find_entry(module)
                    entry = listed or (ALL_LINEAR if _MODULE_INDEX_PATTERN.sub(".*", name) in adapted else None)
                    if entry is not None:
                        yield entry, name
                parents = (known[: match.start()] for match in re.finditer(r"\.", known))
                yield from ((saved, name) for saved in map(modules.saved.find_entry, parents) if saved is not None)
    for entry in modules.targets.names:  # names of modules that the class calls otherwise
        name = find_weight_name(model, f"{entry}{_WEIGHT_SUFFIX}")
        if name in shapes and modules.find_entry(name.removesuffix(_WEIGHT_SUFFIX)) is None:
            yield entry, name
