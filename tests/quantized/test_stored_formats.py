"""Formats that stored names show are decoded to their owners' numbers, or named; no cast rounds a scale."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from codes import CODECS, LLAMA, plain_state, write
from reading import assert_same, read
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardctl.base.errors import SourceError, UnsupportedError
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.diff import diff
from shardctl.verbs.inspect import inspect
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MLX = ("affine-mixed", "affine-tied", "experts", "experts-global", "mxfp4", "mxfp8", "nvfp4")
QUANTO = ("qint8", "qint4", "qint2", "qfloat8", "qfloat8-e5m2")
TITLES = {
    "affine-tied": "MLX 8-bit (group 32)",
    "experts": "MLX 4-bit (group 32) and 8-bit (group 64)",
    "nvfp4": "MLX nvfp4",
    "qint4": "quanto qint4",
    "qfloat8": "quanto qfloat8 (F8_E4M3)",
}


def copy(path, tmp_path):
    """A copy of one file, as a checkpoint without a config."""
    target = tmp_path / "source"
    target.mkdir()
    shutil.copy(path, target / path.name)
    return target


def split_experts(numbers):
    """The matrices of stacked experts by the names of the Hub."""
    found = {}
    for name, stack in numbers.items():
        around, _, own = name.partition("switch_mlp.")
        parts = {f"{around}experts.{e}.{own}": matrix for e, matrix in enumerate(stack)} if own else {name: stack}
        found |= parts
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", MLX)
def test_mlx_is_decoded_to_its_own_numbers(tmp_path, case, dtype):
    source = FIXTURES / "mlx" / case
    done = reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype=dtype))
    found, config = read(tmp_path / "out"), json.loads((tmp_path / "out/config.json").read_text())
    for name, numbers in split_experts(load_file(source.with_suffix(".safetensors"))).items():
        assert torch.equal(found[name], numbers.to(DTYPES[dtype])), name
    assert {"quantization", "quantization_config"}.isdisjoint(config)
    assert not [name for name in found if name.endswith((".scales", ".biases", "global_scale"))]
    assert inspect(tmp_path / "out").architecture == config["architectures"][0]
    assert done.warnings == ()
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", QUANTO)
def test_quanto_is_decoded_to_its_own_numbers(tmp_path, case, dtype):
    source = FIXTURES / "quanto" / case
    done = reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype=dtype))
    found = read(tmp_path / "out")
    for name, numbers in load_file(source.with_suffix(".safetensors")).items():
        assert torch.equal(found[name], numbers.to(DTYPES[dtype])), name
    assert not (tmp_path / "out/quanto_qmap.json").exists()
    (line,) = done.warnings
    assert line.startswith("the result leaves out ")
    assert "input_scale" in line
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok


@pytest.mark.parametrize("file", ["layers", "header", "scaled"])
def test_comfyui_is_decoded_to_its_own_numbers(tmp_path, file):
    source = copy(FIXTURES / f"comfy/{file}.safetensors", tmp_path)
    owners = load_file(FIXTURES / "comfy/decoded/decoded.safetensors")
    for dtype, kind in DTYPES.items():
        reshard(source, tmp_path / dtype, ReshardOptions(to="hf", dtype=dtype))
        found = read(tmp_path / dtype)
        weights = {name for name in owners if file != "scaled" or ".float8" in name}
        biases = {name.replace("weight", "bias") for name in weights}
        assert found.keys() == weights | biases | {"model.diffusion_model.norm.weight"}
        for name in weights:
            assert torch.equal(found[name], owners[name].to(kind)), name
        (written,) = (tmp_path / dtype).glob("*.safetensors")
        with safe_open(written, "pt") as opened:
            assert "_quantization_metadata" not in opened.metadata()
    assert verify(tmp_path / "bf16", VerifyOptions(level="full", against=source)).ok


def test_a_format_of_comfyui_that_is_not_decoded_is_named(tmp_path):
    state = load_file(FIXTURES / "comfy/layers.safetensors")
    text = json.dumps({"format": "int8_tensorwise", "convrot": True}).encode()
    state["model.diffusion_model.blocks.0.int8_rows.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    (tmp_path / "source").mkdir()
    save_file(state, tmp_path / "source/model.safetensors")
    with pytest.raises(UnsupportedError, match=r"int8_rows\.weight .* 'int8_tensorwise' with rotated inputs"):
        reshard(tmp_path / "source", tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    reshard(tmp_path / "source", tmp_path / "kept", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "kept"), state)


@pytest.mark.parametrize("case", TITLES)
def test_inspect_names_the_format_and_does_not_advise_to_remove_the_config(case):
    path = FIXTURES / ("mlx" if case in MLX else "quanto") / case
    found = inspect(path)
    assert found.why_no_model == f"the weights are quantized: {TITLES[case]}"
    assert found.warnings == ()


def test_decoded_weights_are_cut_for_any_mesh_and_layout(tmp_path):
    source = FIXTURES / "quanto/qint4"
    reshard(source, tmp_path / "plain", ReshardOptions(to="hf", dtype="bf16"))
    with pytest.raises(UnsupportedError, match="quantized: quanto qint4") as caught:
        reshard(source, tmp_path / "tp2", ReshardOptions(mesh=Mesh.of(tp=2)))
    assert "--dtype bf16" in caught.value.hint
    for number, options in enumerate(
        (ReshardOptions(mesh=Mesh.of(tp=2), dtype="bf16"), ReshardOptions(to="dcp", dtype="bf16"))
    ):
        there, back = tmp_path / f"there{number}", tmp_path / f"back{number}"
        reshard(source, there, options)
        assert verify(there, VerifyOptions(level="full", against=source)).ok
        reshard(there, back, ReshardOptions(to="hf"))
        assert_same(read(back), read(tmp_path / "plain"))
    assert diff(tmp_path / "plain", source).changes == ()


def test_packed_weights_travel_as_they_are_on_one_device(tmp_path):
    source = FIXTURES / "mlx/affine-mixed"
    done = reshard(source, tmp_path / "out", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "out"), read(source))
    assert any("MLX" in line and "stay so" in line for line in done.warnings)


def test_mlx_without_its_settings_is_decoded_where_the_models_sizes_leave_one_way(tmp_path):
    source = shutil.copytree(FIXTURES / "mlx/affine-mixed", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        del config[key]
    (source / "config.json").write_text(json.dumps(config))
    reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    reshard(FIXTURES / "mlx/affine-mixed", tmp_path / "told", ReshardOptions(to="hf", dtype="bf16"))
    assert_same(read(tmp_path / "out"), read(tmp_path / "told"))
    (source / "config.json").unlink()
    with pytest.raises(SourceError, match=r"does not say how MLX packed .* fit .* or ") as caught:
        reshard(source, tmp_path / "unknown", ReshardOptions(to="hf", dtype="bf16"))
    assert "group_size" in caught.value.hint


def test_mlx_is_refused_where_it_changes_values_or_names(tmp_path):
    source = shutil.copytree(FIXTURES / "mlx/experts", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_next"}))
    with pytest.raises(UnsupportedError, match="norms plus one for qwen3_next"):
        reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    (source / "config.json").write_text(json.dumps(config | {"model_type": "x", "architectures": ["XForCausalLM"]}))
    with pytest.raises(UnsupportedError, match="only for models of which shardctl knows every tensor"):
        reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))


AQLM = {
    "quant_method": "aqlm",
    "in_group_size": 8,
    "nbits_per_codebook": 16,
    "linear_weights_not_to_quantize": ["lm_head"],
}


def write_packed(path, settings, build):
    """A Llama whose linear weights `build` makes of a weight's shape."""
    state = {}
    for name, tensor in plain_state(LLAMA).items():
        module = name.removesuffix(".weight")
        linear = tensor.ndim == 2 and ".layers." in name
        state |= {f"{module}.{own}": t for own, t in build(*tensor.shape).items()} if linear else {name: tensor}
    return write(path, {**LLAMA, **settings}, state)


