"""torchao's tensors in safetensors: what transformers wrote, what torchao decodes of it, and the cuts between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from codes import LLAMA, plain_state, write
from reading import assert_same, read
from safetensors import safe_open
from safetensors.torch import load_file

from shardctl.base.errors import PartitionError, SourceError, UnsupportedError
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures/torchao"
ALL = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir() and path.name != "__pycache__")
BLOCKED = [name for name in ALL if name.startswith(("mx", "nvfp4"))]
"""Those whose scales are in blocks of 128 outputs, and stay whole along the inputs."""
CASES = [name for name in ALL if name not in BLOCKED]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def read_metadata(path):
    (file,) = path.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        return opened.metadata()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ALL)
def test_the_numbers_are_those_of_torchao(tmp_path, case, dtype):
    source, owners = FIXTURES / case, load_file(FIXTURES / f"{case}.safetensors")
    reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype=dtype))
    found = read(tmp_path / "out")
    assert len(owners) == (6 if case == "by-name" else 2 if case in BLOCKED else 7)
    for name, values in owners.items():
        assert torch.equal(found[name], values.to(DTYPES[dtype])), name
    assert not [name for name in found if "_weight_" in name]
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert read_metadata(tmp_path / "out").keys() == {"format"}  # no class of torchao is left there
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok


@pytest.mark.parametrize("case", BLOCKED)
def test_scales_in_blocks_are_cut_by_blocks_of_outputs_or_not_at_all(tmp_path, case):
    source, owners = FIXTURES / case, load_file(FIXTURES / f"{case}.safetensors")
    assert inspect(source).warnings == ()
    with pytest.raises(PartitionError, match="cannot split"):
        reshard(source, tmp_path / "tp2", ReshardOptions(mesh=Mesh.of(tp=2)))
    reshard(source, tmp_path / "fsdp2", ReshardOptions(mesh=Mesh.of(fsdp=2)))
    reshard(tmp_path / "fsdp2", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "back"), read(source))
    reshard(tmp_path / "fsdp2", tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    assert all(torch.equal(read(tmp_path / "out")[name], values) for name, values in owners.items())


@pytest.mark.parametrize("case", CASES)
def test_they_are_cut_and_come_back(tmp_path, case):
    source = FIXTURES / case
    found = inspect(source)
    assert (found.family, found.warnings) == ("llama", ())
    for number, mesh in enumerate((Mesh.of(tp=2), Mesh.of(fsdp=3))):
        there, back = tmp_path / f"ranks{number}", tmp_path / f"back{number}"
        reshard(source, there, ReshardOptions(mesh=mesh))
        reshard(there, back, ReshardOptions(to="hf"))
        assert_same(read(back), read(source))
        assert read_metadata(back) == read_metadata(source)
        assert digest(source).digest == digest(there).digest
        assert verify(there, VerifyOptions(level="full", against=source)).ok
    reshard(tmp_path / "ranks0", tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))
    reshard(source, tmp_path / "direct", ReshardOptions(mesh=Mesh.of(tp=2), dtype="bf16"))
    reshard(tmp_path / "direct", tmp_path / "joined", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "joined"), read(tmp_path / "out"))


@pytest.mark.parametrize("case", [case for case in CASES if case != "by-name"])
def test_the_config_alone_describes_the_arrays(case):
    config, stored = json.loads((FIXTURES / case / "config.json").read_text()), read(FIXTURES / case)
    assert {t.name: t.shape for t in describe_model(config).own() if not t.optional} == {
        name: tuple(tensor.shape)
        for name, tensor in stored.items()
        if not name.endswith("zero_point") or case[3] != "8"
    }


def test_a_cut_through_a_group_is_refused(tmp_path):
    """The groups of 16 inputs of `int4-activations` are four in `down_proj`, and two in `o_proj`."""
    with pytest.raises(PartitionError, match=r"o_proj.*2 blocks of 16"):
        reshard(FIXTURES / "int4-activations", tmp_path / "out", ReshardOptions(mesh=Mesh.of(tp=4)))


def of(kind, **said):
    chosen = {"_type": kind, "_version": 2, "_data": said}
    return {**LLAMA, "quantization_config": {"quant_method": "torchao", "quant_type": {"default": chosen}}}


def test_four_bits_in_pairs_follow_their_writers_formula(tmp_path):
    """MSLK's `int4_row_quantize_zp` and `pack_int4`; torchao has no function that decodes them."""
    state, expected = {}, {}
    for name, tensor in plain_state(LLAMA).items():
        if ".layers." not in name or tensor.ndim == 1:
            state[name] = tensor
            continue
        module, groups = name.removesuffix("weight"), tensor.float().reshape(tensor.shape[0], -1, 32)
        low, high = groups.amin(2), groups.amax(2)
        scale, zero = ((high - low) / 15).bfloat16(), (low + (high - low) / 15 * 8).bfloat16()
        codes = ((groups - low[..., None]) / scale.float()[..., None]).round().clamp(0, 15) - 8
        flat = codes.reshape(tensor.shape).to(torch.int8)
        state[f"{module}_weight_qdata"] = flat[:, ::2] & 15 | flat[:, 1::2] << 4
        state[f"{module}_weight_scale"] = scale.T.contiguous()
        state[f"{module}_weight_zero_point"] = zero.T.contiguous()
        expected[name] = (codes * scale.float()[..., None] + zero.float()[..., None]).reshape(tensor.shape)
    source = write(tmp_path / "source", of("Int4WeightOnlyConfig", group_size=32), state)
    reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype="fp32"))
    found = read(tmp_path / "out")
    assert len(expected) == 14
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=4)))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "back"), state)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            of("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d"),
            "'TILE_PACKED_TO_4D' are ordered",
        ),
        (of("Int4WeightOnlyConfig", int4_packing_format={"_type": "E", "_data": "PRESHUFFLED"}), "'PRESHUFFLED'"),
        (of("UIntXWeightOnlyConfig"), "UIntXWeightOnlyConfig is not known"),
        (of("Int8WeightOnlyConfig", granularity={"_type": "PerToken", "_data": {}}), "granularity PerToken"),
        ({**LLAMA, "quantization_config": {"quant_method": "torchao", "quant_type": "int8_weight_only"}}, "quant_type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_known_is_refused_and_named(config, message):
    with pytest.raises(UnsupportedError, match=message):
        describe_model(config)


def test_settings_that_are_no_objects_are_an_error():
    config = of("Int8WeightOnlyConfig", granularity="PerRow")
    with pytest.raises(SourceError, match="granularity"):
        describe_model(config)
    config["quantization_config"]["quant_type"]["default"] = ["Int8WeightOnlyConfig"]
    with pytest.raises(SourceError, match="an object of torchao is expected"):
        describe_model(config)
