"""Describes the arrays of Megatron-LM's distributed checkpoints, which do not depend on the mesh.

They are the arrays of `schemas/megatron`, whole, with other names (`sharded_state_dict` in Megatron-LM core 0.12 to
0.16): layers stacked along a new first dim, or each by its number (`transformer/transformer_block.py`); the same of
experts (`transformer/moe/experts.py`); gate over up, or two arrays (`transformer/mlp.py`); and norms named by the
projection that follows them, whatever module they are (`models/gpt/gpt_layer_specs.py`).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.arrays.composite import CompositeArray, SchemaEntry, join_arrays, shift_axes
from shardctl.libraries.arrays.schema import Schema
from shardctl.libraries.megatron import further_layers, layers
from shardctl.libraries.megatron.layers import LayerVariant
from shardctl.libraries.megatron.names import QKV, find_engine_name, find_projection
from shardctl.libraries.megatron.ranks import TITLE
from shardctl.tensors.views import ArrayView

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.base.dtype import DType
    from shardctl.libraries.megatron.whole_array import WholeArray
    from shardctl.models import Model
    from shardctl.tensors.naming_scheme import NamingScheme

NAME: Final = "torch_dist"
LAYERS: Final = "layers_by_number"
"""The fact that says whether each layer has arrays of its own; else those of all are stacked."""
EXPERTS: Final = "experts_by_number"
"""The same of experts."""
HALVES: Final = "halves"
"""The fact that says whether gate and up projection are two arrays; else one is over the other."""
VOCABULARY: Final = "vocabulary"
"""The fact that says to how many rows the vocabulary is padded; not at all without it."""
HYBRID: Final = "hybrid"
"""The fact that says that each layer is one of Mamba, attention, an MLP or experts."""
SPELT: Final = "spelt"
"""The fact that says that norms have every name that a version of the layers asks for; else any of them will do."""
MODULES: Final = "modules"
"""The fact that says that norms have the names of one kind of layers alone: `OWN` or `ENGINE`."""
OWN, ENGINE = "own", "engine"
"""megatron-core's local layers, and Transformer Engine's."""
_LINEAR_FC1_INFIX: Final = ".linear_fc1."
_GATE_UP_SUFFIXES: Final = ("_w", "_v")
_FUSED_NORM_NAMES: Final = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
"""What megatron-core's local layers put in place of the names of their norms, but for those with latents."""


