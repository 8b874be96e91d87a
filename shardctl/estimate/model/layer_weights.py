"""Tells what each weight of a layer multiplies, by which autograd decides what training keeps for its gradient."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, get_args

from shardctl.base.value import value_class
from shardctl.models.tables.family import INDEX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.models.tables.dims import RowDims
    from shardctl.models.tables.family import Row

WeightRole = Literal[
    "attention in",
    "latents",
    "attention out",
    "mlp in",
    "mlp out",
    "experts in",
    "experts out",
    "router",
    "norms",
    "head norms",
]
"""What a weight multiplies: whole tokens before attention; compressed queries, keys and values; attention's result;
whole tokens before the MLP; what its activation function returns; both of experts; whole tokens, for experts to be
chosen or weighted; normed tokens; normed queries, keys or what they are compressed to."""
ROLES: Final = frozenset(get_args(WeightRole))
_ATTENTION_DIM_NAMES: Final = ("q", "kv", "full_q", "full_kv", "window_kv", "gated_q", "qs", "vs", "qkv")
_LAYER_INDEX_PATTERN: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_MATRIX_NDIM: Final = 2
_EXPERT_STACK_NDIM: Final = 3


@value_class
class WeightPlace:
    """A weight of a layer, and what it multiplies."""

    name: str
    """The end of its name, behind the number of its layer, with `{}` for each other number."""
    role: WeightRole


def blank_numbers(name: str) -> str:
    """Put `{}` in the place of each number in a tensor's name.

    >>> blank_numbers("layers.3.mlp.experts.0.w1.weight")
    'layers.{}.mlp.experts.{}.w1.weight'
    """
    return _LAYER_INDEX_PATTERN.sub("{}", name)


def list_weight_places(named: RowDims, rows: Sequence[Row], norms: Sequence[Row]) -> tuple[WeightPlace, ...]:
    """List what the weights of a layer multiply; nothing if that is not known of one of them.

    `norms` are the rows of norms among `rows`.
    """
    found = []
    transposed = _find_stack_order(named, rows)
    for row in rows:
        role = _find_norm_role(named, row) if row in norms else _find_role(named, row, transposed=transposed)
        if role is not None:
            found.append(WeightPlace(blank_numbers(INDEX.sub("{}", row.name.partition("}.")[2])), role))
        elif row not in norms and len(row.dims.split()) >= _MATRIX_NDIM:
            return ()
    return tuple(found)


def _find_stack_order(named: RowDims, rows: Sequence[Row]) -> bool | None:
    """Return whether stacks of experts are `[expert, in, out]`, which the one of gate and up tells; None without."""
    pair = f"{named.known('effn')}+{named.known('effn')}"
    stacks = [row.dims.split() for row in rows if len(row.dims.split()) == _EXPERT_STACK_NDIM]
    return next((words[-1] == pair for words in stacks if pair in words), None)


def _find_norm_role(named: RowDims, row: Row) -> WeightRole:
    return "norms" if row.dims.split()[-1] == named.known("hidden") else "head norms"


def _find_role(named: RowDims, row: Row, *, transposed: bool | None) -> WeightRole | None:
    """Find what a row that is no norm multiplies; None for biases, and for what is not known."""
    words = row.dims.split()
    expert = named.known("effn")
    if expert and any(expert in word.split("+") for word in words):
        if len(words) == _EXPERT_STACK_NDIM and transposed is not None:
            return "experts in" if "+" in row.dims else "experts out"
        return None if len(words) != _MATRIX_NDIM else "experts out" if words[-1] == expert else "experts in"
    return _find_plain_role(named, *words) if len(words) == _MATRIX_NDIM else None


def _find_plain_role(named: RowDims, out: str, into: str) -> WeightRole | None:
    """Find what a matrix multiplies that is no expert's."""
    wide = {named.known(name) for name in ("ffn", "dffn", "sffn")} - {""}
    wide |= {name for name in named.facts.dims if name.startswith("ffn_")}
    heads = {named.known(name) for name in _ATTENTION_DIM_NAMES} - {""}
    ranks = {named.known(name) for name in ("q_rank", "kv_rank")} - {""}
    hidden, made = named.known("hidden"), frozenset(out.split("+"))
    known: tuple[tuple[WeightRole, bool], ...] = (
        ("mlp in", into == hidden and not wide.isdisjoint(made)),
        ("router", into == hidden and out in {named.known("experts"), "1"}),
        ("attention in", into == hidden and made <= heads | ranks | {named.known("rope")}),
        ("latents", into in ranks),
        ("mlp out", out == hidden and into in wide),
        ("attention out", out == hidden and into in heads),
    )
    return next((role for role, holds in known if holds), None)
