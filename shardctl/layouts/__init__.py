"""How cut pieces are packed into files: one file per layout, and one tuple that lists them."""

from typing import Final

from shardctl.layouts import hf, ranks

LAYOUTS: Final = (hf.NAME, ranks.NAME)
"""What `--to` accepts."""
