"""Reads and writes the objects of a place in a bucket, and translates a store's errors for users.

Credentials, regions and endpoints are found as obstore finds them: in the variables of the environment that the stores'
own tools use (`AWS_*`, `GOOGLE_*`, `AZURE_*`), or from the machine.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
import tempfile
from dataclasses import field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shardctl.base.errors import AccessError, DestinationError, UsageError
from shardctl.base.extras import format_install_command
from shardctl.base.value import value_class
from shardctl.base.workers import StopRequest, raise_if_stopped
from shardctl.storage.bounded_text import RECORD_TEXT, check_size
from shardctl.storage.cloud.refusals import RefusalReader
from shardctl.storage.cloud.settings import HOW_ALLOWED, build_store_options
from shardctl.storage.durable import translate_os_errors
from shardctl.storage.retries import TroubleError, make_retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Result = TypeVar("Result")

PIECE: Final = 8 << 20
"""Bytes of a ranged read at most, and of a part of an upload at least: enough to hide what a request costs."""
_MOST_PARTS: Final = 9_000
"""S3 allows 10,000 in one upload (Amazon S3 User Guide, "Multipart upload limits")."""
_DELETED_AT_ONCE: Final = 1_000
"""S3 removes so many objects in one request (Amazon S3 API Reference, DeleteObjects)."""
_COPIED_BY_STORE: Final = {"s3": 5 << 30, "gs": 1 << 50}
"""The largest objects that a store copies by itself, by scheme; of Azure's requests those that finish before they are
answered take 256 MiB (Amazon S3 API Reference, CopyObject; Azure Blob REST API, "Copy Blob")."""
_AT_ONCE: Final = 4
"""Parts of one upload on their way at once."""
_RUST_PANIC_CLASS: Final = "PanicException"
"""The BaseException that PyO3 raises where Rust panics, as obstore does for credentials that no header can hold."""
_UPLOAD_MARK_KEY: Final = "shardctlupload"
"""The name of the metadata by which an upload knows its own object again; no store's rules forbid it."""


