"""Runs programs of fixtures that train, save and go on: ``MODULE train HF FOLDER LOSSES`` and ``resume``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_program(module: str, action: str, hf: Path, folder: Path) -> list[float]:
    """Run a program, and return the losses of the steps after it saved or loaded."""
    losses = folder.with_suffix(".json")
    command = [sys.executable, "-m", module, action, str(hf), str(folder), str(losses)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(losses.read_text())
