"""Puts one model's table inside another's: its rows under a module, and its words apart from the outer ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.tables.family import INDEX, LogicalDim, ModelDims, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardctl.models.tables.family import FusedArray

_FIRST_STAGE_PLACEMENT: Final = {"first": "first", "": "first", "last": "first"}
"""Where the rows of a tower are: all before the text model."""


def nest_rows(
    rows: Sequence[Row], under: str, *, word: str = "", when: str = "", stages: Mapping[str, str] | None = None
) -> tuple[Row, ...]:
    """Return the rows of a model whose base is the module `under`.

    `word` is put before its dims, indices and conditions, `when` is one more condition, of the outer model, and
    `stages` says on which stage the rows of a stage are now, by its name; the name of that of layers is empty.

    >>> up = Row(".layers.{layer}.up.weight", "ffn hidden", "gated")
    >>> row, = nest_rows([up], "tower", word="vision_", when="eyes")
    >>> row.name, row.dims, row.when
    ('.tower.layers.{vision_layer}.up.weight', 'vision_ffn vision_hidden', 'eyes vision_gated')
    """
    return tuple(
        replace(
            row,
            name=INDEX.sub(rf"{{{word}\1}}", _nest_name(row.name, under)),
            dims=" ".join("+".join(_prefix_word(part, word) for part in dim.split("+")) for dim in row.dims.split()),
            when=" ".join(filter(None, (when, *(_nest_condition(flag, word) for flag in row.when.split())))),
            on=(stages or {}).get(row.on, row.on),
            tie=_nest_name(row.tie, under),
        )
        for row in rows
    )


def nest_tower_rows(rows: Sequence[Row], under: str, *, word: str = "vision_", when: str = "") -> tuple[Row, ...]:
    """Return the rows of a model that sees or hears for a text model, as the module `under`, on the first stage."""
    return nest_rows(rows, under, word=word, when=when, stages=_FIRST_STAGE_PLACEMENT)


def nest_fused_arrays(fused: Iterable[FusedArray], under: str) -> tuple[FusedArray, ...]:
    """Return the arrays of a model whose base is the module `under`."""
    return tuple(
        replace(one, name=_nest_name(one.name, under), parts=tuple(_nest_name(part, under) for part in one.parts))
        for one in fused
    )


def nest_facts(facts: ModelDims, word: str, *, layer: int | None = None, whole: bool = False) -> ModelDims:
    """Return what the rows that `nest_rows` made need to know.

    `layer` is the pipeline layer of the inner model's first, None if its layers are none of the pipeline's; `whole`
    keeps every tensor whole under tp unless towers are cut.
    """
    return ModelDims(
        dims={f"{word}{name}": _mark_dims_whole(dims) if whole else dims for name, dims in facts.dims.items()},
        indices={
            f"{word}{name}": replace(index, layer=None if index.layer is None or layer is None else index.layer + layer)
            for name, index in facts.indices.items()
        },
        flags={f"{word}{name}": flag for name, flag in facts.flags.items()},
    )


def join_facts(one: ModelDims, other: ModelDims) -> ModelDims:
    """Return the facts of two models that are parts of a third."""
    return replace(one.extend_dims(dims=other.dims, indices=other.indices, flags=other.flags), stages=one.stages)


def _nest_name(name: str, under: str) -> str:
    return f".{under}{name}" if name.startswith(".") else name


def _prefix_word(part: str, word: str) -> str:
    return part if part == "*" or part.isdecimal() else f"{word}{part}"


def _nest_condition(flag: str, word: str) -> str:
    return f"!{word}{flag.removeprefix('!')}" if flag.startswith("!") else f"{word}{flag}"


def _mark_dims_whole(dims: LogicalDim | tuple[LogicalDim, ...]) -> LogicalDim | tuple[LogicalDim, ...]:
    if isinstance(dims, tuple):
        return tuple(replace(dim, axis="", tower_axis=dim.axis or dim.tower_axis) for dim in dims)
    return replace(dims, axis="", tower_axis=dims.axis or dims.tower_axis)
