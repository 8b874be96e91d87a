"""Llama 1 to 3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.decoder import DECODER, decoder_classes, decoder_facts
from shardctl.models.family import Family

if TYPE_CHECKING:
    from shardctl.models.config import Config
    from shardctl.models.family import Facts


def _facts(config: Config) -> Facts:
    bias = config.switch("attention_bias", default=False)
    return decoder_facts(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.switch("mlp_bias", default=False))


LLAMA: Final = Family(
    name="llama",
    rows=DECODER,
    facts=_facts,
    classes=decoder_classes("Llama", question="transformer"),
    prefixes=("model", "transformer"),
    renamed={"LLaMAForCausalLM": "LlamaForCausalLM"},
)
