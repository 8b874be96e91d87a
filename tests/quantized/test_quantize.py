"""Weights are quantized without data, bit for bit as LLM Compressor and compressed-tensors do."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from codes import LLAMA, plain_state, write
from reading import assert_same, read
from safetensors.torch import load_file, save_file

from shardctl.base.errors import PartitionError, SourceError, UnsupportedError, UsageError
from shardctl.base.workers import NullWatcher
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.checkpoint.quantization.quantizing import choose_recipe, quantize_checkpoint
from shardctl.cli.program import run
from shardctl.models.rounding.codes import round_to_codes
from shardctl.models.rounding.recipes import RECIPES
from shardctl.models.rounding.scales import ScaleRule
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.diff import diff
from shardctl.verbs.plan import plan
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures/llmcompressor"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
PRESETS = {
    "fp8-block": "FP8_BLOCK",
    "fp8-channel": "FP8_DYNAMIC",
    "fp8-tensor": "FP8",
    "int4": "W4A16",
    "int8": "INT8",
    "mxfp4": "MXFP4A16",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4A16",
}
GROUPED = {name for name, recipe in RECIPES.items() if recipe.block[1] in (16, 32)}
SIZES = {**LLAMA, "num_hidden_layers": 1}
UNEVEN = {**SIZES, "hidden_size": 144, "intermediate_size": 200, "num_attention_heads": 6, "num_key_value_heads": 2}
"""Nothing is a multiple of 128."""
SHORT = {**SIZES, "hidden_size": 160, "intermediate_size": 224, "num_attention_heads": 5, "num_key_value_heads": 5}
"""Multiples of 32, and of no more."""
WIDE = {**SIZES, "hidden_size": 384, "intermediate_size": 768, "num_attention_heads": 6, "num_key_value_heads": 6}
"""Blocks of 128 that three ranks divide."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@pytest.fixture(autouse=True)
def _owner():
    pytest.importorskip("compressed_tensors")


def settings_of(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


def odd_state(config, dtype, seed=0):
    """Random weights of several magnitudes, with blocks of zeros, negative zeros, tiny and large elements."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in plain_state(config).items():
        values = torch.randn(tensor.shape, generator=generator)
        if values.ndim == 2:
            values[:, : values.shape[1] // 3] *= 1e-3
            values[:5, 32:64], values[5:9, 40:48] = 0, -0.0
            values[3, 70], values[4, 71] = 300.0, 1e-30
        found[name] = values.to(dtype)
    return found


def quantize_by_owner(name, state):
    """What compressed-tensors' own functions make of every projection, as LLM Compressor calls them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import (
        calculate_qparams,
        generate_gparam,
        maybe_pad_tensor_for_block_quant,
    )

    scheme = preset_name_to_scheme(PRESETS[name], ["Linear"])
    args, found = scheme.weights, {}
    owner = BaseCompressor.get_value_from_registry(RECIPES[name].form)
    for weight_name, weight in state.items():
        module = weight_name.removesuffix(".weight")
        if not module.endswith("_proj"):
            found[weight_name] = weight
            continue
        padded = maybe_pad_tensor_for_block_quant(weight, args.block_structure) if args.block_structure else weight
        rows, columns = padded.shape
        high, wide = args.block_structure or (1, args.group_size or columns)
        high, wide = (rows, columns) if args.strategy == "tensor" else (high, wide)
        cut = padded.reshape(rows // high, high, columns // wide, wide)
        parts = {"weight": weight}
        if args.strategy == "tensor_group":
            own = module.rpartition(".")[2]
            peers = next((group for group in FUSED if own in group), (own,))
            peak = max(state[f"{module.removesuffix(own)}{peer}.weight"].abs().max() for peer in peers).reshape(1)
            parts["weight_global_scale"] = generate_gparam(-peak, peak)
        low, top = cut.amin((1, 3)), cut.amax((1, 3))
        scale, _ = calculate_qparams(low, top, args, global_scale=parts.get("weight_global_scale"))
        parts["weight_scale"] = (scale.reshape(1) if args.strategy == "tensor" else scale).to(weight.dtype)
        found |= {f"{module}.{part}": array for part, array in owner.compress(parts, scheme).items()}
    return found


@pytest.mark.parametrize("case", [*(name for name in PRESETS if name != "fp8-tensor"), "experts-nvfp4"])
def test_the_bits_are_those_of_llm_compressor(tmp_path, case):
    source = FIXTURES / ("experts" if case.startswith("experts") else "llama")
    recipe = case.removeprefix("experts-")
    reshard(source, tmp_path / "out", ReshardOptions(quantize=recipe))
    assert_same(read(tmp_path / "out"), read(FIXTURES / case))
    mine, theirs = settings_of(tmp_path / "out"), settings_of(FIXTURES / case)
    assert mine["format"] == theirs["format"]
    assert mine["ignore"] == [module for module in theirs["ignore"] if module != "model.embed_tokens"]
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok
    assert verify(FIXTURES / case, VerifyOptions(level="full", against=source)).ok


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, UNEVEN) for name in PRESETS if name not in GROUPED and name != "int4"),
        *((name, SHORT) for name in PRESETS if name in GROUPED),
        *((name, WIDE) for name in PRESETS),
    ],
    ids=lambda each: each if isinstance(each, str) else str(each["hidden_size"]),
)
def test_the_bits_are_those_of_compressed_tensors_for_any_shape_and_type(tmp_path, name, config, dtype):
    state = odd_state(config, DTYPES[dtype], seed=len(name))
    source = write(tmp_path / "source", {**config, "dtype": str(DTYPES[dtype]).removeprefix("torch.")}, state)
    reshard(source, tmp_path / "out", ReshardOptions(quantize=name))
    assert_same(read(tmp_path / "out"), quantize_by_owner(name, state))
    reshard(source, tmp_path / "small", ReshardOptions(quantize=name, host_memory=80 << 20, threads=1))
    assert_same(read(tmp_path / "small"), read(tmp_path / "out"))


