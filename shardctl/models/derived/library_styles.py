"""Finds what an installed transformers says of stored tensors: the style of its tensor-parallel plan for each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.value import value_class
from shardctl.models.derived.head_counts import find_topics, list_parts
from shardctl.models.derived.library_names import build_renamer
from shardctl.models.rules.transformers_plan import find_plan
from shardctl.models.tables.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardctl.models.rules.transformers_plan import TransformersPlan

_EXPERT_PARALLEL_STYLE: Final = "grouped_gemm"
"""The style of arrays whose first dim counts experts, which are divided among ranks."""
_PARAMETER_NAMES: Final = ("weight", "bias")
_COLUMN_PARALLEL_STYLES: Final = (
    "colwise",
    "colwise_gather_output",
    "colwise_rep",
    "packed_colwise",
    "embedding_rowwise",
)
_ROW_PARALLEL_STYLES: Final = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")
_REPLICATED_STYLES: Final = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "sequence_parallel")
"""Styles by what they cut of a module: its outputs, its inputs, nothing (distributed/tensor_parallel.py)."""


@value_class
class LibraryStyle:
    """What a library does with one module."""

    style: str
    """Such as `colwise`."""
    source: str
    """The class and the version that say so."""

    @property
    def cut(self) -> Literal["outputs", "inputs", "nothing", ""]:
        """What of a module it divides among ranks; empty for a style that is not known."""
        if self.style in _COLUMN_PARALLEL_STYLES:
            return "outputs"
        return "inputs" if self.style in _ROW_PARALLEL_STYLES else "nothing" if self.style in _REPLICATED_STYLES else ""


def read_library_styles(config: Mapping[str, object], names: Iterable[str]) -> dict[str, LibraryStyle]:
    """Return the style of each stored tensor whose module a plan of transformers names; none if it is not installed."""
    return _read_styles(config, names, lambda plan: plan.tp | plan.head)


def read_library_experts(config: Mapping[str, object], names: Iterable[str]) -> dict[str, LibraryStyle]:
    """Return the style of each stored array whose experts a plan of transformers divides among ranks."""
    found = _read_styles(config, names, lambda plan: plan.ep)
    return {name: style for name, style in found.items() if style.style == _EXPERT_PARALLEL_STYLE}


def _read_styles(
    config: Mapping[str, object], names: Iterable[str], choose: Callable[[TransformersPlan], dict[str, str]]
) -> dict[str, LibraryStyle]:
    architecture = ModelConfig(config).architecture()
    parts = list(list_parts(config))
    kinds = [str(part["model_type"]) for _, part in parts if isinstance(part.get("model_type"), str)]
    plans = [
        (frozenset().union(*map(find_topics, words)) if words else frozenset(), plan)
        for words, part in parts
        if isinstance(kind := part.get("model_type"), str)
        and kind
        and (plan := find_plan(kind, architecture)) is not None
    ]
    if not plans:
        return {}
    rename = build_renamer([architecture, *kinds])
    tables = [(topics, plan.source, _compile_styles(choose(plan))) for topics, plan in plans]
    found: dict[str, LibraryStyle] = {}
    for name in names:
        path = _name_module(rename(name))
        for topics, source, styles in tables:
            style = _find_style(path, topics, styles)
            if style is not None:
                found[name] = LibraryStyle(style, source)
                break
    return found


def _compile_styles(styles: Mapping[str, str]) -> dict[str, tuple[re.Pattern[str], str]]:
    """Compile each name of a plan to an expression for paths of modules, with its style."""
    return {
        key: (re.compile(r"(.*\.|)" + re.escape(key).replace(r"\*", r"\d+")), style) for key, style in styles.items()
    }


def _find_style(path: str, topics: frozenset[int], styles: Mapping[str, tuple[re.Pattern[str], str]]) -> str | None:
    for expression, style in styles.values():
        found = expression.fullmatch(path)
        if found is not None:
            mine = find_topics(found[1])
            if not mine or topics & mine:
                return style
    return None


def _name_module(name: str) -> str:
    """Return the module of a tensor; a parameter with a name of its own is called as plans call it."""
    owner, _, last = name.rpartition(".")
    return owner if last in _PARAMETER_NAMES else name
