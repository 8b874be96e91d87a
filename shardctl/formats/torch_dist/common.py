"""What all ranks of Megatron-LM have alike: its arguments, the iteration, settings of the optimizer.

It is in `common.pt`, a file of torch.save; since Megatron-LM core 0.19 in an item among those of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shardctl.errors import SourceError
from shardctl.formats.links import check_link
from shardctl.formats.pickle_tree import Call, Global, mapping
from shardctl.formats.torch_save import read_saved
from shardctl.formats.torch_zip import read_zip
from shardctl.training import as_setting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.formats.dcp.save import Save
    from shardctl.training import Setting

FILE: Final = "common.pt"
ITEM: Final = "common_state/shard_0_1"
_ARGUMENTS: Final = ("args", "arguments")
_NAMESPACE: Final = "argparse.Namespace"
_SHOWN: Final = 80


@dataclass(frozen=True, slots=True)
class Common:
    """What was found."""

    file: str = ""
    """The path of the file, if it is one."""
    arguments: Mapping[str, Setting] = field(default_factory=dict)
    """Those of `args` that are plain values; types and names of other things are texts."""
    version: float | None = None
    """`checkpoint_version`."""
    iteration: int | None = None
    step: int | None = None
    """Of the optimizer."""
    names: tuple[str, ...] = ()
    """All that there is, by its outermost names."""


def read_common(save: Save, folder: str) -> Common | None:
    """What is common to all ranks; None if the checkpoint has no such thing.

    Raises as `read_saved`, and SourceError for what is no dict.
    """
    source, path = save.source, f"{folder}{FILE}"
    if path in source.files():
        check_link(source, path)
        tree = read_saved(source, path).tree
        return _common(path, tree, path)
    item = save.metadata[0].items.get((ITEM, None))
    if item is None:
        return None
    tree = read_zip(source, item.file, start=item.offset, size=item.length).tree
    if not isinstance(tree, list) or len(tree) != 1:
        raise SourceError(f"{item.file}: {ITEM} is not the one object that Megatron-LM keeps there")
    return _common(ITEM, tree[0], "")


def _common(where: str, tree: object, file: str) -> Common:
    found = mapping(tree)
    if found is None:
        raise SourceError(f"{where} is not the dict that Megatron-LM keeps there")
    iteration, version = found.get("iteration"), found.get("checkpoint_version")
    return Common(
        file=file,
        arguments=next((_arguments(found[name]) for name in _ARGUMENTS if name in found), {}),
        version=float(version) if isinstance(version, int | float) else None,
        iteration=iteration if type(iteration) is int else None,
        step=_step(found.get("optimizer")),
        names=tuple(str(name)[:_SHOWN] for name in found),
    )


def _arguments(node: object) -> dict[str, Setting]:
    state = node.state if isinstance(node, Call) and str(node.function) == _NAMESPACE else node
    return {name: _plain(value) for name, value in (mapping(state) or {}).items() if isinstance(name, str)}


def _plain(node: Any) -> Setting:  # noqa: ANN401 - a node of a tree
    """A plain value as it is, and of anything else what it is."""
    found = as_setting(node)
    return found[0] if found is not None else str(node)[:_SHOWN] if isinstance(node, Global | Call) else ""


def _step(optimizer: object) -> int | None:
    """The number of steps, which groups of parameters or their common state say."""
    for node in _dicts(optimizer, 4):
        step = node.get("common_step", node.get("step"))
        if type(step) is int or (isinstance(step, float) and step == int(step)):
            return int(step)
    return None


def _dicts(node: object, depth: int) -> Iterator[dict[Any, Any]]:
    """The dicts in dicts and lists, the outermost first, few enough to be looked at."""
    found = mapping(node)
    if found is not None:
        yield found
    inside = list(found.values()) if found is not None else node
    if depth and isinstance(inside, list | tuple):
        for part in inside[:100]:
            yield from _dicts(part, depth - 1)
