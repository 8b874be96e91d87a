"""What configs say and headers contradict is a warning of `inspect` and `verify`, with what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from shardctl.base.errors import SourceError
from shardctl.models import describe_model
from shardctl.models.tables.predicting import list_predicting_names
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.storage.bounded_text import CONFIG_TEXT
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

QUANTIZED = (
    "config.json says that the weights are quantized, but the files hold no quantized weights; "
    "remove quantization_config from it, or give the quantized files"
)
CONFIGS = Path(__file__).parents[2] / "fixtures/configs"


def write(path, config, state=None, **files):
    path.mkdir()
    state = state or {name: torch.zeros(shape) for name, shape in describe_model(config).state().items()}
    save_file({name: t.contiguous() for name, t in state.items()}, path / "model.safetensors", {"format": "pt"})
    for name, content in {"config": config, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def get_config(name, **more):
    return {**json.loads((CONFIGS / f"{name}.json").read_text()), **more}


def list_config_findings(path):
    (structure,) = [level for level in verify(path).levels if level.name == "structure"]
    return [finding.message for finding in structure.findings if finding.check == "config"]


def unknown(layers=2, experts=0, rows=16):
    state = {"model.embed_tokens.weight": torch.zeros(rows, 8)}
    for n in range(layers):
        state[f"model.layers.{n}.up.weight"] = torch.zeros(8, 8)
        state |= {f"model.layers.{n}.experts.{e}.w.weight": torch.zeros(4, 8) for e in range(experts)}
    return state


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"num_hidden_layers": 3}, "config.json declares 3 layers, but the files hold 2 of model.layers"),
        ({"num_experts": 5}, "config.json declares 5 experts, but the files hold 4"),
        ({"vocab_size": 32}, "config.json declares a vocabulary of 32, but model.embed_tokens.weight has 16 rows"),
        ({"eos_token_id": [3, 16]}, "config.json has eos_token_id 16, but the vocabulary has only 16 rows"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            QUANTIZED,
        ),
        (
            {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500.0}},
            (
                "config.json has rope_theta 10000, which transformers 4 reads, and 500 in rope_parameters, which "
                "transformers 5 and engines read; keep the one that the model was trained with"
            ),
        ),
    ],
)
def test_a_config_that_headers_contradict_is_named(tmp_path, more, expected):
    config = {"model_type": "nobody", "num_hidden_layers": 2, "num_experts": 4, "vocab_size": 16}
    right = write(tmp_path / "right", config, unknown(experts=4))
    assert not list_config_findings(right)
    wrong = write(tmp_path / "wrong", config | more, unknown(experts=4))
    assert expected in inspect(wrong).warnings
    assert list_config_findings(wrong) == [expected]


def test_layers_that_predict_further_tokens_are_missed(tmp_path):
    config = get_config("deepseek_v3", num_nextn_predict_layers=1)
    (found,) = list_config_findings(write(tmp_path / "lost", config))
    assert "layers that predict further tokens (num_nextn_predict_layers 1)" in found
    assert not list_config_findings(write(tmp_path / "none", config | {"num_nextn_predict_layers": 0}))


def test_tokens_without_a_row_are_named(tmp_path):
    config = get_config("llama")
    rows = config["vocab_size"]
    added = {"added_tokens": [{"id": rows}], "model": {"vocab": {"a": 0}}}
    path = write(tmp_path / "model", config, tokenizer=added, generation_config={"pad_token_id": rows})
    found = list_config_findings(path)
    assert f"generation_config.json has pad_token_id {rows}, but the vocabulary has only {rows} rows" in found
    assert any(message.startswith(f"tokenizer.json has token {rows}") for message in found)


@pytest.mark.parametrize(("layers", "said"), [(2, ()), (1, ("config.json declares 2 layers, but the files hold 4",))])
def test_another_tower_may_be_larger_and_have_more_layers_if_its_config_says_so(tmp_path, layers, said):
    config = {"model_type": "nobody", "text_config": {"num_hidden_layers": 2}, "encoder": {"num_layers": 4}}
    tower = {f"encoder.block.{n}.up.weight": torch.zeros(32, 32) for n in range(4)}
    found = list_config_findings(write(tmp_path / "model", config, unknown(layers) | tower))
    assert [message.partition(" of ")[0] for message in found] == list(said)


def test_a_tokenizer_larger_than_configs_may_be_is_looked_at(tmp_path):
    config = get_config("llama")
    rows = config["vocab_size"]
    words = {f"{'w' * 2000}{n}": n for n in range(9000)} | {"last": rows + 9000}
    path = write(tmp_path / "model", config, tokenizer={"added_tokens": [], "model": {"vocab": words}})
    assert (path / "tokenizer.json").stat().st_size > CONFIG_TEXT.size
    said = f"tokenizer.json has token {rows + 9000}, but the vocabulary has only {rows} rows"
    assert said in list_config_findings(path)[0]


def test_layers_that_predict_are_found_wherever_they_are_and_towers_are_none(tmp_path):
    config = get_config("deepseek_v3", num_nextn_predict_layers=1)
    described = describe_model(config)
    state = {name: torch.zeros(tensor.shape) for name, tensor in described.tensors.items()}
    assert not list_config_findings(write(tmp_path / "whole", config, state))
    names = [*described.state(), "model.visual.blocks.40.up.weight"]
    assert list_predicting_names(config, names) == []
    assert list_predicting_names(config, described.tensors) == [
        name for name, tensor in described.tensors.items() if tensor.row.optional
    ]


def test_a_stale_shard_beside_an_index_is_named(tmp_path):
    config = get_config("llama")
    path = write(tmp_path / "model", config)
    names = list(describe_model(config).state())
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"model.norm.weight": torch.ones(8)}, path / "model-00001-of-00002.safetensors")
    assert any("model-00001-of-00002.safetensors" in warning for warning in inspect(path).warnings)


def list_content_findings(path):
    (content,) = [level for level in verify(path, VerifyOptions(level="full")).levels if level.name == "content"]
    return [finding.message for finding in content.findings if finding.check in ("config", "replicas")]


class TestTies:
    """A head that is stored by itself, though `tie_word_embeddings` says that it is the embedding."""

    @staticmethod
    def odd(tied):
        return {"architectures": ["OddForCausalLM"], "vocab_size": 16, "tie_word_embeddings": tied}

    def test_of_another_shape_is_seen_in_the_headers(self, tmp_path):
        state = unknown() | {"lm_head.weight": torch.zeros(20, 8)}
        expected = (
            "config.json says tie_word_embeddings, but lm_head.weight has the shape [20, 8] and "
            "model.embed_tokens.weight [16, 8]; set it to false"
        )
        path = write(tmp_path / "tied", self.odd(True), state)
        assert expected in inspect(path).warnings
        assert expected in list_config_findings(path)
        assert expected not in inspect(write(tmp_path / "untied", self.odd(False), state)).warnings

    def test_of_other_values_is_seen_in_the_bytes(self, tmp_path):
        state = unknown() | {"lm_head.weight": torch.ones(16, 8)}
        (found,) = list_content_findings(write(tmp_path / "tied", self.odd(True), state))
        assert "lm_head.weight differs from model.embed_tokens.weight, and transformers would leave it out" in found
        assert list_content_findings(write(tmp_path / "untied", self.odd(False), state)) == []
        state["lm_head.weight"] = torch.zeros(16, 8)
        assert list_content_findings(write(tmp_path / "equal", self.odd(True), state)) == []

    def test_of_a_known_model_is_an_error_that_names_the_flag(self, tmp_path):
        config = get_config("llama", tie_word_embeddings=False)
        state = {name: torch.zeros(shape) for name, shape in describe_model(config).state().items()}
        state["lm_head.weight"] += 1
        (found,) = list_content_findings(write(tmp_path / "tied", config | {"tie_word_embeddings": True}, state))
        assert "copies differ" in found
        assert "lm_head.weight is the same tensor: if it is not, set tie_word_embeddings to false" in found

    def test_a_head_that_is_missing_may_be_the_embedding(self, tmp_path):
        config = get_config("llama", tie_word_embeddings=False)
        state = {name: torch.zeros(shape) for name, shape in describe_model(config).state().items()}
        del state["lm_head.weight"]
        with pytest.raises(SourceError, match=r"lacks 1 tensor .*lm_head") as caught:
            inspect(write(tmp_path / "untied", config, state))
        assert "tie_word_embeddings should be true" in caught.value.hint
        assert "--config PATH" in caught.value.hint
        tied = tmp_path / "tied.json"
        tied.write_text(json.dumps(config | {"tie_word_embeddings": True}))
        reshard(
            tmp_path / "untied", tmp_path / "out", ReshardOptions(to="hf"), source_options=SourceOptions(config=tied)
        )
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not info["missing_keys"]
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
