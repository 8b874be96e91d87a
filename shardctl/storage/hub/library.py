"""The parts of huggingface_hub that read files: its connections, its headers with the token, its errors.

The connections are those of `get_session`, an httpx client that users may have given a proxy or certificates
(`set_client_factory`); under which name httpx is shipped differs between versions.
"""

from __future__ import annotations

from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined] # what httpx raises
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    get_session,
    hf_raise_for_status,
    validate_repo_id,
)

__all__ = [
    "HfHubHTTPError",
    "TransportError",
    "build_hf_headers",
    "get_session",
    "hf_raise_for_status",
    "validate_repo_id",
]
