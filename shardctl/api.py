"""The public Python API: every verb as a function that returns a dataclass and raises a `ShardctlError`."""

from shardctl.errors import ShardctlError
from shardctl.execute.worker import Worker
from shardctl.mesh import Mesh
from shardctl.options import PlanOptions, ReshardOptions, SourceOptions, VerifyOptions
from shardctl.verbs.contribute import Contributed, contribute
from shardctl.verbs.diff import Diffed, diff
from shardctl.verbs.digest import Digested, digest
from shardctl.verbs.finish import Finished, finish
from shardctl.verbs.inspect import Inspected, inspect
from shardctl.verbs.load import lens, load
from shardctl.verbs.plan import Planned, plan
from shardctl.verbs.reshard import Resharded, reshard
from shardctl.verbs.verify import Verified, verify
from shardctl.workers import Effort

__all__ = [
    "Contributed",
    "Diffed",
    "Digested",
    "Effort",
    "Finished",
    "Inspected",
    "Mesh",
    "PlanOptions",
    "Planned",
    "ReshardOptions",
    "Resharded",
    "ShardctlError",
    "SourceOptions",
    "Verified",
    "VerifyOptions",
    "Worker",
    "contribute",
    "diff",
    "digest",
    "finish",
    "inspect",
    "lens",
    "load",
    "plan",
    "reshard",
    "verify",
]
