"""Finds PEFT's matrices in the arrays of an adapter that Megatron-Bridge trained.

Beside each array of a linear layer stand two, `linear_in` and `linear_out`. Where the layer is several of the model's,
they share the first, and the rows of the second are in the order of the layer's own (Megatron-Bridge,
models/conversion/peft_bridge.py, `_get_fused_adapter_linear_out_slices`; peft/utils.py, `sharded_state_dict`). With
CanonicalLoRA each has two of its own (peft/canonical_lora.py).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.arrays.binding import BRIDGE_ADAPTER, pull_chunks
from shardctl.libraries.arrays.composite import CompositeArray, Piece, SchemaEntry
from shardctl.libraries.files.impostors import ADAPTER_PREFIX
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Tensor
from shardctl.tensors.views import ArrayView

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.libraries.arrays.schema import Schema
    from shardctl.models import Model
    from shardctl.tensors.manifest import Chunk, Manifest

_ADAPTER_NAME_INFIX: Final = ".adapter."
_ADAPTER_ARRAY_PATTERN: Final = re.compile(
    r"(?P<layer>.+)\.adapter(?:\.adapter_(?P<part>q|k|v|gate|up))?\.linear_(?P<side>in|out)\.weight"
)
_LINEAR_LAYER_PATTERN: Final = re.compile(
    r"model\.layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.weight"
)
"""Layers of which the export of Megatron-Bridge is known: those of models without experts."""
_LORA_MATRIX_NAMES: Final = {"in": "lora_A", "out": "lora_B"}


def is_adapter_alone(stored: Manifest) -> bool:
    """Return whether arrays are those of an adapter without its base."""
    arrays = stored.tensors if stored.dialect is not None else {}
    return bool(arrays) and all(_ADAPTER_NAME_INFIX in name for name in arrays)


def bind_adapter_arrays(schema: Schema, base: Model, stored: Manifest) -> dict[str, Tensor]:
    """Return the matrices of an adapter of `base` by their names in PEFT; `stored` has its arrays, as `schema` says.

    Raises UnsupportedError, by name, for an array of a layer whose export is not known, SourceError for one that does
    not fit the base.
    """
    assert stored.dialect is not None  # noqa: S101 - asked before
    entries = {entry.name: entry for _, entry in schema.arrays(base, stored.dialect)}
    chunks: dict[str, list[Chunk]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, array in stored.tensors.items():
        for entry in _build_entries(base, array, entries):
            for matrix, chunk in pull_chunks(entry, array):
                chunks.setdefault(matrix, []).append(chunk)
            side = _ADAPTER_ARRAY_PATTERN.fullmatch(name)
            inputs = side is not None and side["side"] == "in"
            for piece in entry.content.pieces:
                weight = base.tensors[_find_weight(piece.tensor)]
                shapes[piece.tensor] = (
                    (array.shape[-2], weight.shape[1]) if inputs else (weight.shape[0], array.shape[-1])
                )
    return {name: Tensor(name, parts[0].dtype, shapes[name], tuple(parts)) for name, parts in chunks.items()}


def _build_entries(base: Model, array: Tensor, entries: dict[str, SchemaEntry]) -> Iterator[SchemaEntry]:
    """Yield what an array is made of; the inputs of a layer that is several are each one's, so there are several."""
    match = _ADAPTER_ARRAY_PATTERN.fullmatch(array.name)
    layer = entries.get(f"{match['layer']}.weight") if match is not None else None
    pieces = layer.content.pieces if layer is not None else ()
    if match is None or layer is None or not all(_LINEAR_LAYER_PATTERN.fullmatch(piece.tensor) for piece in pieces):
        raise UnsupportedError(f"shardctl does not know what {array.name} becomes in PEFT", hint=BRIDGE_ADAPTER)
    whole = layer.content.shape
    stack = whole[:-2]
    if len(array.shape) != len(whole):
        raise SourceError(f"{array.name} has shape {list(array.shape)}, but its layer has {list(whole)}")
    if match["side"] == "out" and match["part"] is None:
        rank = array.shape[-1]
        matrices = tuple(
            Piece(
                _name_matrix(piece.tensor, "out"),
                Box((piece.box.origin[0], 0), (piece.box.shape[0], rank)),
                piece.view,
            )
            for piece in pieces
        )
        yield SchemaEntry(array.name, CompositeArray((*whole[:-1], rank), matrices))
        return
    places = {piece.tensor: piece.view.origin[: len(stack)] for piece in pieces}
    kinds = dict.fromkeys(name.rpartition("_proj")[0].rpartition(".")[2] for name in places)
    if match["part"] is not None and match["part"] not in kinds:
        raise UnsupportedError(f"shardctl does not know what {array.name} becomes in PEFT", hint=BRIDGE_ADAPTER)
    for kind in kinds if match["part"] is None else (match["part"],):
        members = {name: place for name, place in places.items() if name.endswith(f".{kind}_proj.weight")}
        rows, columns = base.tensors[next(iter(members))].shape
        shape = (array.shape[-2], columns) if match["side"] == "in" else (rows, array.shape[-1])
        axes = (len(stack), len(stack) + 1)
        content = tuple(
            Piece(_name_matrix(name, match["side"]), Box.whole(shape), ArrayView((*place, 0, 0), axes))
            for name, place in members.items()
        )
        yield SchemaEntry(array.name, CompositeArray((*stack, *shape), content))


def _name_matrix(weight: str, side: str) -> str:
    return f"{ADAPTER_PREFIX}{weight.removesuffix('.weight')}.{_LORA_MATRIX_NAMES[side]}.weight"


def _find_weight(matrix: str) -> str:
    return f"{matrix.removeprefix(ADAPTER_PREFIX).rpartition('.lora_')[0]}.weight"
