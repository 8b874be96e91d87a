"""Reads how transformers renames stored tensors, from the source of its `conversion_mapping.py`, without running it.

The Hub and the classes call the same tensors by different names; a plan speaks of the classes' (transformers 5).
"""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import TYPE_CHECKING, Final

from shardctl.models.rules.transformers_plan import find_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

_Renaming = tuple[tuple[str, ...], str]
"""Patterns of stored names, and what the first that is found becomes."""
_MAPPING_VARIABLE_NAME: Final = "mapping"
_ALIASES_VARIABLE_NAME: Final = "_MODEL_TO_CONVERSION_PATTERN"


def build_renamer(kinds: Iterable[str]) -> Callable[[str], str]:
    """Return a function from stored names to those of the classes, for models of these `model_type`s and classes."""
    sources = find_sources()
    table = _read_table(sources / "conversion_mapping.py") if sources is not None else {}
    renamings = [renaming for kind in dict.fromkeys(kinds) for renaming in table.get(kind, ())]
    compiled = [(re.compile("|".join(map(_build_expression, sources))), target) for sources, target in renamings]

    def rename(name: str) -> str:
        for expression, target in compiled:
            name = expression.sub(lambda found, target=target: _expand(found, target), name, count=1)  # type: ignore[misc]
        return name

    return rename


def _build_expression(pattern: str) -> str:
    """Return a stored pattern as an expression: where it has a `*` alone between dots, it counts."""
    return re.sub(r"(?<=[.])[*](?=[.])", r"\\d+", pattern)


def _expand(found: re.Match[str], target: str) -> str:
    """Return what a match becomes, where the target speaks of a group: the first that took part."""
    group = next((text for text in found.groups() if text is not None), "")
    return target.replace(r"\1", group)


@cache
def _read_table(path: Path) -> dict[str, tuple[_Renaming, ...]]:
    """Return the renamings by `model_type` or class, as far as they are written out."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    table: dict[str, tuple[_Renaming, ...]] = {}
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.AugAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Dict):
            if target.id == _ALIASES_VARIABLE_NAME:
                aliases = ast.literal_eval(node.value)
            elif target.id == _MAPPING_VARIABLE_NAME:
                table |= {str(ast.literal_eval(k)): _read_list(v, table) for k, v in _pair_up(node.value)}
        elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            key = str(target.slice.value)
            before = table.get(key, ()) if isinstance(node, ast.AugAssign) else ()
            table[key] = before + _read_list(node.value, table)
    return {**{kind: table[base] for kind, base in aliases.items() if base in table and kind not in table}, **table}


def _pair_up(node: ast.Dict) -> Iterable[tuple[ast.expr, ast.expr]]:
    return ((k, v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant))


def _read_list(node: ast.expr, table: dict[str, tuple[_Renaming, ...]]) -> tuple[_Renaming, ...]:
    if isinstance(node, ast.List):
        return tuple(renaming for each in node.elts if (renaming := _read_call(each)) is not None)
    if isinstance(node, ast.BinOp):
        return _read_list(node.left, table) + _read_list(node.right, table)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "copy":
        return _read_list(node.func.value, table)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return table.get(str(node.slice.value), ())
    return ()


def _read_call(node: ast.expr) -> _Renaming | None:
    """Return the sources and the target of a `WeightRenaming` or `WeightConverter`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    if node.func.id not in {"WeightRenaming", "WeightConverter"}:
        return None
    given = dict(zip(("source_patterns", "target_patterns"), node.args, strict=False))
    given |= {word.arg: word.value for word in node.keywords if word.arg}
    try:
        sources, targets = (ast.literal_eval(given[key]) for key in ("source_patterns", "target_patterns"))
    except (KeyError, ValueError):
        return None
    sources, targets = ([each] if isinstance(each, str) else list(each) for each in (sources, targets))
    try:
        for source in sources:
            re.compile(_build_expression(source))
    except re.error:
        return None
    return (tuple(sources), _strip_anchors(targets[0])) if targets else None


def _strip_anchors(target: str) -> str:
    """Return a target as plain text: it may be a pattern, because the same table is read backwards."""
    return re.sub(r"(\(\?[^)]*\))|[\^$]", "", target).replace(r"\.", ".")
