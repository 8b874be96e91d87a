"""A vocabulary that Megatron-LM padded is fitted to the config, or both sizes are named."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import assert_same, config_of, loaded, save, stored

from shardctl.base.errors import SourceError
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

PADDED = ("model.embed_tokens.weight", "lm_head.weight")


def pad(tmp_path, tokens, rows, highest=None):
    """A model whose embedding and head have more rows than its config has tokens."""
    tiny = save(tmp_path / "source", {**config_of("llama"), "vocab_size": tokens, "tie_word_embeddings": False})
    state = stored(tiny.path)
    for name in PADDED:
        state[name] = torch.cat([state[name], torch.randn(rows - tokens, state[name].shape[1]).to(state[name].dtype)])
    save_file(state, tiny.path / "model.safetensors", {"format": "pt"})
    if highest is not None:
        tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": highest, "content": "b"}]}
        (tiny.path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tiny, state


@pytest.mark.parametrize("to", [ReshardOptions(to="hf"), ReshardOptions(mesh=Mesh.of(tp=2))])
def test_padding_is_left_out_and_reported(tmp_path, to):
    tiny, state = pad(tmp_path, 120, 128, highest=119)
    done = reshard(tiny.path, tmp_path / "out", to)
    (line,) = [line for line in done.warnings if "padding" in line]
    assert line.startswith("8 of 128 rows of")
    assert done.record.options["dropped_rows"] == "8"
    reshard(tmp_path / "out", tmp_path / "back", ReshardOptions(to="hf"))
    expected = {name: tensor[:120] if name in PADDED else tensor for name, tensor in state.items()}
    assert_same(stored(tmp_path / "back"), expected)
    assert_same(loaded(tmp_path / "back", tiny.kind).state_dict(), expected)
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=tiny.path)).ok
    assert any("8 of 128 rows" in line for line in plan(tiny.path, to).warnings)


def test_keep_padding_raises_the_vocabulary(tmp_path):
    tiny, state = pad(tmp_path, 120, 128)
    options = SourceOptions(keep_padding=True)
    done = reshard(tiny.path, tmp_path / "out", ReshardOptions(to="hf"), source_options=options)
    assert any("vocab_size is raised from 120 to 128" in line for line in done.warnings)
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 128
    assert_same(stored(tmp_path / "out"), state)
    assert_same(loaded(tmp_path / "out", tiny.kind).state_dict(), state)
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=tiny.path), source_options=options).ok


@pytest.mark.parametrize(
    ("tokens", "rows", "highest", "message"),
    [
        (120, 124, None, "120 tokens, and the files have 124 rows, to which Megatron-LM does not pad"),
        (120, 320, None, "120 tokens, and the files have 320 rows"),
        (120, 128, 121, "120 tokens, and the files have 128 rows, of which tokenizer.json uses row 121"),
    ],
)
def test_other_rows_are_refused_with_both_numbers(tmp_path, tokens, rows, highest, message):
    tiny, _ = pad(tmp_path, tokens, rows, highest)
    with pytest.raises(SourceError, match=message) as caught:
        reshard(tiny.path, tmp_path / "out", ReshardOptions(to="hf"))
    assert "--true-vocab 120" in caught.value.hint


def test_true_vocab_says_how_many_rows_are_tokens(tmp_path):
    tiny, state = pad(tmp_path, 120, 124)
    config = json.loads((tiny.path / "config.json").read_text())
    (tiny.path / "config.json").write_text(json.dumps(config | {"vocab_size": 124}))
    options = SourceOptions(true_vocab=120)
    done = reshard(tiny.path, tmp_path / "out", ReshardOptions(to="hf"), source_options=options)
    assert done.record.options["dropped_rows"] == "4"
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 120
    assert stored(tmp_path / "out")[PADDED[0]].shape[0] == 120
    assert torch.equal(stored(tmp_path / "out")[PADDED[0]], state[PADDED[0]][:120])
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=tiny.path), source_options=options).ok


def test_a_padded_directory_itself_is_not_called_right(tmp_path):
    tiny, _ = pad(tmp_path, 120, 128)
    with pytest.raises(SourceError, match="has shape"):
        verify(tiny.path)
    with pytest.raises(SourceError, match="has shape"):
        inspect(tiny.path)