def build_aqlm(out, inputs):
    codes = torch.randint(-9, 9, (out, inputs // 8, 1), dtype=torch.int16)
    return {"codes": codes, "codebooks": torch.randn(1, 256, 1, 8).half(), "scales": torch.rand(out, 1, 1, 1).half()}


def build_exl3(out, inputs):
    trellis = torch.randint(-9, 9, (inputs // 16, out // 16, 64), dtype=torch.int16)
    return {"trellis": trellis, "suh": torch.randn(inputs).half(), "svh": torch.randn(out).half()}


@pytest.mark.parametrize(
    ("title", "settings", "build"),
    [
        ("AQLM", {"quantization_config": AQLM}, build_aqlm),
        ("AQLM", {}, build_aqlm),
        ("EXL3 (ExLlamaV3)", {"quantization_config": {"quant_method": "exl3", "bits": 4.0}}, build_exl3),
        ("EXL3 (ExLlamaV3)", {}, build_exl3),
    ],
)
def test_formats_that_are_not_decoded_are_named(tmp_path, title, settings, build):
    source = write_packed(tmp_path / "source", settings, build)
    found = inspect(source)
    assert found.why_no_model == f"the weights are quantized: {title}"
    assert found.warnings == ()
    with pytest.raises(UnsupportedError, match=f"shardctl does not decode {title.split()[0]}"):
        reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    reshard(source, tmp_path / "kept", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "kept"), read(source))


# Codes that nothing explains ------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [True, False], ids=["config", "no-config"])
@pytest.mark.parametrize("name", CODECS)
def test_no_cast_rounds_the_scales_of_weights_that_stay_quantized(quantised, tmp_path, name, config):
    source = shutil.copytree(quantised(name), tmp_path / "source")
    (source / "config.json").unlink()
    if config:
        (source / "config.json").write_text(json.dumps(LLAMA))
    state = read(source)
    if any(t.dtype.is_floating_point and "scale" in n for n, t in state.items()):
        with pytest.raises(UnsupportedError, match="would round what lies beside it") as caught:
            reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="fp16"))
        assert "--config PATH" in caught.value.hint
    else:
        done = reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="fp16"))
        assert any("are not cast" in line for line in done.warnings)
        found = read(tmp_path / "out")
        assert all(torch.equal(found[n], t) for n, t in state.items() if not t.dtype.is_floating_point)
    reshard(source, tmp_path / "kept", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "kept"), state)


