"""Plans directories that `trtllm-build` reads: `rankN.safetensors` of every tp and pp rank, and `config.json`.

The config's fields are those that its own converters write (NVIDIA/TensorRT-LLM, `from_hugging_face` of
`tensorrt_llm/models/llama/config.py`, `qwen/config.py`, `deepseek_v1/config.py` and `nemotron_nas/config.py`); what
stands in the files is in `arrays`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.dtype import BY_NAME
from shardctl.base.errors import PartitionError, UnsupportedError, UsageError
from shardctl.libraries.arrays.composing import build_manifest, compose_arrays
from shardctl.libraries.safetensors.packing import FileBuilder
from shardctl.libraries.trtllm.arrays import EMBEDDING_DIM, NAME, PARALLEL_EMBEDDING, SCHEMA, SEARCHED, TITLE
from shardctl.libraries.trtllm.model_settings import (
    NO_RENORMALISING,
    RENORMALISE,
    describe_deepseek,
    describe_granite,
    describe_layers,
)
from shardctl.libraries.writer import Layout
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.rope import parse_rope
from shardctl.tensors.manifest import CheckpointFile
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.naming_scheme import NamingScheme, format_rank_prefix
from shardctl.tensors.pieces import split_layers_evenly

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.libraries.writer import PackRequest
    from shardctl.models import Model
    from shardctl.models.tables.model import ModelTensor
    from shardctl.tensors.manifest import Manifest
    from shardctl.tensors.naming_scheme import Fact

_CONFIG_FILE: Final = "config.json"
_MESH_AXIS_ORDER: Final = ("pp", "cp", "tp")
_EMBEDDING_OPTION: Final = "trtllm_embedding"
_EMBEDDING_PARTITION_DIMS: Final = {"whole": None, "vocabulary": 0, "hidden": 1}
"""By option the dim of the embedding that is cut."""
_TRTLLM_DTYPE_NAMES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ROPE_SCALING_TYPES: Final = frozenset({"linear", "dynamic", "llama3", "yarn"})
_MOE_FAMILIES: Final = frozenset({"mixtral", "qwen2_moe", "qwen3_moe", "deepseek"})
_GPUS_PER_NODE: Final = 8
"""What TensorRT-LLM assumes where nobody says; it only decides how ranks reach each other."""
_LAST_VERSION: Final = (
    f"--to {NAME} is for {TITLE} up to 1.2: later versions have no trtllm-build, and their PyTorch backend loads what "
    "--to hf writes"
)


def pack_trtllm(order: PackRequest) -> Manifest:
    """Return the file of every tp and pp rank, and `config.json`.

    Raises as `Layout.pack` says.
    """
    SCHEMA.check(order.model)
    mesh = _build_mesh(order)
    stages = split_layers_evenly(order.model.layers, mesh.degree("pp"))
    if order.stages not in (None, stages):
        raise UsageError(
            f"{TITLE} divides layers over stages by itself, as {','.join(map(str, stages))}", hint="leave --stages out"
        )
    tp, cp = mesh.degree("tp"), mesh.degree("cp")
    numbers = {stage * cp * tp + n: stage * tp + n for stage in range(mesh.degree("pp")) for n in range(tp)}
    facts = _build_facts(order.options.get(_EMBEDDING_OPTION, "whole"))
    dialect = NamingScheme(NAME, mesh, {rank: format_rank_prefix(n) for rank, n in numbers.items()}, stages, facts)
    builder = FileBuilder({"format": "pt"})
    arrays = compose_arrays(order, SCHEMA, dialect)
    for rank, number in numbers.items():
        builder.add(f"rank{number}.safetensors", arrays[rank])
    content = (json.dumps(_build_config(order, dialect), indent=4) + "\n").encode()
    files = {**builder.files, _CONFIG_FILE: CheckpointFile(_CONFIG_FILE, len(content), ((0, content),))}
    packed = build_manifest(NAME, order, SCHEMA, dialect, files, builder.stored())
    return replace(packed, warnings=(*packed.warnings, _LAST_VERSION))


def _build_facts(embedding: str) -> dict[str, Fact]:
    """Build what `--trtllm-embedding` asks for."""
    if embedding not in _EMBEDDING_PARTITION_DIMS:
        raise UsageError(
            f"unknown --trtllm-embedding {embedding!r}", hint=f"use {', '.join(_EMBEDDING_PARTITION_DIMS)}"
        )
    dim = _EMBEDDING_PARTITION_DIMS[embedding]
    return {PARALLEL_EMBEDDING: dim is not None, EMBEDDING_DIM: dim or 0}


def _build_mesh(order: PackRequest) -> Mesh:
    """Build the mesh that TensorRT-LLM numbers ranks by."""
    mesh = order.mesh
    for axis, degree in mesh.axes:
        if degree > 1 and axis not in _MESH_AXIS_ORDER:
            raise PartitionError(
                f"{TITLE} has ranks of tp, pp and cp, but the mesh is {mesh}",
                hint=f"leave --{axis} out: every replica loads the same directory",
            )
    named = [axis for axis, degree in mesh.axes if degree > 1]
    if named != [axis for axis in _MESH_AXIS_ORDER if axis in named]:
        raise PartitionError(
            f"{TITLE} numbers the ranks of tp innermost, and those of pp outermost", hint="use --tp and --pp"
        )
    if mesh.ep > 1 and mesh.degree("cp") > 1:
        raise PartitionError(f"{TITLE} does not divide experts over the ranks of cp", hint="leave --cp or --ep out")
    return Mesh.of(**{axis: mesh.degree(axis) for axis in _MESH_AXIS_ORDER}, ep=mesh.ep, etp=mesh.etp)


def _build_config(order: PackRequest, dialect: NamingScheme) -> dict[str, object]:
    """Build the content of `config.json`."""
    config, model, mesh = ModelConfig(order.config), order.model, dialect.mesh
    heads = config.size("num_attention_heads")
    routed = model.family in _MOE_FAMILIES
    ep, etp = (mesh.ep, mesh.etp) if routed else (1, mesh.degree("tp"))
    tp, pp, cp = (mesh.degree(axis) for axis in ("tp", "pp", "cp"))
    q, k = (_find_first(model, f"self_attn.{part}_proj.weight") for part in ("q", "k"))
    theta, scaling = _describe_rope(order.config)
    return {
        "architecture": model.architecture,
        "dtype": _choose_dtype(order),
        "logits_dtype": "float32",
        "num_hidden_layers": model.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": k.shape[0] * heads // q.shape[0],
        "head_size": q.shape[0] // heads,
        "hidden_size": q.shape[1],
        "intermediate_size": None if model.family == SEARCHED else config.size("intermediate_size"),
        "vocab_size": model.tensors["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": config.values.get("max_position_embeddings"),
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": theta,
        "rotary_scaling": scaling,
        "hidden_act": "swiglu" if routed else config.text("hidden_act", "silu"),
        "norm_epsilon": config.values.get("rms_norm_eps", 1e-6),
        "qk_layernorm": "model.layers.0.self_attn.q_norm.weight" in model.tensors,
        "attn_bias": "model.layers.0.self_attn.q_proj.bias" in model.tensors,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in model.tensors,
        "tie_word_embeddings": "lm_head.weight" in model.aliases,
        "use_parallel_embedding": dialect.read_flag(PARALLEL_EMBEDDING),
        "embedding_sharding_dim": dialect.number(EMBEDDING_DIM),
        "mapping": {
            "world_size": mesh.world,
            "gpus_per_node": _GPUS_PER_NODE,
            "cp_size": cp,
            "tp_size": tp,
            "pp_size": pp,
            "moe_tp_size": etp,
            "moe_ep_size": ep,
        },
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        **_build_expert_settings(config, model.family),
        **(describe_granite(config, q.shape[0] // heads) if model.family == "granite" else {}),
        **(describe_layers(config, model, q.shape[0] // heads) if model.family == SEARCHED else {}),
    }


def _find_first(model: Model, name: str) -> ModelTensor:
    """Find a tensor of the first layer that has it; raises UnsupportedError if none has."""
    found = (model.tensors.get(f"model.layers.{layer}.{name}") for layer in range(model.layers))
    tensor = next(filter(None, found), None)
    if tensor is None:
        raise UnsupportedError(f"{TITLE} needs a layer with {name}")
    return tensor


def _build_expert_settings(config: ModelConfig, family: str) -> dict[str, object]:
    """Build what TensorRT-LLM's Qwen has besides, and what its experts are."""
    said: dict[str, object] = {"qwen_type": family} if family.startswith("qwen") else {}
    if family not in _MOE_FAMILIES:
        return said
    if family == "deepseek":
        return said | describe_deepseek(config)
    count = config.values.get("num_local_experts" if family == "mixtral" else "num_experts")
    weighed = family == "mixtral" or config.read_flag("norm_topk_prob", default=False)
    moe = {
        "num_experts": count if count is not None else config.size("num_local_experts"),
        "top_k": config.size("num_experts_per_tok", 2),
        "normalization_mode": RENORMALISE if weighed else NO_RENORMALISING,
    }
    if family != "mixtral":
        said |= {
            "moe_intermediate_size": config.size("moe_intermediate_size"),
            "moe_shared_expert_intermediate_size": config.count("shared_expert_intermediate_size", 0),
        }
    return {**said, "moe": moe}


