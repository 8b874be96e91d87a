"""Stores and reads the tensors that the class of a model does not have, in a file beside the weights.

No index lists it, and no program that loads the model reads it. Among other tensors, each is called `extra/` and its
name:

>>> format_extra_name("v_head.weight"), is_extra_name("extra/v_head.weight"), is_extra_name("extra.weight")
('extra/v_head.weight', True, False)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.tensors.box import Box
from shardctl.tensors.manifest import CheckpointFile, Chunk, Region, Tensor, compute_dense_strides

if TYPE_CHECKING:
    from shardctl.storage import Source
    from shardctl.tensors.manifest import Manifest

EXTRA_FILE: Final = "extra/extra_tensors.safetensors"
_EXTRA_TENSOR_PREFIX: Final = "extra/"


def format_extra_name(name: str) -> str:
    """Format what an extra tensor is called where it stands among others."""
    return f"{_EXTRA_TENSOR_PREFIX}{name}"


def is_extra_name(name: str) -> bool:
    """Return whether this is what an extra tensor is called among others."""
    return name.startswith(_EXTRA_TENSOR_PREFIX)


def read_extra_file(source: Source, stored: Manifest) -> Manifest:
    """Return `stored` with the tensors of the file that holds extra ones, if there is one.

    Raises as `read_header`.
    """
    if EXTRA_FILE not in source.files():
        return stored
    from shardctl.libraries.safetensors.header import read_header  # which most formats do not need

    header = read_header(source, EXTRA_FILE)
    extra = {}
    for array in header.arrays:
        where = Region(EXTRA_FILE, array.offset, compute_dense_strides(array.dtype, array.shape))
        chunk = Chunk(Box.whole(array.shape), array.dtype, where, array.name)
        extra[array.name] = Tensor(array.name, array.dtype, array.shape, (chunk,))
    return replace(
        stored,
        files={**stored.files, EXTRA_FILE: CheckpointFile(EXTRA_FILE, header.size)},
        objects=tuple(side for side in stored.objects if side.name != EXTRA_FILE),
        extra={**stored.extra, **extra},
    )


def add_extra_tensors(manifest: Manifest) -> Manifest:
    """Return the manifest with its extra tensors among the others, after them."""
    if not manifest.extra:
        return manifest
    extra = {(key := format_extra_name(name)): replace(tensor, name=key) for name, tensor in manifest.extra.items()}
    return replace(manifest, tensors={**manifest.tensors, **extra})


def pack_extra_tensors(have: Manifest, want: Manifest) -> Manifest:
    """Return the target `want` with the extra tensors of `have`, as they are, in their file."""
    if not have.extra:
        return want
    from shardctl.libraries.safetensors.packing import FileBuilder, TensorArray  # which readers do not need

    tensors = {name: tensor for name, tensor in add_extra_tensors(have).tensors.items() if is_extra_name(name)}
    builder = FileBuilder({"format": "pt"})
    arrays = [
        TensorArray.of(name, tensor, tensor.dtype, Box.whole(tensor.shape))
        for name, tensor in zip(have.extra, tensors.values(), strict=True)
    ]
    builder.add(EXTRA_FILE, arrays)
    placed = {name: replace(tensors[name], chunks=(chunk,)) for name, chunk in builder.stored()}
    return replace(want, files={**want.files, **builder.files}, tensors={**want.tensors, **placed})
