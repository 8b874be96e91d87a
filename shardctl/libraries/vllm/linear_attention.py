"""Describes vLLM's arrays of layers that remember: gated DeltaNet of Qwen3-Next and Qwen3.5, convolutions of LFM2.

Names and orders are those of vLLM 0.32.0, `layers/mamba/gdn/qwen_gdn_linear_attn.py` and
`layers/mamba/short_conv.py`: a rank has the key heads of its share, with the value heads that they serve, or channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import PartitionError
from shardctl.libraries.arrays.composite import SchemaEntry, join_arrays

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.libraries.arrays.composite import CompositeArray
    from shardctl.libraries.vllm.rank import VllmRank

_DECAY: Final = BY_NAME["F32"]
"""vLLM keeps the logarithm of the decay in fp32, whatever the type of the others."""


def list_linear_attention(here: VllmRank, have: str) -> Iterator[SchemaEntry]:
    """List the arrays of a layer with gated DeltaNet."""
    yield SchemaEntry(f"{have}.A_log", here.rows(f"{have}.A_log"), dtype=_DECAY)
    yield SchemaEntry(f"{have}.dt_bias", here.rows(f"{have}.dt_bias"))
    yield from here.same(f"{have}.norm.weight")
    yield from here.row_layer(f"{have}.out_proj")
    yield SchemaEntry(f"{have}.conv1d.weight", join_arrays([*_share_sections(here, f"{have}.conv1d.weight")]))
    if f"{have}.in_proj_qkvz.weight" in here:  # Qwen3-Next's, one key head after another in both
        for name in ("in_proj_qkvz.weight", "in_proj_ba.weight"):
            yield SchemaEntry(f"{have}.{name}", join_arrays([*_share_sections(here, f"{have}.{name}")]))
        return
    for new, parts in (("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")), ("in_proj_ba", ("in_proj_b", "in_proj_a"))):
        rows = [rows for part in parts for rows in _share_sections(here, f"{have}.{part}.weight")]
        yield SchemaEntry(f"{have}.{new}.weight", join_arrays(rows))


def _share_sections(here: VllmRank, name: str) -> Iterator[CompositeArray]:
    """Yield this rank's rows of each section, by whole heads."""
    for part, unit in here.sections(name):
        heads = part.shape[0] // unit
        if heads % here.tp:
            raise PartitionError(f"{name}: {heads} key heads of linear attention cannot be divided over tp={here.tp}")
        yield part.share(0, here.index, here.tp)


def list_short_convolution(here: VllmRank, have: str, new: str) -> Iterator[SchemaEntry]:
    """List the arrays of a layer with a short convolution, LFM2's, whose channels are cut."""
    yield from here.column_layer(f"{have}.conv", f"{new}.conv")
    yield from here.row_layer(f"{have}.out_proj", f"{new}.out_proj")
    for kind in ("weight", "bias"):
        if f"{have}.in_proj.{kind}" in here:
            yield SchemaEntry(f"{new}.in_proj.{kind}", join_arrays([*_share_sections(here, f"{have}.in_proj.{kind}")]))
