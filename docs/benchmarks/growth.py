"""How processor time and memory grow with the number of tensors and of chunks; prints a table and draws a picture.

python docs/benchmarks/growth.py WORKDIR [--counts 1000 10000 100000 400000] [--picture FILE.svg]

Processor seconds (user and system) and peak memory of whole programs, as in `effort.py`. The checkpoints are sparse
files with real headers and tensors of 32 elements. The `.metadata` of the distributed checkpoints are pickled from
torch's own objects, one chunk of each tensor for each rank, and the files of all ranks are links to one.
"""

import argparse
import io
import json
import math
import os
import pickle
import shutil
from pathlib import Path

import effort

from shardctl.base.dtype import BY_NAME
from shardctl.libraries.safetensors.header import encode_header

FILES = 40
VERBS = ("inspect", "digest", "reshard --to hf --memory 256MiB", "inspect, DCP", "reshard --dry-run, DCP")
COLOURS = ("#4477aa", "#228833", "#ee6677", "#ccbb44", "#aa3377")
WIDTH, HEIGHT = 560, 300


def make_tensors(place, count):
    """Write safetensors files of `count` small tensors."""
    place.mkdir(parents=True)
    weight_map = {}
    for number in range(FILES):
        part = range(number * count // FILES, (number + 1) * count // FILES)
        names = [f"model.layers.{n // 5000}.mlp.experts.{n % 5000}.up_proj.weight" for n in part]
        encoded = encode_header([(name, BY_NAME["BF16"], (4, 8)) for name in names], {"format": "pt"})
        file = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        with (place / file).open("wb") as opened:
            opened.write(encoded.header)
            opened.truncate(encoded.size)
        weight_map |= dict.fromkeys(names, file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def make_chunks(place, count):
    """Write a distributed checkpoint of `count` chunks, about 213 of each rank."""
    import torch
    from torch.distributed.checkpoint import filesystem, metadata

    place.mkdir(parents=True)
    tensors = min(213, max(count // 8, 1))
    ranks = count // tensors
    saved = io.BytesIO()
    torch.save(torch.zeros(1, 8, dtype=torch.bfloat16), saved)
    item = saved.getvalue()
    names = [f"model.layers.{n // 7}.block.{n % 7}.weight" for n in range(tensors)]
    whole, part = torch.Size([ranks, 8]), torch.Size([1, 8])
    described = {
        name: metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=torch.bfloat16),
            whole,
            [metadata.ChunkStorageMetadata(torch.Size([rank, 0]), torch.Size(list(part))) for rank in range(ranks)],
        )
        for name in names
    }
    stored = {}
    for rank in range(ranks):
        file = f"__{rank}_0.distcp"
        if rank:
            (place / file).hardlink_to(place / "__0_0.distcp")
        else:
            (place / file).write_bytes(item * tensors)
        for number, name in enumerate(names):
            # Names and indices came from the ranks, each an object of its own.
            index = metadata.MetadataIndex((name + " ")[:-1], torch.Size([rank, 0]), rank)
            stored[index] = filesystem._StorageInfo(file, number * len(item), len(item))  # noqa: SLF001 - what is saved
    ways = {name: (name,) for name in names}
    made = metadata.Metadata(described, ways, stored, metadata.StorageMeta(checkpoint_id="x"), version="1.0.0")
    (place / ".metadata").write_bytes(pickle.dumps(made, protocol=4))


def measure(root, count):
    """Processor seconds and peak bytes of each verb; None for one that refuses, with the peak until then."""
    tensors, chunks, out = root / "tensors", root / "chunks", root / "out"
    shutil.rmtree(root, ignore_errors=True)
    make_tensors(tensors, count)
    make_chunks(chunks, count)
    commands = (
        ["inspect", str(tensors)],
        ["digest", str(tensors)],
        ["reshard", str(tensors), str(out), "--to", "hf", "--memory", "256MiB"],
        ["inspect", str(chunks)],
        ["reshard", str(chunks), str(root / "other"), "--to", "hf", "--memory", "2GiB", "--dry-run"],
    )
    found = []
    for command in commands:
        seconds, peak, code = effort.run_any(effort.ROOT, command)
        found.append((seconds if code == 0 else None, peak))
    shutil.rmtree(root)
    return found


def draw(counts, rows, path):
    """Draw a line for each verb, both axes logarithmic."""
    low, high = math.log10(min(counts)), math.log10(max(counts))
    times = [seconds for row in rows for seconds, _ in row if seconds is not None]
    bottom, top = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))

    def place(count, seconds):
        x = 60 + WIDTH * (math.log10(count) - low) / (high - low)
        return x, 10 + HEIGHT * (top - math.log10(seconds)) / (top - bottom)

    size = f'width="{WIDTH + 300}" height="{HEIGHT + 50}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
    for power in range(bottom, top + 1):
        _, y = place(counts[0], 10**power)
        parts.append(f'<line x1="60" y1="{y:.0f}" x2="{60 + WIDTH}" y2="{y:.0f}" stroke="#dddddd"/>')
        parts.append(f'<text x="4" y="{y + 4:.0f}">{10.0**power:g} s</text>')
    for count in counts:
        x, _ = place(count, 10**bottom)
        parts.append(f'<text x="{x - 20:.0f}" y="{HEIGHT + 28}">{count:,}</text>')
    for number, (verb, colour) in enumerate(zip(VERBS, COLOURS, strict=True)):
        shown = [(count, row[number][0]) for count, row in zip(counts, rows, strict=True)]
        points = [point for point in shown if point[1] is not None]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in (place(*p) for p in points)]
        parts.append(f'<text x="{WIDTH + 72}" y="{30 + 20 * number}" fill="{colour}">{verb}</text>')
    path.write_text("\n".join([*parts, "</svg>", ""]))


def main():
    """Parse the arguments and run."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("workdir", type=Path)
    options.add_argument("--counts", type=int, nargs="+", default=[1_000, 10_000, 100_000, 400_000])
    options.add_argument("--picture", type=Path)
    given = options.parse_args()
    root = given.workdir.absolute() / "growth"
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}\n")
    head = " | ".join(f"`{verb}`" for verb in VERBS)
    print(f"| tensors or chunks | {head} |\n|{'--:|' * (len(VERBS) + 1)}")
    rows = []
    for count in given.counts:
        rows.append(measure(root, count))
        cells = [
            f"{'refused' if seconds is None else f'{seconds:.2f} s'}, {peak / 2**20:,.0f} MiB"
            for seconds, peak in rows[-1]
        ]
        print(f"| {count:,} | " + " | ".join(cells) + " |", flush=True)
    if given.picture:
        draw(given.counts, rows, given.picture)


if __name__ == "__main__":
    main()
