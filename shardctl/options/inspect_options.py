"""Declares what `inspect` finds out beside what the headers say."""

from typing import Annotated

from shardctl.options.declaration import CommandOption, HelpPanel
from shardctl.value import settings_class


@settings_class
class InspectOptions:
    """What is found out beside what the headers say."""

    show_rules: Annotated[
        bool, CommandOption(HelpPanel.GENERAL, "List the rules that apply; derived ones as a rule file.")
    ] = False
    """Derives the rules of a model that no table knows."""
