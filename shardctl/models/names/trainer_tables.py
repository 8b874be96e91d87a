"""Lists what trainers call the tensors of models, and how their arrays are made of those of transformers.

torchtune: `torchtune/models/convert_weights.py` and `torchtune/models/*/_convert_weights.py` (bd2a0fc). OLMo:
`scripts/convert_olmo_to_hf_new.py` and `convert_olmo2_to_hf.py` (59a53e3). OLMo-core: `src/olmo_core/nn/hf/convert.py`
(fa6c501).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Mapping


@value_class
class TrainerArray:
    """What one array of a trainer holds; names have ``{layer}`` where a layer's number is."""

    tensors: tuple[str, ...]
    """Names in the class of transformers; several are joined along dim 0."""
    rows: Literal["same", "paired"] = "same"
    """The order of rows: that of transformers, or with the two halves of each head interleaved, as Meta rotates."""
    section: int | None = None
    """Which section of dim 0 it is, where it is not all of the one tensor: of q, k and v, or of gate and up."""


@value_class
class TrainerNames:
    """How a trainer names the tensors of some families."""

    title: str
    families: frozenset[str]
    arrays: Mapping[str, TrainerArray]
    """By the trainer's name."""


def _build_arrays(
    ends: Mapping[str, str], module: str, layer: str, parts: Mapping[str, str]
) -> dict[str, TrainerArray]:
    """Build arrays that are one tensor each: those outside of layers, and by part of a name those of a layer."""
    whole = {theirs: TrainerArray((ours,)) for theirs, ours in ends.items()}
    inside = {f"{module}{theirs}": TrainerArray((f"{layer}{ours}",)) for theirs, ours in parts.items()}
    return whole | inside


