"""Converts model checkpoints between any two layouts: plans, reshards and verifies."""

import sys
from typing import TYPE_CHECKING

from shardctl.version import __version__

if sys.platform == "win32":
    raise ImportError("shardctl runs on Linux and macOS; on Windows, run it in WSL: it needs the file locks of POSIX")

if TYPE_CHECKING:
    from shardctl.loading.state_dict import lens, load

__all__ = ["__version__", "lens", "load"]


def __getattr__(name: str) -> object:
    """Import `load` and `lens` when they are first asked for: what they need is slow to import."""
    if name in {"lens", "load"}:
        from shardctl.loading import state_dict as load

        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
