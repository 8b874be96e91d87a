"""HQQ's weights become the numbers that HQQ decodes; as they are, only whole layers can be placed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from codes import LLAMA
from reading import assert_same, read
from safetensors.torch import load_file, save_file

from shardctl.base.errors import PartitionError, SourceError, UnsupportedError
from shardctl.models import describe_model
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures/hqq"
CASES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_hqq(tmp_path, case, dtype):
    source, owners = FIXTURES / case, load_file(FIXTURES / f"{case}.safetensors")
    done = reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype=dtype))
    found = read(tmp_path / "out")
    assert (len(owners), done.warnings) == (7, ())
    for name, values in owners.items():
        assert torch.equal(found[name], values.to(DTYPES[dtype])), name
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok


@pytest.mark.parametrize("case", ["bits4", "bits3-columns"])
def test_every_layout_holds_the_same_numbers(tmp_path, case):
    reshard(FIXTURES / case, tmp_path / "plain", ReshardOptions(to="hf", dtype="bf16"))
    for number, wish in enumerate(
        (
            ReshardOptions(mesh=Mesh.of(tp=4), dtype="bf16"),
            ReshardOptions(to="dcp", mesh=Mesh.of(fsdp=3), dtype="bf16"),
        )
    ):
        there, back = tmp_path / f"there{number}", tmp_path / f"back{number}"
        reshard(FIXTURES / case, there, wish)
        reshard(there, back, ReshardOptions(to="hf"))
        assert_same(read(back), read(tmp_path / "plain"))


@pytest.mark.parametrize("case", CASES)
def test_as_they_are_only_whole_layers_are_placed(tmp_path, case):
    source = FIXTURES / case
    assert inspect(source).warnings == ()
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(dp=2)))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "back"), read(source))
    with pytest.raises(PartitionError, match="which only pp or ep can place"):
        reshard(source, tmp_path / "cut", ReshardOptions(mesh=Mesh.of(tp=2)))


@pytest.mark.parametrize("case", CASES)
def test_the_config_alone_describes_the_codes(case):
    config, stored = json.loads((FIXTURES / case / "config.json").read_text()), read(FIXTURES / case)
    described = {t.name: (t.dtype.torch, t.shape) for t in describe_model(config).own()}
    for name, tensor in stored.items():
        if name.endswith((".W_q", ".scale", ".zero")):
            assert described[name] == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), name


WRONG = {
    "group": ("group_size", torch.tensor(32, dtype=torch.int32), SourceError, "says groups of 32"),
    "shape": ("shape", torch.tensor([32, 56]), SourceError, "which is not the model's"),
    "packing": ("packing", torch.tensor(list(b"5bit_u8"), dtype=torch.uint8), UnsupportedError, "'5bit_u8'"),
    "scales": ("quant_scale", torch.tensor(1, dtype=torch.uint8), UnsupportedError, "quant_scale = true"),
    "text": ("compute_dtype", torch.zeros(99, dtype=torch.uint8), SourceError, "99 bytes where a short text"),
}


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG.values(), ids=WRONG)
def test_settings_that_do_not_fit_are_an_error(tmp_path, name, value, error, message):
    shutil.copytree(FIXTURES / "bits4", tmp_path / "source")
    file = tmp_path / "source/model.safetensors"
    state = load_file(file)
    save_file(state | {f"{UP}.{name}": value}, file)
    with pytest.raises(error, match=message):
        reshard(tmp_path / "source", tmp_path / "out", ReshardOptions(to="hf", dtype="bf16"))


def test_settings_by_kind_of_module():
    parameters = {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}
    said = {"quant_method": "hqq", "quant_config": {"self_attn.q_proj": parameters, "mlp.up_proj": None}}
    found = describe_model({**LLAMA, "quantization_config": said}).tensors
    assert "model.layers.1.self_attn.q_proj.W_q" in found
    assert "model.layers.1.self_attn.k_proj.weight" in found
    parameters["weight_quant_params"]["nbits"] = 1.58
    with pytest.raises(UnsupportedError, match=r"weights of 1.58 bits"):
        describe_model({**LLAMA, "quantization_config": said})
