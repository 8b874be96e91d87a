"""Declares how much a run says, and where: the options that every verb has."""

from pathlib import Path
from typing import Annotated

from shardctl.base.value import settings_class
from shardctl.options.declaration import CommandOption, HelpPanel, PathAccess
from shardctl.options.places import parse_output_file


@settings_class
class LoggingOptions:
    """How much a run says on stderr; results on stdout, warnings and errors are the same in all of them."""

    quiet: Annotated[
        bool, CommandOption(HelpPanel.REPORTS, "Say nothing of progress and settings.", short="-q", shapes_result=False)
    ] = False
    verbose: Annotated[
        bool,
        CommandOption(
            HelpPanel.REPORTS,
            "Say when each phase begins, how long the run took, and where a bug was raised.",
            short="-v",
            shapes_result=False,
        ),
    ] = False
    log: Annotated[
        Path | None,
        CommandOption(
            HelpPanel.REPORTS,
            "Append to this file, with the time, all that is said, progress and exit code included.",
            metavar="FILE",
            parser=parse_output_file,
            access=PathAccess.WRITTEN,
            shapes_result=False,
        ),
    ] = None
