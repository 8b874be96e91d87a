"""Models on the Hugging Face Hub: read by ranges at one commit, or from the Hub's own cache on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardctl.storage.hub.source import HubSource


def open_hub(text: str) -> HubSource:
    """The model that ``owner/name[@revision]`` or ``hf://owner/name[@revision][/folder]`` names.

    Raises UsageError for an address that is none, UnsupportedError without huggingface_hub, and as `HubSource`.
    """
    from shardctl.storage.hub.address import Address
    from shardctl.storage.hub.source import HubSource

    return HubSource(text, Address.parse(text))
