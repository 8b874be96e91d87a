"""Every switch of a config that changes names or shapes does so as in transformers, and silence means the same."""

from __future__ import annotations

import pytest
from model_oracle import fixture, on_meta, state

from shardctl.base.errors import UnsupportedError
from shardctl.models import describe_model

EYES = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
"""A vision model whose config is silent about the rest."""


def described(config):
    """Names and shapes of the state dict that a config describes."""
    return describe_model(config).state()


@pytest.mark.parametrize(
    ("name", "architecture", "changes"),
    [
        ("falcon", "FalconForCausalLM", {"num_ln_in_parallel_attn": 1}),
        ("falcon", "FalconForCausalLM", {"new_decoder_architecture": False, "num_kv_heads": None}),
        ("falcon", "FalconForCausalLM", {"num_kv_heads": None, "ffn_hidden_size": 40}),
        ("falcon-rw", "FalconForCausalLM", {"parallel_attn": True}),
        ("gpt_neox", "GPTNeoXForCausalLM", {"attention_bias": False}),
        ("gptj", "GPTJForQuestionAnswering", {"n_inner": 40}),
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
        ("llava", "LlavaForConditionalGeneration", {"text_config": {"model_type": "llama", "vocab_size": 32064}}),
        ("llava", "LlavaForConditionalGeneration", {"text_config": {"model_type": "qwen2", "num_hidden_layers": 2}}),
        ("llava", "LlavaForConditionalGeneration", {"text_config": {"model_type": "gemma", "num_hidden_layers": 2}}),
        ("llava", "LlavaForConditionalGeneration", {"vision_feature_layer": [-1, -2], "vision_config": EYES}),
        ("llava", "LlavaForConditionalGeneration", {"multimodal_projector_bias": False}),
        ("llava_next", "LlavaNextForConditionalGeneration", {"text_config": {"model_type": "mistral"}}),
        ("mistral3", "Mistral3ForConditionalGeneration", {"text_config": {"model_type": "ministral3"}}),
        ("mistral3", "Mistral3ForConditionalGeneration", {"vision_config": {"model_type": "pixtral"}}),
        ("mistral3", "Mistral3ForConditionalGeneration", {"multimodal_projector_bias": True, "spatial_merge_size": 4}),
        ("paligemma", "PaliGemmaForConditionalGeneration", {"vision_config": {"model_type": "siglip_vision_model"}}),
        ("paligemma", "PaliGemmaForConditionalGeneration", {"text_config": {"model_type": "gemma2"}}),
        ("gemma3", "Gemma3ForConditionalGeneration", {"text_config": {"model_type": "gemma3_text"}}),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration", {"text_config": {"num_hidden_layers": 1}}),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration", {"vision_config": {"model_type": "qwen2_vl"}}),
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", {"vision_config": {"model_type": "qwen2_5_vl"}}),
        ("clip", "CLIPModel", {"text_config": {}, "vision_config": {}}),
        ("siglip", "SiglipModel", {"text_config": {"projection_size": 48}, "vision_config": {}}),
        ("siglip", "SiglipModel", {"vision_config": {"vision_use_head": False, "image_size": 64}}),
        ("bart", "BartForConditionalGeneration", {"tie_word_embeddings": False, "encoder_ffn_dim": 40}),
        ("whisper", "WhisperForConditionalGeneration", {"tie_word_embeddings": False, "decoder_attention_heads": 2}),
        ("vit", "ViTForImageClassification", {"qkv_bias": False, "image_size": 32, "num_labels": 7}),
        ("vit", "ViTModel", {"pooler_output_size": 12}),
        ("distilbert", "DistilBertForMaskedLM", {"tie_word_embeddings": False}),
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
    if "num_key_value_heads" in absent:
        config["num_attention_heads"] = 8  # as many as Jamba's class assumes for keys and values
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


@pytest.mark.parametrize("own", [None, True, False])
@pytest.mark.parametrize("inner", [None, True, False])
@pytest.mark.parametrize("name", ["llava", "llava_next", "gemma3", "paligemma", "qwen2_vl"])
def test_a_model_that_sees_is_tied_where_transformers_ties_it(name, own, inner):
    config = fixture(name)
    config["text_config"] |= {} if inner is None else {"tie_word_embeddings": inner}
    config |= {} if own is None else {"tie_word_embeddings": own}
    ties = {tie: t.name for t in describe_model(config).own() for tie in t.ties}
    if (own, inner) == (None, False) and name in ("gemma3", "paligemma"):
        assert ties == {}  # transformers looks at the outer config only, ties, and un-ties when the two differ
    elif (own, inner) == (None, True) and name != "llava":
        assert ties  # the same the other way round
    else:
        assert ties == on_meta(config).all_tied_weights_keys


@pytest.mark.parametrize("kind", ["text_config", "vision_config"])
def test_a_text_or_vision_model_that_is_not_known_is_named(kind):
    with pytest.raises(UnsupportedError, match=r"of type swin.*, a combination that shardctl does not know"):
        describe_model(fixture("llava", **{kind: {**fixture("llava")[kind], "model_type": "swin"}}))


def test_a_vision_model_is_whole_on_every_tp_rank_of_the_first_stage():
    for name in ("llava", "llava-pixtral", "mistral3", "paligemma", "gemma3", "qwen2_vl", "qwen2_5_vl"):
        model = describe_model(fixture(name))
        seen = [t for t in model.own() if ".language_model." not in t.name and t.name != "lm_head.weight"]
        assert len(seen) > 10
        for tensor in seen:
            assert tensor.spec.where == (("first", 0),), tensor.name
            assert {cut.axis for cuts in tensor.spec.cuts for cut in cuts} <= {"fsdp"}, tensor.name
        assert model.layers == 2


def test_the_vision_models_layers_follow_the_text_models_in_clip():
    model = describe_model(fixture("clip"))
    where = {name: tensor.spec.where for name, tensor in model.tensors.items()}
    assert model.layers == 4
    assert where["text_model.encoder.layers.1.layer_norm1.weight"] == (("layer", 1),)
    assert where["text_model.final_layer_norm.weight"] == (("layer", 1),)
    assert where["vision_model.embeddings.class_embedding"] == (("layer", 2),)
    assert where["vision_model.encoder.layers.1.layer_norm1.weight"] == (("layer", 3),)
    assert where["visual_projection.weight"] == (("last", 0),)


@pytest.mark.parametrize("name", ["deberta", "deberta-v2"])
@pytest.mark.parametrize("part", ["ForMaskedLM", "ForTokenClassification"])
def test_the_last_stage_has_the_embedding_that_debertas_present_head_computes_with(name, part):
    stem = "Deberta" if name == "deberta" else "DebertaV2"
    model = describe_model(fixture(name, architectures=[f"{stem}{part}"], legacy=False))
    stages = [("first", 0), ("last", 0)] if part == "ForMaskedLM" else [("first", 0)]
    assert list(model.tensors["deberta.embeddings.word_embeddings.weight"].spec.where) == stages
