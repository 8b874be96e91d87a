"""Adapters that are merged into their base, against what PEFT merged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shardctl.api import Mesh, ReshardOptions, SourceOptions, VerifyOptions, VerifyResult, reshard, verify
from shardctl.base.errors import SourceError, UnsupportedError, UsageError
from shardctl.cli.program import run
from shardctl.conversion.plan_file import read_plan_file
from shardctl.tensors.record import RECORD, encode_record, parse_record

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


def assert_near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> None:
    """Names, types and tensors that are replaced whole are the same, and sums as near as the guide says."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        larger = torch.maximum(base[name].double().abs(), (tensor.double() - base[name].double()).abs())
        steps = larger.log2().floor().exp2() * torch.finfo(tensor.dtype).eps
        apart = (found[name].double() - tensor.double()).abs()
        assert (apart <= 2 * steps).all(), name
        assert (apart > 0).double().mean() < 0.01, name


def edited(tmp_path: Path, case: str, **values: object) -> Path:
    """A copy of an adapter with other settings."""
    adapter = tmp_path / "edited"
    shutil.copytree(FIXTURES / case / "adapter", adapter)
    settings = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(settings | values))
    return adapter


@pytest.mark.parametrize("case", CASES)
def test_a_merge_is_as_near_that_of_peft_as_rounding_lets_it_be(tmp_path, case):
    """PEFT's own bits depend on the processor that merged, so none are compared, but of tensors it replaces."""
    wanted = load_file(FIXTURES / case / "merged" / "model.safetensors")
    base = load_file(base_of(case) / "model.safetensors")
    found = merge(case, tmp_path / "out")
    assert_near(found, wanted, base)
    assert any(not torch.equal(base[name], tensor) for name, tensor in wanted.items())
    if case == "embedding-head":
        assert_same(*({name: of[name] for name in ("lm_head.weight", "model.norm.weight")} for of in (found, wanted)))


@pytest.mark.parametrize("case", ["dora", "conv1d-dora", "experts", "experts-transposed"])
def test_a_merge_goes_straight_into_a_mesh_and_back(tmp_path, case):
    adapter, base = FIXTURES / case / "adapter", base_of(case)
    whole = merge(case, tmp_path / "whole")
    reshard(base, tmp_path / "ranks", ReshardOptions(merge=(adapter,), mesh=Mesh.of(tp=2)))
    reshard(
        tmp_path / "ranks",
        tmp_path / "back",
        ReshardOptions(to="hf", experts="split" if "qwen" in base.name else "keep"),
    )
    assert_same(load_file(tmp_path / "back" / "model.safetensors"), whole)
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


@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "transposed DoRA"])
def test_a_merge_of_many_tiles_is_the_same_with_any_bands(tmp_path, kind):
    torch.manual_seed(0)
    out, inside, rank = 700, 1500, 24
    weight, down, up = torch.randn(out, inside).bfloat16(), torch.randn(rank, inside), torch.randn(out, rank)
    if "transposed" in kind:
        weight = weight.T.contiguous()
    tensors = {"lora_A.weight": down, "lora_B.weight": up}
    tensors |= {"lora_magnitude_vector": torch.rand(out) + 0.5} if "DoRA" in kind else {}
    settings = {"use_dora": "DoRA" in kind, "fan_in_fan_out": "transposed" in kind}
    base, adapter = write_merge(tmp_path, weight, tensors, rank=rank, alpha=10, **settings)
    for name, threads, memory in (("one", 1, 64 << 20), ("three", 3, 1 << 30)):
        reshard(base, tmp_path / name, ReshardOptions(merge=(adapter,), threads=threads, host_memory=memory))
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert_same(found, load_file(tmp_path / "three" / "model.safetensors"))
    product = ((up.double() @ down.double()) * (10 / rank)).float()
    if kind == "LoRA":
        assert torch.equal(found["proj.weight"], (weight.float() + product).bfloat16())
    else:
        norms = found["proj.weight"].float().norm(dim=0 if "transposed" in kind else 1)
        assert torch.allclose(norms, tensors["lora_magnitude_vector"], rtol=1e-3)


