"""Which worker a process is: said, or read from the variables of a launcher, and never guessed."""

import pytest

from shardctl.base.errors import UsageError
from shardctl.conversion.engine.worker import WorkerId, find_job_name

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "8"}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "8"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "SHARDCTL_WORKERS": "8"}


@pytest.mark.parametrize(
    "environment",
    [
        TORCHRUN,
        SLURM,
        KUBERNETES,
        TORCHRUN | SLURM,
        {**TORCHRUN, "TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    ],
    ids=["torchrun", "slurm", "kubernetes", "agreeing", "torchrun within slurm"],
)
def test_launchers_say_who_it_is(environment):
    assert WorkerId.parse("auto", environment) == WorkerId(2, 8)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "finds none of RANK and WORLD_SIZE (torchrun), SLURM_PROCID and SLURM_NTASKS (Slurm)"),
        ({"WORLD_SIZE": "8"}, "finds none of"),
        ({"RANK": "2"}, "torchrun set RANK=2, but not WORLD_SIZE"),
        ({"JOB_COMPLETION_INDEX": "0"}, "Kubernetes set JOB_COMPLETION_INDEX=0, but not SHARDCTL_WORKERS"),
        (TORCHRUN | SLURM | {"SLURM_PROCID": "3"}, r"contradict each other: torchrun (RANK, WORLD_SIZE): 2/8, Slurm"),
        ({"RANK": "x", "WORLD_SIZE": "8"}, "RANK='x' of WORLD_SIZE='8' are not two numbers"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "there is no worker 8 of 8"),
    ],
)
def test_what_launchers_do_not_say_is_an_error(environment, said):
    with pytest.raises(UsageError) as raised:
        WorkerId.parse("auto", environment)
    assert said in str(raised.value)
    assert raised.value.hint or "two numbers" in said


@pytest.mark.parametrize("text", ["", "3", "1/", "/3", "-1/3", "1/3/2", " 1/3", "a/b", "Auto", "٣/٤"])
def test_what_is_not_a_worker_is_an_error(text):
    with pytest.raises(UsageError, match="neither I/N nor auto"):
        WorkerId.parse(text, {})


@pytest.mark.parametrize("text", ["3/3", "0/0", "4/3"])
def test_a_worker_that_cannot_be_is_an_error(text):
    with pytest.raises(UsageError, match="there is no worker"):
        WorkerId.parse(text, {})


def test_a_worker_is_written_as_it_is_read():
    assert str(WorkerId.parse("0/3", TORCHRUN)) == "0/3"


def test_a_job_has_the_name_that_its_launcher_keeps():
    assert find_job_name(SLURM | {"SLURM_JOB_ID": "7"}) == "slurm 7"
    assert find_job_name(TORCHRUN | {"TORCHELASTIC_RUN_ID": "train-1", "SLURM_JOB_ID": "7"}) == "torchrun train-1"
    assert find_job_name(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}) == ""
    assert find_job_name(KUBERNETES) == "", "there a pod that is started again has the host name of its predecessor"


def test_a_slip_of_the_finger_is_not_a_hundred_billion_workers():
    with pytest.raises(UsageError, match="more than 100,000"):
        WorkerId.parse("0/99999999999", {})
