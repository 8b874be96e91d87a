"""Finds which of several workers this process is, from the command line or from its launcher's variables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

COUNT: Final = "SHARDCTL_WORKERS"
"""How many workers there are, where a launcher does not say."""
_LAUNCHER_VARIABLES: Final = (
    ("torchrun", "RANK", "WORLD_SIZE"),  # pytorch/torch/distributed/run.py, "Environment Variables"
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),  # srun(1), "OUTPUT ENVIRONMENT VARIABLES"
    ("Kubernetes", "JOB_COMPLETION_INDEX", COUNT),  # kubernetes.io, "Indexed Job": a pod is not told how many there are
)
"""Each with the variable of the number and that of the count."""
_TORCHRUN_ID_VARIABLE: Final = "TORCHELASTIC_RUN_ID"
"""Set by torchrun for what it starts, which Slurm or Kubernetes may have started it for."""


_JOB_ID_VARIABLES: Final = (("torchrun", _TORCHRUN_ID_VARIABLE), ("slurm", "SLURM_JOB_ID"))
"""What names a job, and stays when the launcher starts a worker of it again."""
_MAX_WORKERS: Final = 100_000
"""Workers: each is looked for by every other."""
_PLACEHOLDER_JOB_IDS: Final = frozenset({"", "none"})


def find_job_name(environment: Mapping[str, str]) -> str:
    """Find the name of the job that this process is started for; empty where the launcher gives none.

    Whoever starts worker I of a job has seen its predecessor die, also on another machine.

    >>> find_job_name({"SLURM_JOB_ID": "4711"})
    'slurm 4711'
    """
    found = ((launcher, environment.get(name, "")) for launcher, name in _JOB_ID_VARIABLES)
    return next((f"{launcher} {name}" for launcher, name in found if name not in _PLACEHOLDER_JOB_IDS), "")


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """One of `count` workers that share a conversion."""

    number: int
    """From 0."""
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise UsageError(
                f"there is no worker {self.number} of {self.count}",
                hint=f"workers are counted from 0: 0/{self.count} to {self.count - 1}/{self.count}"
                if self.count > 1
                else "the only worker of 1 is 0/1"
                if self.count == 1
                else "the first of two workers is 0/2",
            )
        if self.count > _MAX_WORKERS:
            raise UsageError(
                f"{self.count:,} workers are more than {_MAX_WORKERS:,}",
                hint="use no more workers than there are files",
            )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str]) -> WorkerId:
        """Read ``I/N``, or for ``auto`` what the launcher says.

        >>> WorkerId.parse("1/3", {})
        WorkerId(number=1, count=3)
        >>> WorkerId.parse("auto", {"RANK": "2", "WORLD_SIZE": "4"})
        WorkerId(number=2, count=4)

        Raises UsageError for anything else, or if launchers say nothing or contradict each other.
        """
        if text == "auto":
            return _find_launched_worker(environment)
        match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        if match is None:
            raise UsageError(
                f"--worker {text!r} is neither I/N nor auto", hint="the first of three workers is --worker 0/3"
            )
        return cls(int(match[1]), int(match[2]))


def _find_launched_worker(environment: Mapping[str, str]) -> WorkerId:
    found: dict[str, WorkerId] = {}
    for launcher, number, count in _LAUNCHER_VARIABLES:
        if number in environment:
            found[f"{launcher} ({number}, {count})"] = _parse_launcher_variables(environment, launcher, number, count)
        if launcher == "torchrun" and found and _TORCHRUN_ID_VARIABLE in environment:
            break
    if not found:
        known = ", ".join(f"{number} and {count} ({launcher})" for launcher, number, count in _LAUNCHER_VARIABLES)
        raise UsageError(
            f"--worker auto finds none of {known}", hint="give the number: --worker 0/3 is the first of three"
        )
    if len(set(found.values())) > 1:
        said = ", ".join(f"{launcher}: {worker}" for launcher, worker in found.items())
        raise UsageError(
            f"--worker auto: launchers contradict each other: {said}", hint="give the number: --worker I/N"
        )
    return next(iter(found.values()))


def _parse_launcher_variables(environment: Mapping[str, str], launcher: str, number: str, count: str) -> WorkerId:
    if count not in environment:
        raise UsageError(
            f"--worker auto: {launcher} set {number}={environment[number]}, but not {count}",
            hint=f"set {count} to the number of workers",
        )
    values = environment[number], environment[count]
    if not all(value.isascii() and value.isdigit() for value in values):
        raise UsageError(f"--worker auto: {number}={values[0]!r} of {count}={values[1]!r} are not two numbers")
    return WorkerId(int(values[0]), int(values[1]))
