"""Runs at length what holds the promises of docs/SECURITY.md: python docs/benchmarks/trust.py WORKDIR [--short]

One table after another: the kill grid of local destinations, pickles with changed opcodes, mutants of every text, the
faults of a Hub-like server, and the kills and faults of buckets. It takes some hours on two cores; `--short` takes
minutes. Ends with 1 if one of them found a fault.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"


class TrustRun(NamedTuple):
    """One program, at length and in short."""

    title: str
    command: tuple[str, ...]
    long: tuple[str, ...] = ()
    short: tuple[str, ...] = ()


def list_runs(work: Path) -> list[TrustRun]:
    script = lambda name: str(HERE / name)  # noqa: E731 - a name for a path
    return [
        TrustRun("Kills and failing calls, local", ("-m", "pytest", "-q", str(TESTS / "crash")), (), ("-k", "kill")),
        TrustRun(
            "Pickles with changed opcodes", (script("fuzz_pickles.py"),), ("--cases", "200000"), ("--cases", "3000")
        ),
        TrustRun("Mutants of texts", (script("fuzz_texts.py"), str(work)), ("--cases", "50000"), ("--cases", "1200")),
        TrustRun("Faults of a Hub-like server", (script("faults_hub.py"),), (), ("--quick",)),
        TrustRun(
            "Faults of buckets", (script("faults_buckets.py"), str(work)), (), ("--points", "2", "--stores", "s3")
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--short", action="store_true")
    asked = parser.parse_args()
    asked.workdir.mkdir(parents=True, exist_ok=True)
    failed = []
    for run in list_runs(asked.workdir):
        print(f"\n## {run.title}\n", flush=True)
        options = run.short if asked.short else run.long
        if subprocess.run([sys.executable, *run.command, *options], check=False).returncode:
            failed.append(run.title)
    print(f"\n{'found faults: ' + ', '.join(failed) if failed else 'no faults'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
