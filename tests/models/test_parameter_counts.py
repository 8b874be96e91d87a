"""Models whose number of parameters is published have it here too, from their config alone."""

from __future__ import annotations

import pytest

from shardctl.models import describe

PUBLISHED = {
    "phi-2": (
        {
            "architectures": ["PhiForCausalLM"],
            "vocab_size": 51200,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        2_779_683_840,
    ),
    "Phi-3-mini-4k-instruct": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
        3_821_079_552,
    ),
    "phi-4": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "vocab_size": 100352,
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
        },
        14_659_507_200,
    ),
    "starcoder2-3b": (
        {
            "architectures": ["Starcoder2ForCausalLM"],
            "vocab_size": 49152,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
        },
        3_030_371_328,
    ),
    "stablelm-3b-4e1t": (
        {
            "architectures": ["StableLmForCausalLM"],
            "vocab_size": 50304,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
        2_795_443_200,
    ),
    "c4ai-command-r-v01": (
        {
            "architectures": ["CohereForCausalLM"],
            "vocab_size": 256000,
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
        },
        34_980_831_232,
    ),
    "glm-4-9b-chat-hf": (
        {
            "architectures": ["GlmForCausalLM"],
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "attention_bias": True,
        },
        9_399_951_360,
    ),
    "OLMo-2-1124-7B": (
        {
            "architectures": ["Olmo2ForCausalLM"],
            "vocab_size": 100352,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        7_298_617_344,
    ),
}
"""Configs with the keys that decide; the numbers are those of the Hub's pages or of the papers."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_number_of_parameters(name):
    config, parameters = PUBLISHED[name]
    assert describe(config).parameters == parameters
