"""Declares how `verify` runs the levels that use devices."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shardctl.options.declaration import CommandOption, HelpPanel
from shardctl.options.sizes import parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """How the levels `load` and `forward` are run; some options imply one of these levels."""

    device: Annotated[
        str | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Device to load every rank onto; implies --level load.",
            flag="--load",
            accepts=Literal["cpu", "cuda", "auto"] | None,
        ),
    ] = None
    """`cpu`, `cuda`, one device such as `cuda:1`, or `auto`, which is CUDA if there is a device; by default `auto`."""
    device_memory: Annotated[
        int | None,
        CommandOption(
            HelpPanel.TRIALS, "Maximum device memory that a rank may use.", metavar="SIZE", parser=parse_size
        ),
    ] = None
    """Bytes."""
    forward: Annotated[bool, CommandOption(HelpPanel.TRIALS, "Run the model; implies --level forward.")] = False
    dtype: Annotated[Literal["fp32", "bf16"], CommandOption(HelpPanel.TRIALS, "Type that the model computes in.")] = (
        "fp32"
    )
    prompt: Annotated[
        str | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Text that source and shards are shown to continue; implies --level forward.",
            metavar="TEXT",
        ),
    ] = None
    tokens: Annotated[
        int, CommandOption(HelpPanel.TRIALS, "Number of tokens to generate after --prompt.", metavar="N", least=1)
    ] = 16
    processes: Annotated[
        int | None,
        CommandOption(HelpPanel.TRIALS, "Maximum number of processes, one per rank.", metavar="N", least=1),
    ] = None
    """None chooses by the size of the model; 0 runs all ranks in this process."""
    virtual: Annotated[bool, CommandOption(HelpPanel.TRIALS, "Run all ranks in one process.")] = False
    second_opinion: Annotated[
        bool, CommandOption(HelpPanel.TRIALS, "Compare with transformers' own tensor parallelism, too.")
    ] = False

    def asked_level(self) -> Literal["quick", "load", "forward"]:
        """Find the lowest level that does what these options ask for."""
        if self.forward or self.prompt is not None or self.second_opinion:
            return "forward"
        return "load" if self.device is not None else "quick"
