"""Declares what several verbs have on the command line: the places they work on, and options that only it has."""

from pathlib import Path
from typing import Annotated

import typer

from shardctl.base.errors import UsageError
from shardctl.cli.signature import DESTINATION, OmittedOptions
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.options.declaration import CommandOption, HelpPanel, PathAccess
from shardctl.options.places import parse_output_file, parse_place

_SOURCE_HELP = (
    "A path, owner/name on the Hub, or an address. The name may have a revision, as in owner/name@main; addresses "
    "begin with s3://, gs:// or az://."
)
_DESTINATION_HELP = (
    "A new or empty directory, or an address. A directory that shardctl wrote is resumed, or replaced with "
    "--overwrite; addresses begin with hf://, s3://, gs:// or az://."
)


def declare_place(metavar: str, text: str) -> typer.models.ArgumentInfo:
    """Declare an argument that is a path or an address."""
    argument: typer.models.ArgumentInfo = typer.Argument(
        metavar=metavar, parser=parse_place, show_default=False, help=text
    )
    return argument


def declare_report(text: str, *, brief: str) -> CommandOption:
    """Declare an option for a file that a view of the result is written to."""
    return CommandOption(
        HelpPanel.REPORTS, text, brief=brief, metavar="FILE", parser=parse_output_file, access=PathAccess.WRITTEN
    )


_HTML_SUFFIXES = (".html", ".htm")
"""The suffixes of a page; with another suffix, the name may be a mistake that would overwrite a valuable file."""


def parse_page_file(text: str) -> Path:
    """Parse the name of a page to write; raises UsageError for another suffix."""
    path = parse_output_file(text)
    if path.suffix.lower() not in _HTML_SUFFIXES:
        raise UsageError(f"--report writes HTML, and {path} has another suffix", hint="name it FILE.html")
    return path


Page = Annotated[
    Path | None,
    CommandOption(
        HelpPanel.REPORTS,
        "Write a self-contained HTML report as well.",
        brief="Write an HTML page as well",
        metavar="FILE.html",
        parser=parse_page_file,
        access=PathAccess.WRITTEN,
    ),
]
Source = Annotated[str, declare_place("SRC", _SOURCE_HELP)]
Destination = Annotated[str | None, declare_place(DESTINATION, _DESTINATION_HELP)]
Json = Annotated[
    bool,
    CommandOption(
        HelpPanel.GENERAL, "Print one JSON document instead of text.", brief="Print one JSON document instead of text"
    ),
]
PlannedConversionOptions = Annotated[ReshardOptions, OmittedOptions({"consumer"})]
"""What `plan` converts a checkpoint to: its own --for says what the devices are for."""
StoredSource = Annotated[SourceOptions, OmittedOptions({"rules_from", "kv_heads"})]
"""How a source is understood by a verb that takes no mesh."""
