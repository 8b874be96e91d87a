"""`--only adapter`: what a trainer saved with its base, or beside it, becomes what PEFT saves by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardctl.base.errors import SourceError, UsageError
from shardctl.cli.program import run
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures/peft"
WHOLE = sorted(path.parent.name for path in FIXTURES.glob("*/whole"))
ADAPTER = ReshardOptions(only="adapter")


def load_base(case):
    """Where the base of a case is."""
    return (
        FIXTURES / json.loads((FIXTURES / case / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    )


def lay_out(case, path, *, tensors=None, at="."):
    """A model as a trainer saves it with its adapter; the adapter's config lies `at` a folder of it."""
    path.mkdir()
    shutil.copy(load_base(case) / "config.json", path)
    (path / "tokenizer.json").write_text("{}")
    (path / at).mkdir(exist_ok=True)
    shutil.copy(FIXTURES / case / "adapter/adapter_config.json", path / at)
    save_file(tensors or load_file(FIXTURES / case / "whole/model.safetensors"), path / "model.safetensors")
    return path


def assert_same_merge(tmp_path, case):
    """What is merged has the bits of what PEFT's own file is merged into."""
    reshard(load_base(case), tmp_path / "wanted", ReshardOptions(merge=(FIXTURES / case / "adapter",)))
    wanted, found = (load_file(tmp_path / name / "model.safetensors") for name in ("wanted", "merged"))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def assert_is_the_adapter(found, case):
    """The same config and the bits of the file that PEFT wrote."""
    expected = FIXTURES / case / "adapter"
    assert (found / "adapter_config.json").read_bytes() == (expected / "adapter_config.json").read_bytes()
    mine, theirs = (load_file(path / "adapter_model.safetensors") for path in (found, expected))
    assert mine.keys() == theirs.keys()
    assert all(mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("case", WHOLE)
def test_what_is_split_off_a_whole_state_dict_is_what_peft_saves(tmp_path, case):
    source = lay_out(case, tmp_path / "source")
    done = reshard(source, tmp_path / "out", ADAPTER)
    assert_is_the_adapter(tmp_path / "out", case)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("adapter_config.json", "adapter_model.safetensors", "shardctl.json", "tokenizer.json")
    ]
    assert any("base_layer" in warning or "left out" in warning for warning in done.warnings)
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok
    assert inspect(tmp_path / "out").adapter == inspect(FIXTURES / case / "adapter").adapter
    reshard(load_base(case), tmp_path / "merged", ReshardOptions(merge=(tmp_path / "out",)))
    assert_same_merge(tmp_path, case)


def test_an_element_that_changed_is_found_afterwards(tmp_path):
    source = lay_out("dora", tmp_path / "source")
    reshard(source, tmp_path / "out", ADAPTER)
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0, 0] += 1
    save_file(tensors, source / "model.safetensors")
    assert not verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok


@pytest.mark.parametrize("wrapped", ["module.{}", "{}"])
def test_names_have_the_prefix_of_peft_whatever_the_trainer_calls_them(tmp_path, wrapped):
    tensors = load_file(FIXTURES / "dora/whole/model.safetensors")
    bare = "" if wrapped == "{}" else "base_model.model."
    renamed = {wrapped.format(bare + name.removeprefix("base_model.model.")): t for name, t in tensors.items()}
    reshard(lay_out("dora", tmp_path / "source", tensors=renamed), tmp_path / "out", ADAPTER)
    assert_is_the_adapter(tmp_path / "out", "dora")


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_torch_save_and_a_config_in_a_folder_do_as_well(tmp_path, suffix):
    source = lay_out("dora", tmp_path / "source", at="lora_adapter")
    if suffix == "bin":
        torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
        (source / "model.safetensors").unlink()
    reshard(source, tmp_path / "out", ADAPTER)
    assert_is_the_adapter(tmp_path / "out", "dora")
    assert not (tmp_path / "out/lora_adapter").exists()


@pytest.mark.parametrize("folder", ["", "adapter", "checkpoints/last"])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_adapter_beside_its_base_or_in_a_folder_is_taken(tmp_path, folder, suffix):
    source = tmp_path / "source"
    shutil.copytree(load_base("lora"), source)
    (source / folder).mkdir(parents=True, exist_ok=True)
    for path in (FIXTURES / "lora/adapter").iterdir():
        shutil.copy(path, source / folder)
    if suffix == "bin":
        torch.save(load_file(source / folder / "adapter_model.safetensors"), source / folder / "adapter_model.bin")
        (source / folder / "adapter_model.safetensors").unlink()
    reshard(source, tmp_path / "out", ADAPTER)
    assert_is_the_adapter(tmp_path / "out", "lora")
    assert not (tmp_path / "out/config.json").exists()
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok
    ranks = ReshardOptions(only="adapter", mesh=Mesh.of(tp=2))
    assert plan(source, ranks).mesh == Mesh.of(tp=2)
    reshard(source, tmp_path / "ranks", ranks)  # the config beside it says how its base is cut
    reshard(
        FIXTURES / "lora/adapter",
        tmp_path / "twin",
        ReshardOptions(mesh=Mesh.of(tp=2)),
        source_options=SourceOptions(config=source),
    )
    for path in sorted((tmp_path / "twin").glob("*.safetensors")):
        mine, theirs = load_file(tmp_path / "ranks" / path.name), load_file(path)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("place", ["inside", "folder"])
