"""Writes files into a model's repository on the Hub, through huggingface_hub: many uploads, and then one commit.

Large files are sent as soon as they are there (`HfApi.preupload_lfs_files`, by Xet where hf_xet is installed); small
ones are held in memory. Nothing of it can be seen in the repository before the commit, which names the commit that it
follows, so that nobody else's work is overwritten.
"""

from __future__ import annotations

import base64
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import AccessError, DestinationError, ShardctlError, SourceError, TransientError, UsageError
from shardctl.base.version import __version__
from shardctl.base.workers import StopRequest
from shardctl.storage.hub import check_settings
from shardctl.storage.hub.listing import list_repository
from shardctl.storage.hub.refusals import build_refusal_error
from shardctl.storage.hub.statuses import PASSING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from shardctl.storage.hub.address import HubAddress
    from shardctl.storage.hub.listing import HubListing

HELD: Final = 64 << 20
"""Anonymous memory that sending takes: the library's five threads, and small files until they are committed."""
_HOW_ALLOWED: Final = "log in with `hf auth login` and a token that may write, or set HF_TOKEN"
_RERUN_COMMAND_HINT: Final = "run the same command again; files that were sent already are not sent again"


class HubRepository:
    """A branch of a model's repository, to be written."""

    def __init__(self, address: HubAddress, *, create: bool = False, private: bool = False) -> None:
        """Look at the branch, which `create` makes if it is not there, in a repository that is `private` if made.

        Raises UsageError for an address that cannot be written, DestinationError for what is not there, AccessError
        for a token that may not write, TransientError without a Hub.
        """
        if address.inside or address.commit is not None or address.revision.startswith("refs/"):
            raise UsageError(
                f"{address.at(address.revision)} cannot be written: only a branch of a whole repository can",
                hint=f"write hf://{address.repository}[@branch]",
            )
        if private and not create:
            raise UsageError("--private says how --create makes a repository", hint="add --create")
        self.address = address
        self.name = f"hf://{address.repository}@{address.revision}"
        self._operations: dict[str, Any] = {}
        self._listing = self._look(create=create, private=private)

    def _look(self, *, create: bool, private: bool) -> HubListing:
        check_settings(os.environ)
        from huggingface_hub import constants, errors

        if constants.HF_HUB_OFFLINE:
            raise UsageError(f"{self.name} cannot be written while HF_HUB_OFFLINE is set", hint="unset HF_HUB_OFFLINE")
        name, branch = self.address.repository, self.address.revision
        try:
            found = list_repository(self.address, StopRequest())
        except SourceError as error:
            missing = isinstance(error.__cause__, errors.RepositoryNotFoundError)
            if not missing and not isinstance(error.__cause__, errors.RevisionNotFoundError):
                raise
            if not create:
                what = f"there is no model {name} on the Hub that you may see" if missing else error.message
                raise DestinationError(what, hint="add --create to make it") from error
        else:
            if private:
                self._require_private()
            return found
        with self._translate_errors("made"):
            api = _open_library()
            if missing:
                api.create_repo(name, private=private or None)
            elif private:
                self._require_private()
            if not missing or branch != constants.DEFAULT_REVISION:
                api.create_branch(name, branch=branch)
        return list_repository(self.address, StopRequest())

    def _require_private(self) -> None:
        with self._translate_errors("looked at"):
            private = _open_library().repo_info(self.address.repository).private
        if not private:
            raise DestinationError(
                f"{self.address.repository} is there already, and it is not private",
                hint="leave --private out, or make it private first",
            )

    @property
    def files(self) -> Collection[str]:
        """The files of the branch when it was looked at."""
        return self._listing.files.keys()

    @property
    def commit(self) -> str:
        """The commit that the branch was at then."""
        return self._listing.commit

    def send(self, files: Mapping[str, Path]) -> dict[str, tuple[int, str, str]]:
        """Send files, so that their places on this machine are needed no more.

        Returns, for each that is in the Hub's store of large files, bytes, SHA-256 and its beginning in base64.
        """
        from huggingface_hub import CommitOperationAdd

        with self._translate_errors("written"):
            additions = [CommitOperationAdd(path, str(place)) for path, place in files.items()]
            if additions:
                _open_library().preupload_lfs_files(
                    self.address.repository, additions, revision=self.address.revision, free_memory=False
                )
        sent = {}
        for addition in additions:
            path, info = addition.path_in_repo, addition.upload_info
            if addition._should_ignore:  # noqa: SLF001 - the library says it nowhere else
                raise DestinationError(
                    f"a .gitignore keeps {path} out of {self.name}", hint="remove it from the repository or the source"
                )
            if addition._upload_mode == "lfs":  # noqa: SLF001
                sent[path] = (info.size, info.sha256.hex(), base64.b64encode(info.sample).decode())
                self.recall(path, sent[path])
            else:
                self.hold(path, files[path].read_bytes())
        return sent

    def recall(self, path: str, sent: tuple[int, str, str]) -> None:
        """Add a file to the commit whose content an earlier `send` has sent."""
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.lfs import UploadInfo

        size, digest, sample = sent
        addition = CommitOperationAdd(path, b"")
        addition.upload_info = UploadInfo(size, base64.b64decode(sample), bytes.fromhex(digest))
        for name, value in (("_upload_mode", "lfs"), ("_is_uploaded", True), ("_should_ignore", False)):
            setattr(addition, name, value)
        self._operations[path] = addition

    def hold(self, path: str, content: bytes) -> None:
        """Add a small file to the commit."""
        from huggingface_hub import CommitOperationAdd

        with self._translate_errors("written"):
            self._operations[path] = CommitOperationAdd(path, content)

    def publish(self, message: str, without: Collection[str] = ()) -> str:
        """Commit what was sent and held, remove the files `without`, and return the commit's hash.

        Raises DestinationError if the branch has moved, or the Hub has not what was sent.
        """
        from huggingface_hub import CommitOperationDelete

        gone = [CommitOperationDelete(path, is_folder=False) for path in sorted(without)]
        with self._translate_errors("committed to"):
            done = _open_library().create_commit(
                self.address.repository,
                [*self._operations.values(), *gone],
                commit_message=message,
                revision=self.address.revision,
                parent_commit=self.commit,
            )
        return str(done.oid)

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        """Translate the library's errors into those of a destination that cannot be `what`."""
        from shardctl.storage.hub.library import (
            HfHubHTTPError,
            TransportError,
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
            keep_token_at,
        )

        shown = not are_progress_bars_disabled()
        disable_progress_bars()  # shardctl shows its own
        try:
            with keep_token_at(_find_endpoint()):
                yield
        except ShardctlError:
            raise
        except (HfHubHTTPError, TransportError, OSError, ValueError, RuntimeError) as error:
            raise self._convert_error(error, what) from error
        finally:
            if shown:
                enable_progress_bars()

    def _convert_error(self, error: Exception, what: str) -> ShardctlError:
        from shardctl.storage.hub.library import HfHubHTTPError, TransportError

        cause = error
        while isinstance(cause, RuntimeError) and isinstance(cause.__cause__, Exception):
            cause = cause.__cause__  # what went wrong in one of the library's threads
        if isinstance(cause, HfHubHTTPError):
            status = cause.response.status_code
            if status in {401, 403}:
                said = build_refusal_error(cause, self.address).message
                return AccessError(f"{self.name} cannot be {what}: {said}", hint=_HOW_ALLOWED)
            if status in {409, 412}:
                return DestinationError(
                    f"{self.name} was changed by another program: {cause.server_message or f'HTTP {status}'}",
                    hint="look at what it has now, and run the same command again",
                )
            if status in PASSING:
                return TransientError(
                    f"{self.name} cannot be {what}: the Hub answers HTTP {status}", hint=_RERUN_COMMAND_HINT
                )
            return DestinationError(
                f"{self.name} cannot be {what}: {cause.server_message or f'HTTP {status}'}",
                hint="if the Hub has lost what an earlier run sent, add --no-resume",
            )
        if isinstance(cause, TransportError):
            return TransientError(f"{self.name} cannot be {what}: {cause}", hint=_RERUN_COMMAND_HINT)
        return DestinationError(f"{self.name} cannot be {what}: {cause}")


def _find_endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _open_library() -> Any:  # noqa: ANN401 - its own type says less than it takes
    from huggingface_hub import HfApi

    return HfApi(library_name="shardctl", library_version=__version__)
