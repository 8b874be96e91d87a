"""Declares what `inspect` finds out beside what the headers say."""

from typing import Annotated

from shardctl.base.value import settings_class
from shardctl.options.declaration import CommandOption, HelpPanel


@settings_class
class InspectOptions:
    """What is found out beside what the headers say."""

    show_rules: Annotated[
        bool,
        CommandOption(
            HelpPanel.GENERAL,
            "List the rules that apply; derived ones as a rule file.",
            brief="List the rules that apply",
        ),
    ] = False
    """Derives the rules of a model that no table knows."""
