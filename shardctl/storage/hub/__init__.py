"""Models on the Hugging Face Hub, read by ranges of bytes at one commit, or from the Hub's own cache on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardctl.errors import UnsupportedError

if TYPE_CHECKING:
    from shardctl.storage import Source


def open_hub(text: str) -> Source:
    """The model that ``owner/name[@revision]`` or ``hf://owner/name[@revision][/folder]`` names."""
    raise UnsupportedError(f"{text} is on the Hub, which this version does not read")