def _choose_dtype(order: PackRequest) -> str:
    """Choose the type of the layers' weights."""
    found = order.dtypes.get(_find_first(order.model, "self_attn.q_proj.weight").name, BY_NAME["BF16"])
    if found.name not in _TRTLLM_DTYPE_NAMES:
        raise UnsupportedError(
            f"{TITLE} computes in bfloat16, float16 or float32, not in {found}", hint="use --dtype bf16"
        )
    return _TRTLLM_DTYPE_NAMES[found.name]


def _describe_rope(config: Mapping[str, object]) -> tuple[float, dict[str, object] | None]:
    """Describe theta and scaling of rotary embeddings, as older configs of transformers say them.

    Raises UnsupportedError for a scaling that TensorRT-LLM does not know, and for embeddings of a part of each head.
    """
    said = parse_rope(config)
    if said.part != 1.0:
        raise UnsupportedError(
            f"{TITLE} rotates whole heads of Llama and Qwen, but the config rotates {said.part} of each"
        )
    if said.kind == "default":
        return said.theta, None
    if said.kind not in _ROPE_SCALING_TYPES:
        raise UnsupportedError(f"{TITLE} does not support rotary embeddings of type {said.kind!r}")
    return said.theta, {"type": said.kind, "rope_type": said.kind, **said.settings}


def _format_file_prefix(dialect: NamingScheme, rank: int) -> str:
    """Format TensorRT-LLM's own number of a rank, which leaves out those of cp."""
    return f"{dialect.ranks.get(rank, '').rstrip('/')}."


LAYOUT: Final = Layout(
    NAME, pack_trtllm, ranks="library", options=frozenset({_EMBEDDING_OPTION}), prefix=_format_file_prefix, served=True
)
