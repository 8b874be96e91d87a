"""`--quantize fp8-block` turns FP4 experts into FP8 if that holds every value, and stops with exit code 4 otherwise."""

from __future__ import annotations

import json

import pytest
import torch
from codes import CODECS, LLAMA, write
from reading import assert_same, read

from shardctl.base.errors import UnsupportedError
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.record import RECORD
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

CONFIG = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 32]}
OPTIONS = ReshardOptions(to="hf", quantize="fp8-block")


def write_experts(path, exponents, *, top):
    """A model of FP8 whose experts are FP4 with random exponents of a range, as DeepSeek-V4 stores them."""
    blocks, state = CODECS["fp8-blocks-ue8m0"], {}
    for tensor in describe_model(CONFIG).own():
        module, values = tensor.name.removesuffix(".weight"), torch.randn(tensor.shape).bfloat16()
        if ".experts." in module:
            rows, columns = tensor.shape
            state[f"{module}.weight"] = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
            scales = torch.randint(*exponents, (rows, columns // 32)) + 127
            state[f"{module}.scale"] = scales.to(torch.uint8).view(torch.float8_e8m0fnu)
        elif module.endswith("_proj"):
            arrays = blocks.encode(values)
            state |= {f"{module}.weight": arrays["weight"], f"{module}.scale": arrays["weight_scale_inv"]}
        else:
            state[tensor.name] = values
    said = {"expert_dtype": "fp4"}
    settings = {"quantization_config": FP8, **said} if top else {"quantization_config": {**FP8, **said}}
    return write(path, {**CONFIG, **settings}, state)


@pytest.mark.parametrize("top", [True, False])
def test_experts_have_the_same_values_in_fp8(tmp_path, top):
    source = write_experts(tmp_path / "source", (-12, 2), top=top)
    done = reshard(source, tmp_path / "out", OPTIONS)
    assert any("the values that they had in FP4" in line for line in done.notes)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config if top else config["quantization_config"])["expert_dtype"] == "fp8"
    assert config["quantization_config"]["quant_method"] == "fp8"
    found, before = read(tmp_path / "out"), read(source)
    experts = {name for name in before if ".experts." in name}
    assert {found[name].dtype for name in experts} == {torch.float8_e4m3fn, torch.float8_e8m0fnu}
    assert_same({n: t for n, t in found.items() if n not in experts}, {n: before[n] for n in before.keys() - experts})
    for name, path in (("before", source), ("after", tmp_path / "out")):
        reshard(path, tmp_path / name, ReshardOptions(to="hf", dtype="fp32", experts="split"))
    assert_same(read(tmp_path / "after"), read(tmp_path / "before"))
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok
    (tmp_path / "out" / RECORD).unlink()
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok
    assert {t.name for t in describe_model(config).own() if not t.optional} == found.keys()


def test_ranks_hold_their_parts(tmp_path):
    source = write_experts(tmp_path / "source", (-3, 3), top=True)
    reshard(source, tmp_path / "out", OPTIONS)
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2), quantize="fp8-block"))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "back"), read(tmp_path / "out"))


def test_values_that_fp8_does_not_hold_are_refused(tmp_path):
    source = write_experts(tmp_path / "source", (-20, 3), top=True)
    with pytest.raises(UnsupportedError, match=r"experts.*does not hold exactly") as caught:
        reshard(source, tmp_path / "out", OPTIONS)
    assert caught.value.exit_code == 4
    assert "--dtype bf16" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_other_formats_still_need_numbers_first(tmp_path):
    source = write_experts(tmp_path / "source", (-3, 3), top=True)
    with pytest.raises(UnsupportedError, match="quantized already"):
        reshard(source, tmp_path / "out", ReshardOptions(to="hf", quantize="int8"))
