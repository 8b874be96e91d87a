"""The grid of faults in short form: docs/benchmarks/faults_hub.py has all of it."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "faults_hub.py"
CASES = [
    "40 % of requests fail",
    "one wrong bit in a network in trouble",
    "next page is itself",
    "next page is elsewhere",
]


def test_the_program_ends_as_it_should():
    command = [sys.executable, SCRIPT, *CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| yes |") == len(CASES)
