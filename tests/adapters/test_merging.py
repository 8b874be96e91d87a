"""Adapters that are merged into their base, against what PEFT merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shardctl.api import Mesh, ReshardOptions, SourceOptions, VerifyOptions, reshard, verify
from shardctl.cli.program import run
from shardctl.conversion.plan_file import read_plan_file
from shardctl.errors import SourceError, UnsupportedError, UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "peft"
CASES = sorted(path.parent.name for path in FIXTURES.glob("*/adapter"))
CONFIG = "adapter_config.json"


def base_of(case: str) -> Path:
    """The base that an adapter was trained on."""
    return FIXTURES / json.loads((FIXTURES / case / "adapter" / CONFIG).read_text())["base_model_name_or_path"]


def merge(case: str, out: Path, **options: object) -> dict[str, torch.Tensor]:
    """What shardctl merges, as one file."""
    reshard(base_of(case), out, ReshardOptions(merge=(FIXTURES / case / "adapter",), **options))
    return load_file(out / "model.safetensors")


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same names, types and bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def edited(tmp_path: Path, case: str, **values: object) -> Path:
    """A copy of an adapter with other settings."""
    adapter = tmp_path / "edited"
    shutil.copytree(FIXTURES / case / "adapter", adapter)
    settings = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(settings | values))
    return adapter


@pytest.mark.parametrize("case", CASES)
def test_a_merge_has_the_bits_of_pefts(tmp_path, case):
    wanted = load_file(FIXTURES / case / "merged" / "model.safetensors")
    assert_same(merge(case, tmp_path / "out"), wanted)
    base = load_file(base_of(case) / "model.safetensors")
    assert any(not torch.equal(base[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("case", ["dora", "conv1d-dora", "experts", "experts-transposed"])
def test_a_merge_goes_straight_into_a_mesh_and_back(tmp_path, case):
    adapter, base = FIXTURES / case / "adapter", base_of(case)
    reshard(base, tmp_path / "ranks", ReshardOptions(merge=(adapter,), mesh=Mesh.of(tp=2)))
    reshard(
        tmp_path / "ranks",
        tmp_path / "back",
        ReshardOptions(to="hf", experts="split" if "qwen" in base.name else "keep"),
    )
    assert_same(
        load_file(tmp_path / "back" / "model.safetensors"), load_file(FIXTURES / case / "merged" / "model.safetensors")
    )
    found = verify(tmp_path / "ranks", VerifyOptions(against=base, merge=(adapter,), level="full"))
    assert found.ok
    assert not verify(tmp_path / "ranks", VerifyOptions(against=base)).ok


def test_verify_compares_what_peft_merged_with_its_base():
    merged = FIXTURES / "rslora-patterns" / "merged"
    options = VerifyOptions(against=base_of("lora"), merge=(FIXTURES / "rslora-patterns" / "adapter",))
    assert verify(merged, options, source_options=SourceOptions(config=base_of("lora") / "config.json")).ok


def test_verify_says_that_the_adapter_is_not_named(tmp_path):
    merge("lora", tmp_path / "out")
    found = verify(tmp_path / "out", VerifyOptions(against=base_of("lora")))
    assert any("name it with --merge" in finding.message for level in found.levels for finding in level.findings)


def test_two_adapters_are_merged_one_after_the_other(tmp_path):
    first, second = (FIXTURES / case / "adapter" for case in ("lora", "dora"))
    reshard(base_of("lora"), tmp_path / "both", ReshardOptions(merge=(first, second)))
    reshard(base_of("lora"), tmp_path / "one", ReshardOptions(merge=(first,)))
    reshard(tmp_path / "one", tmp_path / "other", ReshardOptions(merge=(second,)))
    assert_same(*(load_file(tmp_path / name / "model.safetensors") for name in ("both", "other")))


def test_a_merge_of_many_tiles_has_the_bits_of_torch(tmp_path):
    torch.manual_seed(0)
    out, inside, rank = 700, 1500, 24
    weight, down, up = torch.randn(out, inside).bfloat16(), torch.randn(rank, inside), torch.randn(out, rank)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    save_file({"proj.weight": weight}, base / "model.safetensors")
    module = "base_model.model.proj"
    save_file({f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}, adapter / "adapter_model.safetensors")
    (adapter / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 10}))
    reshard(base, tmp_path / "out", ReshardOptions(merge=(adapter,), threads=3))
    wanted = weight.clone()
    wanted += (up @ down) * (10 / rank)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), {"proj.weight": wanted})


def test_a_plan_follows_its_adapter_and_no_other(tmp_path):
    adapter = edited(tmp_path, "lora")
    assert run(["plan", str(base_of("lora")), "--merge", str(adapter), "--out", str(tmp_path / "plan.json")]) == 0
    (adapter / CONFIG).write_text((adapter / CONFIG).read_text().replace('"lora_alpha": 6', '"lora_alpha": 7'))
    with pytest.raises(SourceError, match="differs from the plan that this version makes"):
        reshard(base_of("lora"), tmp_path / "out", plan=read_plan_file(tmp_path / "plan.json"))


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"peft_type": "IA3"}, UnsupportedError, "LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, UnsupportedError, "changed the base"),
        ({"alora_invocation_tokens": [1, 2]}, UnsupportedError, "aLoRA"),
        ({"r": 8}, SourceError, "ranks 4 and 4, but adapter_config.json says 8"),
        ({"lora_alpha": "much"}, SourceError, "lora_alpha"),
        ({"rank_pattern": {"(a+)+": 3}}, SourceError, "for ever"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, settings, kind, message):
    with pytest.raises(kind, match=message):
        reshard(base_of("lora"), tmp_path / "out", ReshardOptions(merge=(edited(tmp_path, "lora", **settings),)))


def test_an_adapter_of_another_model_is_refused(tmp_path):
    with pytest.raises(SourceError, match="no such module") as raised:
        reshard(base_of("experts"), tmp_path / "out", ReshardOptions(merge=(FIXTURES / "lora" / "adapter",)))
    assert "hf/llama" in raised.value.hint


def test_matrices_of_another_size_are_refused(tmp_path):
    adapter = edited(tmp_path, "lora")
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    save_file(tensors | {name: torch.zeros(16, 4)}, adapter / "adapter_model.safetensors")
    with pytest.raises(SourceError, match=r"a matrix of \[16, 32\]"):
        reshard(base_of("lora"), tmp_path / "out", ReshardOptions(merge=(adapter,)))


def test_a_directory_without_adapter_is_refused(tmp_path):
    with pytest.raises(SourceError, match="is not a PEFT adapter"):
        reshard(base_of("lora"), tmp_path / "out", ReshardOptions(merge=(base_of("lora"),)))


def test_a_merge_needs_something_to_compare_with():
    with pytest.raises(UsageError, match="--merge"):
        verify(base_of("lora"), VerifyOptions(merge=(FIXTURES / "lora" / "adapter",)))


def test_an_interrupted_merge_notices_another_adapter(tmp_path):
    """What was staged belongs to the adapter's bytes."""
    first = merge("lora", tmp_path / "out")
    adapter = edited(tmp_path, "lora")
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    reshard(base_of("lora"), tmp_path / "out2", ReshardOptions(merge=(adapter,)))
    second = load_file(tmp_path / "out2" / "model.safetensors")
    assert any(not np.array_equal(first[n].view(torch.uint8), second[n].view(torch.uint8)) for n in first)
