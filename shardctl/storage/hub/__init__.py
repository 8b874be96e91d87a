"""Reads models on the Hugging Face Hub by ranges or from its cache on this machine, and writes them in one commit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, TypeGuard

from shardctl.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardctl.storage.hub.source import HubSource

_TIMEOUT_VARIABLES: Final = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")
"""What huggingface_hub takes for whole numbers as it is imported, and fails if they are none (`constants.py`); so does
transformers, which imports it."""
_MAX_TIMEOUT_SECONDS: Final = 86_400
"""Seconds in a day; a wait of more than about 292 years is an error in the system's own calls."""


def is_hub_address(text: object) -> TypeGuard[str]:
    """Return whether a place is one on the Hub: ``hf://`` begins it, because ``owner/name`` is a path, too."""
    return isinstance(text, str) and text.startswith("hf://")


def refuse_shared_hub(place: object) -> None:
    """Raise UsageError for a destination on the Hub where several processes write parts of a result."""
    if is_hub_address(place):
        raise UsageError(
            f"{place} is written by one process, because a commit is made at once",
            hint="leave --worker and --engine out, or write to a bucket or a shared directory first",
        )


def check_settings(environment: Mapping[str, str]) -> None:
    """Raise UsageError for a value of the environment that huggingface_hub cannot be imported or used with."""
    for name in _TIMEOUT_VARIABLES:
        text = environment.get(name, "").strip()
        try:
            usable = not text or 0 <= int(text) <= _MAX_TIMEOUT_SECONDS  # of 0 the library makes its default
        except ValueError:
            usable = False
        if not usable:
            raise UsageError(
                f"{name} is {text[:80]!r}, which is not a number of seconds",
                hint=f"unset it, or give a whole number from 1 to {_MAX_TIMEOUT_SECONDS}",
            )
    endpoint = environment.get("HF_ENDPOINT", "").strip()
    if endpoint:
        from shardctl.storage.endpoints import check_endpoint

        check_endpoint("HF_ENDPOINT", endpoint)


def find_cache_folder(text: str) -> Path | None:
    """Find the folder of this machine's cache that may hold the model of an address; None for another address.

    Raises UsageError for a setting of the library that cannot be.
    """
    if "://" in text and not is_hub_address(text):
        return None
    check_settings(os.environ)
    from shardctl.storage.hub.address import HubAddress

    try:
        from shardctl.storage.hub.listing import locate_cache_folder

        return locate_cache_folder(HubAddress.parse(text))
    except (ImportError, UsageError):  # the run itself says so
        return None


def open_hub(text: str) -> HubSource:
    """Return the model that ``owner/name[@revision]`` or ``hf://owner/name[@revision][/folder]`` names.

    Raises UsageError for an address that is none and for a setting of the library that cannot be, UnsupportedError
    without huggingface_hub, and as `HubSource`.
    """
    check_settings(os.environ)
    from shardctl.storage.hub.address import HubAddress
    from shardctl.storage.hub.source import HubSource

    return HubSource(text, HubAddress.parse(text))
