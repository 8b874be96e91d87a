"""Translates a store's refusals for users, and says which of them are temporary."""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import AccessError, ChangedError, DestinationError, SourceError
from shardctl.base.value import value_class
from shardctl.storage.cloud.settings import HOW_ALLOWED, find_endpoint
from shardctl.storage.retries import TroubleError

if TYPE_CHECKING:
    from shardctl.base.errors import ShardctlError

_STATUS_CODE_PATTERN: Final = re.compile(r"status code: (\d{3})")
_ERROR_CODE_PATTERN: Final = re.compile(r"<Code>(\w+)</Code>")
_REGION_PATTERN: Final = re.compile(r"<Region>([a-z0-9-]+)</Region>")
_TRANSIENT_STATUSES: Final = {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.CONFLICT,
    HTTPStatus.TOO_MANY_REQUESTS,
}
"""Statuses below 500 that may be gone the next time."""
_PASSING_CODES: Final = {"RequestTimeout", "IncompleteBody", "BadDigest"}
"""What S3 answers with status 400 when the network, not the request, was at fault (Amazon S3 API Reference, "Error
responses")."""
_WRONG_REGION_CODES: Final = ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException")
"""What S3 answers to a request that was made for another region."""
_BARE_REDIRECT_MESSAGE: Final = "redirect without LOCATION"
"""What `object_store` makes of a redirect to another region."""
_REGION_TIMEOUT_SECONDS: Final = 10
"""Seconds for the question where a bucket is."""


@value_class
class RefusalReader:
    """Reads what obstore raises for one bucket."""

    root: str
    """The bucket's address, without a path."""
    writing: bool
    """Whether the bucket is a destination, so that what is wrong with it is not the source's fault."""
    library: Any
    """obstore's exceptions."""

    def explain_error(self, error: BaseException, doing: str) -> ShardctlError | TroubleError:
        """Return the error to raise for one of obstore's; a TroubleError where another try may succeed."""
        library = self.library
        if isinstance(error, (library.NotFoundError, FileNotFoundError)):
            return self._explain_missing(doing)
        if isinstance(error, (library.PermissionDeniedError, library.UnauthenticatedError, PermissionError)):
            return self._explain_wrong_region(error, doing) or self._explain_forbidden(doing, _get_first_line(error))
        if isinstance(error, library.PreconditionError):
            return self.changed(f"{doing} failed: the object has changed", "run again when nothing writes to it")
        if isinstance(error, library.InvalidPathError):
            return self.refuse(
                f"{doing} failed: a key in it is not a path: {_get_first_line(error)}",
                "rename that object, or remove it",
            )
        status = _STATUS_CODE_PATTERN.search(str(error))
        refusal = self._explain_wrong_region(error, doing) or (
            self._by_status(int(status[1]), error, doing) if status else None
        )
        return refusal or TroubleError(_get_first_line(error))

    def refuse(self, message: str, hint: str) -> ShardctlError:
        """Return the error for what is wrong with this end of a conversion."""
        return (DestinationError if self.writing else SourceError)(message, hint=hint)

    def changed(self, message: str, hint: str) -> ShardctlError:
        """Return the error for an object that somebody else wrote meanwhile."""
        return (DestinationError if self.writing else ChangedError)(message, hint=hint)

    def _explain_missing(self, doing: str) -> ShardctlError:
        hint = "make the bucket first, or check its name" if self.writing else "check the bucket and the path"
        return self.refuse(f"{doing} failed: nothing is there", hint)

    def _explain_forbidden(self, doing: str, words: str) -> ShardctlError:
        return AccessError(f"{doing} is not allowed: {words}", hint=HOW_ALLOWED[self._scheme])

    def _by_status(self, status: int, error: BaseException, doing: str) -> ShardctlError | None:
        """Return what an HTTP status means that obstore has no error of its own for; None if it may pass."""
        if status == HTTPStatus.NOT_FOUND:
            return self._explain_missing(doing)
        if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            return self._explain_forbidden(doing, _get_first_line(error))
        if (
            status >= HTTPStatus.INTERNAL_SERVER_ERROR
            or status in _TRANSIENT_STATUSES
            or _find_error_code(error) in _PASSING_CODES
        ):
            return None
        return self.refuse(f"{doing} failed: {_get_first_line(error)}", "check the address and the store's settings")

    def _explain_wrong_region(self, error: BaseException, doing: str) -> ShardctlError | None:
        """Return the error for a bucket in another region, which it names; None if that is not what is wrong."""
        text, code = str(error), _find_error_code(error)
        status = _STATUS_CODE_PATTERN.search(text)
        wordless = status is not None and status[1] == "400" and not code  # as answers to HEAD are
        if self._scheme != "s3" or not (_BARE_REDIRECT_MESSAGE in text or code in _WRONG_REGION_CODES or wordless):
            return None
        said = _REGION_PATTERN.search(text)
        right = said[1] if said else _find_bucket_region(self.root)
        used = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        if wordless and right in {"", used}:
            return None
        return self.refuse(
            f"{doing} failed: {self.root} is in {f'the region {right}' if right else 'another region'}, not in {used}",
            f"set AWS_REGION={right}" if right else "set AWS_REGION to the bucket's region",
        )

    @property
    def _scheme(self) -> str:
        return self.root.partition("://")[0]


def _find_bucket_region(root: str) -> str:
    """Find the region that S3 says a bucket is in, to everybody who asks; empty if it does not say."""
    name = root.partition("://")[2]
    request = urllib.request.Request(  # noqa: S310 - the user's endpoint, or Amazon's
        f"{find_endpoint('s3') or 'https://s3.amazonaws.com'}/{name}", method="HEAD"
    )
    try:
        with urllib.request.urlopen(request, timeout=_REGION_TIMEOUT_SECONDS) as answer:  # noqa: S310
            return str(answer.headers.get("x-amz-bucket-region", ""))
    except urllib.error.HTTPError as error:
        return str(error.headers.get("x-amz-bucket-region", ""))
    except (OSError, ValueError):
        return ""


def _find_error_code(error: BaseException) -> str:
    found = _ERROR_CODE_PATTERN.search(str(error))
    return found[1] if found else ""


def _get_first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
