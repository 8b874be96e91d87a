"""Names of the Hub of Ling 3.0 and OLMo-Hybrid, which transformers calls otherwise, and Ling's layer that predicts."""

from __future__ import annotations

import pytest
from model_oracle import fixture, stored

from shardctl.models import describe_model
from shardctl.models.names.naming import bind_manifest

LAYER = "model.layers.1"
NEXT = "model.layers.4"


@pytest.mark.parametrize(
    ("name", "hub", "meant"),
    [
        ("bailing_hybrid", "model.word_embeddings.weight", "model.embed_tokens.weight"),
        ("bailing_hybrid", "model.layers.0.attention.A_log", "model.layers.0.self_attn.A_log"),
        ("bailing_hybrid", "model.layers.0.attention.f_proj.weight", "model.layers.0.self_attn.f_proj.weight"),
        ("bailing_hybrid", "model.layers.0.attention.k_conv1d.weight", "model.layers.0.self_attn.k_conv1d.weight"),
        ("bailing_hybrid", f"{LAYER}.attention.dense.weight", f"{LAYER}.self_attn.o_proj.weight"),
        ("bailing_hybrid", f"{LAYER}.mlp.gate.expert_bias", f"{LAYER}.mlp.gate.e_score_correction_bias"),
        ("bailing_hybrid", f"{NEXT}.attention.g_proj.weight", f"{NEXT}.self_attn.g_proj.weight"),
        ("bailing_hybrid", f"{NEXT}.mlp.gate.expert_bias", f"{NEXT}.mlp.gate.e_score_correction_bias"),
        ("olmo_hybrid", f"{LAYER}.attention_layer_norm.weight", f"{LAYER}.input_layernorm.weight"),
        ("olmo_hybrid", f"{LAYER}.feedforward_layer_norm.weight", f"{LAYER}.post_attention_layernorm.weight"),
        ("olmo_hybrid", f"{LAYER}.linear_attn.v_conv1d.weight", f"{LAYER}.linear_attn.v_conv1d.weight"),
    ],
)
def test_names_of_the_hub_are_known(name, hub, meant):
    """transformers' `conversion_mapping.py`; of the layer that predicts Megatron-Bridge's mapping."""
    model = describe_model(fixture(name))
    assert [*bind_manifest(model, stored([(hub, model.tensors[meant].shape)]), partial=True).tensors] == [meant]
    assert model.tensors[meant].optional == meant.startswith(NEXT)


def test_a_small_ling_compresses_queries_and_goes_by_the_hubs_class():
    """As Ling-3.0-Tiny does; transformers 5.23 has no such matrices."""
    config = fixture("bailing_hybrid", architectures=["BailingMoeV3ForCausalLM"], q_lora_rank=12)
    model = describe_model(config)
    assert model.architecture == "BailingHybridForCausalLM"
    assert model.tensors[f"{LAYER}.self_attn.q_b_proj.weight"].shape == (48, 12)
    assert f"{LAYER}.self_attn.q_proj.weight" not in model.tensors
