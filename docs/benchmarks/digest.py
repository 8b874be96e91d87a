"""Measures the digest and the casts against the standard library's hashes: python docs/benchmarks/digest.py."""

from __future__ import annotations

import hashlib
import os
import platform
import threading
import time
import zlib
from functools import partial as bind
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from shardctl.base.dtype import BY_NAME
from shardctl.tensors.box import Box
from shardctl.tensors.cast import cast_elements
from shardctl.tensors.digest import compute_box_sums

BAND = 16 << 20
"""Bytes a call, about the engine's band."""
SHAPES = {"last dim 4096": 4096, "11008": 11008, "64": 64, "7": 7, "3": 3, "1": 1, "1-d": 0}
DTYPES = ("U8", "BF16", "F32", "F64", "F4", "F6_E2M3")


def seconds(work, clock=time.thread_time, rounds=7):
    """The best of several rounds, in this thread's processor time: neighbours on the machine do not count."""
    work()
    best = float("inf")
    for _ in range(rounds):
        begin = clock()
        work()
        best = min(best, clock() - begin)
    return best


def band(name, last):
    dtype = BY_NAME[name]
    elements = BAND * 8 // dtype.bits
    last = -(-last // dtype.unit_elements) * dtype.unit_elements
    shape = (elements // last, last) if last else (elements // 16 * 16,)
    data = np.random.default_rng(0).integers(0, 256, dtype.nbytes(shape), np.uint8)
    return bind(compute_box_sums, data, dtype, Box.whole(shape), shape), data.size


def processor():
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{len(names)} x {names[0]}"


def busy():
    """Processor seconds that the whole machine has worked (Linux)."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def by_the_clock(work, size, threads, rounds=15, repeats=20):
    """GB/s of the wall clock with `threads` threads, in the best round that no other process disturbed."""

    def many():
        for _ in range(repeats):
            work()

    best = 0.0
    for _ in range(rounds):
        workers = [threading.Thread(target=many) for _ in range(threads)]
        begin, machine, own = time.perf_counter(), busy(), time.process_time()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        wall = time.perf_counter() - begin
        if busy() - machine - (time.process_time() - own) < 0.1 * wall:
            best = max(best, threads * repeats * size / wall / 1e9)
    return best or float("nan")


def main():
    print(
        f"{processor()}; Python {platform.python_version()}, NumPy {np.__version__}, ml_dtypes {ml_dtypes.__version__}"
    )
    data = np.random.default_rng(0).integers(0, 256, BAND, np.uint8).tobytes()
    hashes = {"sha256": hashlib.sha256, "blake2b": hashlib.blake2b, "crc32": zlib.crc32}
    rates = {name: BAND / seconds(bind(work, data)) / 1e9 for name, work in hashes.items()}
    print("\nGB/s of one core\n")
    print("| bytes |", " | ".join(rates), "|\n|---|" + "---:|" * len(rates))
    print("| any |", " | ".join(f"{rate:.2f}" for rate in rates.values()), "|\n")

    print("| digest |", " | ".join(SHAPES), "| x sha256 | x crc32 |\n|---|" + "---:|" * (len(SHAPES) + 2))
    for name in DTYPES:
        found = [size / seconds(work) / 1e9 for work, size in (band(name, last) for last in SHAPES.values())]
        ratios = [found[0] / rates["sha256"], found[0] / rates["crc32"]]
        print(f"| {name} |", " | ".join(f"{rate:.2f}" for rate in (*found, *ratios)), "|")

    print("\n| digest of a small tensor | microseconds |\n|---|---:|")
    for shape in ((), (8,), (64, 64), (4096,)):
        x = bytes(2 * prod(shape))
        work = bind(compute_box_sums, x, BY_NAME["BF16"], Box.whole(shape), shape)
        print(f"| BF16 {shape} | {seconds(lambda work=work: [work() for _ in range(1000)]) * 1e3:.0f} |")

    print("\n| GB/s by the clock | 1 thread | 2 threads |\n|---|---:|---:|")
    for name in DTYPES[:4]:
        work, size = band(name, 4096)
        print(f"| {name} |", " | ".join(f"{by_the_clock(work, size, threads):.2f}" for threads in (1, 2)), "|")

    print("\n| cast, GB/s of source | to F32 | to F16 | to BF16 |\n|---|---:|---:|---:|")
    weights = np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(np.float32)
    kinds = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    for name, kind in kinds.items():
        source, row = weights.astype(kind).view(np.uint8), []
        for want in (BY_NAME[n] for n in ("F32", "F16", "BF16")):
            out = np.empty(weights.size * want.bits // 8, np.uint8)
            row.append(source.size / seconds(bind(cast_elements, source, BY_NAME[name], want, out)) / 1e9)
        print(f"| {name} |", " | ".join(f"{rate:.2f}" for rate in row), "|")


if __name__ == "__main__":
    main()
