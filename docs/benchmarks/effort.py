"""Processor seconds and peak memory of starting, planning and many small tensors; prints a Markdown table.

python docs/benchmarks/effort.py WORKDIR [--runs 3] [--beside DIRECTORY]

Processor seconds (user and system) of whole programs are shown, medians, because they depend less than seconds on what
else the machine does. With `--beside`, the package in that directory, such as a checkout of an earlier version, runs in
turn with this one, and the ratio is that of pairs. The large checkpoints are sparse files with real headers.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import generate

import shardctl
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.libraries.safetensors.header import encode_header
from shardctl.options import SourceOptions

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "fixtures/configs_public"
SHARD = 4_300_000_000
RANKS = ["--pp", "16", "--ep", "64", "--dp", "64"]
"""1,024 of them, of which each holds other experts."""


def make_sparse(place, config):
    """Write the headers of a checkpoint that a config describes; returns how many tensors it has."""
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    with open_checkpoint(place / "config.json", SourceOptions(described=True)) as checkpoint:
        rows = [(t.name, t.dtype, t.shape) for t in checkpoint.manifest.tensors.values()]
    groups, room = [[]], SHARD
    for row in rows:
        size = row[1].nbytes(row[2])
        if size > room and groups[-1]:
            groups, room = [*groups, []], SHARD
        groups[-1].append(row)
        room -= size
    weight_map = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        encoded = encode_header(group, {"format": "pt"})
        with (place / name).open("wb") as file:
            file.write(encoded.header)
            file.truncate(encoded.size)
        weight_map |= dict.fromkeys((row[0] for row in group), name)
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return len(rows)


def make_sources(root):
    """Write the checkpoints; returns names of cases with the arguments of the program."""
    deepseek = json.loads((CONFIGS / "deepseek-v3.json").read_text()) | {"num_nextn_predict_layers": 0}
    llama = json.loads((CONFIGS / "llama-3.1-405b.json").read_text())
    tiny = json.loads((ROOT / "fixtures/configs/llama.json").read_text())
    moe = json.loads((ROOT / "fixtures/configs/deepseek_v3.json").read_text())
    counts = {
        name: make_sparse(root / name, config)
        for name, config in (
            ("deepseek", deepseek),
            ("trillion", deepseek | {"n_routed_experts": 384}),
            ("llama", llama),
            ("tiny", tiny),
        )
    }
    generate.config = lambda _: moe | {"num_hidden_layers": 27, "n_routed_experts": 256}
    generate.generate(root / "many")
    many, out = str(root / "many"), str(root / "out")
    plan = f"`plan` of {counts['deepseek']:,} tensors (DeepSeek-V3, fp8) for 1,024 ranks"
    larger = f"`plan` of {counts['trillion']:,} tensors (one trillion parameters, fp8) for 1,024 ranks"
    return {
        "`--help`": ["--help"],
        "`inspect` of a tiny Llama": ["inspect", str(root / "tiny")],
        "`plan` of a tiny Llama": ["plan", str(root / "tiny"), "--tp", "2"],
        plan: ["plan", str(root / "deepseek"), *RANKS],
        larger: ["plan", str(root / "trillion"), *RANKS],
        "`plan` of Llama-405B with fsdp 1,024": ["plan", str(root / "llama"), "--fsdp", "1024"],
        "`digest` of 20,428 small tensors": ["digest", many],
        "`reshard` of 20,428 small tensors": [
            *("reshard", many, out, "--dp", "2", "--ep", "2", "--experts", "split", "--memory", "1GiB", "--overwrite"),
        ],
    }


def run(package, args):
    """Processor seconds and peak bytes of one run of the package in a directory."""
    seconds, peak, code = run_any(package, args)
    if code not in {0, 3}:  # 3: it does not fit
        raise SystemExit(f"{args} of {package} ended with {code}")
    return seconds, peak


def run_any(package, args):
    """Processor seconds, peak bytes and exit code of one run of the package in a directory."""
    # What wait4 says of memory includes this process before the child became the program.
    program = (
        "import atexit, sys\n"
        "status = lambda: dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "atexit.register(lambda: sys.stderr.write('\\n' + status()['VmHWM'].split()[0]))\n"
        "from shardctl.cli import main\n"
        "sys.exit(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(
            [sys.executable, "-c", program, *args], env=environment, stdout=subprocess.DEVNULL, stderr=said, cwd=package
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        peak = int(said.read().splitlines()[-1]) * 1024
    return used.ru_utime + used.ru_stime, peak, child.returncode


def main():
    """Parse the arguments and run."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("workdir", type=Path)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--beside", type=Path)
    given = options.parse_args()
    root = given.workdir.absolute() / "effort"
    shutil.rmtree(root, ignore_errors=True)
    cases = make_sources(root)
    packages = [ROOT, *([given.beside.absolute()] if given.beside else [])]
    for package in packages:
        run(package, ["--help"])  # compiles it
    cores, load = os.cpu_count(), os.getloadavg()[0]
    said = (
        f"shardctl {shardctl.__version__}, Python {platform.python_version()}, {cores} cores, load average {load:.1f}"
    )
    print(f"{said}; {given.runs} runs in turn, medians\n")
    more = " before | ratio |" if given.beside else ""
    print(f"| | processor seconds | peak memory |{more}\n|---|--:|--:|{'--:|--:|' if more else ''}")
    for name, args in cases.items():
        found = [[run(package, args) for package in packages] for _ in range(given.runs)]
        seconds = [statistics.median(pair[n][0] for pair in found) for n in range(len(packages))]
        row = f"| {name} | {seconds[0]:.2f} | {max(pair[0][1] for pair in found) / 2**20:,.0f} MiB |"
        if given.beside:
            row += f" {seconds[1]:.2f} | {statistics.median(one[0] / other[0] for one, other in found):.2f} |"
        print(row, flush=True)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
