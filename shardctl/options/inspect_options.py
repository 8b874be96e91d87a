"""Declares what `inspect` finds out beside what the headers say."""

from dataclasses import dataclass
from typing import Annotated

from shardctl.options.declaration import CommandOption, HelpPanel


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """What is found out beside what the headers say."""

    show_rules: Annotated[
        bool, CommandOption(HelpPanel.GENERAL, "List the rules that apply; derived ones as a rule file.")
    ] = False
    """Derives the rules of a model that no table knows."""
