"""What compressed-tensors and bitsandbytes write is understood, and they read each rank's part with its own scales."""

from __future__ import annotations

import json

import pytest
import torch
from codes import LLAMA, plain_state, write
from compressing import WEIGHTS
from reading import assert_same, of, read
from safetensors.torch import load_file

from shardctl.base.errors import PartitionError
from shardctl.checkpoint.opening import open_checkpoint
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, SourceOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.placement import compute_rank_boxes
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_compressed_tensors_wrote_comes_back(compressed, tmp_path, name):
    source, _ = compressed(name)
    found = inspect(source)
    assert (found.family, found.warnings) == ("llama", ())
    for number, mesh in enumerate((Mesh.of(tp=2, pp=2), Mesh.of(fsdp=3))):
        there, back = tmp_path / f"ranks{number}", tmp_path / f"back{number}"
        reshard(source, there, ReshardOptions(mesh=mesh))
        reshard(there, back, ReshardOptions(to="hf"))
        assert_same(read(back), read(source))
        assert digest(source).digest == digest(there).digest
        assert verify(there, VerifyOptions(level="full", against=source)).ok


@pytest.mark.parametrize("name", WEIGHTS)
def test_compressed_tensors_reads_a_ranks_part_with_the_ranks_own_scales(compressed, tmp_path, name):
    from compressed_tensors.compressors import BaseCompressor

    source, scheme = compressed(name)
    reader, mesh = BaseCompressor.get_value_from_registry(scheme.format), Mesh.of(tp=4)
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=mesh))
    whole, plain = read(source), describe_model(LLAMA)
    for rank in range(4):
        mine, compared = read(tmp_path / "ranks", rank), 0
        for tensor in plain.own():
            if ".layers." not in tensor.name or "norm" in tensor.name:
                continue
            module = tensor.name.removesuffix(".weight")
            (box,) = compute_rank_boxes(tensor.shape, tensor.spec, mesh, mesh.coordinate(rank))
            part = of(module, mine)
            if "weight_shape" in part:
                assert part["weight_shape"].tolist() == list(tensor.shape)  # the whole's, on every rank
                part["weight_shape"] = torch.tensor(box.shape)
            expected = reader.decompress(of(module, whole), scheme)["weight"]
            assert torch.equal(reader.decompress(part, scheme)["weight"], expected[box.slices()]), module
            compared += 1
        assert compared == 14


def four_bits(kind, *, nested):
    """Llama in 4-bit bitsandbytes, written by the library's own packer."""
    library = pytest.importorskip("bitsandbytes").functional
    state = {}
    for name, tensor in plain_state(LLAMA).items():
        if ".layers." not in name or tensor.ndim == 1:
            state[name] = tensor
            continue
        codes, quant_state = library.quantize_4bit(tensor, quant_type=kind, compress_statistics=nested, blocksize=64)
        state[name] = codes
        state |= {f"{name}.{part}": t for part, t in quant_state.as_dict(packed=True).items()}
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    return state, {"quant_method": "bitsandbytes", **settings}


def eight_bits():
    """Llama in 8-bit bitsandbytes, as `Int8Params` keeps it."""
    state = {}
    for name, tensor in plain_state(LLAMA).items():
        if ".layers." not in name or tensor.ndim == 1:
            state[name] = tensor
            continue
        peak = tensor.float().abs().amax(1)
        state[name] = (tensor.float() * 127 / peak[:, None]).round().to(torch.int8)
        module = name.removesuffix(".weight")
        state |= {f"{module}.SCB": peak, f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8)}
    return state, {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.mark.parametrize("form", ["nf4", "fp4-nested", "int8"])
class TestBitsandbytes:
    @pytest.fixture
    def source(self, form, tmp_path):
        kind = form.partition("-")[0]
        state, settings = eight_bits() if form == "int8" else four_bits(kind, nested=form.endswith("nested"))
        return write(tmp_path / "source", {**LLAMA, "quantization_config": settings}, state)

    @pytest.mark.parametrize("mesh", [Mesh.of(pp=2), Mesh.of(dp=2), Mesh.of(pp=2, cp=2)], ids=str)
    def test_pp_places_whole_layers(self, source, tmp_path, mesh):
        reshard(source, tmp_path / "ranks", ReshardOptions(mesh=mesh))
        reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
        assert_same(read(tmp_path / "back"), read(source))
        assert verify(tmp_path / "ranks", VerifyOptions(level="full", against=source)).ok
        assert not inspect(source).warnings

    def test_the_config_alone_describes_as_many_bytes(self, source, tmp_path):
        (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
        with (
            open_checkpoint(source) as real,
            open_checkpoint(tmp_path / "config.json", SourceOptions(described=True)) as described,
        ):
            there, here = real.manifest.tensors, described.manifest.tensors
        assert {n for n in there if not n.endswith("weight_format")} == here.keys()
        values = [n for n in here if "quant_state" not in n]
        assert [(here[n].shape, here[n].dtype) for n in values] == [(there[n].shape, there[n].dtype) for n in values]
        states = [n for n in here if "quant_state" in n]
        assert sum(here[n].nbytes for n in states) == pytest.approx(sum(there[n].nbytes for n in states), rel=0.5)

    @pytest.mark.parametrize("axis", ["tp", "fsdp"])
    def test_any_other_cut_is_refused_and_the_reason_said(self, source, tmp_path, axis):
        with pytest.raises(PartitionError, match=f"over {axis}=2: 1 .* which only pp or ep can place") as caught:
            reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(**{axis: 2})))
        assert caught.value.hint == f"use --{axis} 1"


def test_the_checkpoints_are_what_the_libraries_make_of_a_whole_model(compressed):
    """The fixture wrote scales, codes and a config, and not a plain model."""
    source, _ = compressed("W4A16-asymmetric")
    config = json.loads((source / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    arrays = of("model.layers.0.mlp.up_proj", load_file(source / "model.safetensors"))
    assert {name: (str(t.dtype), tuple(t.shape)) for name, t in arrays.items()} == {
        "weight_packed": ("torch.int32", (256, 16)),
        "weight_scale": ("torch.bfloat16", (256, 4)),
        "weight_shape": ("torch.int64", (2,)),
        "weight_zero_point": ("torch.int32", (32, 4)),
    }
