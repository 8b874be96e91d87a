"""How cut pieces are packed into files: one file per layout, and one tuple that lists them."""

from typing import Final

from shardctl.layouts import dcp, hf, meta, ranks, universal

LAYOUTS: Final = (hf.NAME, ranks.NAME, dcp.NAME, universal.NAME, meta.NAME)
"""What `--to` accepts."""
