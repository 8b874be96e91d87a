"""Converts Meta's `params.json` of a Llama 4 to the `config.json` of transformers, and back.

The fields are those of `ModelArgs` (meta-llama/llama-models `models/llama4/args.py`); what they mean is in `model.py`,
`moe.py` and `vision` beside it.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any, Final

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.libraries.meta.llama4_arrays import TITLE
from shardctl.libraries.meta.params import PARAMS, parse_number
from shardctl.models.tables.rope import parse_rope
from shardctl.tensors.manifest import OwnConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.libraries.meta.params import MetaParams
    from shardctl.models import Model

_ORIGINAL_CONTEXT_LENGTH: Final = 8_192
"""The context of Llama 3, from which Meta's code scales."""
_TEXT_CONFIG_DEFAULTS: Final[Mapping[str, Any]] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "rope_theta": 500_000.0,
}
"""What `Llama4TextConfig` assumes for keys that a config does not have."""
_VISION_CONFIG_DEFAULTS: Final[Mapping[str, Any]] = {
    "hidden_act": "gelu",
    "hidden_size": 768,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "intermediate_size": 5632,
    "vision_output_dim": 7680,
    "image_size": 448,
    "patch_size": 14,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}
"""The same of `Llama4VisionConfig`."""
_KNOWN_PARAMS_KEYS: Final = frozenset(
    {
        *("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "multiple_of", "ffn_dim_multiplier"),
        *("ffn_exp", "norm_eps", "attention_chunk_size", "rope_theta", "use_scaled_rope", "rope_scaling_factor"),
        *("rope_high_freq_factor", "nope_layer_interval", "use_qk_norm", "attn_temperature_tuning", "floor_scale"),
        *("attn_scale", "vision_args", "moe_args", "max_batch_size", "max_seq_len"),
    }
)
_PUBLISHED_FFN_PARAMS: Final = (2048, 1.2, 4.0)
"""The published `multiple_of`, `ffn_dim_multiplier` and `ffn_exp`."""
_LLAMA4_VOCAB_SIZE: Final = 202_048
_SHARED, _DENSE = "feed_forward.w_in_shared_FD.weight", "feed_forward.mlp.fc1_weight"


def build_llama4_config(params: MetaParams, shapes: Mapping[str, tuple[int, ...]], ranks: int) -> OwnConfig | None:
    """Return the config of transformers; None if the file says more than such a config can.

    `shapes` are those of one of `ranks` files, by Meta's names. Raises SourceError for values that make no sense.
    """
    given = {key: value for key, value in params.given.items() if value is not None}
    if not given.keys() <= _KNOWN_PARAMS_KEYS:
        return None
    moe, vocabulary = _read_part(given, "moe_args"), shapes["tok_embeddings.weight"][0] * ranks
    scaled = bool(given.get("use_scaled_rope"))
    inner = _find_rows(shapes, _SHARED)
    dense = _find_rows(shapes, _DENSE)
    text: dict[str, object] = {
        "model_type": "llama4_text",
        "hidden_act": "silu",
        "hidden_size": params.dim,
        "num_hidden_layers": params.layers,
        "num_attention_heads": params.heads,
        "num_key_value_heads": params.kv_heads,
        "head_dim": params.dim // params.heads,
        "intermediate_size": inner * ranks or 8192,
        "intermediate_size_mlp": dense // 2 * ranks or 16384,
        "num_local_experts": moe.get("num_experts", 1),
        "num_experts_per_tok": moe.get("top_k", 1),
        "interleave_moe_layer_step": moe.get("interleave_moe_layer_step", 1) if moe else params.layers + 1,
        "vocab_size": vocabulary,
        "rms_norm_eps": given.get("norm_eps", 1e-5),
        "rope_theta": given.get("rope_theta", 500_000.0),
        "use_qk_norm": bool(given.get("use_qk_norm")),
        "no_rope_layer_interval": given.get("nope_layer_interval", params.layers + 1),
        "attention_chunk_size": given.get("attention_chunk_size"),
        "attn_temperature_tuning": bool(given.get("attn_temperature_tuning")),
        "floor_scale": int(parse_number(given, "floor_scale", 8192)),
        "attn_scale": given.get("attn_scale", 0.1),
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 10_485_760 if scaled else 1_048_576,
    }
    if scaled:
        text["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": float(parse_number(given, "rope_scaling_factor", 16)),
            "low_freq_factor": 1.0,
            "high_freq_factor": float(parse_number(given, "rope_high_freq_factor", 1)),
            "original_max_position_embeddings": _ORIGINAL_CONTEXT_LENGTH,
        }
    said = f"max_position_embeddings {text['max_position_embeddings']:,}"
    assumed = {"max_position_embeddings"}
    if scaled and "rope_scaling_factor" not in given:
        assumed.add("rope_parameters.factor")
    if vocabulary == _LLAMA4_VOCAB_SIZE:
        assumed |= {"bos_token_id", "eos_token_id", "pad_token_id"}
        text |= {"bos_token_id": 200_000, "eos_token_id": 200_001, "pad_token_id": 200_018}
        said += " and bos_token_id 200,000"
    version = "Llama 4 Scout" if scaled else "Llama 4 Maverick"
    warning = (
        f"config.json is made from {PARAMS}, which does not say {said}; the values of {version} are "
        "taken (--config gives others)"
    )
    seen = _read_part(given, "vision_args")
    if not seen:
        return OwnConfig({"architectures": ["Llama4ForCausalLM"], **text}, (warning,), frozenset(assumed))
    whole = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": _build_vision_config(seen),
    }
    return OwnConfig(whole, (warning,), frozenset(f"text_config.{key}" for key in assumed))


