"""Decides which addresses belong to the Hub: only requests to those carry the token."""

from __future__ import annotations

from urllib.parse import urlsplit


def origin_of(url: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port, which together are what a token is for (RFC 6454).

    Raises ValueError for a bad port.

    >>> origin_of("https://Huggingface.co/a/b"), origin_of("http://127.0.0.1:80/")
    (('https', 'huggingface.co', 443), ('http', '127.0.0.1', 80))
    """
    parts = urlsplit(url)
    usual = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or usual


def same_origin(url: str, endpoint: str) -> bool:
    """Return whether an address is of the place that `endpoint` is of."""
    try:
        return origin_of(url) == origin_of(endpoint)
    except ValueError:
        return False
