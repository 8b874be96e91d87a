"""Runs the program against a Hub-like server on loopback that does what goes wrong, and prints what came of each case.

    python docs/benchmarks/faults_hub.py [--quick] [CASE ...]

Each case converts a small model, and is right if the exit code is one of those expected, a result is there only after
exit 0 and has the right bytes, and no request to another origin had the token. `--quick` leaves out the slow cases.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "hub"))

import hub_server as server
from hub_models import content, model, write
from hub_server import HubServer, next_page, status, without_end

NAME = "someone/llama"
SHARD = "model-00002-of-00003.safetensors"
MANY = 400
CASES = {
    "nothing": ("cdn", (), {0}, False),
    "40 % of requests fail": ("cdn", (status(503), None, None, status(500), None) * 9, {0}, False),
    "half a body": ("cdn", (None, server.short_body, None) * 5, {0}, False),
    "another range": ("cdn", (server.other_range, None) * 5, {0}, False),
    "one wrong bit": ("cdn", (None,) * 4 + (server.flipped_bit,), {4}, False),
    "one wrong bit in a network in trouble": ("cdn", (status(503), None, None, server.flipped_bit), {4}, False),
    "next page is itself": ("tree", (next_page("{hub}{path}"),) * MANY, {4}, False),
    "next page is elsewhere": ("tree", (next_page("{other}/api"),), {4}, False),
    "info elsewhere": ("info", (status(307, Location="{other}/api"),), {4}, False),
    "an error without end": ("tree", (without_end(404),) * MANY, {4}, False),
    "a listing without end": ("tree", (without_end(200),) * MANY, {4}, False),
    "redirects without end": ("resolve", (without_end(302, Location="/x"),) * MANY, {4, 7}, False),
    "503 for ever": ("cdn", (status(503),) * MANY, {7}, True),
    "a byte now and then": ("cdn", (server.trickle,) * MANY, {7}, True),
    "100 Continue for ever": ("cdn", (server.only_interim,) * MANY, {7}, True),
}


def main() -> int:
    """Run the cases; returns 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("case", nargs="*", choices=[[], *CASES])
    asked = parser.parse_args()
    files = model()
    chosen = {
        name: case
        for name, case in CASES.items()
        if name in asked.case or not (asked.case or (asked.quick and case[3]))
    }
    wrong = 0
    print("| case | exit code | expected | seconds | tokens to other origins | as it should be |")
    print("|---|---:|---|---:|---:|---|")
    with tempfile.TemporaryDirectory() as folder:
        here = write(files, Path(folder, "here"))
        made = [sys.executable, "-m", "shardctl", "reshard", here, Path(folder, "right"), "--tp", "2"]
        subprocess.run(made, check=True, capture_output=True)
        right = content(Path(folder, "right"))
        for name, case in chosen.items():
            wrong += not _run(name, case, files, right, Path(folder, name.replace(" ", "-")))
    print(f"\n{len(chosen)} cases, {len(chosen) - wrong} as they should be")
    return int(wrong > 0)


def _run(name: str, case: tuple, files: dict[str, bytes], right: dict[str, bytes], out: Path) -> bool:
    route, faults, expected, _ = case
    hub, other = HubServer(), HubServer()
    hub.other = other.url
    hub.add(NAME, files)
    hub.fail(route, *faults)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    more = {"HF_ENDPOINT": hub.url, "HF_HOME": f"{out}-hf", "HF_TOKEN": "hf_good", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "shardctl", "reshard", NAME, out, "--tp", "2"],
        env=kept | more, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    seconds = time.monotonic() - began
    leaked = sum(bool(request.token) for request in [*hub.asked("cdn"), *other.requests]) + other.connections
    as_it_should = done.returncode in expected and not leaked and out.exists() == (done.returncode == 0)
    as_it_should &= "Traceback" not in done.stderr and (done.returncode != 0 or content(out) == right)
    codes = " or ".join(map(str, sorted(expected)))
    print(
        f"| {name} | {done.returncode} | {codes} | {seconds:.1f} | {leaked} | {'yes' if as_it_should else 'NO'} |",
        flush=True,
    )
    hub.close()
    other.close()
    return as_it_should


if __name__ == "__main__":
    sys.exit(main())
