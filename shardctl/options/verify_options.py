"""How `verify` runs its levels that use devices."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shardctl.options.declaration import CommandOption, HelpPanel
from shardctl.options.sizes import parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """How the levels `load` and `forward` are run; some options ask for one of these levels by themselves."""

    device: Annotated[
        str | None,
        CommandOption(
            HelpPanel.TRIALS,
            "Load every rank there: --level load.",
            flag="--load",
            accepts=Literal["cpu", "cuda", "auto"] | None,
        ),
    ] = None
    """`cpu`, `cuda`, one device such as `cuda:1`, or `auto`: CUDA where there is some; by default `auto`."""
    device_memory: Annotated[
        int | None,
        CommandOption(HelpPanel.TRIALS, "What a rank may take of its device.", metavar="SIZE", parser=parse_size),
    ] = None
    """Bytes."""
    forward: Annotated[bool, CommandOption(HelpPanel.TRIALS, "Run the model: --level forward.")] = False
    dtype: Annotated[Literal["fp32", "bf16"], CommandOption(HelpPanel.TRIALS, "What the model computes in.")] = "fp32"
    prompt: Annotated[
        str | None,
        CommandOption(HelpPanel.TRIALS, "Show how source and shards continue it: --level forward.", metavar="TEXT"),
    ] = None
    tokens: Annotated[int, CommandOption(HelpPanel.TRIALS, "How many tokens of it.", metavar="N", least=1)] = 16
    processes: Annotated[
        int | None,
        CommandOption(HelpPanel.TRIALS, "At most so many processes, one a rank.", metavar="N", least=1),
    ] = None
    """None decides by the size of the model; 0 runs all ranks in this process."""
    virtual: Annotated[bool, CommandOption(HelpPanel.TRIALS, "All ranks in one process.")] = False
    second_opinion: Annotated[bool, CommandOption(HelpPanel.TRIALS, "Ask transformers' tensor parallelism too.")] = (
        False
    )

    def asked_level(self) -> Literal["quick", "load", "forward"]:
        """The lowest level that has what these options ask for."""
        if self.forward or self.prompt is not None or self.second_opinion:
            return "forward"
        return "load" if self.device is not None else "quick"
