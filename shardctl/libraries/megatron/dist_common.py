"""Reads what all ranks of Megatron-LM share: arguments, the iteration, optimizer settings.

It is in `common.pt`, a file of torch.save; since Megatron-LM core 0.19 in an item among those of tensors.
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError
from shardctl.base.settings import as_steps
from shardctl.base.value import value_class
from shardctl.libraries.dcp.items import NUMBERS, decode_number
from shardctl.libraries.files.sharded_backend import COMMON
from shardctl.libraries.megatron.dist_groups import list_groups
from shardctl.libraries.megatron.namespace import parse_namespace
from shardctl.libraries.torch_save.pickle_budget import VisitCounter
from shardctl.libraries.torch_save.pickle_tree import CallNode, as_mapping
from shardctl.libraries.torch_save.reading import open_saved
from shardctl.libraries.torch_save.tensors import as_tensor
from shardctl.libraries.torch_save.zip_file import read_torch_zip
from shardctl.storage import read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.base.settings import Setting
    from shardctl.libraries.dcp.save import DcpSave
    from shardctl.libraries.torch_save.tensors import SavedFile
    from shardctl.storage import Source

ITEM: Final = "common_state/shard_0_1"
_DISTRIBUTED_OPTIMIZER_PATTERN: Final = re.compile(
    r"(?:chained_[0-9]+\.)?optimizer\.distributed\.dp_group_idx_([0-9]+)\.optimizer/shard_0_1"
)
_ARGUMENTS_KEYS: Final = ("args", "arguments")
USED: Final = frozenset({*_ARGUMENTS_KEYS, "checkpoint_version", "iteration"})
"""What is read of any checkpoint."""
USED_OF_STATES: Final = frozenset({"optimizer", "opt_param_scheduler"})
"""What is read where there are optimizer states."""
_CONSUMED_SAMPLES_KEYS: Final = ("consumed_train_samples", "consumed_valid_samples")
_MAX_NAME_LENGTH: Final = 80
_MAX_NESTING_DEPTH: Final = 4
"""Dicts and lists in one another between the optimizer's state and its groups."""


@value_class
class CommonState:
    """What was found."""

    file: str = ""
    """The path of the file, if it is one."""
    arguments: Mapping[str, Setting] = field(default_factory=dict)
    """The `args`, as `parse_namespace` reads them."""
    version: float | None = None
    """`checkpoint_version`."""
    iteration: int | None = None
    step: int | None = None
    """Of the optimizer."""
    groups: tuple[Mapping[str, Setting], ...] = ()
    """The settings of the optimizer's groups of parameters."""
    progress: Mapping[str, Setting] = field(default_factory=dict)
    """What the training loop goes on from: samples seen, and the learning rate's schedule."""
    names: tuple[str, ...] = ()
    """All that there is, by its outermost names."""


def read_common(save: DcpSave, folder: str) -> CommonState | None:
    """Read what is common to all ranks; None if the checkpoint has no such thing.

    Raises as `open_saved`, and SourceError for what is no dict.
    """
    source, path = save.source, f"{folder}{COMMON}"
    if path in source.files():
        saved = open_saved(source, path)
        return _parse_common(path, saved, saved.tree, source, path)
    item = save.metadata[0].items.get(ITEM, {}).get(None)
    if item is None:
        return None
    saved = read_torch_zip(source, item.file, start=item.offset, size=item.length)
    if not isinstance(saved.tree, list) or len(saved.tree) != 1:
        raise SourceError(f"{item.file}: {ITEM} is not the one object that Megatron-LM keeps there")
    return _parse_common(ITEM, saved, saved.tree[0], source, "")


def _parse_common(where: str, saved: SavedFile, tree: object, source: Source, file: str) -> CommonState:
    found = as_mapping(tree)
    if found is None:
        raise SourceError(f"{where} is not the dict that Megatron-LM keeps there")
    iteration, version = found.get("iteration"), found.get("checkpoint_version")
    arguments: Mapping[str, Setting] = next(
        (parse_namespace(found[name]) for name in _ARGUMENTS_KEYS if name in found), {}
    )
    return CommonState(
        file=file,
        arguments=arguments,
        version=float(version) if isinstance(version, int | float) else None,
        iteration=iteration if type(iteration) is int else None,
        step=find_step(found.get("optimizer"), saved, source),
        groups=tuple(list_groups(found.get("optimizer"))),
        progress=collect_progress(
            arguments, iteration if type(iteration) is int else None, parse_namespace(found.get("opt_param_scheduler"))
        ),
        names=tuple(str(name)[:_MAX_NAME_LENGTH] for name in found),
    )


def read_local_optimizers(save: DcpSave) -> tuple[int | None, tuple[Mapping[str, Setting], ...]]:
    """Read the steps done and the groups' settings that the optimizers of single ranks keep (`dp_reshardable`).

    All ranks have the same; each chained optimizer's first is read.
    """
    step: int | None = None
    groups: list[Mapping[str, Setting]] = []
    items = save.metadata[0].items
    for key in sorted(items):
        found = _DISTRIBUTED_OPTIMIZER_PATTERN.fullmatch(key)
        if found is None or int(found[1]):
            continue
        for item in items[key].values():
            saved = read_torch_zip(save.source, item.file, start=item.offset, size=item.length)
            tree = saved.tree[0] if isinstance(saved.tree, list) and saved.tree else saved.tree
            step = find_step({0: tree}, saved, save.source) if step is None else step
            groups += list_groups({0: tree})
    return step, tuple(groups)


def is_used(key: str, *, trained: bool) -> bool:
    """Return whether an object holds what is read: all of it, or, if there are states, the settings of an optimizer."""
    return key == ITEM or (trained and _DISTRIBUTED_OPTIMIZER_PATTERN.fullmatch(key) is not None)


def collect_progress(
    arguments: Mapping[str, Setting], iteration: int | None, schedule: Mapping[str, Setting]
) -> dict[str, Setting]:
    """Collect what the training loop goes on from."""
    return {
        **{name: arguments[name] for name in _CONSUMED_SAMPLES_KEYS if name in arguments},
        **({"iteration": iteration} if iteration is not None else {}),
        **{f"opt_param_scheduler/{name}": value for name, value in schedule.items()},
    }


def find_step(optimizer: object, saved: SavedFile, source: Source) -> int | None:
    """Find the number of steps, which groups of parameters or their common state say."""
    for node in _walk_dicts(optimizer, _MAX_NESTING_DEPTH, VisitCounter(saved.path)):
        for name in ("common_step", "step"):
            done = as_steps(_read_number(node.get(name), saved, source))
            if done is not None:
                return done
    return None


def _read_number(node: object, saved: SavedFile, source: Source) -> float | None:
    """Read a number, also one in a tensor."""
    if isinstance(node, int | float) and not isinstance(node, bool):
        return node
    view = as_tensor(node, saved.path) if isinstance(node, CallNode) else None
    if view is None or view.shape or view.dtype.name not in NUMBERS:
        return None
    region = saved.region(view, "step")
    return decode_number(view.dtype.name, read_bytes(source, region.file, region.offset, view.dtype.unit_bytes))


def _walk_dicts(node: object, depth: int, visits: VisitCounter) -> Iterator[dict[Any, Any]]:
    """Yield the dicts in dicts and lists, the outermost first, few enough to be looked at."""
    found = as_mapping(node)
    visits.charge_nodes(1)
    if found is not None:
        yield found
    inside = list(found.values()) if found is not None else node
    if depth and isinstance(inside, list | tuple):
        for part in inside[:100]:
            yield from _walk_dicts(part, depth - 1, visits)