@pytest.mark.parametrize("number", ["fp8", "fp4", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_the_code_of_every_number_is_the_owners(number, dtype):
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.quant_args import round_to_quantized_type_args
    from compressed_tensors.quantization.utils import calculate_range

    kind = "int" if number.startswith("int") else "float"
    args = QuantizationArgs(num_bits=int(number[-1]), type=kind)
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    numbers = numbers[torch.isfinite(numbers)]
    rounded = round_to_quantized_type_args(numbers, args, *calculate_range(args, "cpu"))
    if number == "fp4":
        packed = pack_fp4_to_uint8(rounded.reshape(1, -1)).numpy().ravel()
        expected = np.stack((packed & 15, packed >> 4), axis=1).ravel()
    elif number == "fp8":
        expected = rounded.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    else:
        expected = (rounded.to(torch.int16).numpy() + (8 if number == "int4" else 0)).astype(np.uint8)
    assert np.array_equal(round_to_codes(numbers.float().numpy(), number, dtype), expected)
    if number != "int8":  # nvfp4, and weights in F32, are not rounded to 16 bits in between
        single = torch.cat((numbers.float(), torch.randn(100_000) * 4))
        whole = round_to_quantized_type_args(single, args, *calculate_range(args, "cpu"))
        values = {"fp4": whole, "fp8": whole.to(torch.float8_e4m3fn).float(), "int4": whole}[number].numpy()
        codes = round_to_codes(single.numpy().copy(), number, "F32")
        assert np.array_equal(decode(codes, number), values)


def decode(codes, number):
    if number == "int4":
        return codes.astype(np.float32) - 8
    if number == "fp8":
        return torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    return np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2, np.float32)[codes] * np.where(codes > 7, -1, 1)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("name", PRESETS)
def test_the_scale_of_every_magnitude_is_the_owners(name, dtype):
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args, rule = preset_name_to_scheme(PRESETS[name], []).weights, ScaleRule(RECIPES[name], dtype)
    bits = np.arange(rule.infinity, dtype=np.uint16)
    if rule.recipe.scale == "exponent":
        bits = bits[[not rule.find_overflow(bits[n : n + 1]) for n in range(len(bits))]]
    peaks = torch.from_numpy(bits.view(np.int16).copy()).view(DTYPES[dtype])
    whole, more = 1.0, {}
    if rule.recipe.scale == "fp8":
        for place in random.Random(0).sample(range(len(bits)), 2000):
            found = rule.compute_whole(int(bits[place]))
            one = peaks[place].reshape(1)
            assert generate_gparam(-one, one).item() == (1.0 if found is None else found)
        more = {"global_scale": torch.tensor([896.0])}
        whole = 896.0
    scales, _ = calculate_qparams(-peaks, peaks, args, **more)
    if rule.recipe.scale == "exponent":
        expected = compress_mx_scale(scales, torch.uint8).numpy()
    elif rule.recipe.scale == "fp8":
        expected = scales.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    else:
        expected = scales.view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(rule.compute_scales(bits, whole), expected)


@pytest.mark.parametrize("name", PRESETS)
def test_any_run_of_bytes_of_an_array_is_that_of_the_whole(tmp_path, name):
    source = write(tmp_path / "source", WIDE, odd_state(WIDE, torch.bfloat16))
    chance = random.Random(0)
    with open_checkpoint(source) as opened:
        dtypes = {tensor.name: tensor.dtype for tensor in opened.manifest.tensors.values()}
        found = quantize_checkpoint(opened, choose_recipe(name), (), dtypes, threads=1)
        again = quantize_checkpoint(opened, choose_recipe(name), (), dtypes, threads=1)
        for tensor in found.manifest.tensors.values():
            path = next(iter(tensor.files), "")
            if "(quantized)" not in path:
                continue
            whole = bytearray(tensor.nbytes)
            found.source.read_at(path, 0, memoryview(whole))
            for _ in range(6):
                item = tensor.dtype.unit_bytes
                start = chance.randrange(0, tensor.nbytes, item)
                stop = chance.randrange(start, tensor.nbytes, item) + item
                part = bytearray(stop - start)
                again.source.read_at(path, start, memoryview(part))
                assert part == whole[start:stop], (path, start, stop)


@pytest.mark.parametrize("name", PRESETS)
def test_every_layout_that_carries_codes_holds_the_same(tmp_path, name):
    source = write(tmp_path / "source", WIDE, odd_state(WIDE, torch.bfloat16))
    reshard(source, tmp_path / "whole", ReshardOptions(quantize=name))
    for number, wish in enumerate(
        (
            ReshardOptions(mesh=Mesh.of(tp=3, fsdp=2), quantize=name),
            ReshardOptions(to="dcp", mesh=Mesh.of(fsdp=2), quantize=name),
        )
    ):
        there, back = tmp_path / f"there{number}", tmp_path / f"back{number}"
        reshard(source, there, wish)
        assert verify(there, VerifyOptions(level="full", against=source)).ok
        reshard(there, back, ReshardOptions(to="hf"))
        assert_same(read(back), read(tmp_path / "whole"))


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_loads_it_and_computes_with_what_shardctl_decodes(tmp_path, name):
    import transformers

    reshard(FIXTURES / "llama", tmp_path / "out", ReshardOptions(quantize=name))
    reshard(tmp_path / "out", tmp_path / "plain", ReshardOptions(to="hf", dtype="bf16"))
    wish = transformers.CompressedTensorsConfig(dequantize=True)
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(tmp_path / "out", dtype=torch.bfloat16, quantization_config=wish)
    mine = load(tmp_path / "plain", dtype=torch.bfloat16)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, mine(tokens).logits)
    running = load(tmp_path / "out", dtype=torch.bfloat16)
    assert "weight" in dict(running.model.layers[0].mlp.up_proj.named_parameters()) or name in GROUPED | {"int4"}
    with torch.no_grad():
        assert torch.isfinite(running(tokens).logits).all()


