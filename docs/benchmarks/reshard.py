"""Time and memory of `reshard --tp 4` beside `cp -r` and the tools people use now; prints a Markdown table.

python docs/benchmarks/reshard.py WORKDIR [--gigabytes 4] [--runs 3] [--growth]

Every contender starts with the same source, whose pages were just read, ends with `sync`, and runs in turn with the
others, so that the ratios hold on a noisy machine. Peak memory is the child's largest RssAnon, sampled every 5 ms.
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from generate import generate

import shardctl

RESHARD = [sys.executable, "-m", "shardctl", "reshard", "{src}", "{dst}", "--tp", "4", "--memory", "256MiB"]
SLICES = """
import os, sys, glob
from safetensors import safe_open
from safetensors.torch import save_file
src, dst = sys.argv[1:]
os.makedirs(dst)
def dim(name):
    if any(k in name for k in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")):
        return 0
    return 1 if "o_proj" in name or "down_proj" in name else None
for rank in range(4):
    part = {}
    for file in sorted(glob.glob(src + "/*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():
                piece, cut = f.get_slice(name), dim(name)
                n = piece.get_shape()[cut] // 4 if cut is not None else 0
                if cut is None:
                    part[name] = piece[:]
                elif cut == 0:
                    part[name] = piece[rank * n : (rank + 1) * n]
                else:
                    part[name] = piece[:, rank * n : (rank + 1) * n].contiguous()
    save_file(part, f"{dst}/rank{rank}.safetensors")
"""
HUB = """
import os, sys, glob
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
src, dst = sys.argv[1:]
os.makedirs(dst)
state = {}
for file in sorted(glob.glob(src + "/*.safetensors")):
    state.update(load_file(file))
save_torch_state_dict(state, dst, max_shard_size="1GB")
"""
CONTENDERS = {
    "`shardctl reshard --tp 4 --memory 256MiB`": RESHARD,
    "`cp -r`": ["cp", "-r", "{src}", "{dst}"],
    "a safetensors slicing loop, tp 4": [sys.executable, "-c", SLICES, "{src}", "{dst}"],
    "huggingface_hub `save_torch_state_dict`": [sys.executable, "-c", HUB, "{src}", "{dst}"],
}


def anonymous(pid):
    """Bytes of anonymous memory of a process now."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith("RssAnon")), "RssAnon: 0")
    return int(line.split()[1]) * 1024


def warm(src):
    """Read everything, so that the page cache is the same for everyone."""
    for file in sorted(src.iterdir()):
        with file.open("rb") as data:
            while data.read(1 << 24):
                pass


def run(command, src, dst, warm=warm):
    """Seconds and peak bytes of one run, sync included; the output is removed."""
    shutil.rmtree(dst, ignore_errors=True)
    warm(src)
    os.sync()
    began, peak = time.perf_counter(), 0
    places = {"{src}": str(src), "{dst}": str(dst)}
    child = subprocess.Popen([places.get(part, part) for part in command], stdout=subprocess.DEVNULL)
    while child.poll() is None:
        peak = max(peak, anonymous(child.pid))
        time.sleep(0.005)
    os.sync()
    seconds = time.perf_counter() - began
    if child.returncode:
        raise SystemExit(f"{command[:4]} failed with {child.returncode}")
    shutil.rmtree(dst)
    os.sync()
    return seconds, peak


def compare(root, gigabytes, runs):
    """All contenders in turn, `runs` times."""
    src = root / f"src-{gigabytes:g}"
    nbytes = generate(src, gigabytes)
    found = {name: [] for name in CONTENDERS}
    for _ in range(runs):
        for name, command in CONTENDERS.items():
            found[name].append(run(command, src, root / "out"))
    shutil.rmtree(src)
    print(f"\n{nbytes / 1e9:.2f} GB, {runs} runs in turn, medians\n")
    print_table(found, nbytes)


def print_table(found, nbytes):
    """A line for each contender, from the seconds and peak bytes of its runs."""
    print("| | seconds | GB/s | ratio to `cp -r` | peak anonymous memory |\n|---|---|---|---|---|")
    copy = [seconds for seconds, _ in found["`cp -r`"]]
    for name, rows in found.items():
        seconds = statistics.median(s for s, _ in rows)
        ratio = statistics.median(s / c for (s, _), c in zip(rows, copy, strict=True))
        peak = max(peak for _, peak in rows)
        print(f"| {name} | {seconds:.2f} | {nbytes / seconds / 1e9:.2f} | {ratio:.2f} | {peak / 2**20:,.0f} MiB |")


def growth(root, runs):
    """Time per GB and memory as the checkpoint grows."""
    print("\n| size | seconds per GB | peak anonymous memory |\n|---|---|---|")
    for gigabytes in (1, 2, 4, 8):
        src = root / f"src-{gigabytes}"
        nbytes = generate(src, gigabytes)
        rows = [run(RESHARD, src, root / "out") for _ in range(runs)]
        shutil.rmtree(src)
        seconds = statistics.median(s for s, _ in rows) / nbytes * 1e9
        print(f"| {nbytes / 1e9:.2f} GB | {seconds:.2f} | {max(p for _, p in rows) / 2**20:.0f} MiB |", flush=True)


def main():
    """Parse the arguments and run."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("workdir", type=Path)
    options.add_argument("--gigabytes", type=float, default=4)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--growth", action="store_true", help="shardctl alone at 1, 2, 4 and 8 GB")
    given = options.parse_args()
    given.workdir.mkdir(parents=True, exist_ok=True)
    print(f"shardctl {shardctl.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, Linux")
    if given.growth:
        growth(given.workdir, given.runs)
    else:
        compare(given.workdir, given.gigabytes, given.runs)


if __name__ == "__main__":
    main()
