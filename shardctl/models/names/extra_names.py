"""Says which of the tensors that a model's class does not have are reported: not those that transformers ignores.

It ignores `_keys_to_ignore_on_load_unexpected`. Here are those of the classes of each family in transformers 5.24,
which include those of 4.57; a test compares them with the installed version.

>>> [is_ignored("nemotron_h", "NemotronHForCausalLM", name) for name in ("mtp.layers.0.norm.weight", "v_head.weight")]
[True, False]
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.amounts import format_file_size
from shardctl.base.errors import format_first_few
from shardctl.base.value import value_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Tensor

EVERYWHERE: Final = (r"rotary_emb\.inv_freq",)
"""What `PreTrainedModel._adjust_missing_and_unexpected_keys` adds to the patterns of every class."""
MAX_NAMED_TENSORS: Final = 8
"""Tensors that one message names; tables and JSON have more."""
IGNORED_PATTERNS: Final[Mapping[str, tuple[str, ...]]] = {
    "bart": (r"decoder.version", r"encoder.version"),
    "deberta": (r"position_embeddings",),
    "deberta-v2": (r"mask_predictions.*", r"position_embeddings"),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32"), (r"model\.layers\.61.*",)),
    **dict.fromkeys(("deepseek_v4", "minimax_m3_vl", "minimax_m3_vl_text"), (r"(^|\.)mtp\..*",)),
    "ernie4_5_moe": (r"mtp",),
    **dict.fromkeys(("exaone_moe", "nemotron_h"), (r"mtp.*",)),
    "glm4_moe": (r"model\.layers\.46.*", r"model\.layers\.92.*"),
    "glm4_moe_lite": (r"model\.layers\.47.*",),
    "glm5_next": (r"layers\.45\.", r"layers\.\d+\.shared_head\."),
    "glm_moe_dsa": (r"model\.layers\.78.*",),
    "gpt2": (r"attn.bias", r"crossattention.bias"),
    "gpt_neox": (r"attention.bias", r"attention.masked_bias"),
    "gptj": (r"attn.bias", r"attn.masked_bias"),
    **dict.fromkeys(("gte", "nomic_bert"), (r"inv_freq", r"original_inv_freq")),
    "hy_v3": (r"model\.layers\.80.*",),
    "hy_v4": (r"model\.mtp_layers\..*",),
    "longcat_flash": (r"model\.mtp.*",),
    "mimo_v2_flash": (r"^model\.mtp\.",),
    "mistral_large4": (r"mtp_dspark\..*",),
    **dict.fromkeys(
        ("longt5", "mt5", "t5", "umt5"), (r"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
    ),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"), (r"^mtp.*",)),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen4_exp_text"), (r"^model.visual.*", r"^mtp.*")),
}
"""Regular expressions by family, which are searched in names."""
IGNORED_BY_CLASS: Final[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
    ("LongT5EncoderModel", "T5EncoderModel"), ("decoder",)
)
"""Those of classes that other classes of the family need."""


@value_class
class ExtraTensor:
    """A tensor that the model's class does not have."""

    name: str
    """As the source has it."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kept: bool
    """Whether it is, or will be, in the file beside the weights."""


def is_ignored(family: str, architecture: str, name: str) -> bool:
    """Return whether transformers says nothing of a tensor that its class does not have.

    The name may begin with modules of a trainer, which transformers does not have before it.
    """
    patterns = (*EVERYWHERE, *IGNORED_PATTERNS.get(family, ()), *IGNORED_BY_CLASS.get(architecture, ()))
    words = name.split(".")
    return any(re.search(pattern, ".".join(words[n:])) for n in range(len(words)) for pattern in patterns)


def list_reported_extra(model: Model, extra: Iterable[Tensor]) -> list[Tensor]:
    """List those extra tensors that transformers would name when it loads the model."""
    return [tensor for tensor in extra if not is_ignored(model.family, model.architecture, tensor.name)]


def format_extra_tensors(extra: Iterable[Tensor]) -> str:
    """Format the first of some tensors with their sizes."""
    return format_first_few(
        [f"{tensor.name} ({format_file_size(tensor.nbytes)})" for tensor in extra], MAX_NAMED_TENSORS
    )
