"""Declares what `inspect` finds out in addition to what the headers say."""

from typing import Annotated

from shardctl.base.value import settings_class
from shardctl.options.declaration import CommandOption, HelpPanel
from shardctl.options.reshard_options import HostMemory, Threads


@settings_class
class InspectOptions:
    """What is found out in addition to what the headers say."""

    show_rules: Annotated[
        bool,
        CommandOption(
            HelpPanel.GENERAL,
            "List the rules that apply; derived ones as a rule file.",
            brief="List the rules that apply",
        ),
    ] = False
    """Derives the rules of a model that no table knows."""
    stats: Annotated[
        bool,
        CommandOption(
            HelpPanel.GENERAL,
            "Read every value, and print norm, mean, largest absolute value, zeros, NaN and infinities per layer, and "
            "with --tensors per tensor.",
            brief="Read every value: norm, mean, zeros, NaN",
        ),
    ] = False
    """Quantized weights are decoded first, where shardctl can decode them."""
    host_memory: HostMemory = 1 << 30
    """Bytes of anonymous memory that reading values may take."""
    threads: Threads = None
    """Threads that read values."""
