"""A place in a bucket: its objects, and what a store's troubles mean to a user.

Credentials, regions and endpoints are found as obstore finds them: in the variables of the environment that the stores'
own tools use (`AWS_*`, `GOOGLE_*`, `AZURE_*`), or from the machine.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shardctl.errors import AccessError, ChangedError, DestinationError, SourceError, UsageError
from shardctl.storage.patience import Patience, TroubleError
from shardctl.workers import Stop, heed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardctl.errors import ShardctlError

Result = TypeVar("Result")

PIECE: Final = 8 << 20
"""Bytes of a ranged read at most, and of a part of an upload at least: enough to hide what a request costs."""
_MOST_PARTS: Final = 9_000
"""S3 allows 10,000 in one upload (Amazon S3 User Guide, "Multipart upload limits")."""
_AT_ONCE: Final = 4
"""Parts of one upload on their way at once."""
_QUICK: Final = {"max_retries": 2, "retry_timeout": timedelta(seconds=20)}
"""Within one try; further ones are ours, because only between ours a signal is heard."""
_ONE_REQUEST: Final = timedelta(minutes=5)
"""For all of one, body included: obstore's 30 s are too few for four parts on their way at less than 1.1 MB/s."""


def piece_bytes(size: int) -> int:
    """Bytes of each part in which an object of `size` bytes is sent."""
    return max(PIECE, -(-size // _MOST_PARTS))


def sending_bytes(size: int) -> int:
    """Anonymous memory that sending an object of `size` bytes takes (50 MiB were measured for one of 26 MB)."""
    return (_AT_ONCE + 2) * piece_bytes(size) + (16 << 20)


@dataclass(frozen=True, slots=True)
class Object:
    """What a listing says of an object."""

    size: int
    etag: str
    """Another one for another content."""


class Bucket:
    """Everything below `scheme://bucket/prefix`; keys are relative to it."""

    def __init__(self, text: str) -> None:
        """Raises UsageError for an address without a bucket, or if obstore is not installed."""
        scheme, _, rest = text.partition("://")
        name, _, prefix = rest.partition("/")
        parts = prefix.strip("/").split("/") if prefix.strip("/") else []
        if not name or not {"", ".", ".."}.isdisjoint(parts):
            raise UsageError(f"{text} is no address in a bucket", hint=f"write {scheme}://BUCKET/FOLDER")
        self.name = text.rstrip("/")
        self.root = f"{scheme}://{name}"
        self.prefix = "/".join(parts)
        self.stop = Stop()
        self._obstore: Any = _library()

    @cached_property
    def _store(self) -> Any:  # noqa: ANN401 - obstore's stores have no common type
        endpoint = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", ""))
        plain = self.root.startswith("s3:") and endpoint.startswith("http://")
        options = {"timeout": _ONE_REQUEST, "allow_http": plain}
        with self._told("opening"):
            return self._obstore.store.from_url(self.root, client_options=options, retry_config=_QUICK)

    def _key(self, path: str) -> str:
        return "/".join(filter(None, (self.prefix, path)))

    def objects(self) -> dict[str, Object]:
        """Every object below the prefix, by key, sorted; empty if there is none."""
        start = f"{self.prefix}/" if self.prefix else ""

        def listed() -> dict[str, Object]:
            found: dict[str, Object] = {}
            for batch in self._obstore.list(self._store, prefix=self.prefix or None, chunk_size=1000):
                for meta in batch:
                    path = str(meta["path"])
                    if path.startswith(start) and not path.endswith("/"):
                        found[path[len(start) :]] = _object(meta)
            return found

        return dict(sorted(self._tried("listing", "", listed).items()))

    def head(self, path: str) -> Object | None:
        """What there is under a key; None if there is nothing."""

        def looked() -> Object | None:
            try:
                return _object(self._obstore.head(self._store, self._key(path)))
            except (self._obstore.exceptions.NotFoundError, FileNotFoundError):
                return None

        return self._tried("looking at", path, looked)

    def fetch(self, path: str, offset: int, into: memoryview, etag: str) -> None:
        """Fill `into` from an object, if it still is the one with that ETag; raises ChangedError if it is not."""
        for start in range(0, len(into), PIECE):
            self._fetch(path, offset + start, into[start : start + PIECE], etag)

    def _fetch(self, path: str, offset: int, into: memoryview, etag: str) -> None:
        options: dict[str, Any] = {"range": (offset, offset + len(into))}
        if etag:
            options["if_match"] = etag

        def got() -> None:
            answer = self._obstore.get(self._store, self._key(path), options=options)
            if tuple(answer.range) != options["range"]:
                raise TroubleError(f"bytes {answer.range} came for {options['range']}")
            data = memoryview(answer.bytes())
            if len(data) != len(into):
                raise TroubleError(f"{len(data)} bytes came for {len(into)}")
            into[:] = data

        self._tried("reading", path, got)

    def read(self, path: str) -> bytes | None:
        """The content of a small object; None if there is none."""
        found = self.head(path)
        if found is None:
            return None
        content = bytearray(found.size)
        self.fetch(path, 0, memoryview(content), found.etag)
        return bytes(content)

    def write(self, path: str, content: bytes) -> None:
        """Put a small object: all of it, or nothing."""
        self._tried("writing", path, lambda: self._obstore.put(self._store, self._key(path), content))

    def upload(self, path: str, file: Path, size: int) -> Object:
        """Put a file: in parts, which become an object when the last one is there; else nothing of them stays."""
        piece = piece_bytes(size)

        def put() -> str:
            pieces = self._pieces(file, piece)
            key = self._key(path)
            done = self._obstore.put(
                self._store, key, pieces, chunk_size=piece, max_concurrency=_AT_ONCE, use_multipart=size > piece
            )
            return str(done["e_tag"] or "")

        etag, there = self._tried("writing", path, put), self.head(path)
        if there is not None and etag and there.etag != etag:
            raise ChangedError(f"{self.name}/{path} was written by somebody else meanwhile", hint="run again alone")
        if there is None or there.size != size:
            raise DestinationError(f"{self.name}/{path} has not the {size:,} bytes that were sent")
        return there

    def _pieces(self, file: Path, piece: int) -> Iterator[bytes]:
        with file.open("rb", buffering=0) as data:
            while part := data.read(piece):
                if self.stop:
                    raise _Stopped
                yield part

    def delete(self, paths: list[str]) -> None:
        """Remove objects; those that are not there do not matter."""
        keys = [self._key(path) for path in paths]
        if keys:
            self._tried("removing", paths[0], lambda: self._obstore.delete(self._store, keys))

    def _tried(self, doing: str, path: str, act: Callable[[], Result]) -> Result:
        """The result of `act`, which is done again where the trouble may pass."""
        where = f"{self.name}/{path}" if path else self.name
        patience = Patience(f"{doing} {where}", self.stop)
        while True:
            try:
                with self._told(f"{doing} {where}"):
                    return act()
            except TroubleError as trouble:
                patience.wait(trouble)

    @contextlib.contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """Say what a store's refusal means; what may pass is a TroubleError."""
        errors = self._obstore.exceptions
        try:
            yield
        except (errors.NotFoundError, FileNotFoundError) as error:
            raise SourceError(f"{doing} failed: there is nothing", hint="check the bucket and the path") from error
        except (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError) as error:
            raise AccessError(f"{doing} is not allowed: {_first_line(error)}", hint=_HOW_ALLOWED) from error
        except errors.PreconditionError as error:
            raise ChangedError(
                f"{doing} failed: the object has changed", hint="run again when nothing writes to it"
            ) from error
        except errors.BaseError as error:
            heed(self.stop)
            if "invalid path" in str(error):
                raise SourceError(
                    f"{doing} failed: a key in it is no path: {_first_line(error)}",
                    hint="rename that object, or remove it",
                ) from error
            status = _STATUS.search(str(error))
            refusal = _refusal(doing, int(status[1]), _first_line(error)) if status else None
            raise refusal or TroubleError(_first_line(error)) from error
        except _Stopped:
            heed(self.stop)
            raise


class _Stopped(Exception):  # noqa: N818 - a signal, not a fault
    """A signal came while an object was being sent."""


_STATUS: Final = re.compile(r"status code: (\d{3})")
_HOW_ALLOWED: Final = "set the store's usual variables, such as AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION"


def _library() -> Any:  # noqa: ANN401 - a module
    try:
        importlib.import_module("obstore.exceptions")
        importlib.import_module("obstore.store")
        return importlib.import_module("obstore")
    except ImportError as error:
        raise UsageError(
            "buckets need obstore, which is not installed", hint="pip install 'shardctl[cloud]'"
        ) from error


def _refusal(doing: str, status: int, words: str) -> ShardctlError | None:
    """What an HTTP status means that obstore has no error of its own for; None if it may pass."""
    if status == HTTPStatus.NOT_FOUND:
        return SourceError(f"{doing} failed: there is nothing", hint="check the bucket and the path")
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return AccessError(f"{doing} is not allowed: {words}", hint=_HOW_ALLOWED)
    passing = status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in {
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.CONFLICT,
        HTTPStatus.TOO_MANY_REQUESTS,
    }
    return (
        None if passing else SourceError(f"{doing} failed: {words}", hint="check the address and the store's settings")
    )


def _object(meta: Any) -> Object:  # noqa: ANN401 - obstore's dictionary
    return Object(int(meta["size"]), str(meta.get("e_tag") or ""))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
