"""Measures programs and the disk beside them: seconds, processor seconds, and the peak of anonymous memory."""

import datetime as dt
import mmap
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[2]
BLOCK = 8 << 20


class ProgramUsage(NamedTuple):
    """What one run of a program took."""

    wall: float
    """Seconds, `sync` included."""
    user: float
    """Processor seconds of the program,"""
    system: float
    """and those of the kernel for it."""
    peak: int
    """Bytes of anonymous memory, sampled every 10 ms."""


def measure_program(command, package=ROOT, accept=(0,)):
    """Run a command to its end and until all it wrote is on the disk; raises RuntimeError for another exit code."""
    environment = {**os.environ, "PYTHONPATH": f"{package}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users have compiled modules
    peak = 0
    with tempfile.TemporaryFile("w+") as said:
        began = time.perf_counter()
        child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=said, cwd=package)
        while True:
            peak = max(peak, read_anonymous_bytes(child.pid))
            pid, status, used = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(0.01)
        os.sync()
        wall = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode not in accept:
            said.seek(0)
            raise RuntimeError(f"exit code {child.returncode}: {said.read().strip()[-300:]}")
    return ProgramUsage(wall, used.ru_utime, used.ru_stime, peak)


def run_shardctl(args, package=ROOT, accept=(0,)):
    """Measure one run of the package in a directory."""
    program = "import sys; from shardctl.cli import main; sys.exit(main())"
    return measure_program([sys.executable, "-c", program, *map(str, args)], package, accept)


def read_anonymous_bytes(pid):
    """Bytes of anonymous memory of a process now; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon")), 0)


def measure_direct_write(folder, nbytes):
    """Seconds to write so many random bytes by direct calls and make them durable; the file is removed."""
    memory = mmap.mmap(-1, BLOCK)
    block = np.frombuffer(memory, np.uint8)
    block[:] = np.random.default_rng(0).integers(0, 256, BLOCK, np.uint8)
    path = folder / "disk.bin"
    os.sync()
    began = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    for at in range(0, nbytes, BLOCK):
        os.pwrite(descriptor, block.data, at)
    os.fsync(descriptor)
    seconds = time.perf_counter() - began
    os.close(descriptor)
    path.unlink()
    return seconds * nbytes / (-(-nbytes // BLOCK) * BLOCK)


def drop_files(folder):
    """Ask the kernel to forget the pages of every file."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def describe_machine(folder):
    """What a reader must know to compare: processor, memory, file system, versions, and how busy it is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cores = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    total = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
    system = subprocess.run(["df", "--output=fstype", str(folder)], capture_output=True, text=True, check=True)
    return {
        "processor": f"{len(cores)} x {cores[0]}",
        "memory": f"{total:.0f} GiB",
        "file_system": system.stdout.split()[-1],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load": round(os.getloadavg()[0], 1),
    }


def name_state(package):
    """The version of the package in a directory, and the commit of its checkout."""
    program = "import shardctl; print(shardctl.__version__)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=package)
    git = ["git", "-C", str(package), "log", "-1", "--abbrev=9", "--format=%h %cs"]
    commit, _, day = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip().partition(" ")
    return {
        "version": said.stdout.strip(),
        "commit": commit,
        "committed": day,
        "measured": f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC",
    }
