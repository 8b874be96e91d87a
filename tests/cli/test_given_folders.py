"""Folders that users give which hold a checkpoint nearly, or in a folder: the message says what to do."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file


def shard(source, place, pattern="model-{:05d}-of-00002.safetensors"):
    """The same checkpoint in two numbered files, and what its index says of them."""
    shutil.copytree(source, place, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(source / "model.safetensors")
    weight_map = {name: pattern.format(1 + number % 2) for number, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, its in weight_map.items() if its == file}, place / file)
    return weight_map


def write_index(place, weight_map):
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("verb", ["inspect", "plan", "verify", "digest"])
@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_extensions_in_capital_letters_are_not_passed_over(say, source, tmp_path, verb, indexed):
    place = tmp_path / "model"
    weight_map = shard(source, place, "Model-{:05d}-of-00002.SAFETENSORS")
    if indexed:
        write_index(place, weight_map)
    code, _, err = say(verb, place)
    assert code == 4
    assert "has the extension .SAFETENSORS, which no library reads: it is .safetensors" in err


@pytest.mark.parametrize("verb", ["inspect", "digest"])
def test_a_shard_that_the_index_does_not_name_is_named(say, source, tmp_path, verb):
    place = tmp_path / "model"
    weight_map = shard(source, place)
    write_index(place, {name: file for name, file in weight_map.items() if "00001" in file})
    code, _, err = say(verb, place)
    assert code == 4
    assert "model-00002-of-00002.safetensors, which the index does not name, may hold them" in err
    assert "hint:  the index is incomplete: move it away" in err
    (place / "model.safetensors.index.json").unlink()
    assert say(verb, place).code == 0


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
def test_the_folder_of_a_run_has_the_newest_checkpoint_named(say, source, tmp_path, file):
    for step in (500, 1000):
        place = shutil.copytree(source, tmp_path / "run" / f"checkpoint-{step}")
        torch.save(load_torch_file(place / "model.safetensors"), place / "training_args.bin")
        if file != "model.safetensors":
            (place / "training_args.bin").rename(place / file)
            (place / "model.safetensors").unlink()
    code, _, err = say("inspect", tmp_path / "run")
    assert code == 4
    assert "2 folders in it do: checkpoint-500, checkpoint-1000" in err
    assert f"hint:  give one of them, such as {tmp_path / 'run'}/checkpoint-1000" in err
    assert say("inspect", tmp_path / "run" / "checkpoint-1000").code == 0


@pytest.mark.parametrize("folder", ["checkpoint-2/pytorch_model_fsdp_0", "step_3/model", "run/1/dcp"])
def test_a_distributed_save_without_metadata_is_told_at_any_depth(say, tmp_path, folder):
    place = tmp_path / folder
    dcp.save({"model": {"a": torch.ones(4)}}, checkpoint_id=str(place), no_dist=True)
    (place / ".metadata").unlink()
    code, _, err = say("inspect", tmp_path)
    assert code == 4
    assert f"{tmp_path}/{folder} holds torch.distributed.checkpoint files, but no .metadata" in err
    assert "the save did not finish, or a copy left out hidden files" in err


@pytest.mark.parametrize("target", ["model.safetensors", "../blobs/none"], ids=["itself", "nothing"])
@pytest.mark.parametrize("verb", ["inspect", "plan", "verify", "digest"])
def test_weights_that_are_a_link_to_nothing_are_not_passed_over(say, source, tmp_path, verb, target):
    """`inspect` and `plan` described the config alone, with exit code 0."""
    place = shutil.copytree(source, tmp_path / "model")
    (place / "model.safetensors").unlink()
    (place / "model.safetensors").symlink_to(target)
    code, _, err = say(verb, place)
    assert code == 4
    assert "model.safetensors is a link to a file that does not exist" in err
    assert "hint:  the download's cache was emptied" in err
