"""Measures everything that only a device can tell, and prints it as a page of Markdown.

python tests/gpu/table.py                  on the first CUDA device, real proportions; about ten minutes
python tests/gpu/table.py --device cpu     tiny models, to see that the measuring works
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import forwarding
import loading
import local_tensor
import numpy as np
import peaks
import safetensors
import torch
import transformers
from gpu_models import Scale

import shardctl
from shardctl.base.amounts import format_file_size, format_rate

Rows = Iterator[tuple[object, ...]]


def size(nbytes: int | None) -> str:
    return "" if nbytes is None else format_file_size(nbytes)


def forward_rows(scale: Scale, folder: Path) -> Rows:
    yield "model", "mesh", "type", "status", "worst block", "logits", "time", "peak"
    for ran in forwarding.ran(folder, scale):
        status = f"{ran.status}: {ran.reason}" if ran.reason else ran.status
        numbers = f"{ran.worst:.1e}", f"{ran.output:.1e}", f"{ran.seconds:.1f} s", size(ran.peak_bytes)
        yield ran.model, ran.mesh, ran.dtype, status, *numbers


def native_rows(scale: Scale, folder: Path) -> Rows:
    yield "tp", "logits", "time", "problem"
    for found in local_tensor.native(folder, scale):
        yield found.tp, f"{found.apart:.1e}", f"{found.seconds:.1f} s", found.problem


def loading_rows(scale: Scale, folder: Path) -> Rows:
    yield "way", "cache", "bytes", "time", "rate"
    for way in loading.ways(folder, scale):
        yield (
            way.way,
            way.cache,
            size(way.nbytes),
            f"{way.seconds:.2f} s",
            format_rate(way.nbytes, way.seconds),
        )
    level = loading.proved(folder, scale)
    for rank in level.ranks:
        speed = format_rate(rank.nbytes, rank.seconds)
        yield f"verify --level load, rank {rank.rank}", "", size(rank.nbytes), f"{rank.seconds:.2f} s", speed
    yield "the same, all of it compared with the source", "", size(level.nbytes), f"{level.seconds:.2f} s", ""
    for rank in level.ranks:
        peak = f"peak {size(rank.peak_bytes)}, plan {size(rank.planned_bytes)}"
        yield f"rank {rank.rank} allocated", "", peak, "", ""


def peak_rows(scale: Scale, _folder: Path) -> Rows:
    yield "what", "allocated", "plan", "expected between", "plan / allocated"
    for peak in peaks.peaks(scale):
        ratio = f"{peak.planned / peak.measured:.3f}" if peak.measured else peak.problem
        span = f"{size(peak.low)} and {size(peak.high)}"
        yield str(peak.case), size(peak.measured), size(peak.planned), span, ratio


SECTIONS: dict[str, tuple[str, Callable[[Scale, Path], Rows]]] = {
    "forward": ("The executor", forward_rows),
    "native": ("transformers' tensor parallelism under LocalTensorMode, fp32", native_rows),
    "loading": ("Loading", loading_rows),
    "peaks": ("Peaks of allocation, without the CUDA context", peak_rows),
}


def table(rows: Iterable[tuple[object, ...]]) -> Iterator[str]:
    """The rows as Markdown, each as soon as it is there; the first is the head."""
    for number, row in enumerate(rows):
        yield "| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |"
        if not number:
            yield "|" + "---|" * len(row)


def heading(scale: Scale) -> Iterator[str]:
    """What was measured on."""
    name = torch.cuda.get_device_name(scale.device) if scale.cuda else f"CPU ({platform.machine()})"
    count = f"{torch.cuda.device_count()} x " if scale.cuda else ""
    yield f"# {count}{name}, {datetime.now(UTC):%Y-%m-%d}"
    yield ""
    modules = (shardctl, torch, transformers, safetensors, np)
    versions = [f"{module.__name__} {module.__version__}" for module in modules]
    cuda = [f"CUDA {torch.version.cuda}"] if scale.cuda else []
    yield ", ".join([f"Python {platform.python_version()}", *versions, *cuda])
    if scale.tiny:
        yield ""
        yield "Tiny models: this shows that the measuring works, and nothing else."


def main() -> int:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="tiny models, as on the CPU")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="this section; may be given several times")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; about 20 GB")
    asked = parser.parse_args()
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        print("there is no CUDA device; --device cpu shows that the measuring works", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    scale = Scale(asked.device, asked.tiny or asked.device == "cpu")
    for line in heading(scale):
        print(line, flush=True)
    for name, (title, rows) in SECTIONS.items():
        if asked.only and name not in asked.only:
            continue
        print(f"\n## {title}\n", flush=True)
        with TemporaryDirectory(dir=asked.folder) as folder:
            for line in table(rows(scale, Path(folder))):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
