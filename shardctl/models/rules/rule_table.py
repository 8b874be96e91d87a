"""Formats the rules that apply as a table for people."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from shardctl.models.tables.model import Model

_INDEX_PLACEHOLDER_PATTERN: Final = re.compile(r"\{\w+\}")


@value_class
class RuleRow:
    """One rule, and how much it governs."""

    pattern: str
    """Over names, as a rule file would say it."""
    dims: str
    """The family's logical dims, one word a dim; empty for a tensor that only a rule file knows."""
    axes: tuple[tuple[str, ...], ...]
    """For each dim, the mesh axes that cut it, in the order of cutting."""
    stages: tuple[str, ...]
    """The kinds of stage: `first`, `layer`, `last`."""
    tensors: int
    """How many tensors of the model it governs."""
    divides: str = ""
    """The axis that divides the tensors themselves among its ranks, whole: `ep` for experts; empty for none."""


def build_rule_table(model: Model) -> tuple[RuleRow, ...]:
    """Build the rules in force for the class's own tensors, in model order."""
    counts: dict[tuple[str, str, tuple[tuple[str, ...], ...], tuple[str, ...], str], int] = {}
    prefix = f"{model.prefix}." if model.prefix else ""
    for tensor in model.own():
        name = tensor.row.name
        key = (
            _INDEX_PLACEHOLDER_PATTERN.sub("*", f"{prefix}{name[1:]}" if name.startswith(".") else name),
            tensor.row.dims,
            tuple(tuple(cut.axis for cut in cuts) for cuts in tensor.spec.cuts),
            tuple(where for where, _ in tensor.spec.where),
            tensor.spec.member.axis if tensor.spec.member else "",
        )
        counts[key] = counts.get(key, 0) + 1
    return tuple(
        RuleRow(pattern, dims, axes, stages, count, divides)
        for (pattern, dims, axes, stages, divides), count in counts.items()
    )
