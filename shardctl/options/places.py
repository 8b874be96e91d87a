"""Reads paths and addresses from the command line."""

from __future__ import annotations

from pathlib import Path

from shardctl.base.errors import UsageError


def parse_place(text: str) -> str:
    """Refuse an empty path: an unset shell variable gives one, and it must not become the working directory."""
    if not text:
        raise UsageError("a path is empty", hint="an unset shell variable gives an empty path")
    return text


def parse_output_file(text: str) -> Path:
    """Read the path of a plan or report; refuse an address, which would become a directory of that name."""
    from shardctl.storage.addresses import check_written_file

    check_written_file(parse_place(text))
    return Path(text)
