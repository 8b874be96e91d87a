"""Measures how good the time left is that `verify` and a resumed `reshard` say.

Writes a checkpoint of `--gb` gigabytes below `--folder`, runs the program, and notes when each line of progress came
and what it promised. Prints, for each phase, the first promise at or after five seconds of it, or its last one if the
phase was over before, and how far the end that it promised was from the end that came.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

LEFT = re.compile(r"(?:(\d+):)?(?:(\d+):)?([\d.]+)(?: s)? left")
SHARE = re.compile(r"\((\d+) %\)")


def write_checkpoint(folder: Path, gigabytes: float) -> Path:
    """One file of bfloat16 tensors of 128 MiB."""
    folder.mkdir(parents=True)
    count = int(gigabytes * 1e9) >> 27
    block = np.random.default_rng(7).integers(0, 0x3F80, 1 << 26, np.uint16).tobytes()
    entries = {
        f"layers.{i}.weight": {"dtype": "BF16", "shape": [1 << 13, 1 << 13], "data_offsets": [i << 27, (i + 1) << 27]}
        for i in range(count)
    }
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(count):
            file.write(block)
    return folder


def read_seconds(line: str) -> float | None:
    """Seconds that a line says are left."""
    found = LEFT.search(line)
    if found is None:
        return None
    seconds = 0.0
    for part in filter(None, found.groups()):
        seconds = seconds * 60 + float(part)
    return seconds


def run_program(args: list[str], *, stop_at: int | None = None) -> tuple[float, list[tuple[float, str]]]:
    """Run it; returns its seconds and each line with the second it came in. `stop_at` per cent it is interrupted."""
    began, lines = time.monotonic(), []
    program = subprocess.Popen([sys.executable, "-m", "shardctl", *args], stderr=subprocess.PIPE, text=True)

    def collect() -> None:
        for line in program.stderr:
            lines.append((time.monotonic() - began, line.strip()))
            share = SHARE.search(line)
            if stop_at is not None and share is not None and int(share[1]) >= stop_at:
                program.send_signal(signal.SIGINT)

    reader = threading.Thread(target=collect)
    reader.start()
    program.wait()
    reader.join()
    return time.monotonic() - began, lines


def report(what: str, seconds: float, lines: list[tuple[float, str]]) -> None:
    """Print the row of a run, or one for each of its two phases if it first checked what an earlier run had written."""
    checked = [(at, line) for at, line in lines if ": re-checking, " in line]
    moved = [(at, line) for at, line in lines if SHARE.search(line) and (at, line) not in checked]
    turned = moved[0][0] if moved and checked else 0.0
    if checked:
        report_phase(f"{what}: re-checking", 0.0, turned, checked)
    report_phase(what, turned, seconds, moved)


def report_phase(what: str, began: float, ended: float, lines: list[tuple[float, str]]) -> None:
    """Print the row of a phase."""
    promises = [(at, left, line) for at, line in lines if (left := read_seconds(line)) is not None]
    if not promises:
        print(f"| {what} | {ended - began:.1f} s | no line said what was left | | | |")
        return
    at, left, line = next((each for each in promises if each[0] >= began + 5), promises[-1])
    came = ended - at
    print(f"| {what} | {ended - began:.1f} s | {at - began:.1f} s | {left:.1f} s | {came:.1f} s | {left / came:.2f} |")
    print(line, file=sys.stderr)


def main() -> None:
    """Run verify, and a reshard that is interrupted and resumed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--threads", default="1")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="progress-", dir=given.folder))
    try:
        source = str(write_checkpoint(folder / "source", given.gb))
        print("| phase | took | first promise at or after 5 s | promised | came | promised / came |")
        print("|---|---|---|---|---|---|")
        report("`verify --level full`", *run_program(["verify", source, "--level", "full", "--threads", given.threads]))
        convert = ["reshard", source, str(folder / "out"), "--dtype", "fp32", "--threads", given.threads]
        run_program(convert, stop_at=40)
        report("`reshard`, resumed", *run_program(convert))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
