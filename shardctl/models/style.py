"""What a model's layers compute besides their matrices: which norms, which activation, whether they drop anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from shardctl.models.config import Config

if TYPE_CHECKING:
    from collections.abc import Mapping

Norm = Literal["rms", "rms32", "layer"]
"""RMS norm; RMS norm that multiplies its weight in fp32 (Gemma); LayerNorm."""

_LAYER_NORM: Final = frozenset(
    (
        "albert",
        "bart",
        "bert",
        "bloom",
        "camembert",
        "clip",
        "clip_text_model",
        "clip_vision_model",
        "cohere",
        "cohere2",
        "distilbert",
        "electra",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "marian",
        "mbart",
        "mpt",
        "nemotron",
        "olmo",
        "opt",
        "pegasus",
        "persimmon",
        "phi",
        "phimoe",
        "roberta",
        "siglip",
        "stablelm",
        "starcoder2",
        "vit",
        "whisper",
        "xlm-roberta",
    )
)
"""By `model_type`: those with LayerNorm (transformers 5, `models/*/modeling_*.py`); the others have an RMS norm."""
_RMS_IN_FP32: Final = frozenset(
    (
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "qwen3_next",
        "t5gemma",
    )
)
_ONE_NORM: Final = frozenset(
    (
        "cohere",
        "cohere2",
        "falcon",
        "gptj",
        "phi",
    )
)
"""Whose attention and MLP see the output of one norm."""
_FOUR_NORMS: Final = frozenset(
    (
        "gemma2",
        "gemma3",
        "gemma3_text",
        "glm4",
    )
)
"""With a norm after attention and MLP, too."""
_HEAD_NORMS: Final = frozenset(
    (
        "gemma3",
        "gemma3_text",
        "olmo2",
        "olmo3",
        "olmoe",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
    )
)
"""With norms of queries and keys."""
_BIASED: Final = frozenset(("longt5", "mt5", "t5", "udop", "umt5"))
_DROPOUTS: Final = (
    "hidden_dropout_prob",
    "resid_pdrop",
    "residual_dropout",
    "resid_dropout",
    "hidden_dropout",
    "dropout_rate",
    "dropout",
)
"""What configs call the share of a layer's output that is dropped."""
_ATTENTION_DROPOUTS: Final = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout", "dropout_rate")
_DROPS_BY_DEFAULT: Final = frozenset(
    (
        "bart",
        "bert",
        "distilbert",
        "electra",
        "gpt2",
        "mbart",
        "mt5",
        "roberta",
        "t5",
        "xlm-roberta",
    )
)
"""By `model_type`: those that drop a tenth where a config is silent (transformers 5's config classes)."""
_ACTIVATIONS: Final = ("hidden_act", "hidden_activation", "activation_function", "activation", "feed_forward_proj")
_STEPS: Final[Mapping[str, int]] = {"gelu_new": 3, "gelu_fast": 3, "quick_gelu": 2, "gated-gelu": 3}
"""By the activation's name: how many intermediate results transformers keeps of it, where it is not one kernel
(`activations.py`)."""


@dataclass(frozen=True, slots=True)
class Style:
    """What a model's layers compute besides their matrices."""

    norm: Norm = "rms"
    norms: int = 2
    """Of one layer, of whole tokens; without that of cross attention."""
    parallel: bool = False
    """Whether attention and MLP see the same input."""
    head_norms: bool = False
    """Whether queries and keys are normed, too."""
    dropout: bool = False
    """Whether the outputs of attention and MLP are partly dropped in training."""
    attention_dropout: bool = False
    """Whether attention's scores are partly dropped in training."""
    steps: int = 0
    """Results that transformers keeps within the activation function, besides its input and output."""
    capped_scores: bool = False
    """Whether attention's scores are bounded by a hyperbolic tangent."""
    capped_logits: bool = False
    """Whether the logits are."""
    position_biases: bool = False
    """Whether scores get learned biases, which fused attention must be given as a tensor (T5)."""
    query_latent: int = 0
    """Elements of the compressed queries of latent attention; 0 where they are not compressed."""
    key_latent: int = 0
    """Elements of its compressed keys and values, without the rotary part."""


def style(config: Mapping[str, object]) -> Style:
    """The style of the model that a `config.json` describes; raises SourceError where a value is not what it should be.

    >>> style({"model_type": "gpt2"}).norm, style({"model_type": "llama"}).dropout
    ('layer', False)
    """
    text = config.get("text_config")
    values = Config({**config, **text} if isinstance(text, dict) else config)
    kind = values.text("model_type", "")
    norm: Norm = "layer" if kind in _LAYER_NORM else "rms32" if kind in _RMS_IN_FP32 else "rms"
    named = [values.values.get(key) for key in _ACTIVATIONS]
    activation = next((name for name in named if isinstance(name, str)), "gelu_new" if kind == "gpt2" else "")
    return Style(
        norm=norm,
        norms=1 if kind in _ONE_NORM else 4 if kind in _FOUR_NORMS else 2,
        parallel=kind in _ONE_NORM,
        head_norms=kind in _HEAD_NORMS,
        dropout=_drops(values, _DROPOUTS, kind),
        attention_dropout=_drops(values, _ATTENTION_DROPOUTS, kind),
        steps=_STEPS.get(activation, 0),
        capped_scores=bool(values.values.get("attn_logit_softcapping", kind == "gemma2")),
        capped_logits=bool(values.values.get("final_logit_softcapping", kind == "gemma2")),
        position_biases=kind in _BIASED,
        query_latent=values.count("q_lora_rank", 0),
        key_latent=values.count("kv_lora_rank", 0),
    )


def _drops(values: Config, keys: tuple[str, ...], kind: str) -> bool:
    """Whether any of `keys` is a share above zero."""
    found = [value for key in keys if isinstance(value := values.values.get(key), int | float)]
    return any(value > 0 for value in found) if found else kind in _DROPS_BY_DEFAULT
