"""Says of a family's layers what rows cannot show: activation functions, dropout, windows, kinds of norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from shardctl.base.errors import SourceError
from shardctl.base.value import settings_class, value_class

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.windows import WindowRule

NormKind = Literal["rms", "rms16", "rms32", "layer", "layer32", "bare32"]
"""RMS norm; RMS norm that multiplies its input before it is cast (T5); RMS norm that multiplies its weight in fp32
(Gemma); `nn.LayerNorm`; LayerNorm that is written out in fp32 (Cohere); a norm without a weight that computes in fp32
(OLMo 1, Llama 4's of queries and keys)."""
ACTIVATION_STEPS: Final[Mapping[str, float]] = {
    "gelu_new": 3,
    "gelu_fast": 3,
    "quick_gelu": 1,
    "gated-gelu": 3,
    "xielu": 3.5,
}
"""By the activation's name: how many intermediate results transformers keeps of it, where it is not one kernel
(`activations.py`). A half is a choice of one byte; that of xIELU is without the package of that name."""
_DISABLED_SETTING: Final = ("", 0.0)


@value_class
class FurtherTensor:
    """Tensors that training keeps of a family's layers in transformers, besides what it keeps of all families'."""

    name: str
    """What they are, in words."""
    size: str = "tokens"
    """What their elements are counted by, in the words of estimates (`estimate.sizes.Size`), times those of `dims`."""
    dims: str = ""
    """Logical dims of the family's table."""
    width: float | None = None
    """Bytes of an element; None for those of the type that computes."""
    when: str = ""
    """Conditions of the table that hold for the layers that keep them."""
    given: tuple[str, ...] = ()
    """What holds of the computation, in the words of estimates (`estimate.kept_tensors.Flag`)."""


@settings_class
class LayerFeatures:
    """What the layers of a family compute besides their rows.

    A pair is a key of the config and what the config class assumes where a config is silent; an empty key is in none.
    """

    activation: tuple[str, str]
    """The activation function of the MLP, by the name that transformers has for it (`activations.py`)."""
    norm: NormKind | None = None
    """The kind of those norms that have no bias; those with one are `nn.LayerNorm`, and need not be spoken of."""
    dropout: tuple[str, float] = _DISABLED_SETTING
    """The share of the outputs of attention and MLP that is dropped in training."""
    attention_dropout: tuple[str, float] = ("attention_dropout", 0.0)
    """The share of attention's scores that is dropped in training."""
    window: WindowRule | None = None
    """Which layers attend to a window of tokens only; None for a family without windows."""
    experts_per_token: int | None = None
    """The experts that each token goes to where a config is silent; None if a config must say it."""
    narrow_experts: bool = False
    """Whether the weights of the experts chosen are cast to the type of the activations; else they stay fp32."""
    score_cap: tuple[str, float] = _DISABLED_SETTING
    """The bound of attention's scores, by a hyperbolic tangent; none where it is 0 or null."""
    logit_cap: tuple[str, float] = _DISABLED_SETTING
    """The bound of the logits."""
    position_biases: bool = False
    """Whether scores get learned biases, which fused attention must be given as a tensor (T5)."""
    alone: bool = False
    """Whether a layer may be an MLP or experts and nothing else (Nemotron-H)."""
    fp32_sums: tuple[str, bool] = ("", False)
    """Whether what layers add to is fp32 whatever computes (Mamba)."""
    inner_dropout: tuple[str, float] = _DISABLED_SETTING
    """The share of the activation function's result that is dropped in training."""
    undropped: Literal["", "attention", "mlp"] = ""
    """Whose output is not dropped though the other's is; empty where both are or neither."""
    side_by_side: tuple[str, bool] = ("", False)
    """Whether attention and MLP read the same sum (GPT-NeoX)."""
    narrow_softmax: bool = False
    """Whether eager attention makes scores probabilities in the type that computes; else it does so in fp32."""
    fp32_scores: bool = False
    """Whether eager attention multiplies fp32 copies of queries and keys (GPT-J)."""
    shifted_scores: bool = False
    """Whether eager attention subtracts the largest score of each row itself (gpt-oss)."""
    copied_keys: tuple[str, bool] = ("", False)
    """Whether even fused attention gets keys and values for each query head (Falcon)."""
    wide_router: bool = False
    """Whether routers multiply an fp32 copy of what they read (DeepSeek)."""
    rotated_product: bool = False
    """Whether queries, keys and values are parts of one product, of which only the rotated ones are copied: values
    then keep all of it (Phi-3)."""
    joined_queries: bool = False
    """Whether queries are joined of a rotated and another part, and so lie by heads, as does what fused attention makes
    of them; the projection behind it has a copy."""
    expert_steps: int = 0
    """Results that are kept within the activation function of experts, besides its input and output (gpt-oss)."""
    cast_experts: bool = False
    """Whether autocast casts what experts multiply: products of one expert each, where others group them."""
    every_expert: bool = False
    """Whether transformers' experts compute all tokens, those not chosen as zeros (Llama 4)."""
    unfused: bool = False
    """Whether transformers has eager attention only."""
    powered_norms: bool = False
    """Whether RMS norms take a power of the mean square, which keeps one more number of each row (Gemma 4)."""
    masked: bool = False
    """Whether attention gets a mask as a tensor even where every token sees all before."""
    further: tuple[FurtherTensor, ...] = ()
    """What its layers keep besides."""
    unmodelled: str = ""
    """What its layers compute that estimates of training do not know of; empty for nothing."""
    unmodelled_when: tuple[str, ...] = ()
    """Conditions of the table, of which any makes a model one with `unmodelled`; empty where every model is."""


@value_class
class LayerStyle:
    """What all layers of one model compute besides their matrices."""

    norm: NormKind
    """The kind of the norms of whole tokens."""
    dropout: bool = False
    """Whether the outputs of attention and MLP are partly dropped in training."""
    attention_dropout: bool = False
    """Whether attention's scores are partly dropped in training."""
    activation: str = ""
    """The activation function's name; empty for one that is one kernel."""
    capped_scores: bool = False
    """Whether attention's scores are bounded by a hyperbolic tangent."""
    capped_logits: bool = False
    """Whether the logits are."""
    position_biases: bool = False
    """Whether scores get learned biases."""
    inner_dropout: bool = False
    """Whether the activation function's result is partly dropped in training."""
    undropped: Literal["", "attention", "mlp"] = ""
    """Whose output is not dropped though the other's is."""
    side_by_side: bool = False
    """Whether attention and MLP read the same sum."""
    narrow_softmax: bool = False
    """Whether eager attention makes scores probabilities in the type that computes."""
    fp32_scores: bool = False
    """Whether eager attention multiplies fp32 copies of queries and keys."""
    shifted_scores: bool = False
    """Whether eager attention subtracts the largest score of each row itself."""
    copied_keys: bool = False
    """Whether even fused attention gets keys and values for each query head."""
    wide_router: bool = False
    """Whether routers multiply an fp32 copy of what they read."""
    rotated_product: bool = False
    """Whether values keep the whole product of which queries and keys are copied."""
    joined_queries: bool = False
    """Whether queries lie by heads, as does what fused attention makes of them."""
    expert_steps: int = 0
    """Results that are kept within the activation function of experts, besides its input and output."""
    cast_experts: bool = False
    every_expert: bool = False
    """Whether transformers' experts compute all tokens."""
    unfused: bool = False
    """Whether transformers has eager attention only."""
    powered_norms: bool = False
    """Whether norms keep one more number of each row."""
    masked: bool = False
    """Whether attention gets a mask as a tensor even where every token sees all before."""
    unmodelled: str = ""
    """What layers compute that estimates of training do not know of."""

    @property
    def steps(self) -> float:
        """Results that transformers keeps within the activation function, besides its input and output."""
        return ACTIVATION_STEPS.get(self.activation, 0)


def read_style(traits: LayerFeatures, norm: NormKind, config: ModelConfig) -> LayerStyle:
    """Read the style of a model with norms of the kind `norm`.

    Raises SourceError for a value that is not what it should be.

    >>> from shardctl.models.tables.config import ModelConfig
    >>> traits = LayerFeatures(activation=("hidden_act", "silu"), dropout=("resid_pdrop", 0.1))
    >>> read_style(traits, "rms", ModelConfig({"hidden_act": "gelu_new"}))
    LayerStyle(norm='rms', dropout=True, attention_dropout=False, activation='gelu_new', ...)
    """
    key, usual = traits.activation
    return LayerStyle(
        norm=norm,
        dropout=_is_positive(config, *traits.dropout),
        attention_dropout=_is_positive(config, *traits.attention_dropout),
        activation=config.text(key, usual),
        capped_scores=_is_positive(config, *traits.score_cap),
        capped_logits=_is_positive(config, *traits.logit_cap),
        position_biases=traits.position_biases,
        inner_dropout=_is_positive(config, *traits.inner_dropout),
        undropped=traits.undropped,
        side_by_side=config.read_flag(traits.side_by_side[0], default=traits.side_by_side[1]),
        narrow_softmax=traits.narrow_softmax,
        fp32_scores=traits.fp32_scores,
        shifted_scores=traits.shifted_scores,
        copied_keys=config.read_flag(traits.copied_keys[0], default=traits.copied_keys[1]),
        wide_router=traits.wide_router,
        rotated_product=traits.rotated_product,
        joined_queries=traits.joined_queries,
        expert_steps=traits.expert_steps,
        cast_experts=traits.cast_experts,
        every_expert=traits.every_expert,
        unfused=traits.unfused,
        powered_norms=traits.powered_norms,
        masked=traits.masked,
        unmodelled=traits.unmodelled,
    )


def _is_positive(config: ModelConfig, key: str, usual: float) -> bool:
    """Return whether the number of a key is above zero.

    Null is zero, and `usual` is that of a config without the key.
    """
    number = config.values.get(key, usual)
    if number is None:
        return False
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise SourceError(f"config.json has {key} = {number!r} where a number is expected")
    return number > 0
