"""Declares the options of weighted sums of checkpoints, which `reshard` computes and `verify` computes again."""

from typing import Final, Protocol

from shardctl.options.declaration import CommandOption, HelpPanel, PathAccess

AVERAGE_WITH: Final = CommandOption(
    HelpPanel.WRITING,
    "Average the source with this checkpoint, in any layout; may be repeated.",
    brief="Average the source with this checkpoint",
    metavar="SRC",
    accepts=list[str],
    access=PathAccess.READ,
)
AVERAGE_WEIGHTS: Final = CommandOption(
    HelpPanel.WRITING,
    "Weights of the average, the source's first, such as 0.5,0.25,0.25. Default: equal.",
    metavar="W,W,...",
)
EMA: Final = CommandOption(
    HelpPanel.WRITING,
    "Exponential moving average over the checkpoints of the run SRC, by step: decay * average + (1 - decay) * next.",
    metavar="DECAY",
)
ADD_DIFFERENCE: Final = CommandOption(
    HelpPanel.WRITING,
    "Add --scale times the difference B - C of two checkpoints (a task vector) to the source.",
    metavar="B C",
    accepts=tuple[str, str],
    access=PathAccess.READ,
)
SCALE: Final = CommandOption(HelpPanel.WRITING, "Factor of --add-difference. Default: 1.", metavar="S")


class _SumFields(Protocol):
    """Options with the fields of a sum."""

    @property
    def average_with(self) -> tuple[str, ...]: ...
    @property
    def average_weights(self) -> str | None: ...
    @property
    def ema(self) -> str | None: ...
    @property
    def add_difference(self) -> tuple[str, str] | None: ...
    @property
    def scale(self) -> str | None: ...


def requests_sum(options: _SumFields) -> bool:
    """Return whether an option of a sum is given; most runs need none of the code that computes them."""
    given = options.average_weights, options.ema, options.add_difference, options.scale
    return bool(options.average_with) or any(each is not None for each in given)
