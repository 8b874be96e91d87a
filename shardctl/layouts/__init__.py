"""How cut pieces are packed into files: one file per layout, and two tuples that list them."""

from typing import Final

from shardctl.layouts import dcp, deepseek_mp, hf, megatron, meta, ranks, torch_dist, trtllm, universal, vllm
from shardctl.layouts.composed import Layout

COMPOSED: Final[tuple[Layout, ...]] = (
    trtllm.LAYOUT,
    deepseek_mp.LAYOUT,
    megatron.LAYOUT,
    torch_dist.LAYOUT,
    vllm.LAYOUT,
)
"""The layouts whose arrays another library defines."""
LAYOUTS: Final = (hf.NAME, ranks.NAME, dcp.NAME, universal.NAME, meta.NAME, *(layout.name for layout in COMPOSED))
"""What `--to` accepts."""
