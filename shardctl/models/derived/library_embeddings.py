"""Finds embeddings that an installed transformers norms within their module, from its source, without running it."""

from __future__ import annotations

import ast
from functools import cache
from typing import TYPE_CHECKING, Final

from shardctl.models.derived.head_counts import list_parts
from shardctl.models.rules.transformers_plan import find_sources, list_config_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_BASE: Final = "Embedding"


def list_normed_embeddings(config: Mapping[str, object]) -> frozenset[str]:
    """List what the classes of a config call embeddings that end with a norm; none if transformers is not installed.

    Inkling's and Muse Glimmer's are subclasses of `nn.Embedding`; the norm of the latter has no weight to be seen.
    """
    sources = find_sources()
    kinds = {str(kind) for _, part in list_parts(config) if (kind := part.get("model_type"))}
    if sources is None:
        return frozenset()
    files = (next(list_config_files(sources / "models", kind), None) for kind in sorted(kinds))
    folders = {path.parent for path in files if path is not None}
    return frozenset[str]().union(*(_read_folder(folder) for folder in folders))


@cache
def _read_folder(folder: Path) -> frozenset[str]:
    """Return the attributes that are such embeddings in the classes of one folder."""
    found: set[str] = set()
    for path in folder.glob("modeling_*.py"):
        text = path.read_bytes()
        if b"nn.Embedding)" not in text:
            continue
        try:
            classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        except (SyntaxError, ValueError):  # written for a newer Python
            continue
        normed = {
            node.name
            for node in classes
            if any(isinstance(base, ast.Attribute) and base.attr == _BASE for base in node.bases)
            and any("norm" in attribute for attribute, _ in _list_submodules(node))
        }
        found |= {name for node in classes for name, kind in _list_submodules(node) if kind in normed}
    return frozenset(found)


def _list_submodules(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """List what a class assigns to attributes of itself by calling a class: the attribute, and the class."""
    for each in ast.walk(node):
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call) and isinstance(each.value.func, ast.Name):
            target = each.targets[0]
            if isinstance(target, ast.Attribute):
                yield target.attr, each.value.func.id
