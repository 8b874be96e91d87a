"""Configs whose key/value heads do not divide the query heads, which transformers cannot run: none is planned."""

import json

import pytest
import torch
import transformers

from shardctl.base.errors import SourceError
from shardctl.models import describe_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "vocab_size": 16,
}
FALCON = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 16,
    "new_decoder_architecture": True,
}


def runs(config):
    """Whether transformers can build and run the model."""
    try:
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
        model(torch.arange(4)[None])
    except (RuntimeError, ValueError, ZeroDivisionError):
        return False
    return True


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 16])
def test_llama(heads):
    config = LLAMA | {"num_key_value_heads": heads}
    if runs(config):
        describe_model(config)
        return
    with pytest.raises(
        SourceError, match=f"num_key_value_heads = {heads}, which does not divide its 4 attention heads"
    ):
        describe_model(config)


@pytest.mark.parametrize("heads", [3, 8])
def test_falcon(heads):
    config = FALCON | {"num_kv_heads": heads}
    assert not runs(config)
    with pytest.raises(SourceError, match=f"num_kv_heads = {heads}, which does not divide"):
        describe_model(config)


def test_heads_of_no_size():
    with pytest.raises(SourceError, match="64 attention heads and a hidden_size of 32"):
        describe_model(LLAMA | {"num_attention_heads": 64})


@pytest.mark.parametrize("heads", [3, 16])
def test_the_program_says_so(tmp_path, capsys, heads):
    from shardctl.cli.program import run

    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_key_value_heads": heads}))
    for more in (["--tp", "2"], ["--for", "train"], ["--search", "--gpu", "h100-80g", "--gpus", "8"]):
        assert run(["plan", str(tmp_path / "config.json"), *more]) == 4
        assert "does not divide its 4 attention heads" in capsys.readouterr().err
