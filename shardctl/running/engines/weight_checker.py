"""Asks a running vLLM for the sums of the weights that it holds.

`POST /weight_checker` with the action `checksum` gives a SHA-256 for each parameter of each worker (vLLM 0.32,
`entrypoints/rl/online/api_router.py`).
"""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import AccessError, SourceError, TransientError, UnsupportedError, UsageError
from shardctl.base.value import value_class
from shardctl.tensors.mesh import MOST_RANKS, Mesh

if TYPE_CHECKING:
    from collections.abc import Mapping

EMPTY: Final = sha256(b"").hexdigest()
"""Of a parameter without elements: its kernel keeps the weight somewhere else."""
_CHECKSUM_KEY_PATTERN: Final = re.compile(r"dp([0-9]{1,6}):pp([0-9]{1,6}):pcp([0-9]{1,6}):tp([0-9]{1,6}):(.+)")
_SHA256_PATTERN: Final = re.compile(r"[0-9a-f]{64}")
_MAX_RESPONSE_BYTES: Final = 1 << 30
"""Bytes of an answer; 10,000 parameters on 64 ranks take 100 MB."""
_KEY_VARIABLE: Final = "VLLM_API_KEY"
_NOT_THERE: Final = (404, 405)
_UNAUTHORIZED_STATUSES: Final = (401, 403)
_REDIRECT_STATUSES: Final = range(300, 400)
_OTHER_FORM: Final = (400, 422)
"""What FastAPI answers if a request has another form than its route."""
_RETRYABLE_STATUSES: Final = (429, 502, 503, 504)
_MAX_REASON_CHARACTERS: Final = 200
"""Characters of an engine's own words that a message repeats."""


@value_class
class HeldWeights:
    """What the workers of an engine say that they hold."""

    sums: Mapping[tuple[int, int, int, str], str]
    """By replica (of dp and pcp together), stage, tp rank and name of the parameter."""
    mesh: Mesh
    """Of one replica."""
    replicas: int


class _RefusedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, because urllib would send the key along: it is for the origin that the user named."""

    def redirect_request(self, *_: object) -> None:
        """Decline, so that the redirect is an HTTPError."""


def fetch_held_weights(address: str, seconds: float) -> HeldWeights:
    """Ask the engine at `address`; raises UsageError for an address that is none, UnsupportedError without the route.

    The key is sent to that address only: a redirect is a UsageError, too. Raises AccessError if the engine refuses,
    TransientError if it does not answer within so many seconds or is not ready, UnsupportedError if its route wants
    something else, SourceError for an answer of another form.
    """
    url = f"{address.rstrip('/')}/weight_checker"
    headers = {"Content-Type": "application/json", **_build_authorization()}
    opener = urllib.request.build_opener(_RefusedRedirects)
    try:
        request = urllib.request.Request(url, b'{"action": "checksum"}', headers)  # noqa: S310 - http or https
        with opener.open(request, timeout=seconds) as answer:
            content = answer.read(_MAX_RESPONSE_BYTES + 1)
            lost = answer.length if len(content) <= _MAX_RESPONSE_BYTES else 0
    except urllib.error.HTTPError as error:
        with error:
            if error.code in _REDIRECT_STATUSES:
                raise UsageError(
                    f"{url} redirects to {error.headers.get('location', 'nowhere')!a:.200}, which is not asked: "
                    "the key is for the address that was given",
                    hint="if the engine is there, give that address: --engine http://HOST:PORT",
                ) from error
            raise _explain_status(url, error.code, _read_reason(error)) from error
    except ValueError as error:
        raise UsageError(
            f"{address} is not the address of an engine: {error}", hint="write http://HOST:PORT"
        ) from error
    except http.client.HTTPException as error:
        raise SourceError(
            f"{url} does not answer in HTTP: {type(error).__name__} {error!a:.100}",
            hint="is this the port of the engine's OpenAI server?",
        ) from error
    except OSError as error:
        raise TransientError(f"{url} does not answer: {error}", hint="is the engine running, and ready?") from error
    if lost:
        raise TransientError(f"{url} ends {lost:,} bytes before its answer does", hint="has the engine stopped?")
    return _parse_answer(content, address)


def _build_authorization() -> dict[str, str]:
    """Build the header with the engine's key; empty if there is none.

    Raises UsageError for a key that no header can hold, without repeating it, as http.client does.
    """
    key = os.environ.get(_KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"{_KEY_VARIABLE} holds characters that no key can have", hint="write the engine's --api-key into it again"
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


def _read_reason(error: urllib.error.HTTPError) -> str:
    """Read what the engine says of a status, in its own words; empty if it says nothing in JSON."""
    try:
        said = json.loads(error.read(1 << 16))
    except (ValueError, RecursionError, OSError, http.client.HTTPException):
        return ""
    for key in ("error", "detail", "message"):
        while isinstance(said, dict) and key in said:
            said = said[key]
    return f": {ascii(said)[:_MAX_REASON_CHARACTERS]}" if said else ""


def _explain_status(url: str, status: int, reason: str) -> UnsupportedError | AccessError | TransientError:
    if status in _NOT_THERE:
        return UnsupportedError(
            f"{url} is not there (HTTP {status})",
            hint="vLLM has it where its routes for reinforcement learning are on; SGLang has other sums",
        )
    if status in _UNAUTHORIZED_STATUSES:
        return AccessError(f"{url} is refused (HTTP {status})", hint=f"set {_KEY_VARIABLE} to the engine's --api-key")
    if status in _OTHER_FORM:
        return UnsupportedError(
            f"{url} wants another request (HTTP {status}){reason}",
            hint="shardctl asks as vLLM 0.32 is asked; another version or engine may have another route of this name",
        )
    if status in _RETRYABLE_STATUSES:
        return TransientError(
            f"the engine behind {url} is not ready (HTTP {status}){reason}",
            hint="it may still load its weights; ask again when its /health answers 200",
        )
    return TransientError(f"{url} answers HTTP {status}{reason}", hint="the engine's log says why")


def _parse_answer(content: bytes, address: str) -> HeldWeights:
    try:
        said = json.loads(content)["checksums"] if len(content) <= _MAX_RESPONSE_BYTES else None
    except (ValueError, LookupError, TypeError, RecursionError):
        said = None
    found = {}
    for key, value in said.items() if isinstance(said, dict) else ():
        match = _CHECKSUM_KEY_PATTERN.fullmatch(key)
        if match is None or not isinstance(value, str) or _SHA256_PATTERN.fullmatch(value) is None:
            raise SourceError(f"{address} names a sum {key!a:.100}, whose form is not known here")
        dp, pp, pcp, tp = (int(number) for number in match.groups()[:4])
        found[dp, pcp, pp, tp, match[5]] = value
    if not found:
        raise SourceError(f"{address} answers with no sums of weights")
    stages, ranks = 1 + max(key[2] for key in found), 1 + max(key[3] for key in found)
    replicas = sorted({key[:2] for key in found})
    if stages * ranks > MOST_RANKS:
        raise SourceError(f"{address} names a rank tp{ranks - 1} of stage pp{stages - 1}, more than are compared")
    number = {replica: at for at, replica in enumerate(replicas)}
    sums = {(number[dp, pcp], pp, tp, name): value for (dp, pcp, pp, tp, name), value in found.items()}
    return HeldWeights(sums, Mesh.of(pp=stages, tp=ranks), len(replicas))
