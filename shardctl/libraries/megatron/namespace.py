"""Reads and writes Megatron-LM's `args`, which argparse keeps and pickle stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardctl.base.settings import as_setting
from shardctl.libraries.torch_save.pickle_tree import CallNode, GlobalNode, as_mapping

if TYPE_CHECKING:
    from shardctl.base.settings import Setting

_MAX_VALUE_CHARACTERS: Final = 80


def parse_namespace(node: object) -> dict[str, Setting]:
    """Parse the fields of a pickled `Namespace` or its like, or the items of a dict in its place.

    None of anything else.
    """
    state = node.state if isinstance(node, CallNode) and isinstance(node.state, dict) else node
    return {name: _as_plain_value(value) for name, value in (as_mapping(state) or {}).items() if isinstance(name, str)}


def _as_plain_value(node: Any) -> Setting:  # noqa: ANN401 - a node of a tree
    """Return a plain value as it is, and of anything else what it is: types and functions are texts."""
    found = as_setting(node)
    return (
        found[0]
        if found is not None
        else str(node)[:_MAX_VALUE_CHARACTERS]
        if isinstance(node, GlobalNode | CallNode)
        else ""
    )
