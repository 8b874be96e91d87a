"""Describes gated DeltaNet and attention with gates (Qwen3-Next, Qwen3.5) as megatron-core's arrays.

Names and orders are those of `ssm/gated_delta_net.py` and of `attention_output_gate` in `transformer/attention.py` of
Megatron-LM core 0.16: one projection has all queries, keys, values, gates, betas and alphas, each of which is cut by
itself. `torch_dist` keeps each in an array of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.libraries.arrays.composite import CompositeArray, join_arrays
from shardctl.libraries.megatron.whole_array import WholeArray
from shardctl.tensors.manifest import GAMMA_LESS_ONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.libraries.arrays.schema import ModelParts

_PROJECTION_COMPONENT_NAMES: Final = ("query", "key", "value", "z", "beta", "alpha")
"""What core calls the parts of the projection."""


def list_delta_arrays(parts: ModelParts, have: str) -> Iterator[WholeArray]:
    """List the arrays of a layer's linear attention, whose tensors are called `have`."""
    yield WholeArray(
        "self_attention.in_proj.weight", _divide_projection(parts, have), 0, parts=_PROJECTION_COMPONENT_NAMES
    )
    convolution = tuple(parts.divide(f"{have}.conv1d.weight"))
    yield WholeArray("self_attention.conv1d.weight", convolution, 0, parts=_PROJECTION_COMPONENT_NAMES[:3])
    for name in ("A_log", "dt_bias"):
        yield WholeArray(f"self_attention.{name}", (parts[f"{have}.{name}"],), 0)
    norm = parts[f"{have}.norm.weight"]  # the only one of such a model that transformers keeps as it is meant
    centred = CompositeArray.whole(norm.pieces[0].tensor, norm.shape, GAMMA_LESS_ONE)
    yield WholeArray("self_attention.out_norm.weight", (centred,))
    yield WholeArray("self_attention.out_proj.weight", (parts[f"{have}.out_proj.weight"],), 1)


def divide_gated_queries(queries: CompositeArray, head: int) -> tuple[CompositeArray, CompositeArray]:
    """Divide a projection whose heads of `head` rows each carry a gate into all queries and all gates."""
    runs = queries.shares(0, queries.shape[0] // head)
    return join_arrays(runs[0::2]), join_arrays(runs[1::2])


def _divide_projection(parts: ModelParts, have: str) -> tuple[CompositeArray, ...]:
    """Divide what linear attention projects to: queries, keys, values, gates, betas, alphas."""
    if f"{have}.in_proj_qkv.weight" in parts:
        whole = (parts[f"{have}.in_proj_{name}.weight"] for name in "zba")
        return (*parts.divide(f"{have}.in_proj_qkv.weight"), *whole)
    keys, _, values = parts.divide(f"{have}.conv1d.weight")
    heads = keys.shape[0] // parts.unit(f"{have}.conv1d.weight")
    qkvz = parts[f"{have}.in_proj_qkvz.weight"].shares(0, heads)
    sizes = [keys.shape[0] // heads] * 2 + [values.shape[0] // heads] * 2
    both = [half for run in parts[f"{have}.in_proj_ba.weight"].shares(0, heads) for half in run.shares(0, 2)]
    found, start = [], 0
    for size in sizes:
        found.append(join_arrays([head.part(0, start, start + size) for head in qkvz]))
        start += size
    return (*found, join_arrays(both[0::2]), join_arrays(both[1::2]))