_LAYER_PREFIX: Final = "model.layers.{layer}."
_TUNE_LAYER: Final = "layers.{layer}."
_TUNE_ENDS: Final = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_TUNE_COMMON: Final = {
    "attn.v_proj.weight": "self_attn.v_proj.weight",
    "attn.output_proj.weight": "self_attn.o_proj.weight",
    "mlp.w1.weight": "mlp.gate_proj.weight",
    "mlp.w2.weight": "mlp.down_proj.weight",
    "mlp.w3.weight": "mlp.up_proj.weight",
    "sa_norm.scale": "input_layernorm.weight",
}
_TUNE_NORM: Final = {"mlp_norm.scale": "post_attention_layernorm.weight"}
_TUNE_QWEN: Final = {
    **{f"attn.{part}_proj.weight": f"self_attn.{part}_proj.weight" for part in "qk"},
    **{f"attn.{part}_proj.bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    **{f"attn.{part}_norm.scale": f"self_attn.{part}_norm.weight" for part in "qk"},
}
_TUNE_PAIRED: Final = {
    f"{_TUNE_LAYER}attn.{part}_proj.weight": TrainerArray((f"{_LAYER_PREFIX}self_attn.{part}_proj.weight",), "paired")
    for part in "qk"
}
_TUNE_GEMMA2: Final = {
    "sa_scale.scale": "post_attention_layernorm.weight",
    "mlp_norm.scale": "pre_feedforward_layernorm.weight",
    "mlp_scale.scale": "post_feedforward_layernorm.weight",
}
_TUNE_PHI3: Final = {
    "attn.output_proj.weight": "self_attn.o_proj.weight",
    "mlp.w2.weight": "mlp.down_proj.weight",
    "sa_norm.scale": "input_layernorm.weight",
    **_TUNE_NORM,
}
_OLMO_ENDS: Final = {
    "transformer.wte.weight": "model.embed_tokens.weight",
    "transformer.ln_f.weight": "model.norm.weight",
    "transformer.ff_out.weight": "lm_head.weight",
}
_OLMO_LAYER: Final = "transformer.blocks.{layer}."
_OLMO_PARTS: Final = {
    "attn_out.weight": "self_attn.o_proj.weight",
    "ff_out.weight": "mlp.down_proj.weight",
    "q_norm.weight": "self_attn.q_norm.weight",
    "k_norm.weight": "self_attn.k_norm.weight",
    "attn_norm.weight": "post_attention_layernorm.weight",
    "ff_norm.weight": "post_feedforward_layernorm.weight",
}
_OLMO_JOINED: Final = {
    f"{_OLMO_LAYER}att_proj.weight": TrainerArray(
        tuple(f"{_LAYER_PREFIX}self_attn.{part}_proj.weight" for part in "qkv")
    ),
    f"{_OLMO_LAYER}ff_proj.weight": TrainerArray(
        tuple(f"{_LAYER_PREFIX}mlp.{part}_proj.weight" for part in ("up", "gate"))
    ),
}
_CORE_ENDS: Final = {
    "embeddings.weight": "model.embed_tokens.weight",
    "lm_head.norm.weight": "model.norm.weight",
    "lm_head.w_out.weight": "lm_head.weight",
}
_CORE_LAYER: Final = "blocks.{layer}."
_CORE_PARTS: Final = {
    **{f"attention.w_{part}.weight": f"self_attn.{part}_proj.weight" for part in "qkv"},
    "attention.w_out.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
_CORE_BEFORE: Final = {
    "attention_norm.weight": "input_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
}
"""Norms of blocks that have them in front of their two parts; OLMo 2 has them behind."""
_CORE_BEHIND: Final = {
    "attention_norm.weight": "post_attention_layernorm.weight",
    "feed_forward_norm.weight": "post_feedforward_layernorm.weight",
}

TRAINERS: Final = (
    TrainerNames(
        "torchtune",
        frozenset({"llama", "mistral", "gemma"}),
        _build_arrays(_TUNE_ENDS, _TUNE_LAYER, _LAYER_PREFIX, {**_TUNE_COMMON, **_TUNE_NORM}) | _TUNE_PAIRED,
    ),
    TrainerNames(
        "torchtune",
        frozenset({"qwen2", "qwen3"}),
        _build_arrays(_TUNE_ENDS, _TUNE_LAYER, _LAYER_PREFIX, {**_TUNE_COMMON, **_TUNE_NORM, **_TUNE_QWEN}),
    ),
    TrainerNames(
        "torchtune",
        frozenset({"gemma2"}),
        _build_arrays(
            {**_TUNE_ENDS, "norm.rms_norm.scale": "model.norm.weight"},
            _TUNE_LAYER,
            _LAYER_PREFIX,
            {**_TUNE_COMMON, **_TUNE_GEMMA2},
        )
        | _TUNE_PAIRED,
    ),
    TrainerNames(
        "torchtune",
        frozenset({"phi3"}),
        _build_arrays(_TUNE_ENDS, _TUNE_LAYER, _LAYER_PREFIX, _TUNE_PHI3)
        | {
            f"{_TUNE_LAYER}attn.{part}_proj.weight": TrainerArray(
                (f"{_LAYER_PREFIX}self_attn.qkv_proj.weight",), section=number
            )
            for number, part in enumerate("qkv")
        }
        | {
            f"{_TUNE_LAYER}mlp.{part}.weight": TrainerArray(
                (f"{_LAYER_PREFIX}mlp.gate_up_proj.weight",), section=number
            )
            for number, part in enumerate(("w1", "w3"))
        },
    ),
    TrainerNames(
        "OLMo",
        frozenset({"olmo", "olmo2"}),
        _build_arrays(_OLMO_ENDS, _OLMO_LAYER, _LAYER_PREFIX, _OLMO_PARTS) | _OLMO_JOINED,
    ),
    TrainerNames(
        "OLMo-core",
        frozenset({"olmo2", "olmo3"}),
        _build_arrays(_CORE_ENDS, _CORE_LAYER, _LAYER_PREFIX, {**_CORE_PARTS, **_CORE_BEHIND}),
    ),
    TrainerNames(
        "OLMo-core",
        frozenset({"llama", "qwen3"}),
        _build_arrays(_CORE_ENDS, _CORE_LAYER, _LAYER_PREFIX, {**_CORE_PARTS, **_CORE_BEFORE}),
    ),
)
"""Trainers whose arrays are tensors of transformers under other names, joined, or in another order of rows."""
