"""transformers saves weights as safetensors of ranks, and the optimizer in a folder of its own, flattened."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from shardctl.base.errors import HostileError, SourceError
from shardctl.options import ReshardOptions
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ADAMW = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "foreach": False}


def take_step(model, optimizer, seed):
    """One step with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


@pytest.fixture
def trained(tmp_path):
    """A model after two steps, saved as `save_optimizer_distributed` of transformers 5.23 saves them."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=32,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for seed in range(2):
        take_step(model, optimizer, seed)
    model.save_pretrained(tmp_path / "source")
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "source/optimizer", no_dist=True)
    return tmp_path / "source", model, optimizer


def test_another_trainer_goes_on_from_it(trained, tmp_path):
    source, model, optimizer = trained
    found = inspect(source)
    assert found.training is not None
    assert {share.state: share.tensors for share in found.training.states} == dict.fromkeys(
        ("exp_avg", "exp_avg_sq", "step"), len(list(model.parameters()))
    )
    assert "the optimizer is that of optimizer/" in found.training.notes
    assert not found.warnings
    reshard(source, tmp_path / "dcp", ReshardOptions(to="dcp"))
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    made = torch.load(tmp_path / "whole.pt", weights_only=True)
    other = transformers.LlamaForCausalLM(model.config)
    other.load_state_dict(made["model"])
    theirs = torch.optim.AdamW(other.parameters(), **ADAMW)
    names = [name for name, _ in other.named_parameters()]
    (group,) = made["optim"]["param_groups"]
    assert sorted(group.pop("params")) == sorted(names)
    states = {number: made["optim"]["state"][name] for number, name in enumerate(names)}
    theirs.load_state_dict({"state": states, "param_groups": [{**group, "params": list(range(len(names)))}]})
    take_step(model, optimizer, 2)
    take_step(other, theirs, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_by_default_hf_leaves_the_states_behind_and_says_so(trained, tmp_path):
    source, _, _ = trained
    done = reshard(source, tmp_path / "out", ReshardOptions(to="hf"))
    assert any(warning.startswith("left behind: the optimizer states") for warning in done.warnings)
    assert not (tmp_path / "out/optimizer").exists()


def test_two_optimizers_are_not_told_apart(trained):
    source, _, _ = trained
    (source / "optimizer").rename(source / "optimizer_0")
    assert inspect(source).training is not None
    dcp.save({"optimizer": {"state.x.step": torch.ones(())}}, checkpoint_id=source / "optimizer_1", no_dist=True)
    with pytest.raises(SourceError, match="several optimizers: optimizer_0, optimizer_1"):
        inspect(source)


@pytest.mark.parametrize("damage", ["metadata", "file"])
def test_weights_beside_an_optimizer_that_is_broken_are_read(trained, tmp_path, damage):
    source, model, _ = trained
    (file,) = source.glob("optimizer/*.distcp")
    if damage == "file":
        file.write_bytes(file.read_bytes()[:200])
    else:
        (source / "optimizer/.metadata").write_bytes(b"\x80\x04N.")
    why = "the optimizer states in optimizer/ cannot be read"
    assert any(warning.startswith(why) for warning in inspect(source).warnings)
    done = reshard(source, tmp_path / "out", ReshardOptions(to="hf"))
    assert any(warning.startswith(why) for warning in done.warnings)
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found.parameters(), strict=True))
    for options in (ReshardOptions(to="hf", optimizer_states="keep"), ReshardOptions(to="dcp")):
        with pytest.raises(SourceError, match=why) as raised:
            reshard(source, tmp_path / "states", options)
        assert "--optimizer-states drop" in str(raised.value.hint)
    reshard(source, tmp_path / "dropped", ReshardOptions(to="dcp", optimizer_states="drop"))


def test_an_optimizer_beside_weights_that_would_run_code_stays_an_error(trained):
    source, _, _ = trained
    (source / "optimizer/.metadata").write_bytes(b"\x80\x04cposix\nsystem\n.")
    with pytest.raises(HostileError, match="runs code"):
        inspect(source)
