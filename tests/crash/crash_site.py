"""A place where conversions are killed: what is there before and after, and a process that runs them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from shardctl.models import describe_model

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "fixtures" / "configs" / "llama.json"


def checkpoint(place, seed=0):
    """A small Llama in two files, with side files, one of them in a folder."""
    config = {**json.loads(CONFIG.read_text()), "dtype": "float32"}
    random = np.random.default_rng(seed)
    tensors = {t.name: random.standard_normal(t.shape, np.float32) for t in describe_model(config).own()}
    place.mkdir(parents=True)
    halves = sorted(tensors)[::2], sorted(tensors)[1::2]
    weight_map = {}
    for number, names in enumerate(halves, 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, place / file, {"format": "pt"})
        (place / file).chmod(0o644)
        weight_map |= dict.fromkeys(names, file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (place / "config.json").write_text(json.dumps(config))
    (place / "tokenizer.json").write_text(json.dumps({"seed": seed}))
    (place / "1_Pooling").mkdir()
    (place / "1_Pooling" / "config.json").write_text("{}")
    return place


def snapshot(tree):
    """Every name below a directory, with its mode, and its bytes if it is a file; None if there is no directory."""
    tree = Path(tree)
    if not tree.exists():
        return None
    return {
        path.relative_to(tree).as_posix(): (oct(path.lstat().st_mode), path.read_bytes() if path.is_file() else None)
        for path in [tree, *sorted(tree.rglob("*"))]
    }


def flip(path):
    """Damage one byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)


class Runner:
    """The process that forks one child per job."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, HERE / "runner.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, source, destination, faults=None, **options):
        job = {"source": str(source), "destination": str(destination), "faults": faults or {}, **options}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, source, destination, faults=None, **options):
        """The same in a process that can be sent signals; `finish` says what came of it."""
        job = {"source": str(source), "destination": str(destination), "faults": faults or {}, **options}
        return subprocess.Popen(
            [sys.executable, HERE / "runner.py", json.dumps(job)], stdout=subprocess.PIPE, text=True
        )

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@dataclass
class Site:
    """One directory with a source, and the destination beside it."""

    root: Path
    runner: Runner

    @property
    def source(self):
        return self.root / "source"

    @property
    def destination(self):
        return self.root / "out"

    @property
    def staging(self):
        return self.root / ".out.shardctl"

    def run(self, faults=None, **options):
        return self.runner(self.source, self.destination, faults, **options)

    def start(self, faults=None, **options):
        return self.runner.start(self.source, self.destination, faults, **options)

    def started(self, gate, faults=None, **options):
        """A run that is in the middle of its work, and goes no further until there is a file `gate`."""
        run = self.start({"gate": str(gate), **(faults or {})}, **options)
        deadline = time.monotonic() + 300
        while not gate.with_name(f"{gate.name}.shut").exists():
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return run

    def journalled(self):
        """How many bands an interrupted run has in its journal."""
        journal = self.staging / "journal.jsonl"
        if not journal.exists():
            return 0
        return sum(line.startswith("[") for line in journal.read_text().splitlines()[1:])

    def staged(self):
        """The data files in the staging area."""
        return sorted(self.staging.rglob("*.safetensors"))

    def names(self):
        return sorted(path.name for path in self.root.iterdir())

    def clear(self):
        """Remove everything but the source."""
        for path in self.root.iterdir():
            if path != self.source:
                shutil.rmtree(path)
