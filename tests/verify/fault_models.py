"""Tiny checkpoints of many families, cut over meshes, for faults to be injected into."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.numpy import save_file

from shardctl.base.dtype import BY_NAME
from shardctl.models import describe_model
from shardctl.options import ReshardOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard

if TYPE_CHECKING:
    from types import ModuleType

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
CODES = Path(__file__).parents[1] / "quantized" / "codes.py"
MESHES = {
    "tp2": "tp=2",
    "pp2 tp2": "pp=2,tp=2",
    "fsdp3": "fsdp=3",
    "ep2": "dp=2,ep=2",
    "ep2 tp2": "dp=2,tp=2,ep=2,etp=2",
}
"""By the name that the table has."""
TRAINED = "Llama, with an optimizer"
LIBRARIES = {"Meta's code": "meta", "Megatron-LM": "megatron", "Megatron-LM, torch_dist": "torch_dist"}
"""Layouts of other libraries, with settings of their own, by the name that the table has."""
PLAIN = {
    "Llama": "llama",
    TRAINED: "llama",
    "Phi-3, fused q|k|v and gate|up": "phi3",
    "GPT-2, fused and transposed": "gpt2",
    "GPT-NeoX, q|k|v by head": "gpt_neox",
    "Gemma 2, tied": "gemma2",
    "Mixtral": "mixtral",
    "Mixtral, experts one by one": "mixtral",
    "gpt-oss, stacked experts": "gpt_oss",
    "DeepSeek-V3, latent attention": "deepseek_v3",
    "Bamba, Mamba 2 and attention": "bamba",
    "Nemotron-H, Mamba 2 and experts": "nemotron_h",
    "Qwen3-Next, linear attention": "qwen3_next",
}
QUANTIZED = {
    "Llama in fp8 blocks": ("llama", "fp8-blocks"),
    "Llama in GPTQ": ("llama", "gptq-4"),
    "Llama in AWQ": ("llama", "awq"),
    "Mixtral in fp8 blocks": ("mixtral", "fp8-blocks"),
}
MODELS = (*PLAIN, *QUANTIZED)
"""The families of the table."""
_ONE_BY_ONE = ("Mixtral, experts one by one",)
_DENSE = ("llama", "phi3", "gpt2", "gpt_neox", "gemma2", "bamba")
"""Configs without experts, for which an axis of experts says nothing."""
_SIDE_FILES = {
    "generation_config.json": '{"eos_token_id": 2}',
    "tokenizer_config.json": '{"model_max_length": 64}',
    "tokenizer.json": '{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}',
    "merges.txt": "a b\n",
}


def write_model(model: str, place: Path, seed: int = 0) -> Path:
    """Write a model with random values and side files in one file, in fp32 unless it is quantized."""
    if model in QUANTIZED:
        _write_quantized(*QUANTIZED[model], place, seed)
    else:
        config = {**json.loads((CONFIGS / f"{PLAIN[model]}.json").read_text()), "dtype": "float32"}
        random = np.random.default_rng(seed)
        place.mkdir(parents=True)
        values = {t.name: _draw(random, t.dtype.name, t.shape) for t in describe_model(config).own()}
        if model == TRAINED:
            _add_states(values, place, random)
        save_file(values, place / "model.safetensors", {"format": "pt"})
        (place / "config.json").write_text(json.dumps(config))
    for name, text in _SIDE_FILES.items():
        (place / name).write_text(text)
    return place


def _add_states(values: dict[str, Any], place: Path, random: np.random.Generator) -> None:
    """Add what AdamW keeps of every parameter, as shardctl stores it beside weights."""
    groups = [{"parameters": list(values), "settings": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}]
    (place / "optimizer.json").write_text(json.dumps({"step": 7, "groups": groups}))
    for name, value in list(values.items()):
        values[f"optimizer.exp_avg.{name}"] = random.standard_normal(value.shape, np.float32)
        values[f"optimizer.exp_avg_sq.{name}"] = random.standard_normal(value.shape, np.float32) ** 2


def write_ranks(source: Path, model: str, mesh: str, place: Path) -> Path:
    """Cut a model over a mesh of `MESHES`; raises ShardctlError where that cannot be done."""
    shutil.rmtree(place, ignore_errors=True)
    options = ReshardOptions(mesh=Mesh.parse(MESHES[mesh]), optimizer_states="keep" if model == TRAINED else None)
    reshard(source, place, replace(options, experts="split") if model in _ONE_BY_ONE else options)
    return place


def list_meshes(model: str) -> list[str]:
    """List the meshes that mean something for a model."""
    config = QUANTIZED[model][0] if model in QUANTIZED else PLAIN[model]
    return [mesh for mesh in MESHES if config not in _DENSE or not mesh.startswith("ep")]


def write_library(source: Path, library: str, place: Path) -> Path:
    """Write a model as another library stores it; raises ShardctlError where it has no such model."""
    reshard(source, place, ReshardOptions(to=LIBRARIES[library]))
    return place


def write_several(source: Path, place: Path) -> Path:
    """Write a model into several files with an index, for one device."""
    size = (source / "model.safetensors").stat().st_size
    reshard(source, place, ReshardOptions(to="hf", max_shard_size=max(size // 3, 1 << 14)))
    return place


def _draw(random: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Any:
    if BY_NAME[kind].torch.startswith("int"):
        return random.integers(0, 4, shape, np.int64)
    return random.standard_normal(shape, np.float32)


def _write_quantized(base: str, codec: str, place: Path, seed: int) -> None:
    codes = _load_codes()
    config = dict(codes.LLAMA)
    if base == "mixtral":
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    chosen = codes.CODECS[codec]
    random = np.random.default_rng(seed)
    own = describe_model(config).own()
    state = {t.name: torch.from_numpy(random.standard_normal(t.shape, np.float32)).bfloat16() for t in own}
    skipped = (
        *chosen.skipped,
        *(n.removesuffix(".weight") for n in state if n.endswith("block_sparse_moe.gate.weight")),
    )
    chosen = type(chosen)(chosen.settings, chosen.encode, chosen.decode, skipped)
    settings = {**chosen.settings, "modules_to_not_convert": list(skipped)} if base == "mixtral" else chosen.settings
    codes.write(place, {**config, "quantization_config": settings}, codes.encoded(chosen, state))


def _load_codes() -> ModuleType:
    """Load the writers of quantized weights that the tests of those have."""
    spec = importlib.util.spec_from_file_location("quantized_codes", CODES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
