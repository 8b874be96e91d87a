"""Decides whether and when to retry by HTTP status and headers (RFC 9110; draft-ietf-httpapi-ratelimit-headers)."""

from __future__ import annotations

import re
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Trouble that may be gone the next time."""
REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
EXPIRED: Final = frozenset({400, 401, 403, 404, 410})
"""What stores say of a signed address whose time is over; each its own."""
_RATE_LIMIT_RESET_PATTERN: Final = re.compile(r"\br\s*=\s*0\s*;\s*t\s*=\s*([0-9]{1,6})")
"""The Hub says ``"resolvers";r=0;t=55`` if nothing remains, and in 55 seconds will (its docs, "Rate limits")."""


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Parse seconds that the server asks to wait; None if it does not say.

    >>> (parse_retry_after({"retry-after": "3"}), parse_retry_after({"ratelimit": '"api";r=0;t=55'}),
    ...  parse_retry_after({}))
    (3.0, 56.0, None)
    """
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text)
    if text:
        try:
            return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
        except ValueError:
            return None
    reset = _RATE_LIMIT_RESET_PATTERN.search(headers.get("ratelimit", ""))
    return float(reset[1]) + 1 if reset else None
