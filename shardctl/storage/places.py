"""What a SRC on the command line means: a path, or the address of a place elsewhere."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardctl.errors import UsageError
from shardctl.storage.cloud import SCHEMES
from shardctl.storage.local import LocalSource

if TYPE_CHECKING:
    from shardctl.storage import Source

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://")
_ADDRESSES: Final = ("a path", "owner/name[@revision]", "hf://owner/name[@revision][/folder]", "s3://, gs:// or az://")
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@.+)?")
"""What a model of the Hub is called; a path of two parts looks the same, and wins where it exists."""


def open_source(text: str | Path) -> Source:
    """The place that a SRC names; only what can be said without reading a file is found out.

    A bare ``owner/name`` is the Hub's only if there is no such path here.

    Raises:
        UsageError: the address is of a kind that is not known.
        SourceError: there is nothing.
        AccessError: there is something, for others.
    """
    if isinstance(text, Path) or os.path.lexists(text):
        return _local(Path(text))
    match = _SCHEME.match(text)
    if match is None and _HUB_NAME.fullmatch(text) is None:
        return LocalSource(Path(text))
    match match[1] if match else "hf":
        case "hf":
            from shardctl.storage.hub import open_hub

            return open_hub(text)
        case scheme if scheme in SCHEMES:
            from shardctl.storage.cloud import open_cloud

            return open_cloud(text)
        case other:
            raise UsageError(f"{other}:// is not a place that shardctl reads", hint=f"SRC is {', '.join(_ADDRESSES)}")


def _local(path: Path) -> LocalSource:
    """A directory or file that is here; what Orbax wrote is read through tensorstore."""
    if os.path.isfile(path / "_METADATA"):  # noqa: PTH113 - which is False where it cannot be known
        from shardctl.storage.orbax import OrbaxSource, is_orbax

        if is_orbax(path):
            return OrbaxSource(path)
    return LocalSource(path)
