"""Models whose number of parameters is published have it here too, from their config alone."""

from __future__ import annotations

import pytest

from shardctl.models import describe_model

BART = {"layers": 6, "ffn_dim": 3072, "attention_heads": 12}
WHISPER = {"layers": 4, "ffn_dim": 1536, "attention_heads": 6}
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
    "pythia-6.9b": (
        {
            "architectures": ["GPTNeoXForCausalLM"],
            "vocab_size": 50432,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        6_857_302_016,
    ),
    "gpt-neox-20b": (
        {
            "architectures": ["GPTNeoXForCausalLM"],
            "vocab_size": 50432,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
        },
        20_554_567_680,
    ),
    "gpt-j-6b": (
        {"architectures": ["GPTJForCausalLM"], "vocab_size": 50400, "n_embd": 4096, "n_layer": 28, "n_head": 16},
        6_050_882_784,
    ),
    "bloom": (
        {
            "architectures": ["BloomForCausalLM"],
            "vocab_size": 250880,
            "n_embed": 14336,
            "n_layer": 70,
            "num_attention_heads": 112,
        },
        176_247_271_424,
    ),
    "opt-125m": (
        {
            "architectures": ["OPTForCausalLM"],
            "vocab_size": 50272,
            "hidden_size": 768,
            "ffn_dim": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 768,
        },
        125_239_296,
    ),
    "opt-350m": (
        {
            "architectures": ["OPTForCausalLM"],
            "vocab_size": 50272,
            "hidden_size": 1024,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
        331_196_416,
    ),
    "falcon-7b": (
        {
            "architectures": ["FalconForCausalLM"],
            "vocab_size": 65024,
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "multi_query": True,
        },
        6_921_720_704,
    ),
    "falcon-40b": (
        {
            "architectures": ["FalconForCausalLM"],
            "vocab_size": 65024,
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
        },
        41_303_293_952,
    ),
    "mamba-130m-hf": (
        {"architectures": ["MambaForCausalLM"], "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24},
        129_135_360,
    ),
    "mamba-2.8b-hf": (
        {"architectures": ["MambaForCausalLM"], "vocab_size": 50280, "hidden_size": 2560, "num_hidden_layers": 64},
        2_768_345_600,
    ),
    "falcon-mamba-7b": (
        {
            "architectures": ["FalconMambaForCausalLM"],
            "vocab_size": 65024,
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "tie_word_embeddings": False,
        },
        7_272_665_088,
    ),
    "Mamba-Codestral-7B-v0.1": (
        {
            "architectures": ["Mamba2ForCausalLM"],
            "vocab_size": 32768,
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "num_heads": 128,
            "n_groups": 8,
        },
        7_285_403_648,
    ),
    "clip-vit-base-patch32": (
        {"architectures": ["CLIPModel"], "text_config": {}, "vision_config": {}},
        151_277_313,
    ),
    "llava-1.5-7b-hf": (
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "text_config": {"model_type": "llama", "vocab_size": 32064},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "image_size": 336,
                "patch_size": 14,
            },
        },
        7_063_427_072,
    ),
    "paligemma-3b-pt-224": (
        {
            "architectures": ["PaliGemmaForConditionalGeneration"],
            "projection_dim": 2048,
            "text_config": {
                "model_type": "gemma",
                "hidden_size": 2048,
                "intermediate_size": 16384,
                "num_attention_heads": 8,
                "num_hidden_layers": 18,
                "num_key_value_heads": 1,
                "vocab_size": 257216,
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
        2_923_466_480,
    ),
    "gemma-3-4b-it": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "vocab_size": 262208,
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 1152,
                "image_size": 896,
                "intermediate_size": 4304,
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
        4_300_079_472,
    ),
    "Qwen2-VL-7B-Instruct": (
        {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "in_chans": 3},
        },
        8_291_375_616,
    ),
    "Qwen2.5-VL-7B-Instruct": (
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
        },
        8_292_166_656,
    ),
    "Mistral-Small-3.1-24B-Instruct-2503": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "mistral",
                "vocab_size": 131072,
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "num_hidden_layers": 40,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "patch_size": 14,
            },
        },
        24_011_361_280,
    ),
    "bart-base": (
        {
            "architectures": ["BartModel"],
            "vocab_size": 50265,
            "d_model": 768,
            **{f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in BART.items()},
        },
        139_420_416,
    ),
    "whisper-tiny": (
        {
            "architectures": ["WhisperForConditionalGeneration"],
            "vocab_size": 51865,
            "d_model": 384,
            **{f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in WHISPER.items()},
        },
        37_760_640,
    ),
    "vit-base-patch16-224": (
        {
            "architectures": ["ViTForImageClassification"],
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_labels": 1000,
        },
        86_567_656,
    ),
    "distilbert-base-uncased": (
        {
            "architectures": ["DistilBertModel"],
            "vocab_size": 30522,
            "dim": 768,
            "hidden_dim": 3072,
            "n_layers": 6,
            "n_heads": 12,
        },
        66_362_880,
    ),
}
"""Configs with the keys that decide; the numbers are those of the Hub's pages or of the papers."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_number_of_parameters(name):
    config, parameters = PUBLISHED[name]
    assert describe_model(config).parameters == parameters
