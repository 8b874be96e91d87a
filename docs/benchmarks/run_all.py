"""Runs every benchmark of speed within half an hour, and writes the pages that show the figures.

python docs/benchmarks/run_all.py WORKDIR [--quick] [--beside DIRECTORY] [--only GROUP ...] [--minutes 28]

The figures go to `speed.json`, one entry for each state of the program; the tables and pictures of `speed.md` and
`versions.md` are made of it, also by `--pages` alone. Each conversion has beside it what the disk itself took just
before: a direct write of as many bytes, with fsync. With `--beside` an earlier checkout runs in turn, and gets an entry
of its own. Groups that no time was left for, and cases that failed, are named on the page. WORKDIR needs free space for
twice the largest checkpoint: 32 GB, or 8 with `--quick`.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import speed_cases as cases
from measuring import ROOT, describe_machine, name_state
from speed_pages import RESULTS, write_pages

TIMELINE = ROOT / "docs/pictures/reshard-timeline.svg"
SMALL = ((14, 24), (14, 256), (40, 256))
"""Layers and experts of DeepSeek-V3's names: 1,175 to 30,633 tensors,"""
LARGE = (*SMALL, (121, 256), (513, 256))
"""and up to 400,000."""


def list_groups(quick):
    """By name, what measures a group: the most important first, because the time may end."""
    return {
        "reshard": lambda run: cases.measure_reshard(run, 2 if quick else 4),
        "sources": lambda run: cases.measure_sources(run, 1 if quick else 2),
        "checking": lambda run: cases.measure_checking(run, 0.5 if quick else 2),
        "loading": lambda run: cases.measure_loading(run, 0.5 if quick else 1),
        "growth": lambda run: cases.measure_growth(run, (1, 2, 4) if quick else (1, 2, 4, 8, 16)),
        "timeline": lambda run: cases.measure_timeline(run, 1 if quick else 2, TIMELINE),
        "effort": cases.measure_effort,
        "many": lambda run: cases.measure_many(run, SMALL if quick else LARGE),
    }


class TimeOverError(Exception):
    """The minutes are over."""


def measure_groups(given, entries):
    """Run the groups; `entries` get the rows of this package and of the earlier one."""
    end = time.monotonic() + 60 * (given.minutes or (12 if given.quick else 28))

    def keep(group, case, which, **figures):
        entries[which]["rows"].append({"group": group, "case": case, **figures})
        shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
        print(group, case, which, json.dumps(shown), flush=True)
        if time.monotonic() > end:
            raise TimeOverError

    packages = [ROOT, *([given.beside.absolute()] if given.beside else [])]
    run = cases.BenchmarkRun(given.workdir, packages, keep, given.runs or (1 if given.quick else 2))
    over = False
    for name, measure in list_groups(given.quick).items():
        if given.only and name not in given.only:
            continue
        if over:
            entries["this"]["rows"].append({"group": name, "case": "", "why": "the time was over"})
            continue
        shutil.rmtree(given.workdir, ignore_errors=True)
        given.workdir.mkdir(parents=True)
        began = time.monotonic()
        try:
            measure(run)
        except TimeOverError:
            over = True
            entries["this"]["rows"].append({"group": name, "case": "the rest", "why": "the time was over"})
        except (RuntimeError, OSError) as error:
            entries["this"]["rows"].append({"group": name, "case": "the rest", "why": str(error)})
            print(f"{name}: {error}", file=sys.stderr)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    shutil.rmtree(given.workdir, ignore_errors=True)


def merge_entries(kept, new):
    """Put the entries in the place of those of the same state: groups that were measured now replace older ones."""
    for entry in new:
        same = next((old for old in kept if old["commit"] == entry["commit"]), None)
        groups = {row["group"] for row in entry["rows"]}
        entry["times"] = dict.fromkeys(sorted(groups), entry["measured"])
        if same is None:
            kept.append(entry)
            continue
        rows = [row for row in same["rows"] if row["group"] not in groups]
        same |= {**entry, "rows": rows + entry["rows"], "times": same["times"] | entry["times"]}


def main():
    """Parse the arguments, run, and write the pages."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("workdir", type=Path, nargs="?")
    options.add_argument("--quick", action="store_true", help="smaller checkpoints, in about 12 minutes")
    options.add_argument("--runs", type=int, help="of each case; 2, or 1 with --quick")
    options.add_argument("--minutes", type=float, help="after which nothing new begins")
    options.add_argument("--beside", type=Path, metavar="DIRECTORY", help="a checkout of an earlier version")
    options.add_argument("--only", nargs="+", metavar="GROUP", choices=list(list_groups(quick=True)))
    options.add_argument("--pages", action="store_true", help="write the pages of the figures that are kept")
    given = options.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if not given.pages:
        if given.workdir is None:
            options.error("WORKDIR is missing")
        given.workdir = given.workdir.absolute() / "speed"
        given.workdir.mkdir(parents=True, exist_ok=True)
        facts = {"machine": describe_machine(given.workdir), "quick": given.quick}
        entries = {"this": {**name_state(ROOT), **facts, "rows": []}}
        if given.beside:
            entries["before"] = {**name_state(given.beside), **facts, "rows": []}
        try:
            measure_groups(given, entries)
        finally:
            merge_entries(kept, [entries[which] for which in ("before", "this") if which in entries])
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    write_pages(kept)


if __name__ == "__main__":
    main()
