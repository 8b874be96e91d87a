"""Reads byte ranges of the Hub's files: checks answers, retries failures, and continues partial answers.

A file is asked for at ``/owner/name/resolve/<commit>/<path>``. Large files are elsewhere: the answer is a redirect to a
signed address, which is good for some time and then refused. It is followed once a file, kept, and asked for again
when it is refused. The token goes to the Hub only.
"""

from __future__ import annotations

import re
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urljoin

from shardctl.base.errors import ChangedError, SourceError
from shardctl.base.value import value_class
from shardctl.base.version import __version__
from shardctl.base.workers import raise_if_stopped
from shardctl.storage.hub.limits import (
    ANSWER_TIMEOUTS,
    EXPLAINED,
    PaceMeter,
    answer_within,
    body_is_short,
    read_bounded,
)
from shardctl.storage.hub.origins import origin_of, same_origin
from shardctl.storage.hub.questions import HubQuestions
from shardctl.storage.hub.refusals import build_refusal_error
from shardctl.storage.hub.sockets import BROKEN, ResponseBody, SocketPool
from shardctl.storage.hub.statuses import EXPIRED, PASSING, REDIRECTS, parse_retry_after
from shardctl.storage.hub.xet import XetRanges, has_xet, needs_xet
from shardctl.storage.retries import TroubleError, make_retrying

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.base.workers import StopRequest
    from shardctl.storage.hub.address import HubAddress
    from shardctl.storage.hub.listing import HubFile, HubListing

    Response = Any
    """A response of httpx, under whichever name huggingface_hub ships it, or a `ResponseBody`."""

_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")
_MOST_REDIRECTS: Final = 5
_MAX_WHOLE_FILE_BYTES: Final = 16 << 20
"""Bytes of a file that is still read from its beginning where a server gives no ranges of it."""
_MIN_PROGRESS_BYTES: Final = 64 << 10
"""Bytes after which a connection that breaks was worth it, and the tries are counted anew."""
_RECEIVE_CHUNK_BYTES: Final = 256 << 10
"""Bytes received at once, between two looks at whether to stop."""


@value_class
class _FileLocation:
    """Where a file is really."""

    url: str
    ours: bool
    """Whether it is the Hub itself, which may see the token."""


