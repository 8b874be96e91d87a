"""An adapter by itself: what `inspect` says of it, and ranks whose matrices make the update of their own weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.cli.program import run
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import compute_rank_boxes
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures/peft"
BASES = {
    "lora": "llama",
    "dora": "llama",
    "biases": "llama",
    "rslora-patterns": "llama",
    "embedding-head": "llama",
    "trained-biases": "llama",
    "conv1d": "gpt2",
    "conv1d-dora": "gpt2",
    "experts": "qwen3_moe",
    "experts-transposed": "gpt_oss",
}
TARGETS = ("base_model.model.", ".lora_A.weight", ".lora_B.weight")


def give(case):
    return FIXTURES / case / "adapter", SourceOptions(config=FIXTURES / "hf" / BASES[case])


def read(path, rank=None):
    """The tensors of all files, or of a rank; parts of one that lie in several files are joined."""
    pattern = "*.safetensors" if rank is None else f"shard-{rank + 1:05d}-*.safetensors"
    found = {}
    for file in sorted(path.glob(pattern)):
        for name, tensor in load_file(file).items():
            found.setdefault(name, []).append(tensor)
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize("mesh", [Mesh.of(tp=2), Mesh.of(fsdp=2), Mesh.of(pp=2), Mesh.of(tp=2, fsdp=2)], ids=str)
@pytest.mark.parametrize("case", BASES)
def test_ranks_come_back_bit_for_bit(tmp_path, case, mesh):
    source, options = give(case)
    if mesh.degree("pp") > 1 and list((FIXTURES / "hf" / BASES[case]).glob("config.json")):
        layers = describe_model(json.loads((FIXTURES / "hf" / BASES[case] / "config.json").read_text())).layers
        if layers < mesh.degree("pp"):
            pytest.skip("a model of one layer has one stage")
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=mesh), source_options=options)
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=source)).ok
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert (tmp_path / "back/adapter_config.json").read_bytes() == (source / "adapter_config.json").read_bytes()
    found, expected = load_file(tmp_path / "back/adapter_model.safetensors"), read(source)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("case", ["lora", "rslora-patterns", "conv1d"])
def test_a_ranks_matrices_make_the_update_of_its_own_part_of_a_weight(tmp_path, case):
    source, options = give(case)
    whole, mesh = read(source), Mesh.of(tp=2)
    base = describe_model(json.loads((options.config / "config.json").read_text()))
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=mesh), source_options=options)
    start, first, second = TARGETS
    modules = [name.removesuffix(first) for name in whole if name.endswith(first)]
    compared = smaller = 0
    for rank in range(2):
        mine = read(tmp_path / "ranks", rank)
        for module in modules:
            update, part = whole[module + second] @ whole[module + first], mine[module + second] @ mine[module + first]
            update, part = (update.T, part.T) if base.transposed else (update, part)
            weight = base.tensors[f"{module.removeprefix(start)}.weight"]
            boxes = compute_rank_boxes(weight.shape, weight.spec, mesh, mesh.coordinate(rank))
            expected = torch.cat([update[box.slices()] for box in boxes], 1 if base.transposed else 0)
            assert torch.equal(part, expected), module
            compared += 1
            smaller += mine[module + first].numel() < whole[module + first].numel()
    assert compared == 2 * len(modules)
    assert smaller == (0 if case == "conv1d" else 2 * len([m for m in modules if "o_proj" in m or "down_proj" in m]))


def test_without_a_config_fsdp_and_stages_are_placed_by_names(tmp_path):
    source, _ = give("lora")
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(fsdp=2, pp=2)))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert (tmp_path / "back/adapter_model.safetensors").read_bytes() == (
        source / "adapter_model.safetensors"
    ).read_bytes()
    with pytest.raises((SourceError, UnsupportedError), match="needs to know how to cut"):
        reshard(source, tmp_path / "tp", ReshardOptions(mesh=Mesh.of(tp=2)))


def test_matrices_of_all_experts_stay_whole_and_that_is_said(tmp_path):
    source, options = give("experts")
    done = reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)), source_options=options)
    assert [warning for warning in done.warnings if "all experts of a layer stay whole" in warning]


def test_an_adapter_of_another_model_is_refused(tmp_path):
    source, _ = give("lora")
    with pytest.raises(SourceError, match="no such module"):
        reshard(
            source,
            tmp_path / "out",
            ReshardOptions(mesh=Mesh.of(tp=2)),
            source_options=SourceOptions(config=FIXTURES / "hf/gpt2"),
        )
    config = json.loads((FIXTURES / "hf/llama/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] * 2}))
    with pytest.raises(SourceError, match="but the weight has"):
        reshard(
            source,
            tmp_path / "out",
            ReshardOptions(mesh=Mesh.of(tp=2)),
            source_options=SourceOptions(config=tmp_path / "config.json"),
        )


def test_inspect_says_what_it_is():
    found = inspect(give("dora")[0]).adapter
    assert (found.kind, found.rank, found.base, found.modules) == ("DoRA", 4, "hf/llama", 14)
    assert found.ranks == (4,)
    assert len(inspect(give("rslora-patterns")[0]).adapter.ranks) > 1
    assert inspect(give("embedding-head")[0]).adapter.replaced > 0
    assert inspect(FIXTURES / "hf/llama").adapter is None


def test_the_command_line_says_it_too(capsys):
    source, options = give("lora")
    assert run(["inspect", str(source), "--config", str(options.config)]) == 0
    out = capsys.readouterr().out
    assert "LoRA of rank 4, alpha 6" in out
    assert "14 modules: down_proj, gate_proj, k_proj" in out
    assert run(["inspect", str(source), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["adapter"]["rank"], document["adapter"]["base"]) == (4, "hf/llama")


def test_adapters_of_other_kinds_are_described_and_not_cut(tmp_path):
    source = tmp_path / "ia3"
    source.mkdir()
    (source / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3", "base_model_name_or_path": "b"}))
    save_file(
        {"base_model.model.model.layers.0.mlp.up_proj.ia3_l": torch.ones(8, 1)}, source / "adapter_model.safetensors"
    )
    found = inspect(source)
    assert (found.adapter.kind, found.adapter.base) == ("IA3", "b")
    assert "only knows adapters of the type LORA" in found.adapter.problem
    options = SourceOptions(config=FIXTURES / "hf/llama")
    with pytest.raises(UnsupportedError, match="only knows adapters of the type LORA"):
        reshard(source, tmp_path / "out", ReshardOptions(mesh=Mesh.of(tp=2)), source_options=options)


def test_what_cannot_be_merged_can_be_cut(tmp_path):
    shutil.copytree(give("lora")[0], tmp_path / "source")
    file = tmp_path / "source/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": "pissa"}))
    assert inspect(tmp_path / "source").adapter.kind == "LoRA"
    options = ReshardOptions(mesh=Mesh.of(tp=2))
    assert reshard(tmp_path / "source", tmp_path / "out", options, source_options=give("lora")[1])


def test_names_that_peft_does_not_write_are_said(tmp_path):
    (tmp_path / "adapter_config.json").write_bytes((give("lora")[0] / "adapter_config.json").read_bytes())
    save_file({"layers.0.lora_A": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    assert "names in PEFT adapters begin with base_model.model." in inspect(tmp_path).adapter.problem


def save_as_pickle(case, path):
    """The adapter as PEFT saves it with `safe_serialization=False`."""
    shutil.copytree(give(case)[0], path)
    (path / "adapter_model.safetensors").unlink()
    torch.save(read(give(case)[0]), path / "adapter_model.bin")
    return path


@pytest.mark.parametrize("case", ["lora", "dora", "conv1d", "experts", "embedding-head"])
def test_an_adapter_in_a_pickle_is_cut_and_merged_like_one_in_safetensors(tmp_path, case):
    source, (twin, options) = save_as_pickle(case, tmp_path / "old"), give(case)
    assert inspect(source).adapter == inspect(twin).adapter
    mesh = ReshardOptions(mesh=Mesh.of(tp=2))
    assert plan(source, mesh, source_options=options).ranks == plan(twin, mesh, source_options=options).ranks
    reshard(source, tmp_path / "ranks", mesh, source_options=options)
    assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=twin)).ok
    reshard(twin, tmp_path / "twin", mesh, source_options=options)
    for rank in range(2):
        mine, theirs = read(tmp_path / "ranks", rank), read(tmp_path / "twin", rank)
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
        assert mine.keys() == theirs.keys()
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert read(tmp_path / "back").keys() == read(twin).keys()
    reshard(options.config, tmp_path / "merged", ReshardOptions(merge=(source,)))
    reshard(options.config, tmp_path / "wanted", ReshardOptions(merge=(twin,)))
    wanted = load_file(tmp_path / "wanted/model.safetensors")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in read(tmp_path / "merged").items())


def test_of_an_adapter_in_both_the_one_in_safetensors_is_read(tmp_path):
    source = save_as_pickle("lora", tmp_path / "both")
    shutil.copy(give("dora")[0] / "adapter_model.safetensors", source)
    assert inspect(source).files == ("adapter_model.safetensors",)


def test_an_adapter_is_not_taken_for_the_model_beside_it(tmp_path):
    shutil.copytree(give("lora")[0], tmp_path / "both")
    torch.save({"x": torch.ones(2)}, tmp_path / "both/pytorch_model.bin")
    with pytest.raises(SourceError, match=r"holds no \.safetensors file"):
        inspect(tmp_path / "both")


def test_adapter_matrices_are_found_under_the_names_of_the_files():
    source, options = give("lora")
    with open_checkpoint(source, options) as opened:
        assert opened.adapter
        assert opened.manifest.tensors.keys() == read(source).keys()
        assert opened.model.tensors.keys() == opened.manifest.tensors.keys()
