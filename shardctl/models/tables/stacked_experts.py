"""Describes experts that the Hub has in two arrays as LLM Compressor stores them: each with three matrices of its own.

Names: LLM Compressor 0.14 (modeling/moe/linear_experts.py, llama4.py), which vLLM 0.32 reads beside the arrays
(model_executor/models/llama4.py, qwen3_vl_moe.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardctl.models.tables.family import Family, Row
    from shardctl.tensors.manifest import Manifest

_EXPERTS_NAME_INFIX: Final = ".experts."
_FIRST_EXPERT_WEIGHT: Final = ".experts.0.gate_proj.weight"
_GATE_UP: Final = ("gate_up_proj", "expert hidden effn+effn")
_DOWN_PROJ_ARRAY: Final = ("down_proj", "expert effn hidden")


@value_class
class ExpertMatrix:
    """A matrix of one expert within the array of all."""

    name: str
    """That of its module."""
    part: int
    parts: int
    """Which of how many equal runs of outputs it is."""


MATRICES: Final[Mapping[str, tuple[ExpertMatrix, ...]]] = {
    "gate_up_proj": (ExpertMatrix("gate_proj", 0, 2), ExpertMatrix("up_proj", 1, 2)),
    "down_proj": (ExpertMatrix("down_proj", 0, 1),),
}
"""By the name of an array `[expert, in, out]`."""


def split_family(family: Family) -> Family | None:
    """Return a family whose experts have matrices of their own; None if it has none in arrays of the known kind."""
    rows: list[Row] = []
    for row in family.rows:
        rows.extend(_split_row(row))
    if len(rows) == len(family.rows):
        return None
    stacks = {row.name for row in family.rows} - {row.name for row in rows}
    fused = tuple(each for each in family.fused if stacks.isdisjoint(each.parts))
    return replace(family, rows=tuple(rows), fused=fused)


def stores_split_experts(config: Mapping[str, Any], stored: Manifest | None) -> bool:
    """Return whether experts have matrices of their own: as stored, else as compressed-tensors has quantized ones."""
    if stored is not None:
        return any(_FIRST_EXPERT_WEIGHT in name for name in stored.tensors)
    settings = config.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == "compressed-tensors"


def _split_row(row: Row) -> Iterator[Row]:
    module, _, own = row.name.rpartition(".")
    if not module.endswith(_EXPERTS_NAME_INFIX.rstrip(".")) or (own, row.dims) not in {_GATE_UP, _DOWN_PROJ_ARRAY}:
        yield row
        return
    for matrix in MATRICES[own]:
        dims = "effn hidden" if own == _GATE_UP[0] else "hidden effn"
        yield replace(row, name=f"{module}.{{expert}}.{matrix.name}.weight", dims=dims)