@pytest.mark.parametrize("name", PRESETS)
def test_the_config_is_the_one_that_compressed_tensors_writes(tmp_path, name):
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme

    reshard(FIXTURES / "llama", tmp_path / "out", ReshardOptions(quantize=name))
    found = settings_of(tmp_path / "out")
    scheme = preset_name_to_scheme(PRESETS[name], ["Linear"])
    if name == "fp8-tensor":  # its preset has scales of activations, which need data
        scheme.input_activations = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]).input_activations
    scheme.format = RECIPES[name].form
    wanted = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=RECIPES[name].form,
        ignore=["lm_head"],
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    assert QuantizationConfig(**found).model_dump() == wanted.model_dump()
    assert not wanted.requires_calibration_data()


def test_a_cast_comes_first_and_a_quantized_source_is_decoded_before(tmp_path):
    state = odd_state(WIDE, torch.float32)
    source = write(tmp_path / "source", {**WIDE, "dtype": "float32"}, state)
    reshard(source, tmp_path / "both", ReshardOptions(quantize="nvfp4", dtype="bf16"))
    reshard(source, tmp_path / "cast", ReshardOptions(to="hf", dtype="bf16"))
    reshard(tmp_path / "cast", tmp_path / "then", ReshardOptions(quantize="nvfp4"))
    assert_same(read(tmp_path / "both"), read(tmp_path / "then"))
    assert json.loads((tmp_path / "both/config.json").read_text())["dtype"] == "bfloat16"
    assert verify(tmp_path / "both", VerifyOptions(level="full", against=source)).ok
    with pytest.raises(UnsupportedError, match="quantized already") as caught:
        reshard(tmp_path / "then", tmp_path / "again", ReshardOptions(quantize="fp8-channel"))
    assert "--dtype bf16" in caught.value.hint
    reshard(tmp_path / "then", tmp_path / "again", ReshardOptions(quantize="fp8-channel", dtype="bf16"))
    reshard(tmp_path / "then", tmp_path / "plain", ReshardOptions(to="hf", dtype="bf16"))
    reshard(tmp_path / "plain", tmp_path / "expected", ReshardOptions(quantize="fp8-channel"))
    assert_same(read(tmp_path / "again"), read(tmp_path / "expected"))
    assert verify(tmp_path / "again", VerifyOptions(level="full", against=tmp_path / "then")).ok


