"""Finds which experts a rank holds; flat partitions number them as their rank does.

DeepSpeed `moe/layer.py`, `utils/groups.py` (`_create_expert_and_data_parallel`: ranks of different experts follow one
another) and `runtime/engine.py` (`_save_moe_checkpoint`: files of experts have the global numbers).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError

if TYPE_CHECKING:
    from shardctl.libraries.deepspeed.automatic_experts import AutomaticExperts
    from shardctl.libraries.deepspeed.geometry import FlatPartition
    from shardctl.libraries.deepspeed.model_states import ModelState
    from shardctl.libraries.deepspeed.optimizer_states import OptimizerState

_EXPERT: Final = re.compile(r"(.*\.deepspeed_experts\.)([0-9]{1,9})(\..*)")


class ExpertNames:
    """The experts that each rank of one model has, told from the names of parameters."""

    def __init__(self, state: ModelState, automatic: AutomaticExperts) -> None:
        self._path = state.path
        self._automatic = automatic
        self._turned = bool(state.config.get("use_data_before_expert_parallelism"))
        found: dict[str, set[str]] = {}
        for group in state.groups or ():
            for name in group:
                m = _EXPERT.fullmatch(name)
                if m is not None:
                    found.setdefault(m[1], set()).add(m[2])
        self._count = {prefix: len(numbers) for prefix, numbers in found.items()}
        """Experts of each layer on one rank."""

    def place(self, name: str, part: FlatPartition, held: OptimizerState, rank: int) -> tuple[str, int]:
        """Return what the whole model calls a parameter, and which rank of those that have parts of it has this one.

        That is the model-parallel `rank`, or the expert-parallel one for an array of experts.
        Raises UnsupportedError for parameters that are divided among ranks in a way that the names do not tell.
        """
        if part.divided == 1:
            return name, rank
        m = _EXPERT.fullmatch(name)
        automatic = self._automatic.holds(name)
        if m is None and not automatic:
            raise UnsupportedError(
                f"{held.path}: {name!r} is divided among {part.divided} kinds of ranks, and its name does not say how",
                hint="DeepSpeed's ds_to_universal.py makes a Universal Checkpoint of it, which shardctl reads",
            )
        if self._turned:
            raise UnsupportedError(
                f"{self._path} was saved with use_data_before_expert_parallelism, whose order of ranks is not known",
                hint="--weights module reads the experts' own files",
            )
        if m is None or automatic:
            return name, part.kind
        return f"{m[1]}{part.kind * self._count[m[1]] + int(m[2])}{m[3]}", rank
