"""Plans plain Hugging Face safetensors: whole tensors, in files of bounded size, with an index."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import format_first_few
from shardctl.libraries.files.file_names import INDEX_SUFFIX, PIPELINE_FORMAT, SAFETENSORS, WHOLE_SAFETENSORS
from shardctl.libraries.files.impostors import ADAPTERS, holds_adapter
from shardctl.libraries.safetensors.packing import FileBuilder, TensorArray, build_container_metadata
from shardctl.libraries.writer import Layout
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import CheckpointFile
from shardctl.tensors.views import ViewGroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardctl.base.dtype import DType
    from shardctl.libraries.arrays.form import ArrayForm, FusedPlace
    from shardctl.libraries.writer import PackRequest
    from shardctl.tensors.manifest import Manifest, Tensor

NAME: Final = "hf"
_DIFFUSERS_WEIGHTS_FILE: Final = "diffusion_pytorch_model.safetensors"
"""What diffusers calls the weights of one part of a pipeline (diffusers, `utils/constants.py`)."""
_DIFFUSION_CLASS: Final = "_class_name"
"""Where its configs name the class."""
USUAL_SHARD: Final = 5_000_000_000
"""Bytes of tensors per file, as huggingface_hub's `split_torch_state_dict_into_shards` has it."""


def pack_hf(request: PackRequest) -> Manifest:
    """Return every array whole, in the source's order of tensors; raises nothing of its own.

    Each part of a pipeline of diffusers has files of its own, in its folder.
    """
    builder, have = FileBuilder(build_container_metadata(request.have)), request.have
    unsaved = [name for name in have.tensors if not request.form.arrays(name)]
    if unsaved:
        kept = {name: tensor for name, tensor in have.tensors.items() if name not in unsaved}
        have = replace(have, tensors=kept)
    arrays = list_whole_arrays(have, request.form, request.dtypes)
    if request.have.format == PIPELINE_FORMAT:
        parts: dict[str, list[TensorArray]] = {}
        for array in arrays:
            part, _, name = array.name.partition("/")
            parts.setdefault(part, []).append(replace(array, name=name))
        for part, own in parts.items():
            _add_files(builder, f"{part}/{_choose_part_name(own)}", group_by_size(own, request.max_shard_size))
    elif holds_adapter(have.tensors):  # PEFT reads one file
        _add_files(builder, ADAPTERS[0], [list(arrays)])
    else:
        whole = _DIFFUSERS_WEIGHTS_FILE if _DIFFUSION_CLASS in request.config else WHOLE_SAFETENSORS
        _add_files(builder, whole, group_by_size(arrays, request.max_shard_size))
    packed = builder.manifest(NAME, have, request.dtypes)
    line = f"not written, because the class computes them and does not save them: {format_first_few(unsaved)}"
    return replace(packed, warnings=(*packed.warnings, line)) if unsaved else packed


def group_by_size(arrays: Iterable[TensorArray], max_shard_size: int | None) -> list[list[TensorArray]]:
    """Group arrays for files of at most so many bytes, or of one array."""
    groups: list[list[TensorArray]] = [[]]
    room = most = max_shard_size or USUAL_SHARD
    for array in arrays:
        if array.nbytes > room and groups[-1]:
            groups.append([])
            room = most
        groups[-1].append(array)
        room -= array.nbytes
    return groups


def list_whole_arrays(have: Manifest, form: ArrayForm, dtypes: dict[str, DType]) -> Iterator[TensorArray]:
    """List every array once, where its first tensor is."""
    known: dict[int, ViewGroup] = {}
    for tensor in have.tensors.values():
        dtype, some = dtypes[tensor.name], form.places.get(tensor.name)
        if some is None:
            for name in form.names[tensor.name]:
                yield TensorArray.of(name, tensor, dtype, Box.whole(tensor.shape))
            continue
        for place in some:
            if place.position == 0:
                held, places = tuple(have.tensors[name] for name in place.fusion.tensors), place.fusion.places
                if id(places) not in known:
                    known[id(places)] = ViewGroup(places.views, places.boxes)
                yield build_shared_array(place, dtype, Box.whole(places.shape), held, known[id(places)])


def build_shared_array(
    place: FusedPlace, dtype: DType, box: Box, tensors: tuple[Tensor, ...], views: ViewGroup
) -> TensorArray:
    """Build a box of an array that holds several tensors, or parts of some, in the shape in which it is declared."""
    places = place.fusion.places
    merged = places if places.declared != places.shape else None
    return TensorArray(place.array, dtype, places.declared, places.merge_dims(box), tensors, views, merged)


def _choose_part_name(arrays: Iterable[TensorArray]) -> str:
    """Choose what the class of a pipeline's part looks for: what diffusers calls it, if the source has that name."""
    files = (path for array in arrays for tensor in array.tensors for path in tensor.files)
    stem = _DIFFUSERS_WEIGHTS_FILE.removesuffix(SAFETENSORS)
    return (
        _DIFFUSERS_WEIGHTS_FILE if any(path.partition("/")[2].startswith(stem) for path in files) else WHOLE_SAFETENSORS
    )


def _add_files(builder: FileBuilder, whole: str, groups: Sequence[Sequence[TensorArray]]) -> None:
    """Add the one file `whole`, or the several that are made of it, with an index."""
    weight_map: dict[str, str] = {}
    stem, suffix = whole.removesuffix(SAFETENSORS), SAFETENSORS
    for number, arrays in enumerate(groups, 1):
        path = whole if len(groups) == 1 else f"{stem}-{number:05d}-of-{len(groups):05d}{suffix}"
        builder.add(path, arrays)
        weight_map |= {array.name: path.rpartition("/")[2] for array in arrays}
    if len(groups) > 1:
        total = sum(array.dtype.nbytes(array.box.shape) for arrays in groups for array in arrays)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        content = (json.dumps(index, indent=2) + "\n").encode()
        path = whole + INDEX_SUFFIX
        builder.files[path] = CheckpointFile(path, len(content), ((0, content),))


LAYOUT: Final = Layout(
    NAME, pack_hf, options=frozenset({"max_shard_size", "names", "experts"}), source_names=True, served=True
)