def test_the_plan_says_the_sizes_afterwards_and_reading_is_counted(tmp_path):
    source = write(tmp_path / "source", WIDE, odd_state(WIDE, torch.bfloat16))
    planned = plan(source, ReshardOptions(quantize="fp8-channel", mesh=Mesh.of(tp=3)))
    said = "7 weights are quantized to fp8-channel; left as they are: model.embed_tokens, lm_head, and all vectors"
    assert said in planned.warnings
    done = reshard(source, tmp_path / "out", ReshardOptions(quantize="fp8-channel", mesh=Mesh.of(tp=3)))
    stored = sum(tensor.nbytes for tensor in read(source).values())
    assert (planned.conversion.read_bytes, done.read_bytes) == (stored, stored)
    assert planned.conversion.write_bytes == sum(file.stat().st_size for file in (tmp_path / "out").glob("*")) - (
        (tmp_path / "out/shardctl.json").stat().st_size
    )
    record = json.loads((tmp_path / "out/shardctl.json").read_text())
    assert record["options"]["quantize"] == "fp8-channel"
    assert any(note.startswith("7 weights are quantized to fp8-channel; left as they are: ") for note in done.notes)
    twice = reshard(source, tmp_path / "nv", ReshardOptions(quantize="nvfp4"))
    projections = sum(t.nbytes for name, t in read(source).items() if "_proj" in name)
    assert twice.read_bytes == stored + projections  # the largest of all is looked for first


@pytest.mark.parametrize(("name", "most"), [("fp8-channel", 0.04), ("nvfp4", 0.15)])
def test_diff_says_how_far_codes_are_from_the_numbers(tmp_path, name, most):
    source = write(tmp_path / "source", WIDE, plain_state(WIDE))
    reshard(source, tmp_path / "out", ReshardOptions(quantize=name))
    reshard(tmp_path / "out", tmp_path / "plain", ReshardOptions(to="hf", dtype="bf16"))
    for a, b in ((source, tmp_path / "out"), (tmp_path / "out", source)):
        found = diff(a, b)
        assert {change.tensor.rpartition(".")[0].rpartition("_")[2] for change in found.changes} == {"proj"}
        assert {change.kind for change in found.changes} == {"values"}
        assert len(found.changes) == 7
        assert 0 < max(change.distance.relative for change in found.changes) < most
        assert any("7 quantized weights were decoded to BF16 before they were compared" in w for w in found.warnings)
    assert not diff(tmp_path / "plain", tmp_path / "out").changes
    assert {change.kind for change in diff(tmp_path / "out", tmp_path / "out").changes} == set()


def test_what_is_to_stay_stays(tmp_path):
    ignore = ("re:.*self_attn.*", "model.layers.0.mlp.up_proj")
    reshard(FIXTURES / "llama", tmp_path / "out", ReshardOptions(quantize="int8", quantize_ignore=ignore))
    plain, found = read(FIXTURES / "llama"), read(tmp_path / "out")
    same = {name for name in plain if name in found and torch.equal(plain[name], found[name])}
    assert {name for name in plain if "proj" in name} - same == {
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    }
    assert "model.layers.0.self_attn.q_proj" in settings_of(tmp_path / "out")["ignore"]
    with pytest.raises(UsageError, match="is no module of this model"):
        reshard(FIXTURES / "llama", tmp_path / "no", ReshardOptions(quantize="int8", quantize_ignore=("mlp.up",)))
    with pytest.raises(UsageError, match="only with --quantize"):
        reshard(FIXTURES / "llama", tmp_path / "no", ReshardOptions(quantize_ignore=("lm_head",)))