def _build_vision_config(seen: Mapping[str, Any]) -> dict[str, object]:
    sizes = {key: _read_part(seen, key) for key in ("image_size", "patch_size")}
    for key, size in sizes.items():
        if size.get("height") != size.get("width") or not isinstance(size.get("height"), int):
            raise SourceError(f"{PARAMS} has {key} {ascii(dict(size))[:80]}, which is no square")
    numbers = ("dim", "n_layers", "n_heads", "mlp_ratio", "output_dim", "pixel_shuffle_ratio")
    for key in numbers:
        if seen.get(key) is None:
            raise SourceError(f"{PARAMS} has no {key} in vision_args")
        parse_number(seen, key)
    return {
        "model_type": "llama4_vision_model",
        "hidden_act": "gelu",
        "hidden_size": seen["dim"],
        "intermediate_size": int(seen["mlp_ratio"] * seen["dim"]),
        "num_hidden_layers": seen["n_layers"],
        "num_attention_heads": seen["n_heads"],
        "image_size": sizes["image_size"]["height"],
        "patch_size": sizes["patch_size"]["height"],
        "pixel_shuffle_ratio": seen["pixel_shuffle_ratio"],
        **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), seen["output_dim"]),
    }


def _read_part(given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = given.get(key)
    if value is not None and not isinstance(value, dict):
        raise SourceError(f"{PARAMS} has {key} {ascii(value)[:40]}, which is no object")
    return value or {}


def _find_rows(shapes: Mapping[str, tuple[int, ...]], ending: str) -> int:
    """Find rows of the first array whose name ends so; 0 if there is none."""
    return next((shape[0] for name, shape in shapes.items() if name.endswith(ending)), 0)


def build_llama4_params(config: Mapping[str, Any], model: Model) -> dict[str, object]:
    """Build the content of `params.json`; raises UnsupportedError for what Meta's code cannot be told."""
    seen = config.get("vision_config") if model.family == "llama4" else None
    inner = config.get("text_config") if model.family == "llama4" else config
    text = {**_TEXT_CONFIG_DEFAULTS, **(inner or {})}
    prefix = "language_model.model" if model.family == "llama4" else "model"
    vocabulary, dim = model.tensors[f"{prefix}.embed_tokens.weight"].shape
    q, k = (model.tensors[f"{prefix}.layers.0.self_attn.{part}_proj.weight"] for part in "qk")
    head = q.spec.cuts[0][0].sections[0].unit
    layers, heads = model.layers, q.shape[0] // head
    if q.shape[0] != dim:
        raise UnsupportedError(f"{TITLE} has heads that together are as wide as the model, {dim}, not {q.shape[0]}")
    _require(text, "hidden_act", "silu")
    experts = [n for n in range(layers) if f"{prefix}.layers.{n}.feed_forward.router.weight" in model.tensors]
    marks = text.get("no_rope_layers") or [int((n + 1) % text["no_rope_layer_interval"] != 0) for n in range(layers)]
    plain = [n for n in range(layers) if not marks[n]]
    wide, narrow = (
        next((t.shape[0] for name, t in model.tensors.items() if name.endswith(f"feed_forward.{end}")), 0)
        for end in ("gate_proj.weight", "shared_expert.gate_proj.weight")
    )
    multiple, multiplier, expansion = _solve_widths(dim, wide, narrow)
    params: dict[str, object] = {
        "dim": dim,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": k.shape[0] // head,
        "head_dim": head,
        "vocab_size": vocabulary,
        "multiple_of": multiple,
        "ffn_dim_multiplier": multiplier,
        "ffn_exp": expansion,
        "norm_eps": text["rms_norm_eps"],
        "attention_chunk_size": text["attention_chunk_size"],
        **_describe_rope(text),
        "nope_layer_interval": _find_step(plain, layers, "layers without positions") if plain else None,
        "use_qk_norm": bool(text["use_qk_norm"]),
        "attn_temperature_tuning": bool(text["attn_temperature_tuning"]),
        "floor_scale": text["floor_scale"],
        "attn_scale": text["attn_scale"],
        "moe_args": {
            "num_experts": text["num_local_experts"],
            "capacity_factor": 1.0,
            "auto_scale_F": True,
            "top_k": text["num_experts_per_tok"],
            "interleave_moe_layer_step": _find_step(experts, layers, "layers with experts") if experts else layers + 1,
        },
    }
    return params if seen is None else {**params, "vision_args": _describe_vision({**_VISION_CONFIG_DEFAULTS, **seen})}


def _require(config: Mapping[str, Any], key: str, value: object) -> None:
    if config.get(key, value) != value:
        raise UnsupportedError(f"{TITLE} has {key} {value}, not {config[key]}")


def _find_step(found: Sequence[int], layers: int, what: str) -> int:
    """Find the step after which layers of a kind come; raises UnsupportedError if they come in no step."""
    step = found[0] + 1
    if list(found) != list(range(step - 1, layers, step)):
        raise UnsupportedError(f"{TITLE} has {what} in steps, but they are {', '.join(map(str, found))[:80]}")
    return step


def _describe_rope(text: Mapping[str, Any]) -> dict[str, object]:
    said = parse_rope(text)
    if said.kind == "default" and said.part == 1.0:
        return {"rope_theta": said.theta, "use_scaled_rope": False}
    usual = {"low_freq_factor": 1.0, "original_max_position_embeddings": _ORIGINAL_CONTEXT_LENGTH}
    if said.kind != "llama3" or said.part != 1.0 or any(said.settings.get(key) != usual[key] for key in usual):
        raise UnsupportedError(f"{TITLE} does not support this config's rotary embeddings of type {said.kind!r}")
    return {
        "rope_theta": said.theta,
        "use_scaled_rope": True,
        "rope_scaling_factor": said.settings["factor"],
        "rope_high_freq_factor": said.settings["high_freq_factor"],
    }


def _describe_vision(seen: Mapping[str, Any]) -> dict[str, object]:
    dim, inner, out, ratio = (
        seen[key] for key in ("hidden_size", "intermediate_size", "vision_output_dim", "pixel_shuffle_ratio")
    )
    _require(seen, "hidden_act", "gelu")
    for key in ("projector_input_dim", "projector_output_dim"):
        _require(seen, key, out)
    if int(dim // ratio**2) != inner:
        raise UnsupportedError(
            f"{TITLE} joins pictures' elements to {int(dim // ratio**2)}, not to intermediate_size {inner}"
        )
    for key in ("image_size", "patch_size"):
        if not isinstance(seen[key], int):
            raise UnsupportedError(f"vision_config has {key} {seen[key]!r}: squares are written for {TITLE}")
    return {
        **{key: {"height": seen[key], "width": seen[key]} for key in ("image_size", "patch_size")},
        "dim": dim,
        "n_layers": seen["num_hidden_layers"],
        "n_heads": seen["num_attention_heads"],
        "mlp_ratio": inner / dim,
        "output_dim": out,
        "pixel_shuffle_ratio": ratio,
    }


def _solve_widths(dim: int, dense: int, expert: int) -> tuple[int, float, float]:
    """Return `multiple_of`, `ffn_dim_multiplier` and `ffn_exp` from which Meta's code makes the widths of its MLPs.

    0 stands for a kind of layers that there are none of. Raises UnsupportedError if no such numbers are found.

    >>> _solve_widths(5120, 16384, 8192)
    (2048, 1.2, 4.0)
    """
    multiple = gcd(dense, expert)
    multiplier = (dense or dim) / int(2 * int(4 * dim) / 3)
    expansion = 3 * expert / multiplier / dim if expert else 1.0
    for given in (
        _PUBLISHED_FFN_PARAMS,
        *((multiple, multiplier * (1 - cut), expansion * (1 - cut)) for cut in (0, 1e-9, 1e-4)),
    ):
        made = _compute_widths(dim, *given)
        if all(wanted in (0, found) for wanted, found in zip((dense, expert), made, strict=True)):
            return given
    raise UnsupportedError(f"{TITLE} cannot be told that MLPs are {dense} wide, and experts {expert}")


def _compute_widths(dim: int, multiple: int, multiplier: float, expansion: float) -> tuple[int, int]:
    """Compute how wide dense layers and experts are, as `TransformerBlock` and `MoE` do."""
    dense = int(multiplier * int(2 * int(4 * dim) / 3))
    expert = int(int(multiplier * int(2 * int(expansion * dim) / 3)) / 2)
    return -(-dense // multiple) * multiple, -(-expert // multiple) * multiple
