"""How cut pieces are packed into files: one file per layout, and two tuples that list them."""

from typing import Final

from shardctl.libraries.arrays.composing import Layout
from shardctl.libraries.dcp import writing as dcp
from shardctl.libraries.deepseek import writing as deepseek_mp
from shardctl.libraries.deepspeed import writing as universal
from shardctl.libraries.megatron import dist_writing as torch_dist
from shardctl.libraries.megatron import legacy_writing as megatron
from shardctl.libraries.meta import writing as meta
from shardctl.libraries.safetensors import hf_writing as hf
from shardctl.libraries.safetensors import ranks_writing as ranks
from shardctl.libraries.trtllm import writing as trtllm
from shardctl.libraries.vllm import writing as vllm

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
