"""What lies in the files, as the safetensors library reads it."""

from __future__ import annotations

from safetensors.torch import load_file
from stored_bits import bits


def read(path, rank=None):
    """Every tensor of a directory, or of one rank's files."""
    pattern = "*.safetensors" if rank is None else f"shard-{rank + 1:05d}-*.safetensors"
    found = {}
    for file in sorted(path.glob(pattern)):
        found |= load_file(file)
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def of(module, state):
    """A module's arrays, by the names that follow its own."""
    return {name.removeprefix(f"{module}."): t for name, t in state.items() if name.startswith(f"{module}.")}
