"""What trainers leave in the folders of a run: which one to give, and what beside the weights is no weight."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from stored_bytes import gather, scan

from shardctl.base.errors import SourceError
from shardctl.options import SourceOptions
from shardctl.verbs.inspect import inspect

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4)}
OPTIMIZER = {
    "state": {name: {"exp_avg": value * 0.5, "step": torch.tensor(3.0)} for name, value in WEIGHTS.items()},
    "param_groups": [{"lr": 1e-3, "params": list(WEIGHTS)}],
}


def save_dcp(tree: dict, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    dcp.save(tree, checkpoint_id=place, no_dist=True)


def assert_whole(place: Path, *, states: bool = True, step: int | None = 3) -> None:
    """The weights are there under their own names, and the moments of each."""
    found = scan(place)
    place = place if place.is_dir() else place.parent
    bits = {name: gather(place, tensor) for name, tensor in found.tensors.items()}
    assert bits == {name: value.numpy().tobytes() for name, value in WEIGHTS.items()}
    moments = {f"optimizer.exp_avg.{name}": (value * 0.5).numpy().tobytes() for name, value in WEIGHTS.items()}
    held = {} if found.training is None else {n: gather(place, t) for n, t in found.training.states.items()}
    assert {n: data for n, data in held.items() if "exp_avg" in n} == (moments if states else {})
    assert not states or found.training.step == step


def refused(place: Path) -> SourceError:
    with pytest.raises(SourceError) as error:
        inspect(place)
    return error.value


RUN = {
    "model": WEIGHTS,
    "optimizers": {"DecoupledAdamW": OPTIMIZER},
    "schedulers": {"Linear": {"last_epoch": 3}},
    "timestamp": {"epoch": 0, "batch": 3},
    "train_metrics": {"loss": {"state_dict": {"sum": torch.zeros(2)}}},
    "rank_zero_seed": 17,
}
"""What Composer has in the `state` of a run (`composer/core/state.py`)."""


@pytest.mark.parametrize("given", ["file", "folder", "sharded"])
def test_composer_has_the_model_in_the_state_of_a_run(tmp_path, given):
    if given == "sharded":
        save_dcp({"state": RUN}, tmp_path)
    else:
        torch.save({"state": RUN, "rng": [{"torch": torch.get_rng_state()}]}, tmp_path / "ep0-ba3-rank0.pt")
    assert_whole(tmp_path / "ep0-ba3-rank0.pt" if given == "file" else tmp_path)


def test_a_loss_beside_the_model_is_no_weight(tmp_path):
    """nanoGPT's and llama2.c's train.py keep the best loss in a tensor of one number, and some keep random numbers."""
    more = {"best_val_loss": torch.tensor(1.25), "rng_state": torch.get_rng_state(), "iter_num": 3}
    torch.save({"model": WEIGHTS, "optimizer": OPTIMIZER, **more}, tmp_path / "ckpt.pt")
    assert_whole(tmp_path / "ckpt.pt")
    assert any("'best_val_loss'" in warning for warning in inspect(tmp_path / "ckpt.pt").warnings)


def test_a_matrix_beside_the_model_is_not_passed_over(tmp_path):
    torch.save({"model": WEIGHTS, "ema": torch.ones(2, 3)}, tmp_path / "ckpt.pt")
    assert "tensors in several places: 'model', the top level" in refused(tmp_path / "ckpt.pt").message


@pytest.mark.parametrize("beside", ["meta.pt", "rng.pt"])
def test_files_without_a_matrix_are_no_second_checkpoint(tmp_path, beside):
    """Lightning's sharded save has `meta.pt` beside its items, and slime's FSDP backend `rng.pt`."""
    save_dcp({"model": WEIGHTS, "optimizer_0": OPTIMIZER}, tmp_path)
    torch.save({"epoch": 0, "hyper_parameters": {"lr": 1e-3}, "rng": torch.get_rng_state()}, tmp_path / beside)
    assert_whole(tmp_path)
    assert not any(beside in warning for warning in inspect(tmp_path).warnings)


def test_another_model_beside_a_save_is_asked_about(tmp_path):
    save_dcp({"model": WEIGHTS}, tmp_path)
    torch.save(WEIGHTS, tmp_path / "model.pt")
    assert refused(tmp_path).hint == "say which with --from dcp or --from torch"


def test_slime_saves_a_model_and_its_optimizer_apart(tmp_path):
    step = tmp_path / "iter_0000003"
    save_dcp({"model_state": {"model": WEIGHTS}}, step / "model")
    save_dcp({"optim_state": {"optim": OPTIMIZER}}, step / "optimizer")
    torch.save({"torch": torch.get_rng_state()}, step / "rng.pt")
    assert refused(tmp_path).hint == f"the weights are in {step}: give that"
    assert_whole(step)


def test_a_hint_never_names_the_folder_of_an_optimizer(tmp_path):
    """NeMo-RL has weights as safetensors and the optimizer as a distributed checkpoint, each in a folder of its own."""
    weights = tmp_path / "policy" / "weights" / "model"
    weights.mkdir(parents=True)
    writer = dcp.HuggingFaceStorageWriter(str(weights), save_distributed=True)
    dcp.save(WEIGHTS, storage_writer=writer, no_dist=True)
    (weights / ".hf_metadata").mkdir()
    (weights / ".hf_metadata" / "config.json").write_text(json.dumps({"model_type": "none", "architectures": ["X"]}))
    save_dcp({"optim": OPTIMIZER}, tmp_path / "policy" / "optimizer" / "optim")
    for given in (tmp_path, tmp_path / "policy"):
        assert refused(given).hint == f"the weights are in {weights}: give that"
    assert_whole(weights, states=False)
    assert scan(weights).own_config.values["architectures"] == ["X"]


def test_an_optimizer_alone_is_said_to_be_one(tmp_path):
    save_dcp({"optim": OPTIMIZER}, tmp_path / "run" / "optim")
    assert "no weights: give the folder that the model was saved in" in refused(tmp_path).hint


@pytest.mark.parametrize("folder", ["pytorch_model_fsdp_0", "model", ""])
def test_a_stale_model_beside_a_distributed_one_is_asked_about(tmp_path, folder):
    """`save_pretrained` of a sharded module, or an earlier run, left other weights beside those that were trained."""
    save_dcp({"model": WEIGHTS}, tmp_path / folder)
    save_file({name: value * 0 for name, value in WEIGHTS.items()}, tmp_path / "model.safetensors")
    error = refused(tmp_path)
    assert "model.safetensors, and a distributed checkpoint in" in error.message
    assert (folder or "__0_0.distcp") in error.message
    assert error.hint == "say which with --from dcp or --from safetensors"
    for container in ("dcp", "safetensors"):
        assert inspect(tmp_path, source_options=SourceOptions(container=container)).format == container


@pytest.mark.parametrize("given", ["", "model", "model/model"])
def test_a_run_of_nanotron_is_named(tmp_path, given):
    """`nanotron/serialize/weights.py` writes a file for each parameter and rank, in the folders of its modules."""
    rank = tmp_path / "model/model/decoder/0/pp_block/attn/o_proj"
    norm = tmp_path / "model/model/final_layer_norm/pp_block"
    for place, name in ((rank, "model_weight_pp-rank-0-of-1_tp-rank-0-of-2"), (norm, "model_weight")):
        place.mkdir(parents=True)
        save_file({"data": torch.ones(2, 2)}, place / f"{name}.safetensors")
    (tmp_path / "checkpoint_metadata.json").write_text("{}")
    found = refused(tmp_path / given)
    assert "is a checkpoint of nanotron" in found.message
    assert "convert_nanotron_to_hf.py" in found.hint
