"""Describes gpt-oss as megatron-core's arrays: experts whose gate and up columns take turns, their biases, and sinks.

Names are those of `transformer/dot_product_attention.py` (`softmax_offset`), of `transformer/moe/router.py` (`bias`)
and of experts with biases (`transformer/mlp.py`) in Megatron-LM core 0.16. Its gate stands over its up, as elsewhere,
and each is transposed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.libraries.megatron.whole_array import WholeArray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.libraries.arrays.schema import ModelParts

LIMIT: Final = 7.0
"""Up to which gates and ups count: transformers and engines know no other."""
_FIRST, _SECOND = "mlp.experts.linear_fc1", "mlp.experts.linear_fc2"


def list_sinks(parts: ModelParts, attention: str) -> Iterator[WholeArray]:
    """List what the softmax of each head of `attention` counts beside its tokens, if it has that."""
    if f"{attention}.sinks" in parts:
        yield WholeArray("self_attention.core_attention.softmax_offset", (parts[f"{attention}.sinks"],), 0)


def list_turning_experts(parts: ModelParts, have: str, held: range | None) -> Iterator[WholeArray]:
    """List the arrays of the mixture `have`; of its experts only those that are `held`, if that is given."""
    for kind in ("weight", "bias"):
        yield WholeArray(f"mlp.router.{kind}", (parts[f"{have}.router.{kind}"],))
    count = parts[f"{have}.router.weight"].shape[0]
    both = parts[f"{have}.experts.gate_up_proj"].unfold_dim(2).permute_dims((3, 0, 2, 1)).split()
    biases = parts[f"{have}.experts.gate_up_proj_bias"].unfold_dim(2).permute_dims((2, 0, 1)).split()
    down, bias = (parts[f"{have}.experts.{name}"] for name in ("down_proj", "down_proj_bias"))
    for expert in held or range(count):
        yield WholeArray(f"{_FIRST}.weight", tuple(each.at(0, expert) for each in both), 0, expert)
        yield WholeArray(f"{_FIRST}.bias", tuple(each.at(0, expert) for each in biases), 0, expert)
        yield WholeArray(f"{_SECOND}.weight", (down.at(0, expert).transposed,), 1, expert)
        yield WholeArray(f"{_SECOND}.bias", (bias.at(0, expert),), None, expert)
