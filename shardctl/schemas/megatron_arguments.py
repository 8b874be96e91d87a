"""What Megatron-LM's `args` say of a model, and the config of transformers that follows from them; in both directions.

The names are those of `megatron/training/arguments.py` in Megatron-LM core 0.12 to 0.16, as `load_args_from_checkpoint`
reads them back. They describe an architecture and never name the model, so that the simplest one is taken which has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.errors import UnsupportedError, UsageError
from shardctl.manifest import OwnConfig
from shardctl.mesh import Mesh
from shardctl.models.config import Config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models import Model
    from shardctl.training import Setting

_CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_USUAL: Final[dict[str, Setting]] = {
    "position_embedding_type": "rope",
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "apply_layernorm_1p": False,
    "multi_latent_attention": False,
    "attention_output_gate": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_layer_freq": 1,
    "rotary_seq_len_interpolation_factor": None,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "heterogeneous_layers_config_path": None,
    "hybrid_override_pattern": None,
    "mtp_num_layers": None,
}
"""What all the models below have; a field that is absent has it, too."""
_ROPE: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8_192}
"""Of `--use-rope-scaling`, whose factor alone can be given (`rotary_pos_embedding.py`)."""
_DIVISIBLE: Final = 128
"""Megatron-LM's own `--make-vocab-size-divisible-by`."""
_MOST: Final = 1 << 20


