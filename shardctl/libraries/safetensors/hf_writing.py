"""Plans plain Hugging Face safetensors: whole tensors, in files of bounded size, with an index."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from shardctl.box import Box
from shardctl.libraries.files.file_names import INDEX_SUFFIX, SAFETENSORS, WHOLE_SAFETENSORS
from shardctl.libraries.files.impostors import ADAPTERS, holds_adapter
from shardctl.libraries.safetensors.packing import FileBuilder, TensorArray, build_container_metadata
from shardctl.libraries.writer import Layout
from shardctl.manifest import CheckpointFile, Manifest
from shardctl.views import ViewGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.dtype import DType
    from shardctl.libraries.arrays.form import ArrayForm
    from shardctl.libraries.writer import PackRequest

NAME: Final = "hf"
_DIFFUSION: Final = "diffusion_pytorch_model.safetensors"
"""What diffusers calls the weights of one part of a pipeline (diffusers, `utils/constants.py`)."""
_DIFFUSION_CLASS: Final = "_class_name"
"""Where its configs name the class."""
USUAL_SHARD: Final = 5_000_000_000
"""Bytes of tensors per file, as huggingface_hub's `split_torch_state_dict_into_shards` has it."""


def pack_hf(request: PackRequest) -> Manifest:
    """Return every array whole, in the source's order of tensors; raises nothing of its own."""
    groups: list[list[TensorArray]] = [[]]
    room = max_shard_size = request.max_shard_size or USUAL_SHARD
    single = holds_adapter(request.have.tensors)  # PEFT reads one file of an adapter
    for array in list_whole_arrays(request.have, request.form, request.dtypes):
        if array.nbytes > room and groups[-1] and not single:
            groups.append([])
            room = max_shard_size
        groups[-1].append(array)
        room -= array.nbytes
    return _build_manifest(request, groups)


def list_whole_arrays(have: Manifest, form: ArrayForm, dtypes: dict[str, DType]) -> Iterator[TensorArray]:
    """List every array once, where its first tensor is."""
    known: dict[int, ViewGroup] = {}
    for tensor in have.tensors.values():
        dtype, place = dtypes[tensor.name], form.places.get(tensor.name)
        if place is None:
            for name in form.names[tensor.name]:
                yield TensorArray.of(name, tensor, dtype, Box.whole(tensor.shape))
        elif place.position == 0:
            held, places = tuple(have.tensors[name] for name in place.fusion.tensors), place.fusion.places
            if id(places) not in known:
                known[id(places)] = ViewGroup(places.views, tuple(one.shape for one in held))
            yield TensorArray(place.array, dtype, places.shape, Box.whole(places.shape), held, known[id(places)])


def _choose_file_name(request: PackRequest) -> str:
    """Choose what the class in the config looks for if there is one file."""
    if holds_adapter(request.have.tensors):
        return ADAPTERS[0]
    return _DIFFUSION if _DIFFUSION_CLASS in request.config else WHOLE_SAFETENSORS


def _build_manifest(request: PackRequest, groups: list[list[TensorArray]]) -> Manifest:
    have, dtypes = request.have, request.dtypes
    builder = FileBuilder(build_container_metadata(have))
    weight_map: dict[str, str] = {}
    whole = _choose_file_name(request)
    stem, suffix = whole.removesuffix(SAFETENSORS), SAFETENSORS
    for number, arrays in enumerate(groups, 1):
        path = whole if len(groups) == 1 else f"{stem}-{number:05d}-of-{len(groups):05d}{suffix}"
        builder.add(path, arrays)
        weight_map |= {array.name: path for array in arrays}
    if len(groups) > 1:
        total = sum(array.dtype.nbytes(array.box.shape) for arrays in groups for array in arrays)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        content = (json.dumps(index, indent=2) + "\n").encode()
        path = whole + INDEX_SUFFIX
        builder.files[path] = CheckpointFile(path, len(content), ((0, content),))
    return builder.manifest(NAME, have, dtypes)


LAYOUT: Final = Layout(NAME, pack_hf, options=frozenset({"max_shard_size", "names", "experts"}), source_names=True)