@pytest.mark.parametrize(
    ("codes", "beside"),
    [
        ("block.proj.weight", "block.proj.some_factor"),  # a format that nobody knows
        ("block.proj.packed", "block.proj.lut"),
        ("experts.gate_up_proj", "experts.gate_up_proj_scale"),
        ("weight", "weight_scale"),
        ("block.proj.weight.inner", "block.proj.other"),
    ],
)
def test_the_rule_needs_no_name_of_a_format(tmp_path, codes, beside):
    for kind in (torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32):
        (tmp_path / "source").mkdir(exist_ok=True)
        state = {codes: torch.ones(16, 32).to(kind), beside: torch.rand(16), "block.norm.weight": torch.rand(32)}
        save_file(state, tmp_path / "source/model.safetensors")
        with pytest.raises(UnsupportedError, match="would round what lies beside it"):
            reshard(tmp_path / "source", tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))


def test_floats_of_a_byte_without_scales_are_cast_exactly(tmp_path):
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    every = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    state = {f"blocks.{n}.proj.weight": every.clone().view(kind) for n, kind in enumerate(kinds)}
    state |= {"blocks.0.proj.bias": torch.rand(16), "blocks.0.ln.bias": torch.ones(16).to(torch.float8_e4m3fn)}
    (tmp_path / "source").mkdir()
    save_file(state, tmp_path / "source/model.safetensors")
    for dtype, kind in DTYPES.items():
        done = reshard(tmp_path / "source", tmp_path / dtype, ReshardOptions(to="hf", dtype=dtype))
        assert any("5 tensors of F8_E4M3" in line and "have no scales beside them" in line for line in done.warnings)
        found = read(tmp_path / dtype)
        for name, tensor in state.items():
            assert torch.equal(found[name].isnan(), tensor.to(kind).isnan()), name
            assert torch.equal(found[name].nan_to_num(0), tensor.to(kind).nan_to_num(0)), name
        assert verify(tmp_path / dtype, VerifyOptions(level="full", against=tmp_path / "source")).ok
    changes = diff(tmp_path / "fp32", tmp_path / "source").changes
    assert {(change.kind, change.count, change.cast) for change in changes} == {("dtype", 0, "F32")}