@value_class
class StackCell:
    """What a layer, or an expert of one, has of an array: all of it, or an index of its stack."""

    name: str
    """Of the array."""
    pieces: tuple[CompositeArray, ...]
    """Joined along dim 0; what is divided by tp is divided in each by itself."""
    dim: int | None = None
    """Along which tp divides it."""
    place: tuple[int, ...] = ()
    """Its indices in the dims that the array has before its own."""
    counts: tuple[int, ...] = ()
    """The extents of those."""
    layer: int | None = None
    """Whose it is; None before the first and behind the last, where layers that predict are, too."""
    expert: int | None = None
    optional: bool = False
    """Whether a checkpoint may lack it, because the tensors are in another array, too."""
    dtype: DType | None = None
    """The type that it must have."""
    first: bool = False
    """Whether it stands before the first layer."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        first = self.pieces[0].shape
        return (*self.counts, sum(piece.shape[0] for piece in self.pieces), *first[1:])

    @property
    def content(self) -> CompositeArray:
        """All of it, without the dims of the stack."""
        return join_arrays(self.pieces)


def list_cells(model: Model, dialect: NamingScheme) -> Iterator[StackCell]:
    """List everything that the arrays are made of, in the model's order.

    Raises SourceError for a padded vocabulary that is smaller than the model's.
    """
    parts = layers.build_model_parts(model, dialect)
    if layers.is_hybrid(model):
        dialect = replace(dialect, facts={**dialect.facts, HYBRID: True})
    padded = dialect.number(VOCABULARY)
    (name, tokens), *others = layers.list_embeddings(parts)
    yield replace(_build_vocabulary_cell(name, tokens, padded), first=True)
    for name, content in others:
        yield StackCell(name, (content,), first=True)
    by_number = dialect.read_flag(LAYERS)
    for number in range(model.layers):
        wholes = list(layers.list_layer_arrays(parts, number, LayerVariant()))
        prefix = f"decoder.layers.{number}." if by_number else "decoder.layers."
        yield from _list_layer_cells(wholes, prefix, number, () if by_number else ((number, model.layers),), dialect)
    for whole in layers.list_last_norm(parts):
        yield StackCell(whole.name, whole.pieces)
    for index in range(dialect.number(further_layers.COUNT)):
        for inner, further in further_layers.list_further_modules(parts, index, LayerVariant()):
            yield from _list_layer_cells(list(further), f"mtp.layers.{index}.{inner}", None, (), dialect)
    if not layers.is_tied(model):
        yield _build_vocabulary_cell("output_layer.weight", layers.get_output_layer(parts), padded)


def _build_vocabulary_cell(name: str, tokens: CompositeArray, padded: int) -> StackCell:
    if 0 < padded < tokens.shape[0]:
        raise SourceError(
            f"{name} has {padded:,} rows, but the model has {tokens.shape[0]:,} tokens",
            hint="the config, or --true-vocab, may belong to another model",
        )
    return StackCell(name, (tokens.pad_rows(padded) if padded else tokens,), 0)


def _list_layer_cells(
    wholes: list[WholeArray],
    prefix: str,
    number: int | None,
    stacked: tuple[tuple[int, int], ...],
    dialect: NamingScheme,
) -> Iterator[StackCell]:
    """List the cells of a layer, at an index of some extent in each dim of the stack; `number` says on which stage."""
    experts = 1 + max((whole.expert for whole in wholes if whole.expert is not None), default=-1)
    latent = any("linear_kv_up_proj" in whole.name for whole in wholes)
    projection = find_projection(whole.name for whole in wholes)
    for whole in wholes:
        if whole.expert is None:
            names = _list_array_names(
                whole.name, experts=bool(experts), latent=latent, projection=projection, dialect=dialect
            )
            for name in names:
                optional = len(names) > 1 and not dialect.read_flag(SPELT)
                yield from _list_array_cells(prefix + name, whole, number, stacked, dialect, optional=optional)
            continue
        expert = f"experts.experts.{whole.expert}." if dialect.read_flag(EXPERTS) else "experts.experts."
        within = stacked if dialect.read_flag(EXPERTS) else (*stacked, (whole.expert, experts))
        yield from _list_array_cells(prefix + whole.name.replace("experts.", expert, 1), whole, number, within, dialect)


def _list_array_cells(
    name: str,
    whole: WholeArray,
    layer: int | None,
    stacked: tuple[tuple[int, int], ...],
    dialect: NamingScheme,
    *,
    optional: bool = False,
) -> Iterator[StackCell]:
    """List an array's cell, at an index of some extent in each dim of the stack.

    Those of gate and up, if they are two.
    """
    place, counts = tuple(index for index, _ in stacked), tuple(count for _, count in stacked)
    for part, piece in zip(whole.parts, whole.pieces if whole.parts else (), strict=True):
        yield StackCell(f"{name}.{part}", (piece,), whole.dim, place, counts, layer, None, optional, whole.dtype)
    if whole.parts:
        return
    pieces = whole.pieces if _LINEAR_FC1_INFIX in name else (whole.content,)
    halves = (
        _GATE_UP_SUFFIXES
        if dialect.read_flag(HALVES) and _LINEAR_FC1_INFIX in name and len(pieces) == len(_GATE_UP_SUFFIXES)
        else ()
    )
    if not halves:
        yield StackCell(name, pieces, whole.dim, place, counts, layer, whole.expert, optional, whole.dtype)
    for half, piece in zip(halves, pieces, strict=False):
        yield StackCell(name + half, (piece,), whole.dim, place, counts, layer, whole.expert, optional, whole.dtype)


def _list_array_names(
    local: str, *, experts: bool, latent: bool, projection: str, dialect: NamingScheme
) -> tuple[str, ...]:
    """List the names that versions of the layers have for an array: one, but for norms.

    If `SPELT`, those that local layers and Transformer Engine's ask for; else local layers' own name, too; if `MODULES`
    says of which layers, the name of their module.
    """
    asked = local
    for alone, fused in _FUSED_NORM_NAMES[projection != QKV :] if not latent else ():
        asked = asked.replace(alone, fused) if local.startswith(alone) else asked
    engine = find_engine_name(f".{local}", experts=experts, latent=latent, projection=projection).removeprefix(".")
    if dialect.read_flag(HYBRID):  # of which core has no local layers, but whose norms ModelOpt keeps in modules
        return (engine,) if dialect.read_flag(SPELT) else tuple(dict.fromkeys((engine, local)))
    if dialect.text(MODULES):
        return (local if dialect.text(MODULES) == OWN else engine,)
    return tuple(dict.fromkeys((asked, engine) if dialect.read_flag(SPELT) else (asked, engine, local)))


def _list_entries(model: Model, dialect: NamingScheme, rank: int) -> Iterator[SchemaEntry]:
    del rank  # arrays are global
    arrays: dict[str, list[StackCell]] = {}
    for cell in list_cells(model, dialect):
        arrays.setdefault(cell.name, []).append(cell)
    for name, same in arrays.items():
        check_stack(same)
        yield SchemaEntry(name, stack_cells(same), optional=same[0].optional, dtype=same[0].dtype)


def check_stack(same: list[StackCell]) -> None:
    """Raise UnsupportedError if the cells of an array do not fill its stack: then layers are unlike each other."""
    if len(same) != prod(same[0].counts) or len({cell.shape for cell in same}) > 1:
        raise UnsupportedError(
            f"{TITLE} stacks layers of one kind, but {same[0].name} is not the same in all of them",
            hint="such a model is saved with a number in the name of each layer",
        )


def stack_cells(same: list[StackCell]) -> CompositeArray:
    """Return the array that cells make up."""
    first = same[0]
    if not first.counts:
        return first.content
    before = len(first.counts)
    pieces = tuple(
        replace(
            piece,
            view=ArrayView((*cell.place, *piece.view.origin), shift_axes(piece.view.axes, before), piece.view.steps),
        )
        for cell in same
        for piece in cell.content.pieces
    )
    return CompositeArray((*first.counts, *first.content.shape), pieces)


SCHEMA: Final = Schema(
    NAME, TITLE, layers.check_model, _list_entries, layers.FURTHER_LAYERS, further_layers.LEFT_BEHIND
)
