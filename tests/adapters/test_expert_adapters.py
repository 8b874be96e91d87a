"""Adapters of stacked experts, taken apart into those of each expert, against PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shardctl.base.errors import UnsupportedError, UsageError
from shardctl.options import ReshardOptions, SourceOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures" / "peft"
BASE = FIXTURES / "hf/qwen3_moe"
CASES = ("experts", "experts-0.18", "experts-0.19")
SPLIT = ReshardOptions(experts="split")
KNOWN = SourceOptions(config=BASE / "config.json")


@pytest.mark.parametrize("case", CASES)
def test_each_expert_gets_the_product_that_peft_merges(tmp_path, case):
    """In the layouts of PEFT 0.18, 0.19 and later, which differ in which matrix is that of the inputs."""
    out = tmp_path / "out"
    reshard(FIXTURES / case / "adapter", out, SPLIT, source_options=KNOWN)
    assert verify(out).ok
    reshard(BASE, tmp_path / "merged", ReshardOptions(merge=(out,)))
    found, base = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", BASE))
    wanted = load_file(FIXTURES / case / "merged/model.safetensors")
    for name, tensor in wanted.items():
        steps = torch.maximum(base[name].abs(), (tensor - base[name]).abs()).double() * 2**-7
        assert ((found[name].double() - tensor.double()).abs() <= 2 * steps).all(), name
    assert any(not torch.equal(base[name], found[name]) for name in base if ".experts." in name)


def test_peft_computes_the_same_with_both_forms(tmp_path):
    from peft import PeftModel

    reshard(FIXTURES / "experts/adapter", tmp_path / "out", SPLIT, source_options=KNOWN)
    tokens, logits = torch.arange(8)[None], []
    for adapter in (FIXTURES / "experts/adapter", tmp_path / "out"):
        base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        with torch.no_grad():
            logits.append(PeftModel.from_pretrained(base, adapter).eval()(tokens).logits)
    assert torch.allclose(*logits, atol=1e-4)


def test_experts_are_divided_like_those_of_the_base(tmp_path):
    mesh = ReshardOptions(experts="split", mesh=Mesh.of(tp=2))
    reshard(FIXTURES / "experts/adapter", tmp_path / "ranks", mesh, source_options=KNOWN)
    reshard(FIXTURES / "experts/adapter", tmp_path / "out", SPLIT, source_options=KNOWN)
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    back, out = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("back", "out"))
    assert back.keys() == out.keys()
    assert all(torch.equal(back[name], out[name]) for name in out)
    assert inspect(tmp_path / "out").adapter.targets == ("down_proj", "gate_proj", "q_proj", "up_proj")


def test_what_cannot_be_taken_apart_is_refused(tmp_path):
    with pytest.raises(UsageError, match="needs an adapter of stacked experts"):
        reshard(
            FIXTURES / "lora/adapter",
            tmp_path / "out",
            SPLIT,
            source_options=SourceOptions(config=FIXTURES / "hf/llama/config.json"),
        )
    with pytest.raises(UnsupportedError, match="in one array on the Hub"):
        reshard(
            FIXTURES / "experts-transposed/adapter",
            tmp_path / "out",
            SPLIT,
            source_options=SourceOptions(config=FIXTURES / "hf/gpt_oss/config.json"),
        )


FUSE = ReshardOptions(experts="fused")
FUSE_FOR_018 = ReshardOptions(experts="fused@0.18")


@pytest.mark.parametrize("case", CASES)
def test_peft_merges_the_joined_matrices_of_experts_to_the_same(tmp_path, case):
    """What was taken apart, in any layout, and joined again; the products of gate and up become one of both ranks."""
    from peft import PeftModel

    reshard(FIXTURES / case / "adapter", tmp_path / "split", SPLIT, source_options=KNOWN)
    reshard(tmp_path / "split", tmp_path / "fused", FUSE, source_options=KNOWN)
    assert verify(tmp_path / "fused").ok
    stored = load_file(tmp_path / "fused/adapter_model.safetensors")
    version = json.loads((tmp_path / "fused/adapter_config.json").read_text())["peft_version"]
    assert version == {"experts": "0.21.2", "experts-0.18": "0.19.0", "experts-0.19": "0.19.1"}[case]
    module = "base_model.model.model.layers.0.mlp.experts"
    assert stored[f"{module}.base_layer.lora_A.weight"].shape == (4 * 4, 32)
    assert stored[f"{module}.base_layer.lora_B.weight"].shape == (48, 4 * 4)
    assert stored[f"{module}.lora_A.weight"].shape == (4 * 2, 24)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), tmp_path / "fused")
    model.merge_and_unload().save_pretrained(tmp_path / "peft")
    theirs = load_file(tmp_path / "peft/model.safetensors")
    for name, tensor in load_file(FIXTURES / case / "merged/model.safetensors").items():
        assert torch.allclose(theirs[name], tensor, atol=1e-3, rtol=2**-6), name
    reshard(BASE, tmp_path / "ours", ReshardOptions(merge=(tmp_path / "fused",)))
    reshard(BASE, tmp_path / "theirs", ReshardOptions(merge=(tmp_path / "split",)))
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    base = load_file(BASE / "model.safetensors")
    for name, tensor in wanted.items():
        steps = torch.maximum(base[name].abs(), (tensor - base[name]).abs()).double() * 2**-7
        assert ((found[name].double() - tensor.double()).abs() <= 2 * steps).all(), name


def test_experts_without_matrices_get_zeros(tmp_path):
    reshard(FIXTURES / "experts/adapter", tmp_path / "split", SPLIT, source_options=KNOWN)
    file = tmp_path / "split/adapter_model.safetensors"
    tensors = load_file(file)
    left = {name: t for name, t in tensors.items() if ".experts.2." not in name and ".up_proj." not in name}
    save_file(left, file)
    reshard(tmp_path / "split", tmp_path / "fused", FUSE, source_options=KNOWN)
    fused = load_file(tmp_path / "fused/adapter_model.safetensors")
    module = "base_model.model.model.layers.0.mlp.experts"
    down, up = (fused[f"{module}.base_layer.lora_{part}.weight"] for part in "AB")
    assert down.shape == (4 * 2, 32)
    assert not up[24:].any()
    assert not down[4:6].any()
    for expert in (0, 1, 3):
        ours = up[:24, expert::4] @ down[2 * expert : 2 * expert + 2]
        own = f"base_model.model.model.layers.0.mlp.experts.{expert}.gate_proj"
        assert torch.equal(ours, left[f"{own}.lora_B.weight"] @ left[f"{own}.lora_A.weight"])
    assert all(torch.equal(fused[name], tensor) for name, tensor in left.items() if "q_proj" in name)


def test_what_cannot_be_joined_is_refused(tmp_path):
    with pytest.raises(UsageError, match="matrices of each expert, and this one has none"):
        reshard(FIXTURES / "experts/adapter", tmp_path / "out", FUSE, source_options=KNOWN)
    with pytest.raises(UsageError, match="--experts fused needs the config"):
        reshard(FIXTURES / "experts/adapter", tmp_path / "out", FUSE)
    with pytest.raises(UsageError, match="arrays of experts in another layout"):
        reshard(FIXTURES / "experts-0.18/adapter", tmp_path / "out", FUSE_FOR_018, source_options=KNOWN)
    with pytest.raises(UsageError, match="the source is not an adapter"):
        reshard(BASE, tmp_path / "out", FUSE_FOR_018)
    gpt_oss = SourceOptions(config=FIXTURES / "hf/gpt_oss/config.json")
    with pytest.raises(UsageError, match="arrays of experts in another layout"):  # one layout in every version
        reshard(FIXTURES / "experts-transposed/adapter", tmp_path / "out", FUSE_FOR_018, source_options=gpt_oss)


def test_layouts_of_peft_018_and_019_turn_into_each_other_bit_for_bit(tmp_path):
    """What PEFT 0.18 wrote, in the layout of 0.19, which PEFT 0.21 merges to what 0.18 merged, and back again."""
    from peft import PeftModel

    for first, there, back in (("experts-0.18", FUSE, FUSE_FOR_018), ("experts-0.19", FUSE_FOR_018, FUSE)):
        source = FIXTURES / first / "adapter"
        reshard(source, tmp_path / f"{first}-there", there, source_options=KNOWN)
        reshard(tmp_path / f"{first}-there", tmp_path / f"{first}-back", back, source_options=KNOWN)
        stored, turned, same = (
            load_file(path / "adapter_model.safetensors")
            for path in (source, tmp_path / f"{first}-there", tmp_path / f"{first}-back")
        )
        assert stored.keys() == turned.keys() == same.keys()
        assert all(torch.equal(stored[name], same[name]) for name in stored)
        assert any(stored[name].shape != turned[name].shape for name in stored)
    written = json.loads((tmp_path / "experts-0.19-there/adapter_config.json").read_text())
    assert written["peft_version"] == "0.18.0"
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), tmp_path / "experts-0.18-there")
    model.merge_and_unload().save_pretrained(tmp_path / "peft")
    merged = load_file(tmp_path / "peft/model.safetensors")
    for name, tensor in load_file(FIXTURES / "experts-0.18/merged/model.safetensors").items():
        assert torch.allclose(merged[name], tensor, atol=1e-3, rtol=2**-6), name


def test_matrices_of_each_expert_are_joined_in_the_layout_of_peft_018(tmp_path):
    """The same matrices as in the layout of PEFT 0.19, zeros included, the other way round."""
    reshard(FIXTURES / "experts/adapter", tmp_path / "split", SPLIT, source_options=KNOWN)
    file = tmp_path / "split/adapter_model.safetensors"
    left = {name: t for name, t in load_file(file).items() if ".experts.2." not in name}
    save_file(left, file)
    for name, options in (("0.18", FUSE_FOR_018), ("0.19", FUSE)):
        reshard(tmp_path / "split", tmp_path / name, options, source_options=KNOWN)
    reshard(tmp_path / "0.18", tmp_path / "turned", FUSE, source_options=KNOWN)
    turned, wanted = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("turned", "0.19"))
    assert turned.keys() == wanted.keys()
    assert all(torch.equal(turned[name], wanted[name]) for name in wanted)
