"""Reads what an installed transformers says about tensor and pipeline parallelism, from its source, without running it.

`base_model_tp_plan` and `base_model_pp_plan` are literals in the config classes, `_tp_plan` in the model classes
(transformers 5, `models/*/configuration_*.py` and `modeling_*.py`); importing them would import torch.
"""

from __future__ import annotations

import ast
from dataclasses import field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterator


@value_class
class TransformersPlan:
    """What transformers says about one architecture."""

    source: str
    """The class and the version that say it."""
    tp: dict[str, str]
    """Styles by module, in names below the base model, `*` for an index."""
    head: dict[str, str] = field(default_factory=dict)
    """The same for modules outside the base model."""
    pp: tuple[str, ...] = ()
    """Children of the base model in the order of execution."""
    ep: dict[str, str] = field(default_factory=dict)
    """Styles by module where experts are divided among ranks."""


def read_plan(model_type: str, architecture: str) -> TransformersPlan:
    """Read the plan for configs of `model_type`.

    Raises UsageError if transformers is not installed, UnsupportedError if it has no plan.
    """
    if find_sources() is None:
        raise UsageError(
            "--rules-from transformers needs transformers, which is not installed here",
            hint="install it beside shardctl, or write a rule file for --rules FILE",
        )
    plan = find_plan(model_type, architecture)
    if plan is None or not plan.tp:
        what = model_type or "a config without model_type"
        raise UnsupportedError(
            f"transformers {_find_version()} has no tensor-parallel plan for {what}",
            hint="write a rule file and give it with --rules FILE",
        )
    return plan


def find_sources() -> Path | None:
    """Return the folder of an installed transformers, which is not imported."""
    spec = find_spec("transformers")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def find_plan(model_type: str, architecture: str) -> TransformersPlan | None:
    """Return the plan for configs of `model_type`, perhaps of experts only; None if there is none or no library."""
    sources = find_sources()
    if sources is None:
        return None
    for path in list_config_files(sources / "models", model_type):
        for node in _list_classes(path):
            literals = _read_literals(node)
            tp, ep = literals.get("base_model_tp_plan"), literals.get("base_model_ep_plan")
            if literals.get("model_type") == model_type and any(isinstance(one, dict) and one for one in (tp, ep)):
                pp = literals.get("base_model_pp_plan")
                return TransformersPlan(
                    source=f"{node.name} of transformers {_find_version()}",
                    tp=_spell_styles(tp),
                    head=_read_head_plan(path.parent, architecture),
                    pp=tuple(map(str, pp)) if isinstance(pp, dict) else (),
                    ep=_spell_styles(ep),
                )
    return None


def list_config_files(models: Path, model_type: str) -> Iterator[Path]:
    """List files that may define the config class: first the folder of that name, which most types have."""
    usual = models / model_type.replace("-", "_")
    if model_type.replace("-", "_").isidentifier():
        yield from sorted(usual.glob("configuration_*.py"))
    quoted = (f'"{model_type}"'.encode(), f"'{model_type}'".encode())
    for path in sorted(models.glob("*/configuration_*.py")):
        if path.parent != usual and any(text in path.read_bytes() for text in quoted):
            yield path


def _spell_styles(plan: object) -> dict[str, str]:
    return {str(key): str(style) for key, style in plan.items()} if isinstance(plan, dict) else {}


def _read_head_plan(folder: Path, architecture: str) -> dict[str, str]:
    """Read `_tp_plan` of the model class, which speaks of what comes after the base model."""
    for path in sorted(folder.glob("modeling_*.py")):
        for node in _list_classes(path):
            plan = _read_literals(node).get("_tp_plan") if node.name == architecture else None
            if isinstance(plan, dict):
                return {str(key): str(style) for key, style in plan.items()}
    return {}


def _list_classes(path: Path) -> Iterator[ast.ClassDef]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # written for a newer Python
        return
    yield from (node for node in tree.body if isinstance(node, ast.ClassDef))


def _read_literals(node: ast.ClassDef) -> dict[str, object]:
    """Read what the class assigns to plain names, as far as it is written out."""
    found: dict[str, object] = {}
    for statement in node.body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(statement, ast.AnnAssign):
            target = statement.target
        if isinstance(target, ast.Name) and isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value:
            try:
                found[target.id] = ast.literal_eval(statement.value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue  # computed, not written out
    return found


def _find_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # loads email and calendar

    try:
        return version("transformers")
    except PackageNotFoundError:
        return "of unknown version"