def choose_part_size(size: int) -> int:
    """Choose bytes of each part in which an object of `size` bytes is sent."""
    return max(PIECE, -(-size // _MOST_PARTS))


def estimate_upload_memory(size: int) -> int:
    """Estimate the anonymous memory that sending an object of `size` bytes takes (measured: 50 MiB for 26 MB)."""
    return (_AT_ONCE + 2) * choose_part_size(size) + (16 << 20)


@value_class
class BucketObject:
    """What a listing says of an object."""

    size: int
    etag: str
    """Another one for another content; without the quotes, which Azure leaves out of its listings only."""
    version: str = field(default="", compare=False)
    """Google's generation, by which a conditional write there names the object that it replaces."""


class CloudBucket:
    """Everything below `scheme://bucket/prefix`; keys are relative to it."""

    def __init__(self, text: str, *, writing: bool = False) -> None:
        """`writing` says that it is a destination: what is wrong is then a DestinationError, else a SourceError.

        Raises UsageError for an address without a bucket, or if obstore is not installed.
        """
        scheme, _, rest = text.partition("://")
        name, _, prefix = rest.partition("/")
        parts = prefix.strip("/").split("/") if prefix.strip("/") else []
        if not name or not {"", ".", ".."}.isdisjoint(parts):
            raise UsageError(f"{text} is not an address in a bucket", hint=f"write {scheme}://BUCKET/FOLDER")
        self.name = text.rstrip("/")
        self.root = f"{scheme}://{name}"
        self.prefix = "/".join(parts)
        self.stop = StopRequest()
        self.lost: DestinationError | None = None
        """What ends an upload in the middle, because nobody wants it any more."""
        self._obstore: Any = _import_obstore()
        self._refusals = RefusalReader(self.root, writing, self._obstore.exceptions)

    @cached_property
    def _store(self) -> Any:  # noqa: ANN401 - obstore's stores have no common type
        scheme = self.root.partition("://")[0]
        options = build_store_options(scheme)
        try:
            return self._obstore.store.from_url(self.root, **options)
        except ValueError as error:
            raise UsageError(
                f"{self.root} is not the address of a bucket: {error}", hint=f"write {scheme}://BUCKET/FOLDER"
            ) from error
        except self._obstore.exceptions.BaseError as error:
            words = str(error).strip().partition("\n")[0]
            raise AccessError(f"{self.root} cannot be opened: {words}", hint=HOW_ALLOWED[scheme]) from error

    def _build_key(self, path: str) -> str:
        return "/".join(filter(None, (self.prefix, path)))

    def objects(self) -> dict[str, BucketObject]:
        """Return every object below the prefix, by key, sorted; empty if there is none."""
        start = f"{self.prefix}/" if self.prefix else ""

        def listed() -> dict[str, BucketObject]:
            found: dict[str, BucketObject] = {}
            for batch in self._obstore.list(self._store, prefix=self.prefix or None, chunk_size=1000):
                for meta in batch:
                    path = str(meta["path"])
                    if path.startswith(start) and not path.endswith("/"):
                        found[path[len(start) :]] = _parse_object(meta)
            return found

        return dict(sorted(self._retry_call("listing", "", listed).items()))

    def head(self, path: str) -> BucketObject | None:
        """Return what there is under a key; None if there is nothing."""

        def looked() -> BucketObject | None:
            try:
                return _parse_object(self._obstore.head(self._store, self._build_key(path)))
            except (self._obstore.exceptions.NotFoundError, FileNotFoundError):
                return None

        return self._retry_call("looking at", path, looked)

    def fetch(self, path: str, offset: int, into: memoryview, etag: str) -> None:
        """Fill `into` from an object, if it still is the one with that ETag; raises ChangedError if it is not."""
        for start in range(0, len(into), PIECE):
            self._fetch(path, offset + start, into[start : start + PIECE], etag)

    def _fetch(self, path: str, offset: int, into: memoryview, etag: str) -> None:
        options: dict[str, Any] = {"range": (offset, offset + len(into))}
        if etag:
            options["if_match"] = f'"{etag}"'

        def got() -> None:
            answer = self._obstore.get(self._store, self._build_key(path), options=options)
            if tuple(answer.range) != options["range"]:
                raise TroubleError(f"the store sent bytes {answer.range} for {options['range']}")
            data = memoryview(answer.bytes())
            if len(data) != len(into):
                raise TroubleError(f"{len(data)} bytes came for {len(into)}")
            into[:] = data

        self._retry_call("reading", path, got)

    def read(self, path: str) -> bytes | None:
        """Return the content of a small object; None if there is none."""
        found = self.read_object(path)
        return found[0] if found is not None else None

    def read_object(self, path: str) -> tuple[bytes, BucketObject] | None:
        """Return the content of a small object, and which one it is; None if there is none.

        One request gets both, so that they belong together even while another run replaces the object.
        """

        def got() -> tuple[bytes, BucketObject] | None:
            try:
                answer = self._obstore.get(self._store, self._build_key(path))
            except (self._obstore.exceptions.NotFoundError, FileNotFoundError):
                return None
            found = _parse_object(answer.meta)
            check_size(found.size, path, RECORD_TEXT)
            content = bytes(answer.bytes())
            if len(content) != found.size:
                raise TroubleError(f"{len(content)} bytes came for {found.size}")
            return content, found

        return self._retry_call("reading", path, got)

    def write(self, path: str, content: bytes) -> BucketObject:
        """Put a small object: all of it, or nothing."""
        attributes = {_UPLOAD_MARK_KEY: secrets.token_hex(16)}
        put = partial(self._obstore.put, self._store, self._build_key(path), content, attributes=attributes)
        done = self._retry_call("writing", path, put)
        return BucketObject(len(content), _strip_etag(done["e_tag"]), done["version"] or "")

    def create(self, path: str, content: bytes) -> bool:
        """Put a small object if there is none of that name; returns whether it was put.

        A store that has no conditional writes says that they are not implemented, and puts it in any case.
        """

        def put() -> bool:
            try:
                self._obstore.put(self._store, self._build_key(path), content, mode="create")
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            except self._obstore.exceptions.BaseError as error:
                if "NotImplemented" not in str(error):
                    raise
                self._obstore.put(self._store, self._build_key(path), content)
            return True

        return self._retry_call("writing", path, put)

    def replace(self, path: str, content: bytes, found: BucketObject) -> BucketObject | None:
        """Put a small object in the place of the one that was `found`; None if that is not there any more.

        A store that has no conditional writes says that they are not implemented, and puts it in any case.
        """
        library = self._obstore.exceptions
        mode = {"e_tag": f'"{found.etag}"', **({"version": found.version} if found.version else {})}

        def put() -> BucketObject | None:
            try:
                done = self._obstore.put(self._store, self._build_key(path), content, mode=mode)
            except (library.PreconditionError, library.AlreadyExistsError, library.NotFoundError, FileNotFoundError):
                there = self.read_object(path)  # which is what was put, if the first answer was lost
                return there[1] if there is not None and there[0] == content else None
            except library.BaseError as error:
                if "NotImplemented" not in str(error):
                    raise
                done = self._obstore.put(self._store, self._build_key(path), content)
            return BucketObject(len(content), _strip_etag(done["e_tag"]), done["version"] or "")

        return self._retry_call("writing", path, put)

    def is_ours(self, path: str) -> bool:
        """Return whether shardctl wrote an object, whoever ran it; False if there is none."""

        def look() -> bool:
            try:
                answer = self._obstore.get(self._store, self._build_key(path), options={"head": True})
            except (self._obstore.exceptions.NotFoundError, FileNotFoundError):
                return False
            return _UPLOAD_MARK_KEY in answer.attributes

        return self._retry_call("looking at", path, look)

    def upload(self, path: str, file: Path, size: int) -> BucketObject:
        """Put a file: in parts, which become an object when the last one is there; else nothing of them stays.

        If the store's last answer is lost, the object is known by its mark, and not sent again.
        """
        piece, mark = choose_part_size(size), secrets.token_hex(16)

        def put() -> BucketObject:
            try:
                done = self._obstore.put(
                    self._store,
                    self._build_key(path),
                    self._read_pieces(file, piece),
                    chunk_size=piece,
                    max_concurrency=_AT_ONCE,
                    use_multipart=size > piece,
                    attributes={_UPLOAD_MARK_KEY: mark},
                )
                return BucketObject(size, _strip_etag(done["e_tag"]))
            except (self._obstore.exceptions.BaseError, FileNotFoundError) as error:
                there = self._find_marked_object(path, mark)
                if there is not None:
                    return there
                if "NoSuchUpload" in str(error):
                    raise TroubleError("the store no longer has the parts that were sent") from error
                raise

        sent, there = self._retry_call("writing", path, put), self.head(path)
        if there is not None and sent.etag and there.etag != sent.etag:
            raise self._refusals.changed(
                f"{self.name}/{path} was written by another program in the meantime",
                "run the same command again, and no other at the same time",
            )
        if there is None or there.size != size:
            raise self._refusals.refuse(
                f"{self.name}/{path} does not have the {size:,} bytes that were sent", "run the same command again"
            )
        return there

    def _find_marked_object(self, path: str, mark: str) -> BucketObject | None:
        """Return the object that an upload with this mark made.

        None if there is none, or if that cannot be found out.
        """
        with contextlib.suppress(self._obstore.exceptions.BaseError, OSError):
            answer = self._obstore.get(self._store, self._build_key(path), options={"head": True})
            if answer.attributes.get(_UPLOAD_MARK_KEY) == mark:
                return _parse_object(answer.meta)
        return None

    def _read_pieces(self, file: Path, piece: int) -> Iterator[bytes]:
        with file.open("rb", buffering=0) as data:
            while part := data.read(piece):
                if self.stop or self.lost is not None:
                    raise _UploadStopped
                yield part

    def copy(self, old: str, new: str, found: BucketObject) -> None:
        """Put what is under one key under another too: within the store, where it can, else through this machine."""
        if found.size > _COPIED_BY_STORE.get(self.root.partition("://")[0], -1):
            self._copy_through(old, new, found)
            return
        self._retry_call(
            "writing", new, lambda: self._obstore.copy(self._store, self._build_key(old), self._build_key(new))
        )
        there = self.head(new)
        if there is None or there.size != found.size:
            raise self._refusals.refuse(
                f"{self.name}/{new} does not have the {found.size:,} bytes that were copied",
                "run the same command again",
            )

    def _copy_through(self, old: str, new: str, found: BucketObject) -> None:
        with tempfile.TemporaryDirectory(prefix="shardctl-") as scratch:
            file = Path(scratch, "object")
            with translate_os_errors(file, "writing"), file.open("wb") as content:
                for offset in range(0, found.size, PIECE):
                    raise_if_stopped(self.stop)
                    piece = bytearray(min(PIECE, found.size - offset))
                    self.fetch(old, offset, memoryview(piece), found.etag)
                    content.write(piece)
            self.upload(new, file, found.size)

    def delete(self, paths: list[str]) -> None:
        """Remove objects; those that are not there do not matter."""
        for start in range(0, len(paths), _DELETED_AT_ONCE):
            batch = paths[start : start + _DELETED_AT_ONCE]
            self._retry_call(
                "removing", batch[0], partial(self._delete_objects, [self._build_key(path) for path in batch])
            )

    def _delete_objects(self, keys: list[str]) -> None:
        missing = (self._obstore.exceptions.NotFoundError, FileNotFoundError)
        try:
            self._obstore.delete(self._store, keys)
        except missing:  # Azure and Google refuse to remove what is gone, and may then have left the others
            for key in keys if len(keys) > 1 else ():
                with contextlib.suppress(*missing):
                    self._obstore.delete(self._store, key)

    def _retry_call(self, doing: str, path: str, act: Callable[[], Result]) -> Result:
        """Return the result of `act`, which is done again where the trouble may pass."""
        where = f"{self.name}/{path}" if path else self.name
        return make_retrying(f"{doing} {where}", self.stop)(self._explain_refusal(f"{doing} {where}")(act))

    @contextlib.contextmanager
    def _explain_refusal(self, doing: str) -> Iterator[None]:
        """Say what a store's refusal means; what may pass is a TroubleError."""
        try:
            yield
        except _UploadStopped:
            raise_if_stopped(self.stop)
            if self.lost is not None:
                raise self.lost from None
            raise
        except (self._obstore.exceptions.BaseError, FileNotFoundError, PermissionError) as error:
            raise_if_stopped(self.stop)
            raise self._refusals.explain_error(error, doing) from error
        except BaseException as error:
            if type(error).__name__ != _RUST_PANIC_CLASS:
                raise
            raise UsageError(
                f"{doing} failed: obstore cannot make a request of the settings of the environment: {error}",
                hint="look for line breaks and other characters that no address and no header can have in the store's "
                "variables",
            ) from error


class _UploadStopped(Exception):  # noqa: N818 - a signal, not a fault
    """A signal came while an object was being sent."""


def _import_obstore() -> Any:  # noqa: ANN401 - a module
    try:
        importlib.import_module("obstore.exceptions")
        importlib.import_module("obstore.store")
        return importlib.import_module("obstore")
    except ImportError as error:
        raise UsageError(
            "buckets need obstore, which is not installed", hint=format_install_command("cloud")
        ) from error


def _parse_object(meta: Any) -> BucketObject:  # noqa: ANN401 - obstore's dictionary
    return BucketObject(int(meta["size"]), _strip_etag(meta.get("e_tag")), meta.get("version") or "")


def _strip_etag(etag: str | None) -> str:
    return (etag or "").strip('"')
