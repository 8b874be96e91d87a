"""Time and memory of `shardctl.load` beside other loaders of safetensors, on the CPU; prints a Markdown table.

python docs/benchmarks/loading.py WORKDIR [--gigabytes 1] [--runs 3]

Each loader gets the same files, whose pages were just read, in a process of its own and in turn, and adds up one
element of every page of every tensor, so that a loader that maps files has read them, too. Loaders that are not
installed, or do not run on this machine, are named below the table with the reason. `load_file` maps the files and
copies nothing, so that the page cache serves as its memory; cloned tensors are the caller's own, as the others' are.
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from generate import generate
from reshard import warm

import shardctl

_BEGIN = """
import glob, os, resource, sys, time
import torch
files = sorted(glob.glob(sys.argv[1] + "/*.safetensors"))
"""
_END = """
total = sum(int(t.view(torch.uint8).reshape(-1)[::4096].sum()) for t in state.values())
seconds = time.perf_counter() - began
used = resource.getrusage(resource.RUSAGE_SELF)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(seconds, used.ru_utime + used.ru_stime - before, int(status["RssAnon"].split()[0]) * 1024, total, len(state))
sys.stdout.flush()
os._exit(0)
"""
_CLOCK = """
used = resource.getrusage(resource.RUSAGE_SELF)
before, began = used.ru_utime + used.ru_stime, time.perf_counter()
"""
LOADERS = {
    "`shardctl.load`": ("shardctl", "import shardctl, shardctl.api", "state = shardctl.load(sys.argv[1])"),
    "safetensors `load_file`": (
        "safetensors",
        "from safetensors.torch import load_file",
        "state = {k: v for file in files for k, v in load_file(file).items()}",
    ),
    "the same, each tensor cloned": (
        "safetensors",
        "from safetensors.torch import load_file",
        "state = {k: v.clone() for file in files for k, v in load_file(file).items()}",
    ),
    "fastsafetensors `fastsafe_open`": (
        "fastsafetensors",
        "from fastsafetensors import fastsafe_open",
        (
            "opened = fastsafe_open(files, nogds=True, device='cpu'); "
            "state = {k: opened.get_tensor(k) for k in opened.keys()}"
        ),
    ),
    "InstantTensor `safe_open`": (
        "instanttensor",
        "import instanttensor",
        (
            "opened = instanttensor.safe_open(files, framework='pt', device='cpu').__enter__(); "
            "state = dict(opened.tensors())"
        ),
    ),
}
"""By name: the distribution, what is imported before the clock starts, and what is timed."""


def run(place, prepare, load):
    """Seconds, processor seconds, anonymous bytes, and what was added up of so many tensors; or why not."""
    program = f"{_BEGIN}{prepare}\n{_CLOCK}{load}\n{_END}"
    done = subprocess.run([sys.executable, "-c", program, str(place)], capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        return (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1][:200]
    seconds, processor, anonymous, *added = done.stdout.split()[-5:]
    return float(seconds), float(processor), int(anonymous), tuple(added)


def name_version(distribution):
    """The version of a loader; empty if it is not installed."""
    try:
        return shardctl.__version__ if distribution == "shardctl" else version(distribution)
    except PackageNotFoundError:
        return ""


def measure_loaders(source, gigabytes, runs):
    """By loader what each run gave; why some did not run; how many bytes there are."""
    nbytes = generate(source, gigabytes)
    found, without = {name: [] for name in LOADERS}, {}
    for _ in range(runs):
        for name, (distribution, prepare, load) in LOADERS.items():
            if name in without:
                continue
            if not name_version(distribution):
                without[name] = "not installed"
                continue
            warm(source)
            one = run(source, prepare, load)
            if isinstance(one, str):
                without[name] = one
            else:
                found[name].append(one)
    shutil.rmtree(source)
    sums = {one[3] for rows in found.values() for one in rows}
    if len(sums) != 1:
        raise RuntimeError(f"loaders differ: {sums}")
    return found, without, nbytes


def main():
    """Parse the arguments and run."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("workdir", type=Path)
    options.add_argument("--gigabytes", type=float, default=1)
    options.add_argument("--runs", type=int, default=3)
    given = options.parse_args()
    found, without, nbytes = measure_loaders(given.workdir / "load-src", given.gigabytes, given.runs)
    tensors = next(one[3][1] for rows in found.values() for one in rows)
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores; load average {os.getloadavg()[0]:.1f}\n")
    print(f"{nbytes / 1e9:.2f} GB in {tensors} tensors, {given.runs} runs in turn, medians\n")
    print(
        "| | seconds | GB/s | ratio to `load_file` | processor seconds | anonymous memory |\n|---|---|---|---|---|---|"
    )
    usual = [one[0] for one in found["safetensors `load_file`"]]
    for name, rows in found.items():
        if name in without:
            continue
        seconds, processor = (statistics.median(one[n] for one in rows) for n in (0, 1))
        ratio = statistics.median(one[0] / other for one, other in zip(rows, usual, strict=True))
        memory = max(one[2] for one in rows) / 2**20
        label = f"{name} {name_version(LOADERS[name][0])}"
        speed = nbytes / seconds / 1e9
        print(f"| {label} | {seconds:.2f} | {speed:.2f} | {ratio:.2f} | {processor:.2f} | {memory:,.0f} MiB |")
    for name, why in without.items():
        print(f"\n{name} {name_version(LOADERS[name][0])}: {why}")


if __name__ == "__main__":
    main()
