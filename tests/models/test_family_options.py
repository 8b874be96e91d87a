"""Every switch of a config that changes names or shapes does so as in transformers, and silence means the same."""

from __future__ import annotations

import pytest
from model_oracle import fixture, on_meta, state

from shardctl.errors import UnsupportedError
from shardctl.models import describe


def described(config):
    """Names and shapes of the state dict that a config describes."""
    return {name: t.shape for t in describe(config).own() for name in (t.name, *t.ties)}


@pytest.mark.parametrize(
    ("name", "architecture", "changes"),
    [
        ("falcon", "FalconForCausalLM", {"num_ln_in_parallel_attn": 1}),
        ("falcon", "FalconForCausalLM", {"new_decoder_architecture": False, "num_kv_heads": None}),
        ("falcon", "FalconForCausalLM", {"num_kv_heads": None, "ffn_hidden_size": 40}),
        ("falcon-rw", "FalconForCausalLM", {"parallel_attn": True}),
        ("gpt_neox", "GPTNeoXForCausalLM", {"attention_bias": False}),
        ("gptj", "GPTJForQuestionAnswering", {"num_labels": 3, "n_inner": 40}),
        ("opt", "OPTForCausalLM", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
        ("opt-prenorm", "OPTForCausalLM", {"_remove_final_layer_norm": True}),
        ("stablelm", "StableLmForCausalLM", {"use_parallel_residual": True, "qk_layernorm": False}),
        ("starcoder2", "Starcoder2ForCausalLM", {"use_bias": False}),
        ("olmo", "OlmoForCausalLM", {"attention_bias": True}),
        ("granite", "GraniteForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("cohere", "CohereForCausalLM", {"use_qk_norm": False, "attention_bias": True}),
        ("glm", "GlmForCausalLM", {"attention_bias": False}),
        ("mamba", "MambaForCausalLM", {"use_bias": True, "use_conv_bias": False}),
        ("mamba", "MambaForCausalLM", {"time_step_rank": "auto", "expand": 3}),
        ("mamba2", "Mamba2ForCausalLM", {"use_bias": False, "use_conv_bias": False, "tie_word_embeddings": True}),
        ("mamba2", "Mamba2ForCausalLM", {"n_groups": 1}),
        ("jamba", "JambaForCausalLM", {"mamba_proj_bias": False, "mamba_conv_bias": False, "attn_layer_offset": 0}),
    ],
)
def test_switches_change_what_they_change_in_transformers(name, architecture, changes):
    config = fixture(name, architectures=[architecture], **changes)
    assert described(config) == state(on_meta(config))


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("opt", ("word_embed_proj_dim", "do_layer_norm_before", "tie_word_embeddings")),
        ("gptj", ("tie_word_embeddings",)),
        ("mamba", ("state_size", "expand", "time_step_rank")),
        ("falcon_mamba", ("state_size", "expand", "time_step_rank")),
        ("mamba2", ("state_size",)),
        ("jamba", ("mamba_d_state", "mamba_dt_rank", "attn_layer_period", "attn_layer_offset", "num_key_value_heads")),
    ],
)
def test_a_silent_config_means_what_the_config_class_assumes(name, absent):
    config = {key: value for key, value in fixture(name).items() if key not in absent}
    assert described(config) == state(on_meta(config))


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("gpt2", {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}),
        ("gptj", {"n_positions": "max_position_embeddings", "n_head": "num_attention_heads"}),
        ("bloom", {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "hidden_size": "n_embed"}),
        ("falcon", {"hidden_size": "n_embed"}),
    ],
)
def test_keys_may_have_the_other_names_that_transformers_takes(name, renamed):
    config = {renamed.get(key, key): value for key, value in fixture(name).items()}
    assert described(config) == state(on_meta(config))


def test_a_jamba_with_experts_says_that_it_is_not_known_yet():
    with pytest.raises(UnsupportedError, match="Jamba with 16 experts"):
        describe(fixture("jamba", num_experts=16))
