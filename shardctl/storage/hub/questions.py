"""Asks the Hub's API for JSON, with limits on time and size, and sends the token to the Hub only.

huggingface_hub's own `list_repo_tree` follows whatever next page an answer names, with the token, for ever.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urljoin

from shardctl.base.errors import HostileError, SourceError
from shardctl.storage.hub.limits import ANSWER_TIMEOUTS, answer_within, read_bounded
from shardctl.storage.hub.origins import same_origin
from shardctl.storage.hub.statuses import REDIRECTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MAX_RESPONSE_BYTES: Final = 16 << 20
"""Bytes of one answer: a page of 1,000 files has half a million."""
_MOST_REDIRECTS: Final = 5
"""A renamed repository is one."""
_MOST_PAGES: Final = 2_000
"""Two million files, of which the Hub advises 100,000 (its docs, "Storage limits"), in a minute or several."""


class HubQuestions:
    """Asks one Hub, with the token that the user has for it."""

    def __init__(self, endpoint: str, headers: Mapping[str, str], timeout: float) -> None:
        self._endpoint, self._headers, self._timeout = endpoint, headers, timeout

    def ask(self, url: str) -> tuple[Any, str | None]:
        """Return the document at an address of the Hub, and the address of the next page, if there is one.

        Raises HfHubHTTPError for a status that says no, SourceError for an answer that leads elsewhere or has no end,
        TroubleError for one that takes too long, ValueError for what is not JSON.
        """
        from shardctl.storage.hub.library import get_session, hf_raise_for_status

        headers = {**self._headers, "Accept-Encoding": "identity"}
        seconds = ANSWER_TIMEOUTS * self._timeout
        for _ in range(_MOST_REDIRECTS):
            self._require_own(url)
            ask = partial(
                get_session().stream, "GET", url, headers=headers, follow_redirects=False, timeout=self._timeout
            )
            with answer_within(seconds, ask) as response:
                location = response.headers.get("location")
                if response.status_code in REDIRECTS:
                    if not location:
                        raise SourceError(
                            "the Hub redirects a request without saying where to", hint=_CHECK_ENDPOINT_HINT
                        )
                    url = urljoin(url, location)
                    continue
                answer = read_bounded(response, _MAX_RESPONSE_BYTES, seconds)
            hf_raise_for_status(answer)
            if not answer.content:
                raise SourceError(
                    f"the Hub's answer has no content, or more than {_MAX_RESPONSE_BYTES:,} bytes",
                    hint=_CHECK_ENDPOINT_HINT,
                )
            following = answer.links.get("next", {}).get("url")
            try:
                document = json.loads(answer.content)
            except RecursionError as error:
                raise SourceError("the Hub's answer is nested without end", hint=_CHECK_ENDPOINT_HINT) from error
            return document, urljoin(url, following) if following else None
        raise SourceError("the Hub redirects a request to its API without end", hint=_CHECK_ENDPOINT_HINT)

    def pages(self, url: str) -> Iterator[Any]:
        """Yield the documents of all pages, of which this is the address of the first; raises as `ask`."""
        asked: set[str] = set()
        following: str | None = url
        while following is not None:
            if following in asked:
                raise SourceError(
                    "a page of the Hub's listing names one before it as the next", hint=_CHECK_ENDPOINT_HINT
                )
            if len(asked) == _MOST_PAGES:
                raise SourceError(f"the Hub's listing has more than {_MOST_PAGES:,} pages", hint=_CHECK_ENDPOINT_HINT)
            asked.add(following)
            document, following = self.ask(following)
            yield document

    def _require_own(self, url: str) -> None:
        if not same_origin(url, self._endpoint):
            raise HostileError(
                "the Hub's answer names an address of another host, which must not see the token",
                hint=_CHECK_ENDPOINT_HINT,
            )


_CHECK_ENDPOINT_HINT: Final = "is HF_ENDPOINT right? A mirror must answer as the Hub does, with addresses of its own"
