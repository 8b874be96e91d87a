"""Layers of GPT-NeoX, which its tensor-parallel ranks divide: every rank also has norms and biases of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stored_bits import bits

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

GPT_NEOX = Path(__file__).parents[2] / "fixtures" / "gpt_neox"
NAMES = ("pythia", "llama")


def read_options(name: str) -> SourceOptions:
    return SourceOptions(config=GPT_NEOX / f"{name}.hf" / "config.json")


def converted(source: Path, place: Path, name: str) -> dict[str, torch.Tensor]:
    reshard(source, place, ReshardOptions(to="hf"), source_options=read_options(name))
    return load_file(place / "model.safetensors")


@pytest.fixture
def pythia(tmp_path):
    """A copy of the ranks' files, to change some."""
    return Path(shutil.copytree(GPT_NEOX / "pythia", tmp_path / "src")) / "global_step2"


def change(path: Path, name: str, value: torch.Tensor) -> None:
    held = torch.load(path, weights_only=True)
    torch.save({**held, name: value}, path)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_are_joined_as_its_own_converter_joins_them(name, tmp_path):
    """Halves are put together, biases behind row-parallel products are summed, and norms are averaged, bit for bit."""
    found, theirs = (
        converted(GPT_NEOX / name, tmp_path / "hf", name),
        load_file(GPT_NEOX / f"{name}.hf/model.safetensors"),
    )
    assert found.keys() == theirs.keys()
    assert [key for key, value in theirs.items() if bits(found[key]) != bits(value)] == []
    again = verify(
        tmp_path / "hf", VerifyOptions(against=GPT_NEOX / name, level="full"), source_options=read_options(name)
    )
    assert again.ok


@pytest.mark.parametrize("name", NAMES)
def test_inspect_counts_every_rank(name):
    whole = sum(value.numel() for value in load_file(GPT_NEOX / f"{name}.hf" / "model.safetensors").values())
    assert inspect(GPT_NEOX / name, source_options=read_options(name)).parameters == whole


def test_one_rank_is_a_model_by_itself(pythia, tmp_path):
    """Without a second rank nothing is summed or averaged; half of the model is not what the config says."""
    for path in pythia.glob("*-model_01-*"):
        path.unlink()
    (pythia / "mp_rank_01_model_states.pt").unlink()
    state = torch.load(pythia / "mp_rank_00_model_states.pt", weights_only=True)
    torch.save({**state, "mp_world_size": 1}, pythia / "mp_rank_00_model_states.pt")
    with pytest.raises(SourceError, match=r"0\.word_embeddings.weight has 16 rows, but the model has 32 tokens"):
        converted(pythia, tmp_path / "out", "pythia")


def test_a_layer_that_a_rank_lacks_is_named(pythia, tmp_path):
    (pythia / "layer_03-model_01-model_states.pt").unlink()
    with pytest.raises(SourceError, match=r"model_01/3\.[a-z_.]+ is in no file"):
        converted(pythia, tmp_path / "out", "pythia")


def test_equal_norms_are_kept_and_sums_round_to_their_type(pythia, tmp_path):
    """The mean of equal values is that value, whatever the sum would round to."""
    odd, large = torch.full((8,), 1 + 2**-10).half(), torch.tensor([2048.0] * 8).half()
    for rank in range(2):
        layer = pythia / f"layer_02-model_{rank:02d}-model_states.pt"
        change(layer, "input_layernorm.weight", odd)
        change(layer, "attention.dense.bias", large if rank else torch.ones(8).half())
    found = converted(pythia, tmp_path / "out", "pythia")
    assert torch.equal(found["gpt_neox.layers.0.input_layernorm.weight"], odd)
    assert torch.equal(found["gpt_neox.layers.0.attention.dense.bias"], large)  # 2049 rounds to even


def test_without_a_config_nothing_says_what_ranks_have(tmp_path):
    with pytest.raises(SourceError, match="without a config, nothing says which model's tensors are in these arrays"):
        reshard(GPT_NEOX / "pythia", tmp_path / "out", ReshardOptions(to="hf"))


def test_parts_that_nothing_describes_are_no_replicas(tmp_path):
    """Equal shapes do not make the halves of two model-parallel ranks copies of each other, whoever wrote them."""
    for rank in range(2):
        held = {"layers.0.proj.weight": torch.randn(4, 4), "mask": torch.ones(2)}
        state = {"module": held, "buffer_names": ["mask"], "optimizer": None, "mp_world_size": 2, "dp_world_size": 1}
        torch.save(state, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    for verb in (inspect, verify):
        with pytest.raises(UnsupportedError, match=r"'layers\.0\.proj\.weight' is on 2 tensor-parallel ranks, and the"):
            verb(tmp_path)
