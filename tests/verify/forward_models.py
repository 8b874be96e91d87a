"""Tiny models whose every weight counts, saved by transformers and cut by shardctl: for lens and forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from shardctl.checkpoint.opening import open_checkpoint
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.running.forward import CandidateCheckpoint, ForwardOptions, OriginalCheckpoint, compare_forward_passes
from shardctl.tensors.manifest import Region
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard
from shardctl.verify.rank_files import find_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.running.forward import ForwardResult

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
FIXTURES = tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))
REPLICATE = SourceOptions(kv_heads="replicate")


def config_of(name: str, **changes: object) -> dict[str, Any]:
    """A fixture's config, in float32."""
    return {**json.loads((CONFIGS / f"{name}.json").read_text()), "dtype": "float32", **changes}


def build(config: Mapping[str, Any], seed: int = 0) -> Any:
    """The transformers model of a config, its weights random: norms and biases too."""
    kind = getattr(transformers, config["architectures"][0])
    model = kind(kind.config_class.from_dict(dict(config))).to(getattr(torch, config["dtype"])).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + 1 if parameter.ndim == 1 else noise)
    return model


def save(path: Path, config: Mapping[str, Any]) -> Any:
    """Build a model and save it as transformers does."""
    model = build(config)
    model.save_pretrained(path)
    return model


def cut(source: Path, target: Path, mesh: Mesh, **reshard_options: Any) -> Path:
    """Cut a checkpoint over a mesh, key/value heads replicated where there are too few."""
    reshard(source, target, ReshardOptions(mesh=mesh, **reshard_options), source_options=REPLICATE)
    return target


def saved_and_cut(base: Path, name: str, mesh: str = "tp=2") -> tuple[Path, Path]:
    """A fixture's model below `base`, saved as transformers does, and its shards on a mesh; each is made once."""
    whole, shards = base / name, base / f"{name}-{mesh}"
    if not whole.exists():
        save(whole, config_of(name))
    if not shards.exists():
        cut(whole, shards, Mesh.parse(mesh))
    return whole, shards


def run(source: Path, shards: Path, **options: Any) -> ForwardResult:
    """The forward pass of shards beside that of their source."""
    with open_checkpoint(source, REPLICATE) as whole, open_checkpoint(shards, REPLICATE) as cut:
        mesh, stages = (cut.record.mesh, cut.record.stages) if cut.record else (None, ())
        return compare_forward_passes(
            CandidateCheckpoint(cut.manifest, cut.source, cut.model, mesh, stages),
            OriginalCheckpoint(
                whole.stored, whole.manifest, whole.source, whole.config, whole.model, whole.source.root
            ),
            ForwardOptions(**options),
        )


def place(path: Path, tensor: str, rank: int) -> tuple[Path, int, tuple[int, ...], int]:
    """Where a rank's part of a tensor lies: its file, offset and shape, and the width of an element in bytes."""
    with open_checkpoint(path, REPLICATE) as checkpoint:
        for chunk in checkpoint.manifest.tensors[tensor].chunks:
            if isinstance(chunk.where, Region) and find_rank(chunk.where.file) == rank:
                return path / chunk.where.file, chunk.where.offset, chunk.box.shape, chunk.dtype.unit_bytes
    raise LookupError(f"rank {rank} holds nothing of {tensor}")


def values(path: Path, tensor: str, rank: int) -> np.ndarray:
    """A rank's part of a float32 tensor, as its file has it, to be read and written."""
    file, offset, shape, _ = place(path, tensor, rank)
    return np.memmap(file, np.float32, "r+", offset, shape)
