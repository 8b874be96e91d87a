"""Lists the files of a repository at one commit, as the Hub says or as its cache on this machine has them."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from shardctl.base.errors import AccessError, HostileError, SourceError, UsageError
from shardctl.base.settings import is_text
from shardctl.base.value import value_class
from shardctl.base.version import __version__
from shardctl.storage import HIDDEN
from shardctl.storage.hub.questions import HubQuestions
from shardctl.storage.hub.refusals import build_offline_error, build_refusal_error, build_unreachable_error
from shardctl.storage.hub.statuses import PASSING, parse_retry_after
from shardctl.storage.retries import TroubleError, make_retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import TypeVar

    from shardctl.base.workers import StopRequest
    from shardctl.storage.hub.address import HubAddress

    Answer = TypeVar("Answer")

_SHA256_HEX_DIGITS: Final = 64
"""Hexadecimal digits."""
_FIRST_TRIES: Final = 3
"""Before the Hub has answered at all: whoever is not connected should not wait long to hear of it."""
_MAX_FILE_BYTES: Final = 2**63 - 1
"""Bytes; file systems, and the Hub's own, have no larger files."""
_COMMIT_HASH_PATTERN: Final = re.compile(r"[0-9a-f]{40}")


NOT_AN_ANSWER: Final = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What is raised when an answer is taken apart that is no JSON, as of a page that asks to log in to a network,
or JSON of another shape."""


@value_class
class HubFile:
    """One file of a commit."""

    size: int
    """Bytes."""
    blob: str
    """Git's SHA-1 of it, or of the pointer that stands for it; empty where the cache does not say."""
    sha256: str = ""
    """Of its content, where it is stored by LFS or Xet: the larger ones."""
    cached: str = ""
    """Where it lies on this machine, if it does: relative to the listing's `cache`."""
    xet: str = ""
    """Its name in Xet, if it is stored there."""

    @property
    def etag(self) -> str:
        """What the Hub gives as the file's ETag, and what its cache calls it (huggingface_hub, `file_download.py`)."""
        return self.sha256 or self.blob


@value_class
class HubListing:
    """A commit, and every file of it by path."""

    commit: str
    files: Mapping[str, HubFile]
    cache: Path
    """Where the cache keeps this repository, which need not exist."""
    snapshot: Path | None = None
    """The directory of the cache that holds all of these files, if there is one."""


def list_repository(address: HubAddress, stop: StopRequest) -> HubListing:
    """Resolve the revision to a commit, and list that; with HF_HUB_OFFLINE set, from the cache.

    Raises SourceError for what does not exist, AccessError for what is not allowed, TransientError without an answer.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _list_from_cache(address)
    return _add_cached_files(_list_from_hub(address, stop))


def _list_from_hub(address: HubAddress, stop: StopRequest) -> HubListing:
    from huggingface_hub import constants

    from shardctl.storage.hub.library import build_hf_headers, validate_repo_id

    _check_connections()
    try:
        headers = build_hf_headers(library_name="shardctl", library_version=__version__)
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(
            f"the token in {constants.HF_TOKEN_PATH} cannot be read: {error}", hint="set HF_TOKEN, or HF_TOKEN_PATH"
        ) from error
    hub = HubQuestions(constants.ENDPOINT, headers, constants.HF_HUB_DOWNLOAD_TIMEOUT)
    api = f"{constants.ENDPOINT}/api/models/{address.repository}"

    def resolve() -> str:
        validate_repo_id(address.repository)
        found, _ = hub.ask(f"{api}/revision/{quote(address.revision, safe='')}?expand=sha")
        commit = found.get("sha") if isinstance(found, dict) else None
        if not isinstance(commit, str) or _COMMIT_HASH_PATTERN.fullmatch(commit) is None:
            raise SourceError(f"the Hub does not say at which commit {address.revision} of {address.repository} is")
        return commit

    def files(commit: str) -> dict[str, HubFile]:
        validate_repo_id(address.repository)
        entries = (entry for page in hub.pages(f"{api}/tree/{commit}?recursive=true") for entry in _parse_entries(page))
        return {entry["path"]: _parse_file(entry) for entry in entries if entry["type"] == "file"}

    commit = address.commit or _ask_with_retries(resolve, address, stop)
    return HubListing(
        commit,
        _select_visible_files(_ask_with_retries(lambda: files(commit), address, stop)),
        locate_cache_folder(address),
    )


def _check_connections() -> None:
    """Raise UsageError for certificates or proxies of the environment with which no connection can be made."""
    from shardctl.storage.hub.library import InvalidURL, get_session

    try:
        get_session()
    except ImportError as error:  # httpx speaks to SOCKS proxies through a package of its own
        raise UsageError(
            "the environment names a SOCKS proxy, for which the Hub's library needs the package socksio",
            hint="pip install socksio, or unset ALL_PROXY, HTTPS_PROXY and HTTP_PROXY",
        ) from error
    except (OSError, ValueError, InvalidURL) as error:
        raise UsageError(
            f"the Hub's library cannot make connections: {error}",
            hint="check SSL_CERT_FILE, SSL_CERT_DIR, HTTPS_PROXY, HTTP_PROXY and ALL_PROXY, or unset them",
        ) from error


def _parse_entries(page: Any) -> list[Any]:  # noqa: ANN401 - it is any JSON
    if not isinstance(page, list):
        raise TypeError("a page of a listing is not a list")
    return page


def _parse_file(entry: dict[str, Any]) -> HubFile:
    """Parse what an entry of a listing says of a file (huggingface_hub, `hf_api.py`, `RepoFile`)."""
    lfs = entry.get("lfs")
    return HubFile(
        size=lfs["size"] if lfs else entry["size"],
        blob=entry["oid"],
        sha256=lfs["oid"] if lfs else "",
        xet=entry.get("xetHash") or "",
    )


def _ask_with_retries(question: Callable[[], Answer], address: HubAddress, stop: StopRequest) -> Answer:
    """Return the answer to a request, retried after temporary failures."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from shardctl.storage.hub.library import TransportError

    def ask() -> Answer:
        try:
            return question()
        except HfHubHTTPError as error:
            if error.response.status_code not in PASSING:
                raise build_refusal_error(error, address) from error
            trouble = f"it answered HTTP {error.response.status_code}"
            raise TroubleError(trouble, parse_retry_after(error.response.headers)) from error
        except TransportError as error:
            cause = build_unreachable_error(error, address)
            raise TroubleError(str(error) or type(error).__name__, last=cause) from error
        except HFValidationError as error:
            raise SourceError(f"{address.repository} is neither a path here nor a name that the Hub allows") from error
        except NOT_AN_ANSWER as error:
            raise TroubleError(f"its answer is not in the form of the Hub's API: {error}") from error

    return make_retrying(f"asking the Hub about {address.repository}", stop, _FIRST_TRIES)(ask)


