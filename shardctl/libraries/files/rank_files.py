"""Recognises the names of files that hold one rank's part, saved with torch.save."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = Literal["model", "optimizer", "other"]

_RANK_FILE_PATTERN: Final = re.compile(r"(|.*?[._-])rank[._-]?([0-9]{1,6})([._-][^/]*)?\.(bin|pt|pth)")
_DEEPSPEED_FILE_PATTERN: Final = re.compile(r".*(model|optim)_states\.pt")
_OPTIMIZER_FILE_WORDS: Final = frozenset({"opt", "optim", "optimizer"})
_TRAINER_STATE_WORDS: Final = frozenset(
    {"args", "dataloader", "extra", "random", "rng", "scaler", "scheduler", "states"}
)
"""Words in the names of files with counters, random numbers and schedules (verl: `extra_state_..._rank_0.pt`)."""


@value_class
class RankFileName:
    """One rank's file.

    >>> (parse_rank_file_name("pytorch_model_fsdp_0_rank3.bin").rank,
    ...  parse_rank_file_name("optim_world_size_4_rank_1.pt").kind)
    (3, 'optimizer')
    >>> parse_rank_file_name("pytorch_model.bin"), parse_rank_file_name("zero_pp_rank_0_mp_rank_00_model_states.pt")
    (None, None)
    """

    path: str
    before: str
    """The name up to the rank's number."""
    rank: int
    after: str

    @property
    def kind(self) -> Kind:
        """What it seems to hold."""
        words = set(re.split("[^a-z]+", f"{self.before}{self.after}".lower()))
        if words & _TRAINER_STATE_WORDS:
            return "other"
        return "optimizer" if words & _OPTIMIZER_FILE_WORDS else "model"

    @property
    def family(self) -> tuple[str, str]:
        """What the names of all ranks' files of one save have in common."""
        return (self.before, self.after)

    def of(self, rank: int) -> str:
        """Return the name of another rank's file."""
        return f"{self.before}{rank}{self.after}"


def parse_rank_file_name(path: str) -> RankFileName | None:
    """Parse the parts of such a name; None if it is another name, or one of DeepSpeed's, or in a folder."""
    found = _RANK_FILE_PATTERN.fullmatch(path)
    if found is None or "/" in path or _DEEPSPEED_FILE_PATTERN.fullmatch(path):
        return None
    return RankFileName(path, path[: found.start(2)], int(found[2]), path[found.end(2) :])


def list_rank_files(paths: Iterable[str]) -> list[RankFileName]:
    """List those of the paths that have such a name."""
    return [found for path in paths if (found := parse_rank_file_name(path)) is not None]
