"""Qwen-Omni whole: what thinks is cut by its table, and what speaks, which is much like it, is whole and comes back."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import assert_same, stored

from shardctl.api import Mesh, ReshardOptions, VerifyOptions, digest, reshard, verify

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
AUDIO = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 16,
    "output_dim": 32,
    "max_source_positions": 20,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
}
SOUNDS = {**TEXT, "num_hidden_layers": 1, "num_key_value_heads": 4, "codebook_size": 16, "num_quantizers": 3}
WAVES = {
    "dit_config": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 8,
        "emb_dim": 16,
        "mel_dim": 8,
        "num_embeds": 20,
        "enc_emb_dim": 8,
        "enc_dim": 8,
        "enc_attention_channels": 4,
        "enc_channels": [8, 8, 8, 8, 24],
        "look_ahead_layers": [0],
        "look_backward_layers": [0],
    },
    "bigvgan_config": {"mel_dim": 8, "upsample_initial_channel": 64},
}
CONFIGS = {
    "Qwen3OmniMoe": {
        "thinker_config": {
            "text_config": {**TEXT, **EXPERTS, **ROPE},
            "audio_config": {**AUDIO, "downsample_hidden_size": 8},
            "vision_config": {**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        # Sizes of the thinker, so that names alone tell which is which; transformers 5.23 sets some keys nowhere.
        "talker_config": {
            "text_config": {**TEXT, **EXPERTS, **ROPE, "shared_expert_intermediate_size": 16},
            "code_predictor_config": {**TEXT, "num_code_groups": 3, "layer_types": ["full_attention"] * 2},
            "num_code_groups": 3,
            "thinker_hidden_size": 32,
            "spatial_merge_size": 2,
        },
        "code2wav_config": {**SOUNDS, "decoder_dim": 48, "upsample_rates": [2, 2], "upsampling_ratios": [2]},
    },
    "Qwen2_5Omni": {
        "thinker_config": {
            "text_config": {**TEXT, **ROPE},
            "audio_config": AUDIO,
            "vision_config": {**VISION, "fullatt_block_indexes": [0]},
        },
        "talker_config": {**TEXT, **ROPE, "embedding_size": 32, "num_hidden_layers": 3},
        "token2wav_config": WAVES,
    },
}


@pytest.fixture(scope="module", params=CONFIGS)
def omni(request, tmp_path_factory):
    """Where transformers saved a model, all of whose weights are random, and what thinks in it."""
    kind = getattr(transformers, f"{request.param}ForConditionalGeneration")
    torch.manual_seed(3)
    model = kind(kind.config_class(**CONFIGS[request.param], enable_audio_output=True))
    assert {"thinker", "talker"} <= {name.split(".")[0] for name in model.state_dict()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    folder = tmp_path_factory.mktemp(request.param) / "whole"
    model.save_pretrained(folder)
    return folder, model.thinker.eval()


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(pp=2), Mesh.of(fsdp=2), Mesh.of(tp=2, ep=2)], ids=str)
def test_it_comes_back_whole(omni, tmp_path, mesh):
    whole, _ = omni
    if mesh.ep > 1 and "Qwen3" not in str(whole):
        pytest.skip("it has no experts")
    done = reshard(whole, tmp_path / "ranks", ReshardOptions(mesh=mesh))
    if mesh.degree("tp") > 1:
        assert any("inside, thinker.model.**" in line and "talker.**" in line for line in done.warnings)
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=whole)).ok
    back = tmp_path / "back"
    reshard(tmp_path / "ranks", back, ReshardOptions(to="hf"))
    assert_same(stored(back), stored(whole))
    assert digest(back).digest == digest(whole).digest


def test_what_thinks_of_texts_is_a_model_by_itself(omni, tmp_path):
    whole, thinker = omni
    reshard(whole, tmp_path / "text", ReshardOptions(only="text"))
    alone, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    tokens = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(alone.eval()(input_ids=tokens).logits, thinker(input_ids=tokens).logits)
