"""Runs the forward pass with one process per rank: each reads its own files and computes its own part."""

from __future__ import annotations

import base64
import os
import pickle
import sys
from dataclasses import field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from shardctl.base.value import state_class, value_class
from shardctl.base.workers import NullWatcher
from shardctl.running.device import is_cuda_device, select_device
from shardctl.running.forward.comparison import compare_in_process
from shardctl.running.forward.team import ProcessTeam
from shardctl.running.machine_failure import tell_machine_errors
from shardctl.running.processes import NotStartedError, RankError, run_ranks
from shardctl.running.worker_process import build_environment
from shardctl.storage.addresses import open_source
from shardctl.storage.local import LocalSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardctl.running.forward.compared_checkpoints import CandidateCheckpoint, OriginalCheckpoint
    from shardctl.running.forward.comparison import ForwardOptions
    from shardctl.running.processes import Start
    from shardctl.running.worker_process import RankProcess
    from shardctl.tensors.bands import ByteReader
    from shardctl.tensors.mesh import Mesh
    from shardctl.verify.forward_result import ForwardResult

_RENDEZVOUS_TIMEOUT: Final = timedelta(seconds=120)
"""In which ranks must meet; the parent sees a rank that hangs without using the processor long before."""
_MAX_IDLE_SECONDS: Final = 60.0
"""Seconds in which no rank uses the processor or the disk: a network file system may take some to begin with."""
_MAX_SILENCE_SECONDS: Final = 120.0
"""Seconds without a read or an exchange of any rank: each takes seconds at most, even of the slowest disk."""
_MAX_SINGLE_PROCESS_BYTES: Final = 4 << 30
"""Bytes of weights up to which ranks in one process are done before processes of their own have begun to work."""


class MeetingError(Exception):
    """Ranks could not form a group; it says nothing of the checkpoint."""


@value_class
class _PathReader:
    """A reader that another process opens by its path."""

    path: Path

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Refuse to read before it is opened."""
        raise NotImplementedError


@state_class
class _NotingReader:
    """A reader that notes which files it was asked for, and tells that work goes on."""

    reader: ByteReader
    beat: Callable[[], None]
    files: set[str] = field(default_factory=set)

    def read_at(self, path: str, offset: int, into: memoryview) -> None:
        """Note, tell and read."""
        self.files.add(path)
        self.beat()
        self.reader.read_at(path, offset, into)


def detach_readers(
    candidate: CandidateCheckpoint, original: OriginalCheckpoint
) -> tuple[CandidateCheckpoint, OriginalCheckpoint]:
    """Return the two as another process can be told of them; raises NotStartedError where files are not local."""
    if not isinstance(candidate.reader, LocalSource) or not isinstance(original.reader, LocalSource):
        raise NotStartedError("processes of their own can read local files only")
    proved = replace(candidate, reader=_PathReader(candidate.reader.path))
    return proved, replace(original, reader=_PathReader(original.reader.path))


def attach_readers(
    candidate: CandidateCheckpoint, original: OriginalCheckpoint
) -> tuple[CandidateCheckpoint, OriginalCheckpoint]:
    """Return the two in the process that was told of them, their files opened."""
    assert isinstance(candidate.reader, _PathReader)  # noqa: S101 - what `detach_readers` made
    assert isinstance(original.reader, _PathReader)  # noqa: S101
    proved = replace(candidate, reader=open_source(candidate.reader.path))
    return proved, replace(original, reader=open_source(original.reader.path))


def choose_process_count(places: Sequence[str], nbytes: int) -> int:
    """Choose how many ranks have their own process where that is worth it: one a GPU, or one a core for large models.

    `nbytes` are those of the weights. On a CPU all ranks of a model of some GB are done in one process before others
    have imported transformers and met, and that takes no more memory.
    """
    if is_cuda_device(places[0]):
        return len(places)
    return (os.cpu_count() or 1) if nbytes > _MAX_SINGLE_PROCESS_BYTES else 0


def compare_by_processes(
    candidate: CandidateCheckpoint, original: OriginalCheckpoint, options: ForwardOptions
) -> ForwardResult:
    """Compare as `forward` does, each rank of the mesh in a process of its own, on the next of the devices in turn.

    Raises RankError, naming the rank, if one dies, raises or hangs; NotStartedError if they cannot begin.
    """
    mesh = candidate.mesh
    assert mesh is not None  # noqa: S101 - asked for meshes only
    proved, right = detach_readers(candidate, original)
    environment = build_environment(mesh.world)
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    with TemporaryDirectory(prefix="shardctl-forward-") as folder:
        options.watcher.begin(0, phase=f"forward in {mesh.world} processes")
        work = partial(_compute_on_rank, proved, right, replace(options, watcher=NullWatcher()), folder)
        start: Start = "spawn" if is_cuda_device(options.device) else "forkserver"
        try:
            results = run_ranks(
                work,
                mesh.world,
                start=start,
                environment=environment,
                idle=_MAX_IDLE_SECONDS,
                silence=_MAX_SILENCE_SECONDS,
            )
        except RankError as error:
            if error.raised == MeetingError.__name__:
                raise NotStartedError(error.message) from error
            raise
    found: ForwardResult = pickle.loads(base64.b64decode(results[0]["found"]))  # noqa: S301 - our own process made it
    return replace(found, device=", ".join(dict.fromkeys(result["device"] for result in results)))


def _compute_on_rank(
    candidate: CandidateCheckpoint,
    original: OriginalCheckpoint,
    options: ForwardOptions,
    folder: str,
    rank: RankProcess,
) -> dict[str, object]:
    """Compute on one rank: return what it found, of which the first's counts, and which files of the shards it read."""
    import torch.distributed as dist

    places = options.places or (options.device,)
    options = replace(options, device=places[rank.number % len(places)])
    assert candidate.mesh is not None  # noqa: S101
    with tell_machine_errors(options.device):
        select_device(options.device)
        team = _meet_others(candidate.mesh, options.device, folder, rank)
        rank.report_heartbeat()
        candidate, original = attach_readers(candidate, original)
        ours = _NotingReader(candidate.reader, rank.report_heartbeat)
        theirs = _NotingReader(original.reader, rank.report_heartbeat)
        result = compare_in_process(replace(candidate, reader=ours), replace(original, reader=theirs), options, team)
        dist.barrier()  # who ends first closes connections that others still read from
    found = base64.b64encode(pickle.dumps(result)).decode()
    return {"found": found, "files": sorted(ours.files), "device": options.device}


def _meet_others(mesh: Mesh, device: str, folder: str, rank: RankProcess) -> ProcessTeam:
    """Form the group of all ranks; raises MeetingError if that fails.

    They talk by gloo and through the memory of the host also where they compute on GPUs: what they exchange is small,
    several may share a device, and nothing depends on how devices reach one another.
    """
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            init_method=(Path(folder) / "meeting").as_uri(),
            rank=rank.number,
            world_size=rank.world,
            timeout=_RENDEZVOUS_TIMEOUT,
        )
        team = ProcessTeam(rank.number, mesh, device, rank.report_heartbeat)
        dist.barrier()
    except (RuntimeError, ValueError, OSError) as error:
        raise MeetingError(str(error).partition("\n")[0]) from error
    return team
