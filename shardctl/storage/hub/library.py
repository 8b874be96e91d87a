"""Wraps the parts of huggingface_hub that read and write files: its connections, headers with the token, and errors.

The connections are those of `get_session`, an httpx client that users may have given a proxy or certificates
(`set_client_factory`); under which name httpx is shipped differs between versions.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

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

from shardctl.storage.hub.origins import same_origin

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    "keep_token_at",
    "validate_repo_id",
]


@contextmanager
def keep_token_at(endpoint: str) -> Iterator[None]:
    """Take the token off every request of the library that goes to another origin than the Hub's.

    What verifies an upload of Git LFS is at whatever address the answer names, and the library sends the token there
    (huggingface_hub, `lfs.py`, `lfs_upload`).
    """
    client = get_session()
    hooks = client.event_hooks

    def take_off(request: Any) -> None:  # noqa: ANN401 - httpx's
        if not same_origin(str(request.url), endpoint):
            request.headers.pop("authorization", None)

    client.event_hooks = {**hooks, "request": [*hooks.get("request", ()), take_off]}
    try:
        yield
    finally:
        client.event_hooks = hooks