class TestRefusals:
    @pytest.mark.parametrize(("value", "said"), [(float("nan"), "not a number"), (float("inf"), "infinite")])
    @pytest.mark.parametrize("name", PRESETS)
    def test_elements_without_a_scale(self, tmp_path, name, value, said):
        state = odd_state(WIDE, torch.bfloat16)
        state["model.layers.0.mlp.up_proj.weight"][600, 300] = value
        source = write(tmp_path / "source", WIDE, state)
        with pytest.raises(SourceError, match=f"up_proj.weight has elements that are .*{said}") as caught:
            reshard(source, tmp_path / "out", ReshardOptions(quantize=name))
        assert caught.value.hint.endswith("--quantize-ignore model.layers.0.mlp.up_proj")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
    def test_a_scale_that_would_be_infinite(self, tmp_path, name):
        state = odd_state(WIDE, torch.bfloat16)
        state["model.layers.0.mlp.up_proj.weight"][600, 300] = torch.finfo(torch.bfloat16).max
        with pytest.raises(SourceError, match=r"scale in mxfp. would be infinite"):
            reshard(write(tmp_path / "source", WIDE, state), tmp_path / "out", ReshardOptions(quantize=name))

    def test_a_global_scale_that_fp16_does_not_hold(self, tmp_path):
        state = {name: tensor * 1e-3 for name, tensor in plain_state(WIDE).items()}
        state = {name: tensor.to(torch.float16) for name, tensor in state.items()}
        source = write(tmp_path / "source", {**WIDE, "dtype": "float16"}, state)
        with pytest.raises(SourceError, match="F16 does not hold the global scale") as caught:
            reshard(source, tmp_path / "out", ReshardOptions(quantize="nvfp4"))
        assert "--dtype bf16" in caught.value.hint
        reshard(source, tmp_path / "out", ReshardOptions(quantize="nvfp4", dtype="bf16"))

    def test_groups_that_do_not_divide_the_inputs(self, tmp_path):
        source = write(tmp_path / "source", UNEVEN, odd_state(UNEVEN, torch.bfloat16))
        with pytest.raises(UnsupportedError, match="groups of 32 inputs, which do not divide the 144 of") as caught:
            reshard(source, tmp_path / "out", ReshardOptions(quantize="mxfp4"))
        assert "--quantize-ignore 're:model[.]layers[.][0-9]+[.]mlp[.]up_proj$'" in caught.value.hint

    def test_cuts_through_blocks(self, tmp_path):
        source = write(tmp_path / "source", WIDE, odd_state(WIDE, torch.bfloat16))
        with pytest.raises(PartitionError, match="blocks of 128"):
            reshard(source, tmp_path / "out", ReshardOptions(quantize="fp8-block", mesh=Mesh.of(tp=2)))
        assert not list(tmp_path.glob("*out*"))

    @pytest.mark.parametrize("name", ["gptq", "awq", "fp8", "nvfp4-w4a4"])
    def test_what_needs_data(self, tmp_path, name):
        with pytest.raises(UsageError, match="needs data") as caught:
            reshard(FIXTURES / "llama", tmp_path / "out", ReshardOptions(quantize=name))
        assert "LLM Compressor" in caught.value.hint

    @pytest.mark.parametrize("layout", ["vllm", "megatron"])
    def test_layouts_that_have_no_codes(self, tmp_path, layout):
        with pytest.raises(UnsupportedError, match="quantized weights"):
            reshard(FIXTURES / "llama", tmp_path / "out", ReshardOptions(quantize="int8", to=layout))

    def test_a_model_that_nobody_knows(self, tmp_path):
        source = write(tmp_path / "source", {"model_type": "nothing"}, {"a.weight": torch.zeros(4, 4)})
        with pytest.raises(UsageError, match="a model that shardctl knows"):
            reshard(source, tmp_path / "out", ReshardOptions(quantize="int8"))