def test_a_model_of_plain_floats_of_a_byte_is_cast_and_quantized(tmp_path):
    state = {n: t.to(torch.float8_e4m3fn) if "proj" in n else t for n, t in plain_state(LLAMA).items()}
    source = write(tmp_path / "source", LLAMA, state)
    wide = write(tmp_path / "wide", LLAMA, {name: tensor.bfloat16() for name, tensor in state.items()})
    reshard(source, tmp_path / "out", ReshardOptions(mesh=Mesh.of(tp=2), dtype="fp16"))
    reshard(tmp_path / "out", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "back"), {name: tensor.half() for name, tensor in state.items()})
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float16"
    for name, path in (("eight", source), ("wider", wide)):
        reshard(path, tmp_path / name, ReshardOptions(to="hf", dtype="bf16", quantize="int8"))
    assert_same(read(tmp_path / "eight"), read(tmp_path / "wider"))
    assert verify(tmp_path / "eight", VerifyOptions(level="full", against=source)).ok


def test_what_is_excluded_still_shows_that_weights_are_quantized(tmp_path):
    source = copy(FIXTURES / "comfy/scaled.safetensors", tmp_path)
    state = {n.replace("scale_weight", "factor"): t for n, t in load_file(source / "scaled.safetensors").items()}
    save_file(state, source / "scaled.safetensors")
    with pytest.raises(UnsupportedError, match="would round what lies beside it"):
        reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="bf16", include="float8_e5m2"))


def test_plan_says_what_reshard_would():
    source = FIXTURES / "quanto/qint8"
    found = plan(source, ReshardOptions(to="hf", dtype="bf16"))
    assert found.warnings[0].startswith("the result leaves out")
    with pytest.raises(UnsupportedError, match="quantized: quanto qint8"):
        plan(source, ReshardOptions(mesh=Mesh.of(tp=2)), source_options=SourceOptions())


# Methods that transformers 5.24 declares ------------------------------------------------------------------------


def pack_metal(weight):
    from transformers.integrations.metal_quantization import _affine_quantize_tensor

    codes, scales, biases = _affine_quantize_tensor(weight, 32, 4)
    return {"weight": codes, "scales": scales, "qbiases": biases}


def unpack_metal(arrays):
    from transformers.integrations.metal_quantization import _affine_dequantize_tensor

    return _affine_dequantize_tensor(arrays["weight"], arrays["scales"], arrays["qbiases"], 32, 4)


def pack_mxfp8(weight):
    groups = weight.float().reshape(weight.shape[0], -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(2))) - 8
    codes = (groups / torch.exp2(exponents)[..., None]).to(torch.float8_e4m3fn).reshape(weight.shape)
    return {"weight": codes, "weight_scale_inv": (exponents + 127).to(torch.uint8)}


def unpack_mxfp8(arrays):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(arrays["weight"], arrays["weight_scale_inv"], torch.float32)


@pytest.mark.parametrize(
    ("settings", "pack", "unpack"),
    [
        ({"quant_method": "metal", "bits": 4, "group_size": 32}, pack_metal, unpack_metal),
        ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, pack_mxfp8, unpack_mxfp8),
    ],
    ids=["metal", "mxfp8"],
)
def test_methods_of_transformers_are_decoded_to_its_numbers(tmp_path, settings, pack, unpack):
    state, expected = {}, {}
    for name, tensor in plain_state(LLAMA).items():
        if ".layers." not in name or tensor.ndim == 1:
            state[name] = tensor
            continue
        arrays = pack(tensor)
        expected[name] = unpack(arrays)
        state |= {f"{name.removesuffix('weight')}{own}": array for own, array in arrays.items()}
    source = write(tmp_path / "source", {**LLAMA, "quantization_config": settings}, state)
    reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="fp32"))
    found = read(tmp_path / "out")
    assert all(torch.equal(found[name], numbers) for name, numbers in expected.items())
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "back"), state)


@pytest.mark.parametrize("prefix", ["model", "backbone"])
def test_a_config_may_have_another_prefix_of_the_class(prefix):
    config = json.loads((FIXTURES / "configs/nemotron_h.json").read_text())
    names = [t.name for t in describe_model(config).own() if t.name.endswith("_proj.weight") and len(t.shape) == 2]
    layers = {f"{prefix}.{n.partition('.')[2].removesuffix('.weight')}": {"quant_algo": "FP8"} for n in names}
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert describe_model({**config, "quantization_config": settings}).encodings.keys() == set(names)
    settings["quantized_layers"] = {f"other.{name}": said for name, said in layers.items()}
    with pytest.raises(UnsupportedError, match="has none of them"):
        describe_model({**config, "quantization_config": settings})
