"""Parses places on the command line, to read from or write to: paths, and addresses elsewhere."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UsageError
from shardctl.storage.byte_names import is_name
from shardctl.storage.cloud import SCHEMES
from shardctl.storage.local import LocalSource
from shardctl.storage.near_paths import find_near_path

if TYPE_CHECKING:
    from shardctl.storage import Source

_URL_SCHEME_PATTERN: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_ADDRESS_FORMS: Final = (
    "a path",
    "owner/name[@revision]",
    "hf://owner/name[@revision][/folder]",
    "s3://, gs:// or az://",
)
_USER_PART: Final = re.compile(
    r"(?!hf://)[a-zA-Z][a-zA-Z0-9+.-]*://(?:[^/@]*|[^/@:]+:(?!\d{1,5}(?:/|$)).*)@", re.DOTALL
)
"""How an address begins that names a user, perhaps with a password."""
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@.+)?")
"""What a model of the Hub is called; a path of two parts looks the same, and wins where it exists."""

_FILE_SUFFIXES: Final = frozenset({".json", ".safetensors"})
"""Suffixes of files of checkpoints, which no model's name has: ``x/config.json`` is a path."""
_MAX_HUB_NAME: Final = 256
"""Characters of such a name with a revision; the Hub allows 96 for each of its two parts."""


def open_source(text: str | Path) -> Source:
    """Return the place that a SRC names; only what can be said without reading a file is found out.

    A bare ``owner/name`` is the Hub's only if there is neither such a path here nor one that is nearly the same.

    Raises:
        UsageError: the address is of a kind that is not known.
        SourceError: there is nothing.
        AccessError: there is something, for others.
    """
    _check_name(text)
    if isinstance(text, Path) or os.path.lexists(text):
        return _open_local(Path(text))
    match = _URL_SCHEME_PATTERN.match(text)
    named_file = Path(text).suffix in _FILE_SUFFIXES
    if match is None and (named_file or _HUB_NAME.fullmatch(text) is None):
        return LocalSource(Path(text))
    match match[1] if match else "hf":
        case "hf":
            if match is None:
                _refuse_mistyped_path(text)
            from shardctl.storage.hub import open_hub

            return open_hub(text)
        case scheme if scheme in SCHEMES:
            from shardctl.storage.cloud import open_cloud

            return open_cloud(text)
        case other:
            raise UsageError(
                f"{other}:// is not an address that shardctl reads", hint=f"SRC is {', '.join(_ADDRESS_FORMS)}"
            )


def is_hub_name(place: Path) -> bool:
    """Return whether a path that is not here looks like ``owner/name``, a model of the Hub, and not like a file."""
    text = place.as_posix()
    if place.suffix == ".json" or len(text) > _MAX_HUB_NAME or os.path.lexists(place):
        return False
    return _HUB_NAME.fullmatch(text) is not None


def _refuse_mistyped_path(text: str) -> None:
    """Raise SourceError for ``owner/name`` if a path here is nearly the same: it is more likely to be meant."""
    near = find_near_path(Path(text.partition("@")[0]))
    if near is not None:
        raise SourceError(
            f"{text} does not exist", hint=f"did you mean {near}? A model of that name on the Hub is hf://{text}"
        )


def check_destination(place: str | Path) -> None:
    """Raise UsageError for an address of a kind that is not written; a path would make a directory of its scheme.

    A Path is always a directory's, as is text that begins with ``./``.
    """
    _check_name(place)
    scheme = _parse_scheme(place)
    if scheme not in (None, "hf", *SCHEMES):
        rest = str(place).partition("://")[2]
        instead = rest if scheme == "file" and rest.startswith("/") else f"./{place}"
        raise UsageError(
            f"{scheme}:// is not an address that shardctl writes to",
            hint=f"DST is hf://, s3://, gs://, az:// or a directory, such as {instead}",
        )


def refuse_user_part(address: str) -> None:
    """Raise UsageError, without repeating it, for an address that names a user or holds a password.

    Nothing reads it there, and it would be shown, logged and recorded wherever the address is.
    """
    if _USER_PART.match(address) is not None:
        raise UsageError(
            f"the address {address.partition('://')[0]}://... names a user or holds a password",
            hint="leave that out: credentials come from the environment, such as AWS_SECRET_ACCESS_KEY or VLLM_API_KEY",
        )


def check_written_file(place: str | Path) -> None:
    """Raise UsageError for an address of any kind: plans and reports are files of this machine."""
    scheme = _parse_scheme(place)
    if scheme is not None:
        raise UsageError(
            f"{place} is an address, but only checkpoints can be written to addresses",
            hint="name a file on this machine",
        )


def _check_name(place: str | Path) -> None:
    if isinstance(place, str):
        refuse_user_part(place)
    if not is_name(str(place)):
        raise UsageError(f"{str(place)!r} is not a path: it holds characters that no name can have")


def _parse_scheme(place: str | Path) -> str | None:
    match = _URL_SCHEME_PATTERN.match(place) if isinstance(place, str) else None
    return match[1] if match else None


def _open_local(path: Path) -> LocalSource:
    """Return a directory or file that is here; what Orbax wrote is read through tensorstore."""
    if os.path.isfile(path / "_METADATA"):  # noqa: PTH113 - which is False where it cannot be known
        from shardctl.storage.orbax import OrbaxSource, has_plain_arrays, is_orbax

        if is_orbax(path) and not has_plain_arrays(path):
            return OrbaxSource(path)
    return LocalSource(path)