@pytest.mark.parametrize("recipe", ["fp8-channel", "nvfp4"])
@pytest.mark.parametrize("kind", ["llama4", "qwen3_vl_moe"])
class TestStacksOfExperts:
    """Experts that the Hub has in one array: LLM Compressor gives each matrices of its own, and so does shardctl."""

    def test_the_bits_and_names_are_those_of_llm_compressor(self, tmp_path, kind, recipe):
        source, owner = FIXTURES / kind, FIXTURES / f"{kind}-{recipe}"
        reshard(source, tmp_path / "out", ReshardOptions(quantize=recipe))
        assert_same(read(tmp_path / "out"), read(owner))
        mine, theirs = settings_of(tmp_path / "out"), settings_of(owner)
        assert mine["format"] == theirs["format"]
        assert set(theirs["ignore"]) <= set(mine["ignore"])
        quantised = {name.rpartition(".")[0] for name in read(owner) if name.endswith("weight_scale")}
        assert quantised.isdisjoint(mine["ignore"])
        for result in (tmp_path / "out", owner):
            assert verify(result, VerifyOptions(level="full", against=source)).ok

    def test_a_mesh_and_back_and_to_numbers(self, tmp_path, kind, recipe):
        source, owner = FIXTURES / kind, FIXTURES / f"{kind}-{recipe}"
        reshard(source, tmp_path / "ranks", ReshardOptions(quantize=recipe, mesh=Mesh.of(ep=2, dp=2)))
        reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
        assert_same(read(tmp_path / "back"), read(owner))
        reshard(owner, tmp_path / "cut", ReshardOptions(mesh=Mesh.of(ep=2, dp=2)))
        reshard(tmp_path / "cut", tmp_path / "whole", ReshardOptions(to="hf"))
        assert_same(read(tmp_path / "whole"), read(owner))
        reshard(owner, tmp_path / "numbers", ReshardOptions(dtype="bf16"))
        numbers = read(tmp_path / "numbers")
        assert any(".experts.0.gate_proj.weight" in name for name in numbers)
        assert not any("scale" in name for name in numbers)

    def test_a_changed_element_of_an_array_is_found(self, tmp_path, kind, recipe):
        source = tmp_path / "source"
        shutil.copytree(FIXTURES / kind, source)
        reshard(source, tmp_path / "out", ReshardOptions(quantize=recipe))
        tensors = load_file(source / "model.safetensors")
        name = next(name for name in tensors if name.endswith("experts.down_proj"))
        tensors[name][1, 2, 3] = 9.0
        save_file(tensors, source / "model.safetensors")
        assert not verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok


class Heard(NullWatcher):
    """Keeps what a watcher is told, in order."""

    def __init__(self):
        self.events, self.warnings = [], []

    def warn(self, messages):
        self.events.append("warn")
        self.warnings += messages

    def begin(self, *_, **__):
        self.events.append("begin")


@pytest.mark.parametrize("kind", ["gpt_oss", "granitemoe"])
def test_experts_that_no_loader_takes_quantized_are_named_beforehand_and_at_the_end(tmp_path, capsys, kind):
    config = json.loads((FIXTURES.parent / f"configs/{kind}.json").read_text())
    config.pop("quantization_config", None)
    source = write(tmp_path / "source", config, plain_state(config))
    said = "the experts are not quantized"
    assert run(["plan", str(source), "--quantize", "fp8-channel", "--json"]) == 0
    assert any(said in warning for warning in json.loads(capsys.readouterr().out)["warnings"])
    assert run(["plan", str(source), "--quantize", "fp8-channel"]) == 0
    assert said in capsys.readouterr().err
    assert run(["reshard", str(source), str(tmp_path / "out"), "--quantize", "fp8-channel", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count(said) == 1  # beforehand, and not again at the end
    assert any(said in warning for warning in json.loads(captured.out.splitlines()[-1])["warnings"])
    heard = Heard()
    reshard(source, tmp_path / "again", ReshardOptions(quantize="fp8-channel"), progress=heard)
    assert heard.events.index("warn") < heard.events.index("begin")
    assert any(said in warning for warning in heard.warnings)
    before = load_file(source / "model.safetensors")
    stacks = {name: tensor for name, tensor in read(tmp_path / "out").items() if tensor.ndim == 3}
    assert stacks
    assert all(torch.equal(before[name], tensor) for name, tensor in stacks.items())
