"""Reads ranges of files above 50 GB, which the Hub keeps in Xet and may refuse to give otherwise.

The stores behind the Hub's redirects serve no such file whole, and answer 400 for ranges of the largest ones
(huggingface_hub's issues 3868 and 4330, xet-core's 592). `hf_xet` puts ranges together from the chunks that Xet has,
and gives them in order (`XetDownloadStreamGroup.download_stream`). For all other files plain ranges do, in less memory.
"""

from __future__ import annotations

import threading
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from shardctl.base.errors import HostileError
from shardctl.base.workers import raise_if_stopped
from shardctl.storage.retries import TroubleError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.base.workers import StopRequest
    from shardctl.storage.hub.listing import HubFile
    from shardctl.storage.hub.questions import HubQuestions

_SERVER_URL_SCHEMES: Final = frozenset({"https", "http"})
"""Of the address of Xet's server that the Hub names; hf_xet would make a directory for another."""


def needs_xet(file: HubFile) -> bool:
    """Return whether the Hub may refuse plain downloads of a file."""
    from huggingface_hub import constants

    return file.size > constants.MAX_HTTP_DOWNLOAD_SIZE


def has_xet() -> bool:
    """Return whether hf_xet is installed, reads ranges, and is not switched off (`HF_HUB_DISABLE_XET`)."""
    from huggingface_hub import constants

    if constants.HF_HUB_DISABLE_XET or find_spec("hf_xet") is None:
        return False
    return hasattr(import_module("hf_xet"), "XetDownloadStreamGroup")


class XetRanges:
    """Reads ranges of the files of one commit that are in Xet; shared by threads."""

    def __init__(self, hub: HubQuestions, token_url: str, headers: Mapping[str, str]) -> None:
        """`token_url` is where the Hub gives tokens for Xet, `headers` are those that it is asked with."""
        self._hub, self._token_url, self._headers = hub, token_url, dict(headers)
        self._lock = threading.Lock()
        self._opened: Any = None

    def fetch(self, file: HubFile, offset: int, into: memoryview, stop: StopRequest) -> int:
        """Fill `into` from byte `offset`; returns how many bytes came.

        Raises TroubleError for what may be gone the next time, HfHubHTTPError for a token that is refused.
        """
        module, done = import_module("hf_xet"), 0
        wanted = module.XetFileInfo(file.xet, file.size)
        group = self._group(module)
        try:
            for piece in group.download_stream(wanted, start=offset, end=offset + len(into)):
                raise_if_stopped(stop)
                if done + len(piece) > len(into):
                    raise TroubleError("Xet sent more bytes than were requested")
                into[done : done + len(piece)] = piece
                done += len(piece)
        except (module.XetAuthenticationError, module.XetObjectNotFoundError, OSError, RuntimeError) as error:
            self._forget()
            raise TroubleError(f"Xet failed: {error}") from error
        return done

    def _group(self, module: Any) -> Any:  # noqa: ANN401 - hf_xet has no types
        with self._lock:
            if self._opened is None:
                found, _ = self._hub.ask(self._token_url)
                if urlsplit(found["casUrl"]).scheme not in _SERVER_URL_SCHEMES:
                    raise HostileError("the Hub names a server of Xet that is not reached by HTTP")
                self._opened = module.XetSession().new_download_stream_group(
                    endpoint=found["casUrl"],
                    token=found["accessToken"],
                    token_expiry_unix_secs=found["exp"],
                    token_refresh_url=self._token_url,
                    token_refresh_headers=self._headers,
                    custom_headers={k: v for k, v in self._headers.items() if k.lower() != "authorization"},
                )
            return self._opened

    def _forget(self) -> None:
        with self._lock:
            self._opened = None
