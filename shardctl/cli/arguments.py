"""Declares the arguments that several verbs share: the places they work on, and `--json`."""

from pathlib import Path
from typing import Annotated

import typer

from shardctl.cli.signature import OmittedOptions
from shardctl.errors import UsageError
from shardctl.options import SourceOptions


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


_PLACES = "A path; owner/name or owner/name@revision on the Hub; or s3://, gs:// or az://."
_WHERE = "A directory that is new, empty or written by shardctl; or s3://, gs:// or az://."
Source = Annotated[str, typer.Argument(metavar="SRC", parser=parse_place, show_default=False, help=_PLACES)]
Destination = Annotated[str | None, typer.Argument(metavar="DST", parser=parse_place, show_default=False, help=_WHERE)]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON document instead of text.")]
StoredSource = Annotated[SourceOptions, OmittedOptions({"rules_from", "kv_heads"})]
"""How a source is understood by a verb that takes no mesh."""
