"""What cannot be drawn for a model is a refusal with its reason, and no crash."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

from shardctl.base.errors import UnsupportedError
from shardctl.running.forward.inputs import build_inputs


def test_pictures_have_the_size_that_the_encoder_of_a_captioner_takes():
    vit = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
    )
    gpt2 = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=32)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vit, gpt2)
    config.decoder_start_token_id = config.pad_token_id = 0
    inputs = build_inputs(transformers.VisionEncoderDecoderModel(config=config), "cpu")
    assert inputs["pixel_values"].shape == (2, 3, 8, 8)
    assert inputs["decoder_input_ids"].max() < 50


class SeveralTexts:
    def get_text_config(self):
        raise ValueError("Multiple valid text configs were found")


class NoPicture(SimpleNamespace):
    pass


@pytest.mark.parametrize(
    ("config", "main", "said"),
    [
        (SeveralTexts(), "input_ids", "SeveralTexts has several text models"),
        (NoPicture(vocab_size=9), "pixel_values", "NoPicture has no image_size"),
    ],
)
def test_what_cannot_be_drawn_is_refused(config, main, said):
    class Model(torch.nn.Module):
        main_input_name = main

        def forward(self, values):
            return values

    model = Model()
    model.config = config
    with pytest.raises(UnsupportedError, match=said):
        build_inputs(model, "cpu")
