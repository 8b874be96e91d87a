"""Wraps the parts of huggingface_hub that read and write files: its connections, headers with the token, and errors.

The connections are those of `get_session`, an httpx client that users may have given a proxy or certificates
(`set_client_factory`); under which name httpx is shipped differs between versions.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined] # what httpx raises
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
    get_session,
    hf_raise_for_status,
    validate_repo_id,
)

InvalidURL: Final[type[Exception]] = import_module(TransportError.__module__).InvalidURL
"""What httpx raises for an address that is none, such as that of a proxy; it is none of its other errors."""

__all__ = [
    "HfHubHTTPError",
    "InvalidURL",
    "TransportError",
    "are_progress_bars_disabled",
    "build_hf_headers",
    "disable_progress_bars",
    "enable_progress_bars",
    "get_session",
    "hf_raise_for_status",
    "validate_repo_id",
]
