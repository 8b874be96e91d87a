"""Reads TensorRT-LLM's `config.json`, and makes the config of transformers from it.

The fields are those of NVIDIA/TensorRT-LLM `tensorrt_llm/models/modeling_utils.py` (`PretrainedConfig`),
`models/llama/config.py`, `models/qwen/config.py`, `models/deepseek_v1/config.py`, `models/nemotron_nas/config.py` and
`mapping.py`; older files, and those of the exporter in
Megatron-LM core 0.16, have the fields of experts without an object around them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.base.value import value_class
from shardctl.libraries.trtllm.arrays import EMBEDDING_DIM, PARALLEL_EMBEDDING, SEARCHED, TITLE, VOCABULARY
from shardctl.libraries.trtllm.model_settings import RENORMALISE, get_object, read_deepseek, read_granite, read_layers
from shardctl.models import name_usual_class
from shardctl.models.tables.config import ModelConfig
from shardctl.tensors.manifest import OwnConfig
from shardctl.tensors.mesh import MOST_RANKS, Mesh
from shardctl.tensors.naming_scheme import format_rank_prefix
from shardctl.tensors.pieces import split_layers_evenly

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardctl.tensors.naming_scheme import Fact

_LLAMA_ARCHITECTURES: Final = frozenset(
    {"LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"}
)
_QWEN_ARCHITECTURES: Final = frozenset(
    {"QWenForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"}
)
_MODEL_TYPE_BY_ARCHITECTURE: Final = {
    "GraniteForCausalLM": "granite",
    "DeepseekForCausalLM": "deepseek",
    "DeciLMForCausalLM": SEARCHED,
}
"""The model types that follow from the class alone."""
_MODEL_TYPES: Final = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    *_MODEL_TYPE_BY_ARCHITECTURE.values(),
)
_UNGATED_ACTIVATION_NAMES: Final = {"swiglu": "silu", "geglu": "gelu"}
"""What a gated activation is called without its gate."""
_GRANITE_MULTIPLIER_KEYS: Final = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "output_multiplier_scale",
)


@value_class
class TrtllmDescription:
    """What the config says."""

    mesh: Mesh
    ranks: Mapping[int, str]
    """The ranks of the mesh that have files, and what stands before the names of their arrays."""
    stages: tuple[int, ...]
    facts: Mapping[str, Fact]
    config: OwnConfig


def interpret_config(config: ModelConfig, arrays: Collection[str]) -> TrtllmDescription:
    """Return the meaning of a config beside files with these `arrays`, by their names there.

    Raises SourceError for what is malformed or contradicts itself, UnsupportedError for what is not converted.
    """
    _refuse_quantized(config)
    mesh = _build_mesh(get_object(config, "mapping"))
    layers = config.size("num_hidden_layers")
    tp, pp, cp = (mesh.degree(axis) for axis in ("tp", "pp", "cp"))
    if pp > layers:
        raise SourceError(f"config.json has {pp} stages for {layers} layers")
    return TrtllmDescription(
        mesh=mesh,
        ranks={stage * cp * tp + n: format_rank_prefix(stage * tp + n) for stage in range(pp) for n in range(tp)},
        stages=split_layers_evenly(layers, pp),
        facts={
            PARALLEL_EMBEDDING: config.read_flag("use_parallel_embedding", default=False),
            EMBEDDING_DIM: config.count("embedding_sharding_dim", 0),
            VOCABULARY: config.count("vocab_size", 0),
        },
        config=_build_own_config(config, arrays),
    )


def _refuse_quantized(config: ModelConfig) -> None:
    settings = get_object(config, "quantization")
    for key in ("quant_algo", "kv_cache_quant_algo"):
        found = settings.values.get(key)
        if found is not None:
            raise UnsupportedError(
                f"config.json says that the checkpoint is quantized ({key} is {ascii(found)[:40]}): "
                f"quantized checkpoints of {TITLE} are not read",
                hint="convert the model that was quantized",
            )
    if config.read_flag("is_pruned", default=False):
        raise UnsupportedError(
            "config.json says that the checkpoint is pruned: its weights are left out",
            hint="give the checkpoint that trtllm-prune was given",
        )


def _build_mesh(mapping: ModelConfig) -> Mesh:
    tp, pp, cp = (mapping.size(f"{axis}_size", 1) for axis in ("tp", "pp", "cp"))
    for key in ("auto_parallel", "enable_attention_dp"):
        if mapping.read_flag(key, default=False):
            raise UnsupportedError(f"config.json has a mapping with {key}, whose cuts are not known")
    if _find_degree(mapping, "moe_cluster_size", 1) != 1:
        raise UnsupportedError("config.json has a mapping with clusters of experts, whose cuts are not known")
    world = mapping.size("world_size", tp * pp * cp)
    if world > MOST_RANKS:
        raise SourceError(f"config.json has a mapping of {world:,} ranks; more than {MOST_RANKS:,} are not read")
    if world != tp * pp * cp:
        raise SourceError(f"config.json has a mapping of {world} ranks, but tp={tp} x pp={pp} x cp={cp}")
    etp, ep = _find_degree(mapping, "moe_tp_size", None), _find_degree(mapping, "moe_ep_size", None)
    ep = ep or (tp // etp if etp else 1)
    etp = etp or tp // ep
    if etp * ep != tp:
        raise SourceError(f"config.json has a mapping of experts to moe_tp={etp} x moe_ep={ep} ranks, but tp={tp}")
    return Mesh.of(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)


def _find_degree(mapping: ModelConfig, key: str, default: int | None) -> int | None:
    """Find a degree; what stands for none given is -1."""
    return default if mapping.values.get(key) in (None, -1) else mapping.size(key)


def _build_own_config(config: ModelConfig, arrays: Collection[str]) -> OwnConfig:
    """Build the `config.json` of transformers."""
    kind = _choose_model_type(config, arrays)
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    head = config.size("head_size", hidden // heads)
    _refuse_unlike(config, kind, head)
    activation = config.text("hidden_act", "silu")
    said: dict[str, object] = {
        "architectures": [name_usual_class(kind)],
        "model_type": kind,
        "dtype": config.text("dtype", "bfloat16"),
        "hidden_act": _UNGATED_ACTIVATION_NAMES.get(activation, activation),
        "hidden_size": hidden,
        "intermediate_size": None if kind == SEARCHED else config.size("intermediate_size", hidden * 4),
        "num_hidden_layers": config.size("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.size("num_key_value_heads", heads),
        "head_dim": head,
        "vocab_size": config.size("vocab_size") if config.values.get("vocab_size") is not None else None,
        "rms_norm_eps": config.values.get("norm_epsilon", 1e-5),
        "max_position_embeddings": config.size("max_position_embeddings", 2048),
        "rope_theta": config.values.get("rotary_base", 10_000.0),
        "tie_word_embeddings": _is_tied(config, arrays),
    }
    scaling = get_object(config, "rotary_scaling").values
    if scaling:
        kind_of_scaling = scaling.get("rope_type", scaling.get("type"))
        said["rope_scaling"] = {**{k: v for k, v in scaling.items() if k != "type"}, "rope_type": kind_of_scaling}
    if kind in ("llama", "granite", "qwen3", "qwen3_moe"):
        said["attention_bias"] = _has_array(arrays, "attention.dense.bias")
    if kind in ("llama", "granite"):
        said["mlp_bias"] = _has_array(arrays, "mlp.proj.bias")
    windowed = kind not in ("llama", *_MODEL_TYPE_BY_ARCHITECTURE.values())
    if windowed:
        said["sliding_window"] = None
    if kind == "granite":
        said |= read_granite(config, head)
    if kind == SEARCHED:
        said["block_configs"] = config.values.get("block_configs") or read_layers(config, heads)
    said |= _build_expert_settings(config, kind)
    guessed = "the tokens that begin and end texts" + (", nor a sliding window" if windowed else "")
    assumed = {"architectures", "model_type", "sliding_window"}
    if config.values.get("max_position_embeddings") is None:
        assumed.add("max_position_embeddings")
    return OwnConfig(
        said,
        (f"config.json is made from {TITLE}'s, which does not say {guessed} (--config gives them)",),
        frozenset(assumed),
        replaces=True,
    )


def _choose_model_type(config: ModelConfig, arrays: Collection[str]) -> str:
    """Choose the model type, by the class and by the arrays: NVIDIA's exporter calls all of these LlamaForCausalLM."""
    architecture = config.text("architecture", "")
    if architecture in _MODEL_TYPE_BY_ARCHITECTURE:
        return _MODEL_TYPE_BY_ARCHITECTURE[architecture]
    if architecture not in _LLAMA_ARCHITECTURES | _QWEN_ARCHITECTURES or config.text("qwen_type", "") == "qwen":
        raise UnsupportedError(
            f"config.json describes {ascii(architecture)[:60]}, whose arrays are not known here",
            hint=f"known are {', '.join(map(name_usual_class, _MODEL_TYPES))}",
        )
    experts = _has_array(arrays, "mlp.router.weight")
    if _has_array(arrays, "attention.q_layernorm.weight"):
        return "qwen3_moe" if experts else "qwen3"
    shared = _has_array(arrays, "mlp.shared_expert.fc.weight")
    if shared or (_has_array(arrays, "attention.qkv.bias") and not _has_array(arrays, "attention.dense.bias")):
        return "qwen2_moe" if experts else "qwen2"
    if experts:
        return "mixtral"
    return "mistral" if architecture == "MistralForCausalLM" else "llama"


