"""Checkpoints to measure with: random weights of real proportions, or tiny ones to see that the measuring works."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from shardctl.models import describe_model
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""Llama 3 8B, but for the number of layers."""
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
"""Qwen 2.5 7B."""
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
"""Mixtral 8x7B."""
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}


@dataclass(frozen=True)
class Scale:
    """What is measured on: a device, with models of real proportions or tiny ones."""

    device: str
    tiny: bool

    @property
    def cuda(self) -> bool:
        """Whether what is allocated can be measured."""
        return self.device.startswith("cuda")

    def config(self, base: dict[str, Any], layers: int, dtype: str = "bfloat16", **changes: Any) -> dict[str, Any]:
        """The config of some layers of a model."""
        small = TINY if self.tiny else {}
        return {**base, **small, "num_hidden_layers": layers, "dtype": dtype, **changes}


def random_checkpoint(place: Path, config: dict[str, Any], seed: int = 3) -> Path:
    """Random weights, scaled so that a forward pass neither dies out nor explodes; made tensor by tensor."""
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, config["dtype"])
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    index, total = {}, 0
    for number, tensor in enumerate(describe_model(config).own()):
        value = torch.empty(tensor.shape).normal_(generator=generator)
        value = value * tensor.shape[-1] ** -0.5 if len(tensor.shape) > 1 else 1 + 0.1 * value
        file = f"part-{number:05d}.safetensors"
        save_file({tensor.name: value.to(kind)}, place / file, {"format": "pt"})
        index[tensor.name] = file
        total += value.numel() * kind.itemsize
    said = {"metadata": {"total_size": total}, "weight_map": index}
    (place / "model.safetensors.index.json").write_text(json.dumps(said))
    return place


def cut(source: Path, place: Path, **degrees: int) -> Path:
    """The source, cut for a mesh."""
    reshard(source, place, ReshardOptions(mesh=Mesh.of(**degrees)), source_options=SourceOptions(kv_heads="replicate"))
    return place
