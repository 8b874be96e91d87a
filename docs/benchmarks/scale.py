"""What a conversion costs on N nodes, on paper: the model of docs/scale.md, and its tables.

python docs/benchmarks/scale.py
"""

from dataclasses import dataclass, replace
from math import ceil

GB = 10**9
PROCESSOR = 1.1
"""Processor seconds per GB, measured (docs/benchmarks/README.md): 0.4 of them the digest."""


@dataclass(frozen=True)
class Site:
    """What machines and storage give, in bytes a second."""

    name: str
    read: float
    write: float
    """Of one node."""
    all_read: float
    all_write: float
    """Of the storage, for all nodes together."""
    cores: int
    scratch: float = 0
    """Of a node's own disk, where files are filled before they are sent; 0 if they are written in place."""


@dataclass(frozen=True)
class Job:
    """What is converted."""

    nbytes: float
    files: int
    over_read: float = 1
    """Bytes read for each byte needed."""
    start: float = 3
    """Seconds until a worker moves the first byte: interpreter, headers, plan."""


def seconds(job: Job, site: Site, nodes: int) -> dict[str, float]:
    """Each of the times that could bind, and their sum as docs/scale.md takes it."""
    heaviest = ceil(job.files / nodes) / job.files if nodes < job.files else 1 / job.files
    share = job.nbytes * heaviest
    nodes = min(nodes, job.files)
    read = job.over_read * max(share / site.read, job.nbytes / site.all_read)
    write = max(share / site.write, job.nbytes / site.all_write)
    scratch = 2 * share / site.scratch if site.scratch else 0
    processor = PROCESSOR * share / GB / site.cores
    moved = max(read, processor) + scratch + write if site.scratch else max(read, write, processor)
    return {"read": read, "write": write, "scratch": scratch, "processor": processor, "all": job.start + moved}


SITES = (
    Site("local disk", 6 * GB, 4 * GB, float("inf"), float("inf"), 32),
    Site("shared file system", 3 * GB, 3 * GB, 80 * GB, 40 * GB, 32),
    Site("object store", 1 * GB, 0.4 * GB, float("inf"), float("inf"), 32, scratch=2 * GB),
)
JOBS = (
    ("1 TB", Job(10**12, 256)),
    ("10 TB", Job(10**13, 2048)),
    ("1 TB, one file for each rank of tp8", Job(10**12, 8, over_read=2.1)),
)
ALONE = ("local disk", "object store")
"""Sites whose destination only one machine writes to."""


def spelled(value: float) -> str:
    return f"{value:.0f} s" if value < 100 else f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def main() -> None:
    for name, job in JOBS:
        print(f"\n{name} in {job.files:,} files, over-read {job.over_read:g}\n")
        print("| nodes | " + " | ".join(site.name for site in SITES) + " |")
        print("|---|" + "---|" * len(SITES))
        for nodes in (1, 4, 16, 64):
            cells = []
            for site in SITES:
                if site.name in ALONE and nodes > 1:
                    cells.append("")
                    continue
                found = seconds(job if nodes > 1 else replace(job, over_read=1), site, nodes)
                parts = {key: value for key, value in found.items() if key != "all"}
                cells.append(f"{spelled(found['all'])} ({max(parts, key=lambda key: parts[key])})")
            print(f"| {nodes} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
