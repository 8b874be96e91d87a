"""What the tests of quantized checkpoints share: tiny ones, each made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from codes import CODECS, LLAMA, encoded, plain_state, write
from compressing import ACTIVATIONS, WEIGHTS, fill

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def quantised(tmp_path_factory) -> Callable[[str], Path]:
    """Gives a Llama in the form of a codec; it is shared, so nobody may change it."""
    made: dict[str, Path] = {}

    def give(name: str) -> Path:
        if name not in made:
            codec = CODECS[name]
            config = {**LLAMA, "quantization_config": codec.settings}
            made[name] = write(tmp_path_factory.mktemp(name) / "source", config, encoded(codec, plain_state(LLAMA)))
        return made[name]

    return give


@pytest.fixture(scope="session")
def compressed(tmp_path_factory):
    """Gives the directory that compressed-tensors and transformers wrote, and the scheme."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    made = {}

    def give(name):
        if name not in made:
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).bfloat16()
            model.load_state_dict(plain_state(LLAMA))
            group = {"targets": ["Linear"], "weights": WEIGHTS[name], "input_activations": ACTIVATIONS.get(name)}
            config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
            apply_quantization_config(model, config)
            fill(model)
            compressor = ModelCompressor.from_pretrained_model(model)
            compressor.compress_model(model)
            path = tmp_path_factory.mktemp(name) / "source"
            model.save_pretrained(path)
            compressor.update_config(path)
            scheme = model.model.layers[0].mlp.up_proj.quantization_scheme
            made[name] = path, scheme
        return made[name]

    return give
