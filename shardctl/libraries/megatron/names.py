"""Translates the names of Megatron-LM's arrays to those of megatron-core's local layers.

Transformer Engine's layers keep a norm inside of the projection that follows it, and its grouped experts have a weight
each in one module (`megatron/core/extensions/transformer_engine.py`). Before megatron-core, models were nested
dictionaries (`megatron/legacy/model/language_model.py` and `transformer.py`), whose names its loaders still translate.
"""

from __future__ import annotations

import re
from typing import Final

EXTRA_STATE: Final = "_extra_state"
"""How the names end under which layers keep what is no weight: nothing, or Transformer Engine's scales of 8 bits."""
_FURTHER: Final = re.compile(r"(mtp\.layers\.\d+\.)mtp_model_layer\.(.+)")
"""Names in layers that predict further tokens, as of core 0.17; before, and in `torch_dist`, the module has another."""
_OLDER: Final = re.compile(r"(mtp\.layers\.\d+\.)transformer_layer\.(.+)")
_DELTA: Final = "self_attention.in_proj.layer_norm_"
"""How Transformer Engine's layers begin the first norm of a layer with linear attention."""
_FUSED: Final = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    (_DELTA, "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
)
_GROUPED: Final = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d+)")
_SEQUENTIAL: Final = re.compile(r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")
_BEFORE_CORE: Final = (
    ("language_model.embedding.", "embedding."),
    ("language_model.encoder.", "decoder."),
    ("language_model.transformer.", "decoder."),
    ("language_model.output_layer.", "output_layer."),
    ("word_embeddings_for_head.", "output_layer."),
    (".attention.", ".self_attention."),
    (".query_key_value.", ".linear_qkv."),
    (".self_attention.dense.", ".self_attention.linear_proj."),
    (".mlp.dense_h_to_4h.", ".mlp.linear_fc1."),
    (".mlp.dense_4h_to_h.", ".mlp.linear_fc2."),
    (".input_norm.", ".input_layernorm."),
    (".post_attention_norm.", ".pre_mlp_layernorm."),
    (".post_attention_layernorm.", ".pre_mlp_layernorm."),
    ("decoder.final_norm.", "decoder.final_layernorm."),
)


def is_before_core(name: str) -> bool:
    """Return whether a name, its dictionaries joined by dots, is of a model from before megatron-core."""
    return name.startswith(("language_model.", "word_embeddings_for_head."))


def find_local_name(name: str) -> str:
    """Find the name that local layers have for an array, whatever it is called.

    >>> find_local_name("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")
    'decoder.layers.0.pre_mlp_layernorm.weight'
    >>> find_local_name("decoder.layers.1.mlp.experts.linear_fc2.weight3")
    'decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight'
    >>> find_local_name("mtp.layers.0.mtp_model_layer.mlp.router.weight")
    'mtp.layers.0.transformer_layer.mlp.router.weight'
    >>> find_local_name("language_model.encoder.layers.0.attention.dense.bias")
    'decoder.layers.0.self_attention.linear_proj.bias'
    """
    if is_before_core(name):
        for old, new in _BEFORE_CORE:
            name = name.replace(old, new)
        return name
    name = _FURTHER.sub(r"\1transformer_layer.\2", name)
    for fused, alone in _FUSED:
        if fused in name:
            return name.replace(fused, alone)
    grouped = _GROUPED.fullmatch(name)
    return f"{grouped[1]}.local_experts.{grouped[3]}.{grouped[2]}" if grouped is not None else name


def find_engine_name(name: str, *, experts: bool, latent: bool, grouped: bool = False, delta: bool = False) -> str:
    """Find the name that Transformer Engine's layers have for an array of local ones.

    `experts` says whether the layer has routed ones, before which the norm stays a module of its own; `latent` whether
    its attention has latents, where the first norm does, and those of the latents do not; `grouped` whether experts are
    in one module; `delta` whether its attention is linear.

    >>> find_engine_name("decoder.layers.0.input_layernorm.weight", experts=True, latent=False)
    'decoder.layers.0.self_attention.linear_qkv.layer_norm_weight'
    """
    single = _SEQUENTIAL.fullmatch(name)
    if single is not None and grouped:
        return f"{single[1]}.{single[3]}{single[2]}"
    for fused, alone in _FUSED:
        of_latents, first = "_up_proj" in fused, alone == "input_layernorm."
        if first and delta != (fused == _DELTA):
            continue
        kept = latent if first else not latent if of_latents else experts
        if f".{alone}" in name and not kept:
            return name.replace(alone, fused)
    return name


def find_newer_name(name: str) -> str:
    """Find the name that core 0.17 and later have for an array of the module inside a layer that predicts.

    >>> find_newer_name("mtp.layers.0.transformer_layer.mlp.router.weight")
    'mtp.layers.0.mtp_model_layer.mlp.router.weight'
    """
    return _OLDER.sub(r"\1mtp_model_layer.\2", name)