def write_merge(
    tmp_path: Path, weight: torch.Tensor, tensors: dict[str, torch.Tensor], *, rank: int, alpha: float, **more: object
) -> tuple[Path, Path]:
    """Write a base of one matrix, and an adapter for it."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    save_file({"proj.weight": weight}, base / "model.safetensors")
    save_file(
        {f"base_model.model.proj.{name}": tensor for name, tensor in tensors.items()},
        adapter / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["proj"], **more}
    (adapter / CONFIG).write_text(json.dumps(settings))
    return base, adapter


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"alpha": 1e300}, "lora_alpha"),
        ({"alpha": 1e38}, "finite elements of proj.weight NaN or infinite in BF16"),
        ({"value": float("nan")}, r"lora_A.weight has elements that are NaN or infinite"),
    ],
)
def test_a_merge_that_is_not_finite_is_refused(tmp_path, spoil, message):
    down = torch.full((4, 32), spoil.get("value", 1e3))
    tensors = {"lora_A.weight": down, "lora_B.weight": torch.ones(16, 4)}
    base, adapter = write_merge(tmp_path, torch.ones(16, 32).bfloat16(), tensors, rank=4, alpha=spoil.get("alpha", 4))
    with pytest.raises(SourceError, match=message):
        reshard(base, tmp_path / "out", ReshardOptions(merge=(adapter,)))
    assert not (tmp_path / "out").exists()


def test_elements_of_the_base_that_are_not_finite_stay_so(tmp_path):
    weight = torch.ones(16, 32)
    weight[3, 4], weight[5, 6] = float("inf"), float("nan")
    tensors = {"lora_A.weight": torch.ones(4, 32), "lora_B.weight": torch.ones(16, 4)}
    base, adapter = write_merge(tmp_path, weight, tensors, rank=4, alpha=4)
    reshard(base, tmp_path / "out", ReshardOptions(merge=(adapter,)))
    found = load_file(tmp_path / "out" / "model.safetensors")["proj.weight"]
    assert found[3, 4].isinf()
    assert found[5, 6].isnan()
    assert found.isfinite().sum() == weight.numel() - 2


def spoil_merged(tmp_path: Path, *, version: str | None, steps: int) -> VerifyResult:
    """What `verify` says of a result whose record names another arithmetic, with one element so many steps away."""
    torch.manual_seed(0)
    tensors = {"lora_A.weight": torch.randn(4, 32), "lora_B.weight": torch.randn(16, 4)}
    base, adapter = write_merge(tmp_path, torch.randn(16, 32).bfloat16(), tensors, rank=4, alpha=4)
    out = tmp_path / "out"
    reshard(base, out, ReshardOptions(merge=(adapter,)))
    merged = load_file(out / "model.safetensors")
    merged["proj.weight"].view(torch.int16)[2, 3] += steps
    save_file(merged, out / "model.safetensors", metadata={"format": "pt"})
    record = parse_record((out / RECORD).read_bytes())
    assert record.options["merge_arithmetic"] == "2"
    options = {key: value for key, value in record.options.items() if key != "merge_arithmetic"}
    options |= {"merge_arithmetic": version} if version is not None else {}
    (out / RECORD).write_bytes(encode_record(replace(record, options=options, hashes={})))
    return verify(out, VerifyOptions(against=base, merge=(adapter,), level="quick"))


def test_verify_says_that_an_older_version_merged_and_rounded_otherwise(tmp_path):
    found = spoil_merged(tmp_path, version=None, steps=1)
    level = found.levels[-1]
    (finding,) = level.findings
    assert (level.name, finding.severity) == ("identity", "warning")
    assert "version 1 of the arithmetic of merges" in finding.message
    assert "1 element" in finding.message


@pytest.mark.parametrize(("version", "steps"), [("2", 1), (None, 4)])
def test_verify_reports_larger_differences_and_those_of_this_version(tmp_path, version, steps):
    found = spoil_merged(tmp_path, version=version, steps=steps)
    assert [each.severity for each in found.levels[-1].findings if "differs" in each.message] == ["error"]


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
