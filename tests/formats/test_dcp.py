"""Checkpoints of torch.distributed.checkpoint: what torch wrote is found bit for bit; what is wrong has a verdict."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

from shardctl import formats
from shardctl.manifest import Fill
from shardctl.storage.local import LocalSource

FIXTURES = Path(__file__).parents[2] / "fixtures" / "dcp"
WHOLE = ("fsdp2", "tp", "fsdp-tp", "fsdp1", "flat", "alone", "accelerate", "kinds", "tied", "hf", "hf-whole")
TRAINED = ("fsdp2", "fsdp-tp", "flat", "accelerate")


def scan(path: Path):
    with closing(LocalSource(path)) as source:
        return formats.scan(source)


def whole(name: str) -> dict:
    """What torch made of the checkpoint when it was written."""
    return torch.load(FIXTURES / f"{name}.whole.pt", weights_only=True)


def gather(root: Path, tensor) -> bytes:
    """The tensor's bytes in row-major order, fetched by offsets and strides alone."""
    width = tensor.dtype.unit_bytes
    filled = np.zeros((*tensor.shape, width), np.uint8)
    times = np.zeros(tensor.shape, int)
    for chunk in tensor.chunks:
        if isinstance(chunk.where, Fill):
            continue
        content = np.fromfile(root / chunk.where.file, np.uint8)[chunk.where.offset :]
        reach = sum((n - 1) * s for n, s in zip(chunk.box.shape, chunk.where.strides, strict=True)) + width
        assert reach <= len(content)
        view = as_strided(content, (*chunk.box.shape, width), (*chunk.where.strides, 1), writeable=False)
        at = chunk.box.slices()
        assert not times[at].any() or (filled[at] == view).all(), "two copies differ"
        filled[at] = view
        times[at] += 1
    assert times.all(), f"{tensor.name} is not covered"
    return filled.tobytes()


def bits(value: torch.Tensor) -> bytes:
    plain = value.detach().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def check(root: Path, found, expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].name == name
        assert (found[name].shape, found[name].dtype.torch) == (tuple(value.shape), str(value.dtype)[6:]), name
        assert gather(root, found[name]) == bits(value), name


@pytest.mark.parametrize("name", WHOLE)
def test_every_weight_is_what_torch_makes_of_it(name):
    manifest = scan(FIXTURES / name)
    assert manifest.format == ("safetensors" if name.startswith("hf") else "dcp")
    assert manifest.warnings == ()
    check(FIXTURES / name, manifest.tensors, whole(name)["weights"])


@pytest.mark.parametrize("name", TRAINED)
def test_every_optimizer_state_is_what_torch_makes_of_it(name):
    optimizer = whole(name)["optimizer"]
    training = scan(FIXTURES / name).training
    expected = {
        f"optimizer.{state}.{parameter}": value
        for parameter, states in optimizer["state"].items()
        for state, value in states.items()
    }
    check(FIXTURES / name, training.states, expected)
    assert training.step == 2
    groups = {group.parameters[0]: group for group in training.groups}
    for group in optimizer["param_groups"]:
        found = groups[group["params"][0]]
        assert sorted(found.parameters) == sorted(group["params"])
        assert found.settings == {key: value for key, value in group.items() if key != "params"}
