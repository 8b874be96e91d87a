"""Checkpoints of DeepSpeed: what its engines had in memory is found bit for bit; what is wrong has a verdict."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from test_dcp import bits, gather

from shardctl import formats
from shardctl.storage.local import LocalSource

FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"
JOINED = ("z1", "z2", "z1-fp32")
SCATTERED = ("z3", "z3-fp32", "z3-sub")


def scan(path: Path, weights=None):
    with closing(LocalSource(path)) as source:
        return formats.scan(source, weights=weights)


def whole(name: str) -> dict:
    """What the live engine had when it saved."""
    return torch.load(FIXTURES / f"{name}.whole.pt", weights_only=True)


def check(root: Path, found, expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        tensor = found[name]
        assert tensor.name == name
        assert (tensor.shape, tensor.dtype.torch) == (tuple(value.shape), str(value.dtype)[6:]), name
        assert gather(root, tensor) == bits(value), name


def named(tensors):
    """By every name."""
    return {n: t for tensor in tensors.values() for n, t in ((m, tensor) for m in (tensor.name, *tensor.ties))}


@pytest.mark.parametrize("name", [*JOINED, *SCATTERED])
def test_the_master_is_what_the_engine_had(name):
    expected = whole(name)
    found = scan(FIXTURES / name)
    assert found.format == "deepspeed"
    assert found.warnings == ()
    check(FIXTURES / name, found.tensors, expected["module"] | expected["master"])


@pytest.mark.parametrize("name", JOINED)
def test_the_modules_own_copy_is_what_the_engine_had(name):
    found = scan(FIXTURES / name, "module")
    check(FIXTURES / name, found.tensors, whole(name)["module"])


@pytest.mark.parametrize("name", [*JOINED, *SCATTERED])
def test_every_optimizer_state_is_what_the_engine_had(name):
    expected = whole(name)
    training = scan(FIXTURES / name).training
    states = {f"optimizer.{s}.{n}": v for s, held in expected["states"].items() for n, v in held.items()}
    steps = {f"optimizer.step.{n}": torch.tensor(float(expected["step"])) for n in expected["master"]}
    check(FIXTURES / name, training.states, states | steps)
    assert training.step == expected["step"]
    assert training.writer == "DeepSpeed 0.19.8"
    assert training.ranks == 2
