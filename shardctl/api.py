"""Offers every verb as a function that returns a dataclass and raises a `ShardctlError`: the public Python API."""

from shardctl.base.errors import ShardctlError
from shardctl.base.workers import ExecutionOptions
from shardctl.conversion.engine.worker import WorkerId
from shardctl.conversion.worker_part import ContributeResult, contribute
from shardctl.options import (
    DestinationOptions,
    InspectOptions,
    PlanOptions,
    ReshardOptions,
    SourceOptions,
    VerifyOptions,
)
from shardctl.planning.plan_result import PlanResult
from shardctl.running.state_dict import lens, load
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.diff import DiffResult, diff
from shardctl.verbs.digest import DigestResult, digest
from shardctl.verbs.find_newest import NewestCheckpoint, find_newest
from shardctl.verbs.finish import FinishResult, finish
from shardctl.verbs.inspect import InspectResult, inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import ReshardResult, reshard
from shardctl.verbs.reshard_each import ReshardEachResult, reshard_each
from shardctl.verbs.verify import VerifyResult, verify

__all__ = [
    "ContributeResult",
    "DestinationOptions",
    "DiffResult",
    "DigestResult",
    "ExecutionOptions",
    "FinishResult",
    "InspectOptions",
    "InspectResult",
    "Mesh",
    "NewestCheckpoint",
    "PlanOptions",
    "PlanResult",
    "ReshardEachResult",
    "ReshardOptions",
    "ReshardResult",
    "ShardctlError",
    "SourceOptions",
    "VerifyOptions",
    "VerifyResult",
    "WorkerId",
    "contribute",
    "diff",
    "digest",
    "find_newest",
    "finish",
    "inspect",
    "lens",
    "load",
    "plan",
    "reshard",
    "reshard_each",
    "verify",
]
