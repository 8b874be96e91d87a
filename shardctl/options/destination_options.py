"""Declares how a destination is written: the options that only `reshard` has."""

from typing import Annotated, Literal

from shardctl.base.value import settings_class
from shardctl.options.declaration import CommandOption, HelpPanel


@settings_class
class DestinationOptions:
    """How a destination is written; none of this changes a tensor."""

    overwrite: Annotated[
        bool,
        CommandOption(
            HelpPanel.GENERAL,
            "Replace a checkpoint that shardctl wrote.",
            brief="Replace a checkpoint that shardctl wrote",
        ),
    ] = False
    no_resume: Annotated[bool, CommandOption(HelpPanel.GENERAL, "Start again instead of resuming an earlier run.")] = (
        False
    )
    checksums: Annotated[
        Literal["sha256"] | None,
        CommandOption(
            HelpPanel.GENERAL,
            "Write SHA256SUMS, and Megatron-LM's integrity.json.",
            flag="--hash",
        ),
    ] = None
    prove: Annotated[
        bool,
        CommandOption(
            HelpPanel.GENERAL,
            "Run the result and the source, and publish the result only if they agree.",
            brief="Run both models, and publish only if they agree",
        ),
    ] = False
    allow_overflow: Annotated[
        bool,
        CommandOption(
            HelpPanel.GENERAL, "Publish a result in which finite values became infinite, which is refused otherwise."
        ),
    ] = False
    create: Annotated[
        bool,
        CommandOption(
            HelpPanel.GENERAL,
            "Create the repository or the branch of a destination on the Hub.",
            brief="Create the repository or branch on the Hub",
        ),
    ] = False
    private: Annotated[bool, CommandOption(HelpPanel.GENERAL, "With --create, make the repository private.")] = False

    @property
    def sha256(self) -> bool:
        """Whether the SHA-256 of every file is written beside them."""
        return self.checksums == "sha256"
