"""Says what TensorRT-LLM's config has of Granite, of DeepSeek's experts and of Nemotron-NAS's layers, both ways."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.trtllm.arrays import TITLE
from shardctl.models.tables.config import ModelConfig

if TYPE_CHECKING:
    from shardctl.models import Model

NO_RENORMALISING, RENORMALISE = 0, 1
"""`MoeConfig.ExpertScaleNormalizationMode` of tensorrt_llm/layers/moe.py."""
_ATTENTION_KEYS: Final = frozenset({"no_op", "replace_with_linear", "n_heads_in_group"})
_FFN_KEYS: Final = frozenset({"no_op", "replace_with_linear", "ffn_mult"})


def get_object(config: ModelConfig, key: str) -> ModelConfig:
    """Return the object under `key`, or an empty one; raises SourceError if there is something else."""
    value = config.values.get(key)
    if value is None:
        return ModelConfig({})
    if not isinstance(value, dict):
        raise SourceError(f"config.json has {key} = {ascii(value)[:40]} where an object is expected")
    return ModelConfig(value)


def describe_granite(config: ModelConfig, head: int) -> dict[str, object]:
    """Build Granite's multipliers; that of attention is beside the usual 1 / sqrt(head), and logits are multiplied."""
    return {
        "embedding_multiplier": config.number("embedding_multiplier", 1.0),
        "attention_multiplier": config.number("attention_multiplier", 1.0) * math.sqrt(head),
        "residual_multiplier": config.number("residual_multiplier", 1.0),
        "output_multiplier_scale": 1.0 / config.number("logits_scaling", 1.0),
    }


def describe_layers(config: ModelConfig, model: Model, head: int) -> dict[str, object]:
    """Build what each layer has: the blocks of the Hub's config if they say all that `DeciConfig` asks of them."""
    blocks = config.values.get("block_configs")
    if isinstance(blocks, list) and all(
        block["attention"].keys() >= _ATTENTION_KEYS and block["ffn"].keys() >= _FFN_KEYS for block in blocks
    ):
        return {"block_configs": blocks}
    said = []
    for layer in range(model.layers):
        k = model.tensors.get(f"model.layers.{layer}.self_attn.k_proj.weight")
        up = model.tensors.get(f"model.layers.{layer}.mlp.up_proj.weight")
        said.append(
            {
                "attention": {
                    "impl": "no_op" if k is None else "attention",
                    "num_key_value_heads": None if k is None else k.shape[0] // head,
                },
                "ffn": {
                    "impl": "no_op" if up is None else "mlp",
                    "intermediate_size": None if up is None else up.shape[0],
                },
            }
        )
    return {"layer_configs": said}


def describe_deepseek(config: ModelConfig) -> dict[str, object]:
    """Build what DeepSeek's experts are; raises UnsupportedError for routing that the engine has not."""
    if config.number("routed_scaling_factor", 1.0) != 1.0 or config.text("scoring_func", "softmax") != "softmax":
        raise UnsupportedError(f"{TITLE}'s DeepSeek has no factor of experts, and no routing but softmax")
    width = config.size("moe_intermediate_size")
    return {
        "moe_intermediate_size": width,
        "moe": {
            "num_experts": config.size("n_routed_experts"),
            "shared_expert_intermediate_size": config.count("n_shared_experts", 0) * width,
            "top_k": config.size("num_experts_per_tok"),
            "normalization_mode": RENORMALISE
            if config.read_flag("norm_topk_prob", default=False)
            else NO_RENORMALISING,
        },
    }


def read_granite(config: ModelConfig, head: int) -> dict[str, object]:
    """Build Granite's multipliers, of which that of attention holds the usual 1 / sqrt(head) in transformers."""
    return {
        "embedding_multiplier": config.number("embedding_multiplier", 1.0),
        "attention_multiplier": config.number("attention_multiplier", 1.0) / math.sqrt(head),
        "residual_multiplier": config.number("residual_multiplier", 1.0),
        "logits_scaling": 1.0 / config.number("output_multiplier_scale", 1.0),
    }


def read_layers(config: ModelConfig, heads: int) -> list[dict[str, object]]:
    """Build what each layer of a Nemotron-NAS has; raises as `interpret_config`."""
    listed, layers = config.values.get("layer_configs"), config.size("num_hidden_layers")
    if not isinstance(listed, list) or len(listed) != layers or not all(isinstance(each, dict) for each in listed):
        raise SourceError(f"config.json has layer_configs that do not speak of {layers} layers")
    blocks: list[dict[str, object]] = []
    for each in map(ModelConfig, listed):
        attention, ffn = get_object(each, "attention"), get_object(each, "ffn")
        kinds = attention.text("impl", "attention"), ffn.text("impl", "mlp")
        if kinds[0] not in ("attention", "no_op") or kinds[1] not in ("mlp", "no_op"):
            raise UnsupportedError(f"config.json has a layer of {ascii(kinds)[:60]}, which is not known")
        shared, width = config.values.get("num_key_value_heads"), config.values.get("intermediate_size")
        said: dict[str, object] = {"no_op": kinds[0] == "no_op"}
        if kinds[0] == "attention":
            said["n_heads_in_group"] = heads // attention.over({"num_key_value_heads": shared}).size(
                "num_key_value_heads"
            )
        mlp: dict[str, object] = {"no_op": kinds[1] == "no_op"}
        if kinds[1] == "mlp":
            mlp["intermediate_size"] = ffn.over({"intermediate_size": width}).size("intermediate_size")
        blocks.append({"attention": said, "ffn": mlp})
    return blocks


def read_deepseek(config: ModelConfig, moe: ModelConfig) -> dict[str, object]:
    """Build what DeepSeek's experts are, from TensorRT-LLM's class of them."""
    width = config.size("moe_intermediate_size")
    return {
        "n_routed_experts": moe.size("num_experts"),
        "num_experts_per_tok": moe.size("top_k"),
        "moe_intermediate_size": width,
        "n_shared_experts": moe.count("shared_expert_intermediate_size", 0) // width,
        "norm_topk_prob": moe.values.get("normalization_mode") == RENORMALISE,
        "first_k_dense_replace": 1,
    }
