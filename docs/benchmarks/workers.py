"""What several workers cost: bytes read and written, processor time and memory of each, one after another.

    python docs/benchmarks/workers.py PLACE [--workers 1,2,4,8] [--tp 8] [--layers 12]

Makes a Llama of zeros (sparse, so the disk is read little and written fully) in PLACE, and reshards it with each number
of workers. Bytes read are what the processes asked the kernel for (`/proc/PID/io`, `rchar`), gaps included.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from shardctl.models import describe_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CHILD = """
import json, re, sys, threading, time
from pathlib import Path
peak = 0
def watch():
    global peak
    while True:
        found = re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())
        peak = max(peak, int(found[1]) * 1024)
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
from shardctl.cli.program import run
code = run(sys.argv[1:])
io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
print(json.dumps({"peak": peak, "rchar": int(io["rchar"]), "wchar": int(io["wchar"])}), file=sys.stderr)
sys.exit(code)
"""


def checkpoint(place: Path, layers: int) -> Path:
    header, end = {}, 0
    for tensor in describe_model({**CONFIG, "num_hidden_layers": layers}).own():
        size = int(np.prod(tensor.shape)) * 2
        header[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    place.mkdir(parents=True)
    with (place / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (place / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    return place


def run(*args) -> dict:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, args)],
        check=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = json.loads(done.stderr.splitlines()[-1])
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**said, "seconds": time.monotonic() - began, "processor": processor}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("place", type=Path)
    parser.add_argument("--workers", default="1,2,4,8")
    parser.add_argument("--tp", default="8")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("options", nargs="*")
    given = parser.parse_args()
    source = given.place / "source"
    if not source.exists():
        checkpoint(source, given.layers)
    size = (source / "model.safetensors").stat().st_size
    print(f"{size / 1e9:.2f} GB to tp{given.tp}; one worker after another, {os.cpu_count()} processors")
    titles = ("workers", "files each", "read, all", "read, most by one", "written", "processor s, all", "slowest s")
    titles += ("peak MiB", "finish s")
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")
    for count in map(int, given.workers.split(",")):
        out = given.place / "out"
        shutil.rmtree(out, ignore_errors=True)
        options = (source, out, "--tp", given.tp, "--threads", 2, *given.options)
        runs = [run("reshard", *options, "--worker", f"{number}/{count}") for number in range(count)]
        finish = run("finish", out)
        files = [path for path in out.iterdir() if path.suffix == ".safetensors"]
        read = [r["rchar"] for r in runs]
        print(
            f"| {count} | {len(files) / count:g} | {sum(read) / 1e9:.2f} GB | {max(read) / 1e9:.2f} GB "
            f"| {sum(r['wchar'] for r in runs) / 1e9:.2f} GB | {sum(r['processor'] for r in runs):.1f} "
            f"| {max(r['seconds'] for r in runs):.1f} | {max(r['peak'] for r in runs) / 2**20:.0f} "
            f"| {finish['seconds']:.2f} |",
            flush=True,
        )
        shutil.rmtree(out)


if __name__ == "__main__":
    main()