def _has_array(arrays: Collection[str], name: str) -> bool:
    return f"transformer.layers.0.{name}" in arrays


def _is_tied(config: ModelConfig, arrays: Collection[str]) -> bool:
    shared = config.read_flag("share_embedding_table", default=False)
    return config.read_flag("tie_word_embeddings", default=shared) or "lm_head.weight" not in arrays


def _refuse_unlike(config: ModelConfig, kind: str, head: int) -> None:
    """Raise UnsupportedError for what no config of transformers' class would say."""
    position = config.text("position_embedding_type", "rope_gpt_neox")
    turned = config.values.get("rotary_embedding_dim")
    if position != "rope_gpt_neox" or turned not in (None, head) or config.values.get("rotary_pct", 1.0) != 1.0:
        raise UnsupportedError(
            f"config.json has positions of another kind ({ascii(position)[:40]}) than Llama and Qwen"
        )
    odd = next(
        (key for key in _GRANITE_MULTIPLIER_KEYS if kind != "granite" and config.values.get(key, 1.0) != 1.0), None
    )
    odd = odd or ("residual_mlp" if config.values.get("residual_mlp") else None)
    if odd is not None:
        raise UnsupportedError(f"config.json has {odd}, which Llama and Qwen do not have")


def _build_expert_settings(config: ModelConfig, kind: str) -> dict[str, object]:
    """Build what the config says of experts."""
    settings = get_object(config, "moe").values or {
        key.removeprefix("moe_"): value for key, value in config.values.items() if key.startswith("moe_")
    }
    moe = ModelConfig(settings)
    if kind == "mixtral":
        return {"num_local_experts": moe.size("num_experts"), "num_experts_per_tok": moe.size("top_k", 2)}
    if kind == "deepseek":
        return read_deepseek(config, moe)
    if not kind.endswith("_moe"):
        return {}
    inner = config.size("moe_intermediate_size") if config.values.get("moe_intermediate_size") else None
    said: dict[str, object] = {
        "num_experts": moe.size("num_experts"),
        "num_experts_per_tok": moe.size("top_k"),
        "moe_intermediate_size": inner or config.size("intermediate_size"),
        "norm_topk_prob": moe.values.get("normalization_mode") == RENORMALISE,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if kind == "qwen2_moe":
        said["shared_expert_intermediate_size"] = config.size("moe_shared_expert_intermediate_size")
    return said
