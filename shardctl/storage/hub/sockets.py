"""Receives bodies of large files directly in the caller's memory, which takes a third of the CPU time.

The library's HTTP client hands each body over in pieces of 64 KiB that Python has copied several times, with the
interpreter's lock held: 280 MB a second, hashes included, whatever the number of threads. The standard library's
`http.client` receives into memory that it is given, without the lock: 800 MB for a second of CPU time. So signed
addresses, for which no token is needed, are asked in this way; not through a proxy, and not where a client was set
that may do otherwise (`huggingface_hub.set_client_factory`).
"""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.request
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, urlsplit

from shardctl.storage.hub.limits import ANSWER_TIMEOUTS, ended_after
from shardctl.storage.retries import TroubleError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Mapping

BROKEN: Final = (OSError, http.client.HTTPException)
"""What a connection that fails raises, when it is opened and when it is read."""
_MAX_IDLE_CONNECTIONS: Final = 16
"""Connections that wait for their next request."""


class ResponseBody:
    """A response whose body has not been read."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response
        self.status_code = response.status
        self.headers: Mapping[str, str] = response.headers  # type: ignore[assignment] # a mapping but for its base

    def readinto(self, into: memoryview) -> int:
        """Fill the beginning of `into` with what has come; returns how many bytes that is, 0 at the end."""
        return self._response.readinto1(into)  # `readinto` would wait until all of it is full

    def is_exhausted(self) -> bool:
        """Return whether there is nothing more, which lets the connection be used again."""
        return not self._response.read(1)


class SocketPool:
    """Connections to the places that the Hub redirects to; shared by threads."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: list[tuple[tuple[str, str], http.client.HTTPConnection]] = []
        self._tls: ssl.SSLContext | None = None
        self._usual = _is_default_client()
        self._direct: dict[str, bool] = {}

    def reach(self, url: str) -> bool:
        """Return whether the address can be asked directly, as the library's client would."""
        parts = urlsplit(url)
        plain = url.isascii() and url.isprintable() and " " not in url  # `http.client` refuses others, and says them
        if not self._usual or not plain or parts.scheme not in {"http", "https"} or parts.username is not None:
            return False
        if parts.netloc not in self._direct:
            proxied = not urllib.request.getproxies().keys().isdisjoint({parts.scheme, "all"})
            self._direct[parts.netloc] = not proxied or bool(urllib.request.proxy_bypass(parts.hostname or ""))
        return self._direct[parts.netloc]

    @contextmanager
    def get(self, url: str, headers: Mapping[str, str]) -> Iterator[ResponseBody]:
        """Open the response to a GET, no redirect followed; trouble is TroubleError.

        The connection is kept for the next request if the body was read to its end.
        """
        parts = urlsplit(url)
        try:
            connection, response = self._sent(parts, headers)
        except BROKEN as error:
            raise TroubleError(f"the connection failed: {error or type(error).__name__}") from error
        try:
            yield ResponseBody(response)
        finally:
            if response.isclosed() and connection.sock is not None:
                self._return_connection(parts, connection)
            else:
                response.close()
                connection.close()

    def _sent(
        self, parts: SplitResult, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request; one that waited for too long, and that the other side has closed, is replaced."""
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        while True:
            connection, used = self._get_connection(parts)
            try:
                with ended_after(ANSWER_TIMEOUTS * self._timeout, partial(_break_connection, connection)):
                    connection.request("GET", target, headers=dict(headers))
                    return connection, connection.getresponse()
            except BROKEN as error:
                connection.close()
                if not used or isinstance(error, TimeoutError):
                    raise

    def _get_connection(self, parts: SplitResult) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, and whether it was used before."""
        place = (parts.scheme, parts.netloc)
        with self._lock:
            for number in reversed(range(len(self._idle))):
                if self._idle[number][0] == place:
                    return self._idle.pop(number)[1], True
            if parts.scheme == "https" and self._tls is None:
                self._tls = _make_tls_context()
        if parts.scheme == "https":
            return http.client.HTTPSConnection(parts.netloc, timeout=self._timeout, context=self._tls), False
        return http.client.HTTPConnection(parts.netloc, timeout=self._timeout), False

    def _return_connection(self, parts: SplitResult, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._idle.append(((parts.scheme, parts.netloc), connection))
            _, oldest = self._idle.pop(0) if len(self._idle) > _MAX_IDLE_CONNECTIONS else (None, None)
        if oldest is not None:
            oldest.close()

    def close(self) -> None:
        """Close connections that wait."""
        with self._lock:
            for _, connection in self._idle:
                with suppress(OSError):
                    connection.close()
            self._idle.clear()


def _break_connection(connection: http.client.HTTPConnection) -> None:
    """Make a thread fail that waits for an answer: interim ones may come without end, each with a timeout anew."""
    if connection.sock is not None:
        connection.sock.shutdown(socket.SHUT_RDWR)


def _is_default_client() -> bool:
    """Return whether the library makes its client itself, as far as can be seen.

    `set_client_factory` has no public counterpart that reads, and a client does not show whether it was given a proxy
    or certificates, so the factory itself is compared. If its private name is gone, the library's client is used.
    """
    module = import_module("huggingface_hub.utils._http")
    made = getattr(module, "_GLOBAL_CLIENT_FACTORY", None)
    return made is not None and made is getattr(module, "default_client_factory", None)


def _make_tls_context() -> ssl.SSLContext:
    """Return the certificates that the library's client believes, SSL_CERT_FILE and SSL_CERT_DIR heeded."""
    from shardctl.storage.hub.library import TransportError

    client = import_module(TransportError.__module__.partition(".")[0])
    context: ssl.SSLContext = client.create_ssl_context()
    return context
