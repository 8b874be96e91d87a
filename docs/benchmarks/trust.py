"""Runs at length what holds the promises of docs/SECURITY.md, and prints docs/benchmarks/trust.md.

python docs/benchmarks/trust.py WORKDIR [--short] [--jobs N]

The kill grid of local destinations, pickles with changed opcodes, mutants of every text, the faults of a Hub-like
server, and the kills and faults of buckets: N of them at a time, each with its output in WORKDIR. It takes some hours
on two cores; `--short` takes minutes. Ends with 1 if one of them found a fault.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import platform
import re
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"
JUDGES = ("torch", "safetensors", "huggingface_hub", "obstore", "moto")


class TrustRun(NamedTuple):
    """One program, at length and in short."""

    title: str
    seeds: str
    command: tuple[str, ...]
    long: tuple[str, ...] = ()
    short: tuple[str, ...] = ()


class TrustResult(NamedTuple):
    """What a program came to."""

    run: TrustRun
    code: int
    seconds: float
    said: str

    @property
    def counts(self) -> tuple[str, str]:
        """Cases, and those that were as they should be; question marks if the program did not come to its end."""
        found = re.search(r"([\d,]+) cases, ([\d,]+) as they should be", self.said)
        if found:
            return found[1], found[2]
        counted = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|errors?)\b", self.said)}
        return (str(sum(counted.values())), str(counted.get("passed", 0))) if counted else ("?", "?")


def list_runs(work: Path) -> list[TrustRun]:
    """List the programs, those that take longest first."""
    script = lambda name: str(HERE / name)  # noqa: E731 - a name for a path
    buckets = script("faults_buckets.py"), str(work)
    return [
        TrustRun("Pickles with changed opcodes", "0", (script("fuzz_pickles.py"),), (), ("--cases", "3000")),
        *(
            TrustRun(
                f"Kills and faults of buckets, {store}",
                "15",
                (*buckets, "--stores", store),
                (),
                ("--points", "2", "--rounds", "2"),
            )
            for store in ("s3", "gs", "az")
        ),
        TrustRun(
            "Kills and failing calls, local", "", ("-m", "pytest", "-q", str(TESTS / "crash")), (), ("-k", "kill")
        ),
        TrustRun("Mutants of texts", "0", (script("fuzz_texts.py"), str(work)), (), ("--cases", "1200")),
        TrustRun("Faults of a Hub-like server", "", (script("faults_hub.py"),), (), ("--quick",)),
    ]


def run_program(run: TrustRun, work: Path, *, short: bool) -> TrustResult:
    """Run one program to its end."""
    log = work / f"{run.title.replace(' ', '-')}.txt"
    began = time.monotonic()
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, *run.command, *(run.short if short else run.long)], stdout=output, check=False
        )
    result = TrustResult(run, done.returncode, time.monotonic() - began, log.read_text())
    print(f"{run.title}: exit {result.code}, {result.seconds:.0f} s", file=sys.stderr, flush=True)
    return result


def format_page(results: list[TrustResult], command: str) -> str:
    """Return docs/benchmarks/trust.md."""
    judges = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in JUDGES)
    failed = [result.run.title for result in results if result.code]
    judged = f"Python {platform.python_version()}, {judges}"
    when = f"`{command}` on {dt.datetime.now(dt.UTC):%d %B %Y}, in one piece, with {judged}."
    lines = [
        "# Everything that holds a promise, at length",
        "",
        *textwrap.wrap(when, 130),
        f"{'Found faults: ' + ', '.join(failed) if failed else 'It found no fault'}.",
        "",
        "| program | cases | seed | as they should be | seconds |",
        "|---|--:|--:|--:|--:|",
    ]
    for result in results:
        cases, good = result.counts
        lines.append(f"| {result.run.title} | {cases} | {result.run.seeds} | {good} | {result.seconds:,.0f} |")
    for result in results:
        table = [line for line in result.said.splitlines() if line.startswith("|")]
        if table:
            lines += ["", f"## {result.run.title}", "", *table]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all of them, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    asked.workdir.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(asked.jobs) as pool:
        results = list(
            pool.map(lambda run: run_program(run, asked.workdir, short=asked.short), list_runs(asked.workdir))
        )
    options = "".join((" --short" * asked.short, f" --jobs {asked.jobs}" * (asked.jobs > 1)))
    print(format_page(results, f"python docs/benchmarks/trust.py WORKDIR{options}"), end="")
    return int(any(result.code for result in results))


if __name__ == "__main__":
    sys.exit(main())
