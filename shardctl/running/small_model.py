"""Makes small models of a class of transformers: its config with small sizes, and two layers of each kind.

The sizes keep what decides how tensors are cut: whether keys and values have as many heads as queries, fewer, or one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardctl.verify.transformers_classes import get_config_class

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Torch = Any

SMALL: Final = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "text_vocab_size", "audio_vocab_size"), 96),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embed_dim", "encoder_hidden_size", "decoder_hidden_size"), 32
    ),
    **dict.fromkeys(("dim", "hidden_dim", "emb_dim", "width", "cross_attention_dim", "model_dim", "n_embed"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("encoder_intermediate_size", "ffn_hidden_size", "d_inner", "shared_intermediate_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "num_blocks"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("speech_encoder_layers", "text_encoder_layers", "t2u_encoder_layers", "t2u_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "encoder_num_attention_heads"), 4),
    **dict.fromkeys(("decoder_num_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "d_kv", "kv_channels"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_selected_experts", "moe_k"), 2),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("o_groups", "num_zero_experts", "zero_expert_num"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("vocab_size_per_layer_input",), 96),
    **dict.fromkeys(("hidden_size_per_layer_input",), 8),
    **dict.fromkeys(("projection_hidden_size", "text_hidden_size"), 32),
    **dict.fromkeys(("unpadded_vocab_size",), 90),
    **dict.fromkeys(("swa_num_attention_heads",), 4),
    **dict.fromkeys(("swa_num_key_value_heads",), 2),
    **dict.fromkeys(("swa_head_dim",), 8),
    **dict.fromkeys(("kv_lora_rank", "v_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank",), 16),
    **dict.fromkeys(("qk_rope_head_dim",), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id",), 2),
}
"""What keys of configs become, wherever they stand."""
MAX_ELEMENTS: Final = 50_000_000
"""Elements of the largest model that is still small: 200 MB in fp32, which takes a second to fill and save."""
_LAYER_COUNT_KEYS: Final = {key for key, value in SMALL.items() if "layer" in key or key in {"depth", "num_blocks"}}


_MAX_KINDS: Final = 8
"""Layers up to which a model has one of every kind; a longer pattern is cut to two layers."""


def build_small_model(kind: Torch, values: Mapping[str, Any] | None = None, config_class: Torch = None) -> Torch:
    """Build a model of a class with small sizes, of a config's `values` or else of its class's defaults.

    First as the config's class takes the sizes, else with sizes set afterwards. Raises whatever the class raises that
    these sizes do not suit.
    """
    import torch

    problem: Exception = ValueError("it is not small with these sizes")
    for make in (give_sizes, set_sizes):
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(make(config_class or kind.config_class, values)).parameters())
            if size <= MAX_ELEMENTS:
                torch.manual_seed(0)
                return kind(make(config_class or kind.config_class, values)).eval()
        except Exception as error:  # noqa: BLE001 - whatever a class raises that these sizes do not suit
            problem = error
    raise problem


def fill_randomly(model: Torch) -> None:
    """Give random values to all parameters, norms and biases included."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.ndim == 1))


def give_sizes(kind: Torch, values: Mapping[str, Any] | None = None) -> Torch:
    """Build a config of a class with small sizes given to it and to the configs inside."""
    sizes = _choose_sizes(_build_config(kind, values))
    return kind(**sizes) if values is None else kind(**_merge_settings(values, sizes))


def _build_config(kind: Torch, values: Mapping[str, Any] | None) -> Torch:
    return kind() if values is None else kind.from_dict(dict(values))


