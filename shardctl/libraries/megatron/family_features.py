"""Says what megatron-core is told of each family, and what of other families it has no layers for.

Checked against megatron-core 0.16 and 0.19 (`transformer/transformer_config.py`, `transformer/attention.py`,
`transformer/mlp.py`): what is refused here is in neither, though Megatron-Bridge may have modules of its own for it.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Final

from shardctl.base.value import settings_class

if TYPE_CHECKING:
    from collections.abc import Mapping


@settings_class
class CoreFeatures:
    """What core's layers are told of a family, and its config class assumes where a config is silent."""

    activation: str = "silu"
    """The activation function, by transformers' name."""
    gated: bool = True
    """Whether the activation of one projection multiplies another; else an MLP has two matrices."""
    part: float | None = None
    """Which part of each head is rotated where a config is silent; None if a config cannot say it: then all of it."""
    theta: float = 10_000.0
    """The base of rotary embeddings where a config is silent."""
    interleaved: bool = False
    """Whether a rotation turns neighbours, not halves of a head."""
    centred: bool = False
    """Whether transformers, too, stores the weights of norms less one."""
    layer_norm: bool = False
    """Whether norms subtract the mean, and have a bias."""
    balanced: bool = False
    """Whether routers have a bias, sigmoids and groups."""
    window: bool = False
    """Whether every layer has the window that a config says."""
    skips_rotation: bool = False
    """Whether some layers have no rotary embeddings."""
    delta: bool = False
    """Whether some layers have gated DeltaNet, and the attention of others has gates."""
    hybrid: bool = False
    """Whether each layer is one of Mamba, attention, an MLP or experts, behind one norm."""
    turning: bool = False
    """Whether experts have biases and columns that take turns, and attention has sinks."""
    assumed: Mapping[str, object] = field(default_factory=dict)
    """What else the config class of a family with latents or balanced routers assumes where a config is silent."""


_DEEPSEEK_V3_DEFAULTS: Final = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
_GLM4_MOE_LITE_DEFAULTS: Final = {
    **_DEEPSEEK_V3_DEFAULTS,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-5,
}
_GLM4_MOE_DEFAULTS: Final = {"num_experts_per_tok": 8, "rms_norm_eps": 1e-5}
_QWEN3_NEXT: Final = CoreFeatures(part=0.25, centred=True, delta=True)
TRAITS: Final = {
    "arcee": CoreFeatures(activation="relu2", gated=False),
    "deepseek_v3": CoreFeatures(balanced=True, assumed=_DEEPSEEK_V3_DEFAULTS),
    "dots1": CoreFeatures(balanced=True, assumed={"norm_topk_prob": False}),
    "ernie4_5": CoreFeatures(interleaved=True, theta=500_000.0),
    "glm4_moe": CoreFeatures(balanced=True, part=0.5, assumed=_GLM4_MOE_DEFAULTS),
    "glm4_moe_lite": CoreFeatures(balanced=True, assumed=_GLM4_MOE_LITE_DEFAULTS),
    "gpt_oss": CoreFeatures(theta=150_000.0, turning=True, assumed={"num_experts_per_tok": 4, "rms_norm_eps": 1e-5}),
    "gpt2": CoreFeatures(activation="gelu_new", gated=False, layer_norm=True),
    "llama": CoreFeatures(),
    "mistral": CoreFeatures(window=True),
    "mixtral": CoreFeatures(window=True, theta=1_000_000.0),
    "nemotron": CoreFeatures(activation="relu2", gated=False, part=0.5, centred=True, layer_norm=True),
    "nemotron_h": CoreFeatures(activation="relu2", gated=False, balanced=True, hybrid=True),
    "phi3": CoreFeatures(window=True, part=1.0),
    "qwen2": CoreFeatures(),
    "qwen2_moe": CoreFeatures(),
    "qwen3": CoreFeatures(),
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_NEXT,
    "qwen3_moe": CoreFeatures(),
    "qwen3_next": _QWEN3_NEXT,
    "seed_oss": CoreFeatures(),
    "smollm3": CoreFeatures(theta=2_000_000.0, skips_rotation=True),
}
"""By family: those whose arrays are known here; others of the same names have other norms, multipliers or biases."""
_POST_NORMS_REASON: Final = (
    "norms between what attention and MLP give and the sum, where its layers have norms before them only"
)
_WHOLE_NORMS: Final = "norms over all heads of queries and keys at once, where its layers have norms of each head"
_LATER_NORMS: Final = "norms of queries and keys behind the rotation, where its layers have them before it"
_GEMMA_REASON: Final = f"{_POST_NORMS_REASON}, and multiplies embeddings"
_FIRST_MAMBA: Final = "layers of Mamba 1, where its layers are of Mamba 2"
_SHORT_CONVOLUTIONS_REASON: Final = "short convolutions in place of attention"
MISSING: Final = {
    "apertus": "the activation xIELU, whose numbers are learned",
    "ernie4_5_moe": "routers that choose by softmaxes and a bias, where its routers have a bias with sigmoids only",
    "exaone4": _POST_NORMS_REASON,
    "falcon_h1": "Mamba and attention side by side in each layer, for which Megatron-Bridge has layers of its own",
    "falcon_mamba": _FIRST_MAMBA,
    "gemma": "embeddings that are multiplied",
    "gemma2": f"{_GEMMA_REASON}; scores and logits are bounded",
    "gemma3": _GEMMA_REASON,
    "gemma3_text": _GEMMA_REASON,
    "granitemoehybrid": "sums of which one part is multiplied (residual_multiplier)",
    "hunyuan_v1_dense": _LATER_NORMS,
    "hunyuan_v1_moe": _LATER_NORMS,
    "jamba": _FIRST_MAMBA,
    "lfm2": _SHORT_CONVOLUTIONS_REASON,
    "lfm2_moe": _SHORT_CONVOLUTIONS_REASON,
    "llama4": "attention in chunks, and queries that are multiplied more the later they stand",
    "llama4_text": "attention in chunks, and queries that are multiplied more the later they stand",
    "mamba": _FIRST_MAMBA,
    "minimax_m2": _WHOLE_NORMS,
    "ministral3": "queries that are multiplied more the later they stand",
    "olmo2": f"{_POST_NORMS_REASON}, and {_WHOLE_NORMS}",
    "olmo3": f"{_POST_NORMS_REASON}, and {_WHOLE_NORMS}",
    "olmoe": _WHOLE_NORMS,
    "zamba2": "attention and an MLP that several layers share, with adapters for each",
}
"""By family: what its models have that core's layers do not."""