def _select_visible_files(files: Mapping[str, HubFile]) -> dict[str, HubFile]:
    """Select the files in sorted order, without those in folders that programs keep for themselves.

    Raises HostileError for a name that git does not allow either, such as one that leads out of the directory.
    """
    for path, file in files.items():
        if not all(isinstance(text, str) for text in (path, file.blob, file.sha256)):
            raise SourceError(f"the Hub lists a file {path!r:.200} whose name is not text")
        if "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
            raise HostileError(f"the Hub lists a file {path!r}, which would lie outside of its repository")
        if not is_text(path):
            raise SourceError(f"the Hub lists a file {path!a:.200}, whose name is not Unicode text")
        if not isinstance(file.size, int) or not 0 <= file.size <= _MAX_FILE_BYTES:
            raise SourceError(f"the Hub lists {path!r} with a size of {file.size!r}")
    return {path: files[path] for path in sorted(files) if HIDDEN.isdisjoint(path.split("/")[:-1])}


def locate_cache_folder(address: HubAddress) -> Path:
    """Locate where the cache keeps a model (huggingface_hub, docs, "Understand caching")."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=address.repository, repo_type="model")


def _add_cached_files(listing: HubListing) -> HubListing:
    """Return the listing with the places of files that are on this machine; what has another size is not believed."""
    if not listing.cache.is_dir():
        return listing
    snapshot = f"snapshots/{listing.commit}/"

    def cached(path: str, file: HubFile) -> str:
        for place in (snapshot + path, f"blobs/{file.etag}"):
            full = listing.cache / place
            if full.is_file() and full.stat().st_size == file.size:
                return place
        return ""

    files = {path: replace(file, cached=cached(path, file)) for path, file in listing.files.items()}
    whole = all(file.cached == snapshot + path for path, file in files.items())
    return replace(listing, files=files, snapshot=listing.cache / snapshot if whole else None)


def _list_from_cache(address: HubAddress) -> HubListing:
    folder = locate_cache_folder(address)
    commit = address.commit
    if commit is None:
        reference = folder / "refs" / address.revision
        if not reference.is_file():
            raise build_offline_error(address, f"is neither a path here nor in the Hub's cache at {address.revision}")
        commit = reference.read_text(errors="replace").strip()
        if _COMMIT_HASH_PATTERN.fullmatch(commit) is None:
            raise build_offline_error(address, f"has no commit in the Hub's cache for {address.revision}")
    snapshot = folder / "snapshots" / commit
    if not snapshot.is_dir():
        raise build_offline_error(address, f"is not in the Hub's cache at {commit}")
    return HubListing(commit, _select_visible_files(dict(_walk_snapshot(folder, snapshot))), folder, snapshot)


def _walk_snapshot(folder: Path, snapshot: Path) -> Iterator[tuple[str, HubFile]]:
    for parent, _, names in os.walk(snapshot):
        for name in names:
            file = Path(parent, name)
            if file.is_file():
                blob = file.readlink().name if file.is_symlink() else ""
                sha256 = blob if len(blob) == _SHA256_HEX_DIGITS else ""
                yield (
                    file.relative_to(snapshot).as_posix(),
                    HubFile(file.stat().st_size, blob, sha256, file.relative_to(folder).as_posix()),
                )
