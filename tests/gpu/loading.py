"""How fast a checkpoint's bytes reach a device, by several ways, with the page cache warm and cold."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from gpu_models import LLAMA, cut, random_checkpoint
from safetensors.torch import load_file

import shardctl
from shardctl.options import VerifyOptions
from shardctl.verbs.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gpu_models import Scale


@dataclass(frozen=True)
class Loaded:
    """One way of loading."""

    way: str
    cache: str
    """`warm` or `cold`."""
    nbytes: int
    seconds: float


def ways(folder: Path, scale: Scale) -> Iterator[Loaded]:
    """Every way, twice: what was just written is warm; then the kernel is asked to forget it."""
    source = random_checkpoint(folder / "source", scale.config(LLAMA, 2 if scale.tiny else 6))
    place = cut(source, folder / "ranks", tp=2)
    files = sorted(place.glob("shard-00001-*.safetensors"))
    methods: dict[str, Callable[[], dict[str, Any]]] = {
        "shardctl.load": lambda: shardctl.load(place, rank=0, device=scale.device),
        "safetensors load_file(device)": lambda: load_file(files[0], device=scale.device),
        "safetensors load_file, then to(device)": lambda: {
            name: tensor.to(scale.device) for name, tensor in load_file(files[0]).items()
        },
        "safetensors load_file, pinned, then to(device)": lambda: {
            name: (tensor.pin_memory() if scale.cuda else tensor).to(scale.device, non_blocking=True)
            for name, tensor in load_file(files[0]).items()
        },
    }
    methods["shardctl.load"]()  # CUDA's own start, and the allocator's first memory
    for cache in ("warm", "cold"):
        for way, method in methods.items():
            for file in files:
                remember(file) if cache == "warm" else forget(file)
            yield timed(way, cache, method, scale)


def timed(way: str, cache: str, method: Callable[[], dict[str, Any]], scale: Scale) -> Loaded:
    """One run of it, until every byte is there."""
    wait(scale)
    began = time.perf_counter()
    tensors = method()
    wait(scale)
    seconds = time.perf_counter() - began
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert all(str(tensor.device) == scale.device for tensor in tensors.values())
    del tensors
    if scale.cuda:
        torch.cuda.empty_cache()
    return Loaded(way, cache, nbytes, seconds)


def wait(scale: Scale) -> None:
    if scale.cuda:
        torch.cuda.synchronize(scale.device)


def remember(file: Path) -> None:
    """Have the kernel keep it in the page cache."""
    with file.open("rb") as opened:
        while opened.read(1 << 24):
            pass


def forget(file: Path) -> None:
    """Ask the kernel to drop it from the page cache; it may have been written a moment ago."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def proved(folder: Path, scale: Scale) -> Any:
    """The level `load` of `verify`, on the device, against the source; what `ways` wrote is there already."""
    found = verify(folder / "ranks", VerifyOptions(level="load", against=folder / "source", device=scale.device))
    assert found.ok, found.findings
    return found.levels[-1]
