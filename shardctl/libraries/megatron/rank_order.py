"""Sorts the arrays of a rank as megatron-core's modules have them, which is the order of an optimizer's parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.libraries.megatron.dist_parameters import BUFFERS, ModuleOrder, UnknownOrderError, find_position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardctl.libraries.megatron.rank_state_writing import NamedArray

_NON_LAYER_POSITIONS: Final = {
    "embedding.word_embeddings.weight": (0, 0),
    "embedding.position_embeddings.weight": (0, 1),
    "decoder.final_layernorm.weight": (2, 0),
    "decoder.final_layernorm.bias": (2, 1),
    "output_layer.weight": (3, 0),
}
_LAYER_PATTERN: Final = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_SEQUENTIAL_EXPERT_PATTERN: Final = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
_GROUPED_EXPERT_PATTERN: Final = re.compile(r"mlp\.experts\.linear_fc([12])\.weight(\d+)")
_CONCATENATED_EXPERTS_PATTERN: Final = re.compile(r"mlp\.experts\.weight([12])")


def sort_parameters(named: Sequence[NamedArray], *, engine: bool) -> list[NamedArray]:
    """Sort a rank's arrays, chunk by chunk of a virtual pipeline; `engine` says that layers are Transformer Engine's.

    Raises UnsupportedError, by name, for an array whose place is not known.
    """
    chunks = {chunk: number for number, chunk in enumerate(dict.fromkeys(chunk for chunk, _, _ in named))}
    order = ModuleOrder(engine, grouped=False)
    return sorted(named, key=lambda each: (chunks[each[0]], _find_place(each[1], order)))


def _find_place(name: str, order: ModuleOrder) -> tuple[int, ...]:
    """Find where an array stands in its chunk.

    >>> _find_place("decoder.layers.3.mlp.experts.linear_fc2.weight5", ModuleOrder(True, False))
    (1, 3, 23, 2, 5)
    """
    layer = _LAYER_PATTERN.fullmatch(name)
    if layer is None:
        if name not in _NON_LAYER_POSITIONS:
            raise _refuse(name)
        return _NON_LAYER_POSITIONS[name]
    number, local = int(layer[1]), layer[2]
    try:
        if found := _SEQUENTIAL_EXPERT_PATTERN.fullmatch(local):
            return 1, number, _find_module("mlp.experts", order), int(found[1]), int(found[2])
        if found := _GROUPED_EXPERT_PATTERN.fullmatch(local) or _CONCATENATED_EXPERTS_PATTERN.fullmatch(local):
            return 1, number, _find_module("mlp.experts", order), *map(int, found.groups())
        if local.endswith(BUFFERS):
            return 1, number, _find_module(local.rpartition(".")[0], order), len(local)
        return 1, number, *find_position(local, order)
    except UnknownOrderError as error:
        raise _refuse(name) from error


def _find_module(module: str, order: ModuleOrder) -> int:
    return find_position(f"{module}.weight", order)[0]


def _refuse(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"where {name} stands among the parameters of Megatron-LM's optimizers is not known, and directories of ranks "
        "have no names for states",
        hint="write --to torch_dist, whose states have names, or add --optimizer-states drop",
    )
