"""Quantized weights become numbers, bit for bit those of the library that owns the method, in any layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from codes import CODECS, LLAMA, encoded, plain_state, write
from compressing import WEIGHTS
from reading import assert_same, of, read
from safetensors.torch import save_file

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models import describe_model
from shardctl.options import DestinationOptions, ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

CONFIGS = Path(__file__).parents[2] / "fixtures/configs"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OWN = {"gptq": torch.float16, "awq": torch.float16, "auto-round": torch.float16}
"""The type in which the layers of a method compute their weights, which is that of their scales; else F32."""


def config_of(path):
    return json.loads((path / "config.json").read_text())


def list_modules(state):
    """The modules that are quantized."""
    plain = plain_state(LLAMA)
    found = [n.removesuffix(".weight") for n, t in plain.items() if n not in state or state[n].dtype != t.dtype]
    assert found
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODECS)
def test_every_method_gives_the_numbers_of_its_layers(quantised, tmp_path, name, dtype):
    source = quantised(name)
    reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype=dtype))
    stored, found = read(source), read(tmp_path / "out")
    assert found.keys() == plain_state(LLAMA).keys()
    own = OWN.get(CODECS[name].settings["quant_method"], torch.float32)
    for module in list_modules(stored):
        expected = CODECS[name].decode(of(module, stored)).to(own).to(DTYPES[dtype])
        assert torch.equal(found[f"{module}.weight"], expected), module
    assert "quantization_config" not in config_of(tmp_path / "out")
    assert config_of(tmp_path / "out")["dtype"] == str(DTYPES[dtype]).removeprefix("torch.")
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_numbers_are_those_of_compressed_tensors(compressed, tmp_path, name):
    from compressed_tensors.compressors import BaseCompressor

    source, scheme = compressed(name)
    reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    stored, found = read(source), read(tmp_path / "out")
    owner = BaseCompressor.get_value_from_registry(scheme.format)
    for module in list_modules(stored):
        expected = owner.decompress(dict(of(module, stored)), scheme)["weight"]
        assert torch.equal(found[f"{module}.weight"], expected.bfloat16()), module
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok


def test_fp8_blocks_are_those_of_transformers(quantised, tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    source = quantised("fp8-blocks")
    reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    stored, found = read(source), read(tmp_path / "out")
    for module in list_modules(stored):
        arrays = of(module, stored)
        expected = Fp8Dequantize(None)._dequantize_one(arrays["weight"], arrays["weight_scale_inv"], torch.bfloat16)
        assert torch.equal(found[f"{module}.weight"], expected), module


@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-3", "awq", "modelopt-nvfp4"])
def test_every_layout_holds_the_same_numbers(quantised, tmp_path, name):
    source = quantised(name)
    reshard(source, tmp_path / "plain", ReshardOptions(to="hf", dtype="bf16"))
    for number, wish in enumerate(
        (
            ReshardOptions(mesh=Mesh.of(tp=8), dtype="bf16"),
            ReshardOptions(mesh=Mesh.of(tp=2, pp=2, fsdp=3), dtype="bf16"),
            ReshardOptions(to="dcp", mesh=Mesh.of(fsdp=3), dtype="bf16"),
            ReshardOptions(to="hf", dtype="bf16", host_memory=80 << 20, threads=1),
        )
    ):
        there, back = tmp_path / f"there{number}", tmp_path / f"back{number}"
        reshard(source, there, wish)
        assert verify(there, VerifyOptions(level="full", against=source)).ok
        reshard(there, back, ReshardOptions(to="hf"))
        assert_same(read(back), read(tmp_path / "plain"))


def test_what_is_read_are_the_bytes_of_the_codes(quantised, tmp_path):
    source = quantised("gptq-4")
    done = reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    assert done.read_bytes == sum(tensor.nbytes for tensor in read(source).values())


def test_what_no_weight_is_worked_out_of_is_named(quantised, tmp_path):
    done = reshard(quantised("modelopt-fp8"), tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    (warning,) = done.warnings
    assert warning.startswith("the result leaves out model.layers.0.self_attn.q_proj.input_scale, ")
    assert "14 quantized weights were decoded to BF16" in done.notes
    assert not reshard(quantised("gptq-4"), tmp_path / "gptq", ReshardOptions(to="hf", dtype="bf16")).warnings


def test_ranks_of_a_quantized_model_are_taken_back_too(quantised, tmp_path):
    source = quantised("gptq-4")
    reshard(source, tmp_path / "plain", ReshardOptions(to="hf", dtype="bf16"))
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2, fsdp=2)))
    reshard(tmp_path / "ranks", tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    assert_same(read(tmp_path / "out"), read(tmp_path / "plain"))


def test_values_that_become_infinite_when_they_are_decoded_are_refused(quantised, tmp_path):
    name, source = "model.layers.0.mlp.up_proj.weight", tmp_path / "source"
    shutil.copytree(quantised("fp8-blocks"), source)
    (file,) = source.glob("*.safetensors")
    tensors = read(source)
    tensors[f"{name}_scale_inv"] *= 1e6
    save_file(tensors, file, {"format": "pt"})
    wish = ReshardOptions(mesh=Mesh.of(tp=2), dtype="fp16", threads=1)
    for _ in range(2):
        with pytest.raises(SourceError, match=f"{name}: .* finite values become infinite in F16"):
            reshard(source, tmp_path / "out", wish)
    made = reshard(source, tmp_path / "out", wish, destination_options=DestinationOptions(allow_overflow=True))
    assert made.kept_bytes
    assert made.record.options["allow_overflow"] == "true"
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok
    (tmp_path / "out" / "shardctl.json").unlink()
    found = verify(tmp_path / "out", VerifyOptions(against=source))
    assert found.exit_code == 3
    assert any(f"{name} is infinite in" in each.message for each in found.findings if each.severity == "error")


def test_a_wrong_number_in_the_result_is_found(quantised, tmp_path):
    source = quantised("fp8-blocks")
    reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    (tmp_path / "out" / "shardctl.json").unlink()
    assert verify(tmp_path / "out", VerifyOptions(against=source)).ok
    (file,) = (tmp_path / "out").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-(96 * 128 * 2) - 9] ^= 1
    file.write_bytes(data)
    assert not verify(tmp_path / "out", VerifyOptions(against=source)).ok


def test_experts_of_deepseek_v4_are_fp4_with_exponents(tmp_path):
    config = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2}
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 32], "expert_dtype": "fp4"}
    blocks, packed, state = CODECS["fp8-blocks-ue8m0"], CODECS["quark-mxfp4"], {}
    for tensor in describe_model(config).own():
        module, values = tensor.name.removesuffix(".weight"), torch.randn(tensor.shape).bfloat16()
        if ".experts." in module:
            arrays = packed.encode(values)
            state[f"{module}.weight"] = arrays["weight"].view(torch.int8)
            state[f"{module}.scale"] = arrays["weight_scale"].view(torch.float8_e8m0fnu)
        elif module.endswith("_proj"):
            arrays = blocks.encode(values)
            state |= {f"{module}.weight": arrays["weight"], f"{module}.scale": arrays["weight_scale_inv"]}
        else:
            state[tensor.name] = values
    source = write(tmp_path / "source", {**config, "quantization_config": fp8}, state)
    reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="fp32", experts="split"))
    found, compared = read(tmp_path / "out"), 0
    for name, scale in state.items():
        module = name.removesuffix(".scale")
        if module != name and ".experts." in module:
            arrays = {"weight": state[f"{module}.weight"].view(torch.uint8), "weight_scale": scale.view(torch.uint8)}
            assert torch.equal(found[f"{module}.weight"], packed.decode(arrays)), module
            compared += 1
    assert compared == 12


def test_act_order_mixes_the_groups_of_inputs(tmp_path):
    codec, state = CODECS["gptq-4"], plain_state(LLAMA)
    config = {**LLAMA, "quantization_config": {**codec.settings, "desc_act": True}}
    arrays = encoded(codec, state)
    order = {
        name: torch.randperm(len(t), generator=torch.Generator().manual_seed(1))
        for name, t in arrays.items()
        if name.endswith("g_idx")
    }
    mixed = {name: t[order[name]] if name in order else t for name, t in arrays.items()}
    source = write(tmp_path / "source", config, mixed)
    reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="fp32"))
    found = read(tmp_path / "out")
    for module in list_modules(mixed):
        expected = codec.decode(of(module, mixed)).half().float()
        assert torch.equal(found[f"{module}.weight"], expected), module


def test_an_input_of_a_group_that_does_not_exist_is_an_error(tmp_path):
    codec, state = CODECS["gptq-4"], plain_state(LLAMA)
    config = {**LLAMA, "quantization_config": {**codec.settings, "desc_act": True}}
    arrays = encoded(codec, state)
    name = next(name for name in arrays if name.endswith("g_idx"))
    arrays[name] = arrays[name].clone().fill_(99)
    source = write(tmp_path / "source", config, arrays)
    with pytest.raises(SourceError, match="group 99"):
        reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))


def test_a_method_that_nobody_here_can_work_out_is_refused(tmp_path):
    codec = CODECS["awq"]
    config = {**LLAMA, "quantization_config": {**codec.settings, "bits": 8}}
    arrays = {
        name: t.repeat_interleave(2, 1) if name.endswith(("qweight", "qzeros")) else t
        for name, t in encoded(codec, plain_state(LLAMA)).items()
    }
    source = write(tmp_path / "source", config, arrays)
    with pytest.raises(UnsupportedError, match="does not know how to decode"):
        reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))


@pytest.mark.parametrize(
    ("name", "change", "form", "usual"),
    [("awq", "version", "gemv_fast", "gemm"), ("gptq-4", "format", "marlin_24", "gptq")],
)
def test_weights_in_the_order_of_a_kernel_are_refused_with_what_to_take_instead(tmp_path, name, change, form, usual):
    codec = CODECS[name]
    config = {**LLAMA, "quantization_config": {**codec.settings, change: form}}
    source = write(tmp_path / "source", config, encoded(codec, plain_state(LLAMA)))
    for wish in (ReshardOptions(to="hf", dtype="bf16"), ReshardOptions(mesh=Mesh.of(tp=2))):
        with pytest.raises(UnsupportedError, match=f"'{form}' are ordered for one kernel") as caught:
            reshard(source, tmp_path / "out", wish)
        assert f"take the model in the format '{usual}'" in caught.value.hint
    reshard(source, tmp_path / "copy", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "copy"), read(source))


def test_stacks_of_experts_in_mxfp4_are_those_of_transformers(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = json.loads((CONFIGS / "gpt_oss.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    seed = torch.Generator().manual_seed(0)
    state = {
        name: torch.randint(100 if name.endswith("scales") else 0, 150, shape, generator=seed, dtype=torch.uint8)
        if name.endswith(("_blocks", "_scales"))
        else torch.randn(shape, generator=seed).bfloat16()
        for name, shape in describe_model(config).state().items()
    }
    source = write(tmp_path / "source", config, state)
    for number, wish in enumerate(
        (
            ReshardOptions(to="hf", dtype="bf16"),
            ReshardOptions(mesh=Mesh.of(tp=2), dtype="bf16"),
            ReshardOptions(mesh=Mesh.of(tp=2, ep=2), dtype="bf16"),
        )
    ):
        there, back = tmp_path / f"there{number}", tmp_path / f"back{number}"
        reshard(source, there, wish)
        assert verify(there, VerifyOptions(level="full", against=source)).ok
        reshard(there, back, ReshardOptions(to="hf"))
        found = read(back)
        stacks = [name.removesuffix("_blocks") for name in state if name.endswith("_blocks")]
        assert stacks
        for name in stacks:
            expected = convert_moe_packed_tensors(state[f"{name}_blocks"], state[f"{name}_scales"])
            assert torch.equal(found[name], expected), name
