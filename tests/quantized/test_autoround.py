"""AutoRound's weights become the numbers that its own layers compute with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reading import assert_same, read
from safetensors.torch import load_file

from shardctl.options import ReshardOptions, VerifyOptions
from shardctl.tensors.mesh import Mesh
from shardctl.verbs.inspect import inspect
from shardctl.verbs.reshard import reshard
from shardctl.verbs.verify import verify

FIXTURES = Path(__file__).parents[2] / "fixtures/autoround"
CASES = sorted(path.name for path in FIXTURES.iterdir() if (path / "config.json").is_file())
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_autoround(tmp_path, case, dtype):
    source, owners = FIXTURES / case, load_file(FIXTURES / f"{case}.safetensors")
    reshard(source, tmp_path / "out", ReshardOptions(to="hf", dtype=dtype))
    found = read(tmp_path / "out")
    assert len(owners) == 7
    for name, values in owners.items():
        assert torch.equal(found[name], values.to(DTYPES[dtype])), name
    assert verify(tmp_path / "out", VerifyOptions(level="full", against=source)).ok


@pytest.mark.parametrize("case", CASES)
def test_ranks_come_back_bit_for_bit(tmp_path, case):
    source = FIXTURES / case
    assert not [warning for warning in inspect(source).warnings if "quanti" in warning]
    reshard(source, tmp_path / "ranks", ReshardOptions(mesh=Mesh.of(tp=2)))
    reshard(tmp_path / "ranks", tmp_path / "back", ReshardOptions(to="hf"))
    assert_same(read(tmp_path / "back"), read(source))
