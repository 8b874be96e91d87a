"""Translates the names of Megatron-LM's arrays to those of megatron-core's local layers.

Transformer Engine's layers keep a norm inside of the projection that follows it, and its grouped experts have a weight
each in one module (`megatron/core/extensions/transformer_engine.py`). Before megatron-core, models were nested
dictionaries (`megatron/legacy/model/language_model.py` and `transformer.py`), whose names its loaders still translate.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

EXTRA_STATE: Final = "_extra_state"
"""How the names end under which layers keep what is no weight: nothing, or Transformer Engine's scales of 8 bits."""
_NEWER_MTP_PATTERN: Final = re.compile(r"(mtp\.layers\.\d+\.)mtp_model_layer\.(?!layers\.)(.+)")
"""Names in layers that predict further tokens, as of core 0.17; before, and in `torch_dist`, the module has another."""
_OLDER_MTP_PATTERN: Final = re.compile(r"(mtp\.layers\.\d+\.)transformer_layer\.(.+)")
QKV: Final = "self_attention.linear_qkv."
"""The projection that has the first norm of a layer, where it is none of `PROJECTIONS`."""
MAMBA: Final = "mixer.in_proj."
PROJECTIONS: Final = ("self_attention.in_proj.", MAMBA)
"""Those of gated DeltaNet and of Mamba, which only such layers have."""
_FUSED_NORM_PREFIX: Final = "layer_norm_"
_INNER_NORM: Final = "mixer.norm."
"""The norm behind Mamba, which is a module of its own in any case."""
_LAYER_PATTERN: Final = re.compile(r"(.*layers\.\d+)\.")
_FUSED_NORM_NAMES: Final = (
    (QKV + _FUSED_NORM_PREFIX, "input_layernorm."),
    *(
        (projection + _FUSED_NORM_PREFIX, "norm." if projection == MAMBA else "input_layernorm.")
        for projection in PROJECTIONS
    ),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
)
_GROUPED_EXPERT_PATTERN: Final = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d+)")
_SEQUENTIAL_EXPERT_PATTERN: Final = re.compile(
    r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))"
)
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
    name = _NEWER_MTP_PATTERN.sub(r"\1transformer_layer.\2", name).replace(".mixer.conv1d_", ".mixer.conv1d.")
    for fused, alone in _FUSED_NORM_NAMES:
        if fused in name:
            return name.replace(fused, alone)
    grouped = _GROUPED_EXPERT_PATTERN.fullmatch(name)
    return f"{grouped[1]}.local_experts.{grouped[3]}.{grouped[2]}" if grouped is not None else name


def find_projection(names: Iterable[str]) -> str:
    """Find which projection has the first norm of a layer with arrays of these names."""
    return next((each for name in names for each in PROJECTIONS if each in name), QKV)


def find_layer(name: str) -> str:
    """Find what stands before the names of a layer's arrays; all of a name that is of none.

    >>> find_layer("decoder.layers.3.mixer.in_proj.weight")
    'decoder.layers.3'
    """
    found = _LAYER_PATTERN.match(name)
    return found[1] if found is not None else name


def find_engine_name(name: str, *, experts: bool, latent: bool, grouped: bool = False, projection: str = QKV) -> str:
    """Find the name that Transformer Engine's layers have for an array of local ones.

    `experts` says whether the layer has routed ones, before which the norm stays a module of its own; `latent` whether
    its attention has latents, where the first norm does, and those of the latents do not; `grouped` whether experts are
    in one module; `projection` is what `find_projection` finds.

    >>> find_engine_name("decoder.layers.0.input_layernorm.weight", experts=True, latent=False)
    'decoder.layers.0.self_attention.linear_qkv.layer_norm_weight'
    """
    single = _SEQUENTIAL_EXPERT_PATTERN.fullmatch(name)
    if single is not None and grouped:
        return f"{single[1]}.{single[3]}{single[2]}"
    for fused, alone in _FUSED_NORM_NAMES:
        of_latents, first = "_up_proj" in fused, fused.startswith((QKV, *PROJECTIONS))
        if first and fused != projection + _FUSED_NORM_PREFIX:
            continue
        kept = latent if first else not latent if of_latents else experts
        if f".{alone}" in name and f".{_INNER_NORM}" not in name and not kept:
            return name.replace(alone, fused)
    return name


def find_newest_name(name: str) -> str:
    """Find the name that core 0.19 and later have for what older ones keep in a module of the convolution.

    >>> find_newest_name("decoder.layers.0.mixer.conv1d.bias")
    'decoder.layers.0.mixer.conv1d_bias'
    """
    return name.replace(".mixer.conv1d.", ".mixer.conv1d_")


def find_newer_name(name: str) -> str:
    """Find the name that core 0.17 and later have for an array of the module inside a layer that predicts.

    >>> find_newer_name("mtp.layers.0.transformer_layer.mlp.router.weight")
    'mtp.layers.0.mtp_model_layer.mlp.router.weight'
    """
    return _OLDER_MTP_PATTERN.sub(r"\1mtp_model_layer.\2", name)
