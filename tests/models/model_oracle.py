"""What transformers says about the tiny configs: the other implementation that the tables are compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.initialization import no_init_weights

from shardctl.base.dtype import BY_NAME, BY_TORCH
from shardctl.models import load_families
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Manifest, Region, Tensor, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterable

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
FIXTURES = sorted(path.stem for path in CONFIGS.glob("*.json"))
UNBUILDABLE = ("gemma4_assistant", "gemma4_unified_assistant", "mistral_large4", "step3p7", "ernie4_5_vl_moe")
"""Families whose classes transformers 5.23 has, and cannot build: a check of its own refuses every config of theirs;
and those whose files have other arrays than their classes, or rows in another order."""
TRANSFORMERS = frozenset(dir(transformers))
"""What transformers exports; to ask for it would load the module of each family."""
BUILT = [
    family
    for family in load_families()
    if next(iter(family.classes)) in TRANSFORMERS and family.name not in UNBUILDABLE
]
"""The families whose classes transformers builds; of the others, `test_hub_classes.py` says who the judge is."""
FAMILY = {family.name: family for family in load_families()}


def fixture(name: str, **changes: Any) -> dict[str, Any]:
    """A tiny config, with some keys changed."""
    return {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}


def list_classes(name: str) -> list[dict[str, str]]:
    """The classes of a fixture's family, as cases of a check."""
    return [{"architecture": architecture} for architecture in FAMILY[fixture(name)["model_type"]].classes]


def classes() -> list[tuple[str, str]]:
    """Every fixture with every class of its family."""
    return [(name, case["architecture"]) for name in FIXTURES for case in list_classes(name)]


def on_meta(config: dict[str, Any]) -> Any:
    """The transformers model of a config, without memory."""
    kind = getattr(transformers, config["architectures"][0])
    return build_on_meta(kind, kind.config_class.from_dict(config))


def build_on_meta(kind: Any, config: Any) -> Any:
    """A model of a class without memory: as `from_pretrained` builds it, which draws no values."""
    with torch.device("meta"), no_init_weights():
        model = kind(config)
    model.tie_weights()
    return model


def stored(shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: str = "F32") -> Manifest:
    """A checkpoint that stores each tensor whole."""
    kind = BY_NAME[dtype]
    tensors = {}
    for name, shape in shapes:
        chunk = Chunk(Box.whole(shape), kind, Region("model.safetensors", 0, compute_dense_strides(kind, shape)), name)
        tensors[name] = Tensor(name, kind, shape, (chunk,))
    return Manifest("safetensors", tensors, {})


def state(model: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the state dict, but for positions that Marian computes and does not save."""
    computed = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module).__name__ == "MarianSinusoidalPositionalEmbedding"
    }
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in computed}


def dtype_of(model: Any) -> Any:
    """The dtype of the parameters."""
    return BY_TORCH[str(next(model.parameters()).dtype).removeprefix("torch.")]
