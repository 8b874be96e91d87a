"""Runs `reshard` with faults in a process of its own: one process that has everything imported forks for each job.

Jobs come as JSON lines on standard input, and what became of each goes to standard output. A child process that is
killed in the middle of a system call is the only honest test of what survives it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path

from crash_site import checkpoint
from faults import Faults

from shardctl.base.errors import ShardctlError
from shardctl.conversion import conversion_plan as drafting
from shardctl.conversion import worker_part as contributing
from shardctl.conversion.engine import engine
from shardctl.conversion.engine.worker import WorkerId
from shardctl.conversion.worker_part import contribute
from shardctl.options import DestinationOptions
from shardctl.storage import direct, local
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.finish import finish
from shardctl.verbs.reshard import reshard

BLOCK = 8192
assert direct  # imported before a child becomes a user who may not read the interpreter's files


def make_everything_small():
    """Blocks of a few kB, a journal that grows every few of them, and direct I/O for anything that fills a page."""
    usual = drafting.divide_host_memory
    contributing.PATIENCE = 1
    drafting.divide_host_memory = lambda *args, **options: replace(usual(*args, **options), block=BLOCK)
    engine.SYNC_BYTES = 3 * BLOCK
    local._MIN_DIRECT_IO_BYTES = 4096


def run(job):
    """One conversion; what came of it, with every mutating call in order."""
    make_everything_small()
    os.umask(job.get("umask", 0o022))
    for number in job.get("ignored", ()):
        signal.signal(number, signal.SIG_IGN)
    if "largest_file" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"], resource.RLIM_INFINITY))
    if "descriptors" in job:
        local.choose_descriptor_count = lambda: job["descriptors"]
    if "user" in job:
        os.setuid(job["user"])
    faults = Faults(**job.get("faults", {}))
    faults.actions = {int(number): action for number, action in faults.actions.items()}
    faults.errors = {int(number): name for number, name in faults.errors.items()}
    tp = job.get("tp", 2)
    reshard_options = drafting.ReshardOptions(
        mesh=Mesh.of(tp=tp) if tp > 1 else None,
        threads=job.get("threads", 1),
        dtype=job.get("dtype", "keep"),
        max_shard_size=job.get("shard"),
    )
    options = DestinationOptions(
        overwrite=job.get("overwrite", False),
        allow_overflow=job.get("allow_overflow", False),
        no_resume=not job.get("resume", True),
        checksums="sha256" if job.get("sha256") else None,
    )
    faults.install()
    try:
        if "worker" in job:
            worker = WorkerId(*job["worker"])
            part = contribute(
                job["source"],
                job["destination"],
                reshard_options,
                worker=worker,
                run=job.get("run", ""),
                destination_options=options,
            )
            return {
                "code": 0,
                "kept": part.part.kept_bytes,
                "written": part.part.written_bytes,
                "before": part.done_before,
                "missing": [w.number for w in part.missing],
                "calls": faults.calls,
            }
        if "finish" in job:
            whole = finish(job["destination"], patience=0)
            return {"code": 0, "workers": whole.workers, "digest": whole.record.digest, "calls": faults.calls}
        done = reshard(job["source"], job["destination"], reshard_options, destination_options=options)
    except ShardctlError as error:
        result = {"code": error.exit_code, "error": type(error).__name__, "message": str(error), "hint": error.hint}
    except BaseException:  # noqa: BLE001 - the parent wants to see it
        result = {"code": 1, "error": "bug", "message": traceback.format_exc()}
    else:
        result = {
            "code": 0,
            "kept": done.kept_bytes,
            "written": done.written_bytes,
            "warnings": done.warnings,
            "digest": done.record.digest,
        }
    return {**result, "calls": faults.calls}


def fork(job):
    """The result of a job in a child process; `killed` is the signal that ended it, if one did."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        with os.fdopen(write, "wb", closefd=False) as pipe:
            pipe.write(json.dumps(run(job)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(said) if os.WIFEXITED(status) else {"killed": os.WTERMSIG(status)}


def warm():
    """Compute once what every child would compute again, such as the digest's keys."""
    with tempfile.TemporaryDirectory() as place:
        source = str(checkpoint(Path(place, "source")))
        for tp in (1, 2):
            reshard(source, Path(place, f"out{tp}"), drafting.ReshardOptions(mesh=Mesh.of(tp=tp), threads=1))


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    if len(sys.argv) > 1:
        json.dump(run(json.loads(sys.argv[1])), answers)
    else:
        warm()
        for line in sys.stdin:
            print(json.dumps(fork(json.loads(line))), file=answers, flush=True)
    with contextlib.suppress(OSError):
        answers.close()