def _merge_settings(values: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with sizes in place of their own, also in the configs inside, and as many kinds of heads."""
    merged = {**values, **sizes}
    heads, key_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if "num_key_value_heads" in sizes and key_heads in (1, heads) and "num_attention_heads" in sizes:
        merged["num_key_value_heads"] = 1 if key_heads == 1 else sizes["num_attention_heads"]
    for key, size in sizes.items():
        if isinstance(size, dict) and isinstance(values.get(key), dict):
            merged[key] = _merge_settings(values[key], size)
    return merged


def _choose_sizes(config: Torch) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    chosen: dict[str, Any] = {}
    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            chosen[key] = {"model_type": value.model_type, **_choose_sizes(value)}
    return chosen | _find_sizes(config)


def set_sizes(kind: Torch, values: Mapping[str, Any] | None = None) -> Torch:
    """Build a config and set small sizes in it and in the configs inside."""
    config = _build_config(kind, values)
    _change_sizes(config)
    return config


def _change_sizes(config: Torch) -> None:
    from transformers import PreTrainedConfig

    sizes = _find_sizes(config)
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            _change_sizes(value)
    for key, value in sizes.items():
        setattr(config, key, value)


def _find_sizes(config: Torch) -> dict[str, Any]:
    """Find what is to stand in a config, those inside left out."""
    chosen = {key: size for key, size in SMALL.items() if _takes(config, key)} | _shorten_lists(config)
    if "qk_rope_head_dim" in chosen and "head_dim" in chosen:
        chosen["head_dim"] = chosen["qk_rope_head_dim"]  # that of rotary tables, in latent attention
    if "kv_lora_rank" in chosen and "num_key_value_heads" in chosen:
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    return chosen | _narrow_picture_axes(config, chosen) | _fit_together(config, chosen)


def _fit_together(config: Torch, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return what a config's class wants to fit the small sizes: heads of Mamba 2, and which layers are looked at."""
    fitting: dict[str, Any] = {}
    held = vars(config)
    if "mamba_n_heads" in held and "mamba_d_head" in held:
        width = held.get("mamba_d_ssm") or held.get("mamba_expand", 2) * chosen["hidden_size"]
        fitting = {"mamba_n_heads": 4, "mamba_d_head": width // 4, "mamba_n_groups": 2}
        if "attn_layer_indices" in held:
            fitting["attn_layer_indices"] = [1]
    if config.model_type == "mamba2":
        fitting = {"head_dim": held["expand"] * chosen["hidden_size"] // chosen["num_heads"], "n_groups": 2}
    if isinstance(held.get("vision_feature_layer"), list | tuple):
        fitting["vision_feature_layer"] = [-1, -2][: len(held["vision_feature_layer"])]
    if config.model_type == "zamba2":
        size = 2 * chosen["hidden_size"] // chosen["num_attention_heads"]  # whatever a config says
        fitting |= {"head_dim": size, "attention_head_dim": size, "mamba_ngroups": 2}
    if config.model_type == "mllama_vision_model":
        fitting["image_size"] = 56  # its usual pictures take minutes
    if type(config).__name__ == "DbrxAttentionConfig":
        fitting = {"rope_theta": 10000.0, "clip_qkv": 8, "kv_n_heads": 2}  # without which DBRX does not run
    return fitting


def _narrow_picture_axes(config: Torch, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a rotary embedding whose axes of a picture are together half as wide as a small head."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    turned = {*rope, *getattr(config, "ignore_keys_at_rope_validation", ())}
    if "mrope_section" not in turned and config.model_type != "paddleocr_vl_text":
        return {}
    head = chosen.get("head_dim") or chosen["hidden_size"] // chosen["num_attention_heads"]
    half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    count = len(rope.get("mrope_section", "thw"))
    shares = [half - (count - 1) * (half // count), *[half // count] * (count - 1)]
    return {"rope_parameters": {**rope, "mrope_section": shares}}


def _takes(config: Torch, key: str) -> bool:
    """Tell whether a config has a number of its own under a key, so that a small one can stand there."""
    if isinstance(getattr(type(config), key, None), property):
        return False  # it is computed from others
    value = vars(config).get(key) if key in vars(config) else getattr(config, key, None)
    return (isinstance(value, int) and not isinstance(value, bool)) or (value is None and key in vars(config))


def _shorten_lists(config: Torch) -> dict[str, Any]:
    """Return lists of one entry for each layer, as short as can be with one of every kind, and the count of layers."""
    counts = {key: value for key in _LAYER_COUNT_KEYS if isinstance(value := getattr(config, key, None), int)}
    lists = {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, list) and value and len(value) in counts.values() and isinstance(value[0], int | str)
    }
    if not lists:
        return {}
    length = max(2, *(min(n for n in range(1, len(v) + 1) if set(v[:n]) == set(v)) for v in lists.values()))
    if length > _MAX_KINDS:
        length = 2
    return {key: value[:length] for key, value in lists.items()} | {
        key: length for key, value in counts.items() if value in {len(each) for each in lists.values()}
    }


def save_small_model(kind: Torch, values: Mapping[str, Any], folder: Path, *, in_memory: bool) -> None:
    """Save a small model of a class as `save_pretrained` does, or with the names that it has `in_memory`.

    Raises whatever the class raises that small sizes do not suit.
    """
    from safetensors.torch import save_file

    model = build_small_model(kind, values, get_config_class(kind, values))
    fill_randomly(model)
    if not in_memory:
        model.save_pretrained(folder)
        return
    model.config.architectures = [kind.__name__]
    model.config.save_pretrained(folder)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
