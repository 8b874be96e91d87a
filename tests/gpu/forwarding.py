"""The executor on a device: how far ranks run in one process are from the unsharded model, and how long it takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from gpu_models import LLAMA, MIXTRAL, cut, random_checkpoint

from shardctl.base.workers import NullWatcher
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.options import SourceOptions, VerifyOptions
from shardctl.running.device_levels import run_forward_level

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpu_models import Scale

DEGREES = (1, 2, 8)


@dataclass(frozen=True)
class Ran:
    """One forward pass."""

    model: str
    mesh: str
    dtype: str
    status: str
    reason: str
    worst: float
    output: float
    seconds: float
    peak_bytes: int | None
    """None where it cannot be measured."""


def ran(folder: Path, scale: Scale) -> Iterator[Ran]:
    """Llama at tp 1, 2 and 8 in fp32 and bf16, and other meshes and Mixtral in fp32."""
    small = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
    dims = {} if scale.tiny else small
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16} if scale.tiny else {}
    source = random_checkpoint(folder / "llama", scale.config(LLAMA, 2 if scale.tiny else 8, **{**dims, **heads}))
    for tp in DEGREES:
        place = cut(source, folder / f"tp{tp}", tp=tp)
        for dtype in ("fp32", "bf16"):
            yield one("llama", f"tp{tp}", source, place, dtype, scale.device)
    for name, degrees in (("fsdp2", {"fsdp": 2}), ("pp2 x tp2", {"pp": 2, "tp": 2})):
        yield one("llama", name, source, cut(source, folder / name.replace(" ", ""), **degrees), "fp32", scale.device)
    dims = {} if scale.tiny else {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 16}
    mixtral = random_checkpoint(folder / "mixtral", scale.config(MIXTRAL, 2, **dims))
    for name, degrees in (("tp2", {"tp": 2}), ("ep2", {"dp": 2, "ep": 2})):
        yield one("mixtral", name, mixtral, cut(mixtral, folder / f"moe-{name}", **degrees), "fp32", scale.device)


def one(model: str, mesh: str, source: Path, place: Path, dtype: str, device: str) -> Ran:
    """One forward pass of the source and of the ranks."""
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    source_options = SourceOptions(kv_heads="replicate")
    with open_checkpoint(place, source_options) as checkpoint, open_checkpoint(source, source_options) as other:
        began = time.perf_counter()
        level = run_forward_level(
            checkpoint, other, VerifyOptions(device=device, dtype=dtype, virtual=True), NullWatcher(), strict=False
        )
        seconds = time.perf_counter() - began
    result = level.forward
    peak = torch.cuda.max_memory_allocated(device) if cuda else None
    if result is None or result.worst is None:
        return Ran(model, mesh, dtype, level.status, level.reason, float("nan"), float("nan"), seconds, peak)
    return Ran(model, mesh, dtype, level.status, level.reason, result.worst.error, result.output_error, seconds, peak)