class RangeReader:
    """Reads stretches of the files of one commit; shared by threads."""

    def __init__(self, address: HubAddress, listing: HubListing) -> None:
        from huggingface_hub import constants

        from shardctl.storage.hub.library import build_hf_headers

        self._address = address
        self._listing = listing
        self._endpoint = constants.ENDPOINT
        self._timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        self._headers = build_hf_headers(library_name="shardctl", library_version=__version__)
        self._lock = threading.Lock()
        self._places: dict[str, _FileLocation] = {}
        self._resolving: dict[str, threading.Lock] = {}
        self._patient = ANSWER_TIMEOUTS * self._timeout
        self._sockets = SocketPool(self._timeout)
        token_url = f"{self._endpoint}/api/models/{address.repository}/xet-read-token/{listing.commit}"
        self._xet = XetRanges(HubQuestions(self._endpoint, self._headers, self._timeout), token_url, self._headers)

    def fetch(self, path: str, offset: int, into: memoryview, stop: StopRequest) -> None:
        """Fill `into` from byte `offset`.

        Raises SourceError for what the Hub does not have or gives otherwise than it should, ChangedError for a file
        that is not the one of the listing, AccessError, TransientError after the last try, Interrupted.
        """
        file = self._listing.files[path]
        by_xet = bool(file.xet) and needs_xet(file) and has_xet()
        done = recent = 0
        for attempt in make_retrying(f"reading {path} of {self._address.repository}", stop) if into else ():
            with attempt:
                raise_if_stopped(stop)
                try:
                    if by_xet:
                        got = self._by_xet(path, offset + done, into[done:], stop)
                    else:
                        with self._open_range_response(path, offset + done, offset + len(into)) as (response, skip):
                            got = self._take(response, skip, into[done:], stop)
                except TroubleError as trouble:
                    got, problem = 0, trouble
                else:
                    problem = TroubleError(f"the connection ended {len(into) - done - got:,} bytes too early")
                done, recent = done + got, recent + got
                if recent >= _MIN_PROGRESS_BYTES:
                    attempt.retry_state.attempt_number, recent = 1, 0
                if done < len(into):
                    problem.last = self._too_large(path) if needs_xet(file) and not by_xet else None
                    raise problem

    def _by_xet(self, path: str, offset: int, into: memoryview, stop: StopRequest) -> int:
        from shardctl.storage.hub.library import HfHubHTTPError, TransportError

        try:
            return self._xet.fetch(self._listing.files[path], offset, into, stop)
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in PASSING:
                raise TroubleError(
                    f"the server answered with HTTP {status}", parse_retry_after(error.response.headers)
                ) from error
            raise build_refusal_error(error, self._address, path) from error
        except TransportError as error:
            raise TroubleError(f"the connection failed: {error or type(error).__name__}") from error
        except (LookupError, TypeError, ValueError) as error:
            raise TroubleError("the Hub gives no token for Xet") from error

    def _too_large(self, path: str) -> SourceError:
        name = self._address.repository
        return SourceError(
            f"{path} of {name} has {self._listing.files[path].size:,} bytes; its server refuses to send parts of it",
            hint=f"pip install hf_xet; or hf download {name} --local-dir DIR, and give DIR as the source",
        )

    @contextmanager
    def _open_range_response(self, path: str, start: int, stop: int) -> Iterator[tuple[Response, int]]:
        """Open a response whose body holds the bytes from `start` to `stop` after so many others."""
        with self._open_resolved(path, start, stop) as response:
            status = response.status_code
            if status in PASSING:
                raise TroubleError(f"the server answered with HTTP {status}", parse_retry_after(response.headers))
            if status in {200, 206}:
                yield response, _check_response(response, path, self._listing.files[path].size, start, stop)
                return
            raise self._build_refusal(response, path)

    @contextmanager
    def _open_resolved(self, path: str, start: int, stop: int) -> Iterator[Response]:
        """Open a response from where the file is; the first thread that asks finds out, and again when that is over."""
        place = self._places.get(path)
        if place is not None:
            with self._send_request(place, start, stop) as response:
                if place.ours or response.status_code not in EXPIRED | REDIRECTS:
                    yield response
                    return
            with self._lock:
                if self._places.get(path) is place:
                    del self._places[path]
        with self._lock:
            turn = self._resolving.setdefault(path, threading.Lock())
        with ExitStack() as stack:
            with turn:
                place, answer = self._places.get(path), None
                if place is None:
                    place, answer = self._resolve_redirects(path, start, stop, stack)
                    self._places[path] = place
            if answer is None:
                answer = stack.enter_context(self._send_request(place, start, stop))
            if not place.ours and answer.status_code in EXPIRED | REDIRECTS:
                raise TroubleError(f"the address that the Hub gave is refused with HTTP {answer.status_code}")
            yield answer

    def _resolve_redirects(self, path: str, start: int, stop: int, stack: ExitStack) -> tuple[_FileLocation, Response]:
        """Follow redirects from the Hub to where the file is; returns that and its answer, which `stack` closes."""
        commit = self._listing.commit
        url = f"{self._endpoint}/{self._address.repository}/resolve/{quote(commit, safe='')}/{quote(path)}"
        for _ in range(_MOST_REDIRECTS):
            place = _FileLocation(url, ours=same_origin(url, self._endpoint))
            with ExitStack() as attempt:
                response = attempt.enter_context(self._send_request(place, start, stop))
                status, location = response.status_code, response.headers.get("location")
                if place.ours:
                    self._check_resolved(response, path)
                if status not in REDIRECTS or not location:
                    stack.push(attempt.pop_all())
                    return place, response
                url = _resolve_redirect(url, location, path)
        raise SourceError(f"the Hub redirects requests for {path} without end")

    @contextmanager
    def _send_request(self, place: _FileLocation, start: int, stop: int) -> Iterator[Response]:
        """Open a response whose body has not been read; trouble on the way is TroubleError."""
        from shardctl.storage.hub.library import TransportError, get_session

        headers = {
            name: value for name, value in self._headers.items() if place.ours or name.lower() != "authorization"
        }
        headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        if not place.ours and self._sockets.reach(place.url):
            with self._sockets.get(place.url, headers) as body:
                yield body
            return
        session = get_session()
        ask = partial(session.stream, "GET", place.url, headers=headers, follow_redirects=False, timeout=self._timeout)
        try:
            with answer_within(self._patient, ask) as response:
                if response.status_code in REDIRECTS and body_is_short(response):
                    read_bounded(response, EXPLAINED, self._patient)  # so that the connection can be used again
                yield response
        except TransportError as error:
            raise TroubleError(f"the connection failed: {error or type(error).__name__}") from error

    def _take(self, response: Response, skip: int, into: memoryview, stop: StopRequest) -> int:
        """Copy the body after its first `skip` bytes; returns how many bytes of `into` came before it ended."""
        from shardctl.storage.hub.library import TransportError

        if isinstance(response, ResponseBody):
            return self._receive_body(response, skip, into, stop)
        done, pace = -skip, PaceMeter(self._timeout)
        try:
            for piece in response.iter_raw():
                raise_if_stopped(stop)
                pace.add(len(piece))
                new = memoryview(piece)[max(-done, 0) :]
                place = max(done, 0)
                done += len(piece)
                if done > len(into):
                    if response.status_code == 200:  # noqa: PLR2004 - the whole file, and this was its part
                        new = new[: len(into) - place]
                        into[place : place + len(new)] = new
                        break
                    raise TroubleError("the server sent more bytes than were requested")
                into[place : place + len(new)] = new
        except TransportError:
            pass  # what came is good; the caller asks for the rest
        return min(max(done, 0), len(into))

    def _receive_body(self, body: ResponseBody, skip: int, into: memoryview, stop: StopRequest) -> int:
        """Return the same, straight into memory."""
        spare = memoryview(bytearray(min(skip, _RECEIVE_CHUNK_BYTES)))
        done, pace = -skip, PaceMeter(self._timeout)
        try:
            while done < len(into):
                raise_if_stopped(stop)
                got = body.readinto(into[done : done + _RECEIVE_CHUNK_BYTES] if done >= 0 else spare[:-done])
                if not got:
                    break
                done += got
                pace.add(got)
            if body.status_code == 206 and done == len(into) and not body.is_exhausted():  # noqa: PLR2004 - a part
                raise TroubleError("the server sent more bytes than were requested")
        except BROKEN:
            pass  # what came is good; the caller asks for the rest
        return max(done, 0)

    def _build_refusal(self, response: Response, path: str) -> Exception:
        from shardctl.storage.hub.library import HfHubHTTPError, hf_raise_for_status

        if isinstance(response, ResponseBody):
            return SourceError(f"the place that the Hub has {path} at answers with HTTP {response.status_code}")
        if response.status_code in REDIRECTS:  # whose body was read, so that the connection can be used again
            return SourceError(
                f"the Hub redirects a request for {path} without saying where to", hint=_BYPASS_PROXY_HINT
            )
        try:
            hf_raise_for_status(read_bounded(response, EXPLAINED, self._patient))
        except HfHubHTTPError as error:
            return build_refusal_error(error, self._address, path)
        return SourceError(f"the Hub answers a request for {path} with HTTP {response.status_code}")

    def _check_resolved(self, response: Response, path: str) -> None:
        """Raise what the Hub's own answer is, if it is neither the file nor where that is."""
        status = response.status_code
        if status in PASSING:
            raise TroubleError(f"the server answered with HTTP {status}", parse_retry_after(response.headers))
        if status not in {200, 206} and not (status in REDIRECTS and response.headers.get("location")):
            raise self._build_refusal(response, path)
        self._check_same(response, path)

    def close(self) -> None:
        """Close connections that wait."""
        self._sockets.close()

    def _check_same(self, response: Response, path: str) -> None:
        """Raise ChangedError if the Hub speaks of another file than it listed."""
        file: HubFile = self._listing.files[path]
        headers = response.headers
        commit = headers.get("x-repo-commit", self._listing.commit)
        linked = headers.get("x-linked-etag")
        etag = _strip_etag(linked) if linked else file.etag
        size = headers.get("x-linked-size", str(file.size))
        if (commit, etag, size) != (self._listing.commit, file.etag, str(file.size)):
            raise ChangedError(
                f"{path} is not the file that the Hub listed: commit {commit}, ETag {etag}, {size} bytes came back for "
                f"commit {self._listing.commit}, ETag {file.etag}, {file.size} bytes",
                hint="run again; if that does not help, a proxy or mirror may answer in place of the Hub",
            )