def test_a_plan_file_splits_it_off_too(tmp_path, place):
    source = lay_out("dora", tmp_path / "source")
    if place == "folder":
        shutil.copytree(FIXTURES / "dora/adapter", source / "last")
        (source / "adapter_config.json").unlink()
        shutil.copy(load_base("dora") / "model.safetensors", source)
    assert run(["plan", str(source), "--only", "adapter", "--out", str(tmp_path / "plan.json")]) == 0
    assert run(["reshard", "--plan", str(tmp_path / "plan.json"), str(tmp_path / "out")]) == 0
    assert_is_the_adapter(tmp_path / "out", "dora")


def test_of_several_one_is_named(tmp_path):
    tensors = load_file(FIXTURES / "dora/whole/model.safetensors")
    tensors |= {n.replace(".default", ".second"): t + 1 for n, t in tensors.items() if ".default" in n}
    source = lay_out("dora", tmp_path / "source", tensors=tensors)
    with pytest.raises(UsageError, match="several adapters: default, second") as caught:
        reshard(source, tmp_path / "out", ADAPTER)
    assert caught.value.hint == "name one: --only adapter:default"
    reshard(source, tmp_path / "out", ReshardOptions(only="adapter:default"))
    assert_is_the_adapter(tmp_path / "out", "dora")
    reshard(source, tmp_path / "second", ReshardOptions(only="adapter:second"))
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "second"))
    assert all(torch.equal(first[name] + 1, tensor) for name, tensor in second.items())
    assert verify(tmp_path / "second", VerifyOptions(level="full", against=source)).ok
    with pytest.raises(UsageError, match="no adapter third"):
        reshard(source, tmp_path / "third", ReshardOptions(only="adapter:third"))


def test_without_an_adapter_or_its_config_it_is_refused(tmp_path):
    with pytest.raises(UsageError, match="finds no adapter") as caught:
        reshard(load_base("lora"), tmp_path / "out", ADAPTER)
    assert "folder of the adapter" in caught.value.hint
    source = lay_out("dora", tmp_path / "source")
    (source / "adapter_config.json").unlink()
    with pytest.raises(SourceError, match=r"has no adapter_config.json of its adapter default") as missing:
        reshard(source, tmp_path / "out", ADAPTER)
    assert "multiplied with" in missing.value.hint
    assert not (tmp_path / "out").exists()


def test_an_adapter_by_itself_is_one(tmp_path):
    reshard(FIXTURES / "lora/adapter", tmp_path / "out", ADAPTER)
    assert_is_the_adapter(tmp_path / "out", "lora")


def test_a_model_with_its_adapter_is_no_adapter(tmp_path):
    found = inspect(lay_out("dora", tmp_path / "source"))
    assert found.adapter is None
    assert any("--only adapter" in warning for warning in found.warnings)


def lay_out_verl(path, note):
    """Ranks as verl saves them, with its note of the adapter and without a config of PEFT's."""
    path.mkdir()
    (path / "huggingface").mkdir()
    shutil.copy(load_base("lora") / "config.json", path / "huggingface")
    adapter = load_file(FIXTURES / "lora/adapter/adapter_model.safetensors")
    named = {name.replace(".weight", ".default.weight"): tensor for name, tensor in adapter.items()}
    for name, tensor in load_file(load_base("lora") / "model.safetensors").items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        named[f"{module}.base_layer.weight" if f"{module}.lora_A.weight" in adapter else f"{module}.weight"] = tensor
    torch.save(named, path / "model_world_size_1_rank_0.pt")
    (path / "lora_train_meta.json").write_text(json.dumps(note))
    return path


def test_the_note_of_verl_is_enough_for_a_config(tmp_path):
    source = lay_out_verl(tmp_path / "source", {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"})
    done = reshard(source, tmp_path / "out", ADAPTER)
    assert any("does not say whether rsLoRA was used" in warning for warning in done.warnings)
    made = json.loads((tmp_path / "out/adapter_config.json").read_text())
    expected = json.loads((FIXTURES / "lora/adapter/adapter_config.json").read_text())
    assert sorted(made.pop("target_modules")) == sorted(expected["target_modules"])
    assert (made["r"], made["lora_alpha"], made["peft_type"]) == (4, 6, "LORA")
    mine, theirs = (
        load_file(path / "adapter_model.safetensors") for path in (tmp_path / "out", FIXTURES / "lora/adapter")
    )
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    reshard(load_base("lora"), tmp_path / "merged", ReshardOptions(merge=(tmp_path / "out",)))
    assert_same_merge(tmp_path, "lora")


@pytest.mark.parametrize(
    ("note", "said"),
    [({"r": 4}, "does not say the rank and alpha"), ({"r": 8, "lora_alpha": 6}, "has 4 rows, but .* says a rank of 8")],
)
def test_a_note_of_verl_that_does_not_fit_is_refused(tmp_path, note, said):
    source = lay_out_verl(tmp_path / "source", note)
    with pytest.raises(SourceError, match=said):
        reshard(source, tmp_path / "out", ADAPTER)
