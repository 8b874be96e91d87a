"""Scripts save the optimizer beside the weights in one file, and so does Lightning: the states are torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from stored_bytes import check, scan
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from shardctl.options import ReshardOptions, SourceOptions
from shardctl.verbs.reshard import reshard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIG = transformers.LlamaConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=48,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
)


def train(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options):
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(CONFIG)
    optimizer = kind(model.parameters(), lr=0.01, foreach=False, **options)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    return model, optimizer


def list_states(model, optimizer) -> dict[str, torch.Tensor]:
    return {
        f"optimizer.{state}.{parameter}": value
        for parameter, states in get_optimizer_state_dict(model, optimizer)["state"].items()
        for state, value in states.items()
    }


WAYS = {
    "script": lambda model, optimizer: {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1},
    "names": lambda model, optimizer: {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": get_optimizer_state_dict(model, optimizer),
    },
    "lightning": lambda model, optimizer: {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "global_step": 1,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_states_are_those_of_the_optimizer(way, tmp_path):
    model, optimizer = train()
    torch.save(WAYS[way](model, optimizer), tmp_path / "last.pt")
    manifest = scan(tmp_path / "last.pt")
    assert not any("optimizer" in text for text in manifest.warnings)
    check(tmp_path, manifest.training.states, list_states(model, optimizer))
    assert manifest.training.step == 1
    assert [group.settings["lr"] for group in manifest.training.groups] == [0.01]


def test_another_trainer_finds_them(tmp_path):
    model, optimizer = train()
    CONFIG.save_pretrained(tmp_path)
    torch.save(WAYS["lightning"](model, optimizer), tmp_path / "last.ckpt")
    read = SourceOptions(config=tmp_path / "config.json")
    reshard(tmp_path / "last.ckpt", tmp_path / "dcp", ReshardOptions(to="dcp"), source_options=read)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    expected = get_optimizer_state_dict(model, optimizer)
    for name, states in expected["state"].items():
        assert all(torch.equal(found["optim"]["state"][name][state], value) for state, value in states.items())
    assert sorted(found["optim"]["param_groups"][0]["params"]) == sorted(expected["param_groups"][0]["params"])


def test_states_that_nothing_names_are_left_behind(tmp_path):
    held = WAYS["script"](*train())
    held["optimizer"]["param_groups"][0]["params"].pop()
    torch.save(held, tmp_path / "last.pt")
    manifest = scan(tmp_path / "last.pt")
    assert not manifest.training.states
    assert any("their parameters are numbered, not named" in text for text in manifest.warnings)


def test_two_optimizers_are_left_behind(tmp_path):
    model, optimizer = train()
    held = WAYS["lightning"](model, optimizer)
    held["optimizer_states"] *= 2
    torch.save(held, tmp_path / "last.pt")
    manifest = scan(tmp_path / "last.pt")
    assert manifest.training is None
    assert any("'optimizer_states' (list)" in text for text in manifest.warnings)


def test_momentum_alone_is_a_state(tmp_path):
    model, optimizer = train(torch.optim.SGD, momentum=0.9)
    torch.save(WAYS["script"](model, optimizer), Path(tmp_path, "last.pt"))
    check(tmp_path, scan(tmp_path / "last.pt").training.states, list_states(model, optimizer))


def wrap_names(held: dict, before: str) -> dict:
    return {f"{before}{name}": value for name, value in held.items()}


AROUND = {
    "compiled": ("_orig_mod.", ""),
    "compiled optimizer": ("", "_orig_mod."),
    "ddp": ("module.", ""),
    "fsdp": ("_fsdp_wrapped_module._checkpoint_wrapped_module.", "module."),
}


@pytest.mark.parametrize("way", AROUND)
@pytest.mark.parametrize("apart", [False, True])
def test_modules_around_the_weights_need_not_be_around_the_states(way, apart, tmp_path):
    """`_orig_mod.` is in the names of a compiled model, and not in those that an optimizer was given before."""
    model, optimizer = train()
    source = tmp_path / "source"
    CONFIG.save_pretrained(source)
    before, inside = AROUND[way]
    weights, state = wrap_names(model.state_dict(), before), get_optimizer_state_dict(model, optimizer)
    state["state"] = wrap_names(state["state"], inside)
    state["param_groups"][0]["params"] = [f"{inside}{name}" for name in state["param_groups"][0]["params"]]
    if apart:  # as Trainer with FSDP1 saves them (accelerate `utils/fsdp_utils.py`)
        torch.save(weights, source / "pytorch_model_fsdp.bin")
        torch.save(state, source / "optimizer.bin")
    else:
        torch.save({"model": weights, "optimizer": state}, source / "last.pt")
    reshard(source, tmp_path / "dcp", ReshardOptions(to="dcp"))
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)["optim"]
    states = {f"optimizer.{s}.{name}": value for name, held in found["state"].items() for s, value in held.items()}
    expected = list_states(model, optimizer)
    assert states.keys() == expected.keys()
    assert all(torch.equal(states[name], value) for name, value in expected.items())
    assert sorted(found["param_groups"][0]["params"]) == sorted(get_optimizer_state_dict(model, optimizer)["state"])


@pytest.mark.parametrize("file", ["optimizer.bin", "optimizer.pt"])
def test_numbers_in_a_file_beside_have_the_order_of_torch_save(file, tmp_path):
    model, optimizer = train()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / file)
    manifest = scan(tmp_path)
    assert not manifest.warnings
    assert file not in manifest.dropped
    check(tmp_path, manifest.training.states, list_states(model, optimizer))


@pytest.mark.parametrize("named", [False, True])
def test_safetensors_have_no_order_by_which_numbers_are_named(named, tmp_path):
    model, optimizer = train()
    model.save_pretrained(tmp_path)
    torch.save(
        get_optimizer_state_dict(model, optimizer) if named else optimizer.state_dict(), tmp_path / "optimizer.pt"
    )
    manifest = scan(tmp_path)
    if named:
        check(tmp_path, manifest.training.states, list_states(model, optimizer))
    else:
        (said,) = manifest.warnings
        assert "'optimizer.pt.state.0.step' are left behind: their parameters are numbered, not named" in said
        assert "optimizer.pt" in manifest.dropped


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", "weights"])
def test_a_file_beside_that_is_no_optimizer_is_a_warning(content, tmp_path):
    model, _ = train()
    model.save_pretrained(tmp_path)
    (tmp_path / "optimizer.pt").write_bytes(content if isinstance(content, bytes) else b"")
    if content == "weights":
        torch.save(model.state_dict(), tmp_path / "optimizer.pt")
    manifest = scan(tmp_path)
    assert manifest.tensors.keys() == model.state_dict().keys()
    assert any(text.startswith("the optimizer states in optimizer.pt cannot be read") for text in manifest.warnings)


def test_optimizers_in_two_files_are_not_told_apart(tmp_path):
    model, optimizer = train()
    model.save_pretrained(tmp_path)
    for name in ("optimizer.bin", "optimizer.pt"):
        torch.save(optimizer.state_dict(), tmp_path / name)
    assert any("there are several, optimizer.bin and optimizer.pt" in text for text in scan(tmp_path).warnings)


def test_a_buffer_of_a_loss_is_no_parameter(tmp_path):
    """Lightning saves it with the model; the optimizer does not number it."""
    model, optimizer = train()
    held = WAYS["lightning"](model, optimizer)
    held["state_dict"] |= {"loss.weight": torch.ones(48)}
    torch.save(held, tmp_path / "last.ckpt")
    check(tmp_path, scan(tmp_path / "last.ckpt").training.states, list_states(model, optimizer))