def _check_response(response: Response, path: str, size: int, start: int, stop: int) -> int:
    """Return how many bytes of the body come before `start`.

    Raises TroubleError or SourceError for an answer that is wrong.

    A server may ignore a range and give the whole file with status 200 (RFC 9110, section 14.2). Of a small file that
    is taken, the beginning skipped.
    """
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise SourceError(f"{path} was sent encoded as {encoding}, which was not requested", hint=_BYPASS_PROXY_HINT)
    length = response.headers.get("content-length")
    if response.status_code == 200:  # noqa: PLR2004 - the whole file
        if size > _MAX_WHOLE_FILE_BYTES and (start, stop) != (0, size):
            raise SourceError(f"a part of {path} was requested, but all of it was sent", hint=_BYPASS_PROXY_HINT)
        if length is not None and length != str(size):
            raise TroubleError(f"{length} bytes were sent of a file of {size:,}")
        return start
    found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", "").strip())
    expected = (str(start), str(stop - 1))
    if found is None or found.groups()[:2] != expected or found[3] not in {str(size), "*"}:
        said = response.headers.get("content-range", "none")
        raise TroubleError(f"bytes {start}-{stop - 1}/{size} were requested, but Content-Range is {said}")
    if length is not None and length != str(stop - start):
        raise TroubleError(f"{stop - start} bytes were requested, but {length} are announced")
    return 0


_BYPASS_PROXY_HINT: Final = "a proxy or a mirror changes the Hub's answers; bypass it, or download the files first"


def _resolve_redirect(url: str, location: str, path: str) -> str:
    """Return where a redirect leads.

    Raises SourceError if that is no address, without saying it: it may be a signed one.
    """
    try:
        found = urljoin(url, location)
        scheme, host, _ = origin_of(found)
        host.encode("idna")
    except ValueError:
        scheme = host = ""
    if scheme not in {"http", "https"} or not host:
        raise SourceError(f"a request for {path} is redirected to an address that is not HTTP", hint=_BYPASS_PROXY_HINT)
    return found


def _strip_etag(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')
