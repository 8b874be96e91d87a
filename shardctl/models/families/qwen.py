"""Qwen2, with biases on q, k and v, and Qwen3, with norms of q and k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.decoder import DECODER, decoder_classes, decoder_facts
from shardctl.models.family import Family

if TYPE_CHECKING:
    from shardctl.models.config import Config
    from shardctl.models.family import Facts

_HEAD_DIM: Final = 128
"""What `Qwen3Config` assumes where a config is silent."""


def _qwen2(config: Config) -> Facts:
    return decoder_facts(config, qkv_bias=True)


def _qwen3(config: Config) -> Facts:
    bias = config.switch("attention_bias", default=False)
    return decoder_facts(config, head_dim=_HEAD_DIM, qkv_bias=bias, o_bias=bias, qk_norm=True)


QWEN2: Final = Family(
    name="qwen2",
    rows=DECODER,
    facts=_qwen2,
    classes=decoder_classes("Qwen2", question="transformer"),
    prefixes=("model", "transformer"),
)
QWEN3: Final = Family(
    name="qwen3",
    rows=DECODER,
    facts=_qwen3,
    classes=decoder_classes("Qwen3", question="transformer"),
    prefixes=("model", "transformer"),
)
