"""Weights in the order of a kernel, as AutoAWQ and AutoGPTQ pack them, and GPTQModel's own packing and decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from reading import assert_same, read
from safetensors.torch import load_file

from shardctl.base.errors import PartitionError
from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.digest import digest
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = sorted(
    f"{folder}/{path.name}"
    for folder in ("gptqmodel", "kernel_orders")
    for path in (FIXTURES / folder).iterdir()
    if path.is_dir() and path.name != "__pycache__"
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_that_the_owner_packed_or_decodes(tmp_path, case, dtype):
    source, owners = FIXTURES / case, load_file(FIXTURES / f"{case}.safetensors")
    reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype=dtype))
    found = read(tmp_path / "out")
    assert len(owners) == (2 if "kernel" in case else 7)
    for name, values in owners.items():
        assert torch.equal(found[name], values.to(DTYPES[dtype])), name
    assert not [name for name in found if not name.endswith(("weight", "bias"))]
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok


@pytest.mark.parametrize("case", CASES)
def test_they_are_cut_where_that_is_possible_and_come_back(tmp_path, case):
    source = FIXTURES / case
    assert inspect(source).family == "llama"
    for number, mesh in enumerate((Mesh.of(tp=2), Mesh.of(fsdp=2))):
        there = tmp_path / f"there{number}"
        if number == 0 and "gptq-marlin" not in case:  # the groups of the others are one or three
            with pytest.raises(
                PartitionError, match="row of scales with a padded end" if "gemv" in case else "cannot split"
            ):
                reshard(source, there, ReshardOptions(mesh=mesh))
            continue
        reshard(source, there, ReshardOptions(mesh=mesh))
        reshard(there, tmp_path / f"back{number}", ReshardOptions(to="hf"))
        assert_same(read(tmp_path / f"back{number}"), read(source))
        assert digest(source).digest == digest(there).digest
        reshard(there, tmp_path / f"out{number}", ReshardOptions(to="hf", dtype="fp16"))
        owners = load_file(FIXTURES / f"{case}.safetensors")
        found = read(tmp_path / f"out{number}")
        assert all(torch.equal(found[name], values.half()) for name, values in owners.items())