def config_of(arguments: Mapping[str, Setting], *, tied: bool) -> OwnConfig | None:
    """The config that `args` describe; `tied` if there is no output layer beside the embedding.

    None if they say too little, or describe a model that no config here can. The vocabulary is None where they only
    tell to how many rows it was padded.
    """
    if not {"num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"} <= arguments.keys():
        return None
    if any(arguments.get(name, usual) != usual for name, usual in _USUAL.items()):
        return None
    said = Config(arguments)
    heads, experts = said.size("num_attention_heads"), arguments.get("num_experts")
    grouped, family = said.switch("group_query_attention", default=False), _family(arguments)
    dtype = str(arguments.get("params_dtype") or "").removeprefix("torch.")
    values: dict[str, object] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": said.size("hidden_size"),
        "intermediate_size": said.size("ffn_hidden_size"),
        "num_hidden_layers": said.size("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": said.size("num_query_groups", heads) if grouped else heads,
        "head_dim": said.size("kv_channels", said.size("hidden_size") // heads),
        "max_position_embeddings": said.size("max_position_embeddings", 4_096),
        "rms_norm_eps": arguments.get("norm_epsilon", 1e-5),
        "rope_theta": float(said.size("rotary_base", 10_000)),
        "vocab_size": arguments.get("vocab_size"),
        "tie_word_embeddings": tied,
        **({"dtype": dtype} if dtype else {}),
    }
    if said.switch("use_rope_scaling", default=False):
        factor = arguments.get("rope_scaling_factor", 8.0)
        values["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_ROPE}
    if family in {"llama", "qwen3", "qwen3_moe"}:
        values["attention_bias"] = False
    if experts is not None:
        inner = said.size("moe_ffn_hidden_size", said.size("ffn_hidden_size"))
        values |= {"num_experts_per_tok": said.size("moe_router_topk", 2)}
        if family == "mixtral":
            values |= {"num_local_experts": said.size("num_experts"), "intermediate_size": inner}
        else:
            values |= {
                "num_experts": said.size("num_experts"),
                "moe_intermediate_size": inner,
                "norm_topk_prob": not said.switch("moe_router_pre_softmax", default=False),
                "decoder_sparse_step": 1,
            }
    warning = (
        f"config.json is made from Megatron-LM's args, which do not name the model: taken for {_CLASSES[family]} "
        "(or use --config)"
    )
    return OwnConfig(values, (warning,))


def _family(arguments: Mapping[str, Setting]) -> str:
    if arguments.get("num_experts") is not None:
        return "qwen3_moe" if arguments.get("qk_layernorm") else "mixtral"
    if arguments.get("qk_layernorm"):
        return "qwen3"
    return "qwen2" if arguments.get("add_qkv_bias") else "llama"


def mesh_of(arguments: Mapping[str, Setting]) -> Mesh:
    """The mesh that `args` describe; one device if they say nothing that can be."""

    def degree(name: str, default: int = 1) -> int:
        value = arguments.get(name)
        return value if type(value) is int and 0 < value < _MOST else default

    tp, ep = degree("tensor_model_parallel_size"), degree("expert_model_parallel_size")
    etp = degree("expert_tensor_parallel_size", tp)
    pp, cp, dp = (
        degree(name) for name in ("pipeline_model_parallel_size", "context_parallel_size", "data_parallel_size")
    )
    try:
        return Mesh.of(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp)
    except UsageError:
        return Mesh.of(pp=pp, tp=tp)


def padded_vocabulary(tokens: int, tp: int) -> int:
    """Rows of a vocabulary as Megatron-LM pads it (`_vocab_size_with_padding`).

    >>> padded_vocabulary(32_001, 2)
    32256
    """
    unit = _DIVISIBLE * tp
    return -(-tokens // unit) * unit


def arguments_of(config: Mapping[str, object], model: Model, mesh: Mesh, *, padded: int) -> dict[str, Setting]:
    """The `args` from which Megatron-LM builds the model with `--use-checkpoint-args`; `padded` rows of vocabulary.

    Raises UnsupportedError for rotary embeddings that it does not have.
    """
    said, own = Config(config), model.tensors
    q, k = (own[f"model.layers.0.self_attn.{part}_proj.weight"] for part in ("q", "k"))
    heads = said.size("num_attention_heads")
    head = q.shape[0] // heads
    theta, factor = _rope(config)
    experts = config.get("num_local_experts", config.get("num_experts"))
    routed = isinstance(experts, int) and any(".experts." in name for name in own)
    tp, pp, dp = mesh.degree("tp"), mesh.degree("pp"), mesh.degree("dp") * mesh.degree("fsdp")
    inner = said.size("intermediate_size")
    return {
        **_USUAL,
        "num_layers": model.layers,
        "hidden_size": q.shape[1],
        "ffn_hidden_size": inner,
        "num_attention_heads": heads,
        "group_query_attention": k.shape[0] != q.shape[0],
        "num_query_groups": k.shape[0] // head,
        "kv_channels": head,
        "max_position_embeddings": said.size("max_position_embeddings", 4_096),
        "seq_length": said.size("max_position_embeddings", 4_096),
        "use_rotary_position_embeddings": True,
        "rotary_base": int(theta),
        "use_rope_scaling": factor is not None,
        "rope_scaling_factor": factor if factor is not None else 8.0,
        "squared_relu": False,
        "openai_gelu": False,
        "norm_epsilon": _number(config.get("rms_norm_eps", 1e-6)),
        "add_qkv_bias": "model.layers.0.self_attn.q_proj.bias" in own,
        "qk_layernorm": "model.layers.0.self_attn.q_norm.weight" in own,
        "vocab_size": own["model.embed_tokens.weight"].shape[0],
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": _DIVISIBLE,
        "untie_embeddings_and_output_weights": "lm_head.weight" not in model.aliases,
        "num_experts": experts if routed and isinstance(experts, int) else None,
        "moe_ffn_hidden_size": said.size("moe_intermediate_size", inner) if routed else None,
        "moe_router_topk": said.size("num_experts_per_tok", 2),
        "moe_router_pre_softmax": routed and config.get("norm_topk_prob", True) is False,
        "moe_grouped_gemm": routed,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": mesh.degree("cp"),
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
        "data_parallel_size": dp,
        "world_size": mesh.world,
        "rank": 0,
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "ckpt_format": "torch_dist",
        "dist_ckpt_format": "torch_dist",
        "use_distributed_optimizer": False,
    }


def _rope(config: Mapping[str, object]) -> tuple[float, float | None]:
    """Theta, and the factor of Llama 3's scaling if there is one."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope: dict[str, object] = dict(given) if isinstance(given, dict) else {}
    theta = _number(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in {"default", None} and theta == int(theta):
        return theta, None
    if kind != "llama3" or any(rope.get(key) != value for key, value in _ROPE.items()):
        raise UnsupportedError(f"Megatron-LM has no rotary embeddings of the type {kind!r} as this config has them")
    return theta, _number(rope.get("factor", 8.0))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
