"""Tiny models whose every weight counts, saved by transformers and cut by shardctl: for lens and forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from shardctl.verbs.drafting import Wish
from shardctl.verbs.opening import Reading
from shardctl.verbs.reshard import reshard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.mesh import Mesh

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
FIXTURES = tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))
REPLICATE = Reading(kv_heads="replicate")


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


def cut(source: Path, target: Path, mesh: Mesh, **wish: Any) -> Path:
    """Cut a checkpoint over a mesh, key/value heads replicated where there are too few."""
    reshard(source, target, Wish(mesh=mesh, **wish), reading=REPLICATE)
    return target
