"""What each thread of `reshard` does and when, beside `dd` of the same bytes; prints a table and draws a picture.

python docs/benchmarks/timeline.py WORKDIR [--gigabytes 2] [--picture FILE.svg] [--threads N]

The program runs in this process with a clock around what reads, digests, arranges (gathers columns), writes and syncs;
all other time of a thread is waiting or Python. `dd` writes as many bytes with `conv=fsync` before and after, by direct
calls and by the page cache, because the disk's speed is what the result is to be compared with.
"""

import argparse
import contextlib
import io
import os
import resource
import shutil
import subprocess
import threading
import time
from collections import Counter
from itertools import groupby
from pathlib import Path

from generate import generate
from reshard import warm

from shardctl.cli.program import run
from shardctl.conversion.engine import band_mover, small_copies
from shardctl.storage.local import LocalSource, LocalTarget
from shardctl.tensors.bands import BandBuffer

COLOURS = {"read": "#4c78a8", "digest": "#f58518", "arrange": "#e45756", "write": "#54a24b", "sync": "#b279a2"}
WIDTH, ROW = 960, 26


class Clock:
    """Spans of what threads do; what is called inside of something else counts for itself alone."""

    def __init__(self):
        self.spans = []
        self.began = time.perf_counter()
        self.inside = threading.local()

    def around(self, owner, name, what):
        """Put the clock around a function of a module or a class."""
        function = getattr(owner, name)

        def timed(*args, **options):
            stack = self.inside.__dict__.setdefault("stack", [])
            self.turn(stack)
            stack.append([what, time.perf_counter()])
            try:
                return function(*args, **options)
            finally:
                self.turn(stack)
                stack.pop()
                if stack:
                    stack[-1][1] = time.perf_counter()

        setattr(owner, name, timed)

    def turn(self, stack):
        """End the span of what the thread was in, and begin another of the same."""
        now = time.perf_counter()
        if stack:
            what, since = stack[-1]
            self.spans.append((threading.current_thread().name, what, since, now))


def measure_dd(place, nbytes, *flags):
    """Seconds that `dd` takes to write as many bytes and make them durable."""
    file = place / "dd.bin"
    command = ["dd", "if=/dev/zero", f"of={file}", "bs=8M", f"count={-(-nbytes // (8 << 20))}", *flags]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - began
    file.unlink()
    os.sync()
    return seconds


def choose_colours(spans, began, scale):
    """What a thread did most in each pixel's time, if it did something for half of it."""
    shares = {}
    for _, what, start, stop in spans:
        for pixel in range(int((start - began) * scale), min(int((stop - began) * scale), WIDTH - 1) + 1):
            a, b = began + pixel / scale, began + (pixel + 1) / scale
            shares.setdefault(pixel, Counter())[what] += max(min(b, stop) - max(a, start), 0)
    return [
        shares[pixel].most_common(1)[0][0] if pixel in shares and shares[pixel].total() * scale > 1 / 2 else ""
        for pixel in range(WIDTH)
    ]


def draw(spans, began, ended, path):
    """Draw a row for each thread, and what the colours mean."""
    threads = sorted({thread for thread, *_ in spans})
    scale, base = WIDTH / (ended - began), ROW * len(threads) + 18
    size = f'width="{WIDTH + 130}" height="{base + 30}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
    for row, thread in enumerate(threads):
        top = ROW * row + 4
        parts.append(f'<text x="4" y="{top + 14}">thread {row + 1}</text>')
        parts.append(f'<rect x="120" y="{top}" width="{WIDTH}" height="18" fill="#eeeeee"/>')
        start = 120
        for what, same in groupby(choose_colours([span for span in spans if span[0] == thread], began, scale)):
            width = len(list(same))
            if what:
                parts.append(f'<rect x="{start}" y="{top}" width="{width}" height="18" fill="{COLOURS[what]}"/>')
            start += width
    parts += [
        f'<text x="{120 + second * scale:.0f}" y="{base}" fill="#666666">{second} s</text>'
        for second in range(int(ended - began) + 1)
    ]
    for number, (what, colour) in enumerate([*COLOURS.items(), ("waiting, or Python", "#cccccc")]):
        x = 120 + 120 * number
        parts.append(f'<rect x="{x}" y="{base + 8}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{base + 20}">{what}</text>')
    path.write_text("\n".join([*parts, "</svg>", ""]))


def measure_disk(place, nbytes):
    """Seconds of `dd` by direct calls, and by the page cache."""
    return measure_dd(place, nbytes, "oflag=direct", "conv=fsync"), measure_dd(place, nbytes, "conv=fsync")


def reshard(source, target, threads, clock):
    """Run the program with the clock around its parts; returns when it ended, and its processor seconds."""
    for owner, name, what in (
        *((LocalSource, "read_at", "read"), (LocalTarget, "write_at", "write"), (LocalTarget, "sync", "sync")),
        *(
            (BandBuffer, "read", "arrange"),
            (BandBuffer, "write", "arrange"),
            (band_mover, "compute_band_sums", "digest"),
        ),
        *((small_copies, "compute_stacked_sums", "digest"), (small_copies, "_gather_pieces", "arrange")),
    ):
        clock.around(owner, name, what)
    more = ["--threads", str(threads)] if threads else []
    before, clock.began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        code = run(["reshard", str(source), str(target), "--tp", "4", "--memory", "256MiB", *more])
    ended, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    if code:
        raise SystemExit(f"reshard ended with {code}")
    return ended, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime


def main():
    """Parse the arguments and run."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("workdir", type=Path)
    options.add_argument("--gigabytes", type=float, default=2)
    options.add_argument("--picture", type=Path)
    options.add_argument("--threads", type=int)
    given = options.parse_args()
    source, target = given.workdir / "src", given.workdir / "out"
    nbytes = generate(source, given.gigabytes)
    os.sync()
    disk = [measure_disk(given.workdir, nbytes)]
    warm(source)
    clock = Clock()
    ended, user, system = reshard(source, target, given.threads, clock)
    shutil.rmtree(target)
    os.sync()
    disk.append(measure_disk(given.workdir, nbytes))
    shutil.rmtree(source)
    seconds = ended - clock.began
    working = {thread for thread, what, *_ in clock.spans if what == "digest"}
    spans = [span for span in clock.spans if span[0] in working]
    total = Counter()
    for _, what, start, stop in spans:
        total[what] += stop - start
    print(f"{nbytes / 1e9:.2f} GB, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}\n")
    print("| | seconds | of `reshard` |\n|---|---|---|")
    print(f"| `reshard --tp 4 --memory 256MiB` | {seconds:.2f} | 1.00 |")
    for number, name in enumerate(("`dd oflag=direct conv=fsync`", "`dd conv=fsync`")):
        one, two = disk[0][number], disk[1][number]
        print(f"| {name}, before and after | {one:.2f}, {two:.2f} | {one / seconds:.2f}, {two / seconds:.2f} |")
    print(f"\n| of {len(working)} threads | seconds | share |\n|---|---|---|")
    spent = len(working) * seconds
    for what in COLOURS:
        print(f"| {what} | {total[what]:.2f} | {total[what] / spent:.0%} |")
    print(f"| waiting, or Python | {spent - total.total():.2f} | {1 - total.total() / spent:.0%} |")
    gigabyte = (user + system) / nbytes * 1e9
    print(f"\n{gigabyte:.2f} processor seconds a GB, {system / (user + system):.0%} of them in the kernel")
    if given.picture:
        draw(spans, clock.began, ended, given.picture)


if __name__ == "__main__":
    main()
