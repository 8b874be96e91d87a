"""Parses addresses of models on the Hub: `owner/name[@revision]`, `hf://owner/name[@revision][/folder]`."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Final
from urllib.parse import unquote

from shardctl.base.errors import UsageError
from shardctl.base.value import value_class

_HUB_SCHEME: Final = "hf://"
_REPOSITORY_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9._-]{1,96}")
_OTHER_KINDS: Final = ("datasets", "spaces", "kernels", "buckets")
"""What the first part of an address says of repositories that hold no model (huggingface_hub, `constants.py`)."""
_SPECIAL_REVISION_PATTERN: Final = re.compile(r"refs/(?:pr/[0-9]+|convert/[\w.-]+)")
"""Revisions whose name holds a slash, as the Hub itself makes them; others have it as ``%2F``."""
_DEFAULT_REVISION: Final = "main"
_COMMIT_HASH_PATTERN: Final = re.compile(r"[0-9a-f]{40}")


@value_class
class HubAddress:
    """A model, a version of it, and where in its repository the files are."""

    repository: str
    """``owner/name``."""
    revision: str = _DEFAULT_REVISION
    """A branch, a tag or a commit."""
    inside: str = ""
    """A folder, or one file; empty for the whole repository."""
    bare: bool = field(default=False, compare=False)
    """Whether it was written without ``hf://``, so that a path may have been meant."""

    @classmethod
    def parse(cls, text: str) -> HubAddress:
        """Read an address; raises UsageError for what is none.

        Without ``hf://`` all that follows the ``@`` is the revision.
        """
        bare = not text.startswith(_HUB_SCHEME)
        rest = text.removeprefix(_HUB_SCHEME).removeprefix("models/")
        head, at, tail = rest.partition("@")
        if not at:
            parts = rest.split("/", 2)
            head, inside = "/".join(parts[:2]), "/".join(parts[2:])
            revision = _DEFAULT_REVISION
        elif bare:
            revision, inside = tail, ""
        else:
            special = _SPECIAL_REVISION_PATTERN.match(tail)
            revision = special[0] if special else tail.partition("/")[0]
            inside = tail[len(revision) :]
        if head.partition("/")[0] in _OTHER_KINDS:
            raise UsageError(f"{text} is not a model", hint="models are hf://owner/name[@revision][/folder]")
        inside, revision = unquote(inside.strip("/")), unquote(revision)
        wrong = inside and not {"", ".", ".."}.isdisjoint(inside.split("/"))
        if not _REPOSITORY_PATTERN.fullmatch(head) or not revision or wrong:
            raise UsageError(f"{text} is not the address of a model", hint="write hf://owner/name[@revision][/folder]")
        return cls(head, revision, inside, bare)

    @property
    def commit(self) -> str | None:
        """The revision, if it is a whole commit, which never moves."""
        return self.revision if _COMMIT_HASH_PATTERN.fullmatch(self.revision) else None

    def at(self, commit: str) -> str:
        """Return the address as text, bound to a commit."""
        return f"{_HUB_SCHEME}{self.repository}@{commit}" + (f"/{self.inside}" if self.inside else "")
