"""What a manifest says is where, fetched by offsets and strides alone, and the same tensors as torch has them."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided
from stored_bits import bits

from shardctl.libraries import registry as formats
from shardctl.storage.local import LocalSource
from shardctl.tensors.manifest import ConstantFill

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from shardctl.tensors.manifest import Manifest, Tensor


def scan(path: Path, weights: str | None = None) -> Manifest:
    """The manifest of a directory or file."""
    with closing(LocalSource(path)) as source:
        return formats.scan_checkpoint(source, weights=weights)


def gather(root: Path, tensor: Tensor) -> bytes:
    """A tensor's bytes in row-major order; copies of a box must be equal, and every element must be somewhere."""
    width = tensor.dtype.unit_bytes
    filled = np.zeros((*tensor.shape, width), np.uint8)
    times = np.zeros(tensor.shape, int)
    for chunk in tensor.chunks:
        if isinstance(chunk.where, ConstantFill):
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


def check(root: Path, found: Mapping[str, Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The tensors that were found are those of torch, by name, type, shape and bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].name == name
        assert (found[name].shape, found[name].dtype.torch) == (tuple(value.shape), str(value.dtype)[6:]), name
        assert gather(root, found[name]) == bits(value), name
