"""Joins what the ranks have of each tensor of Llama 2, 3 and 4, as `params.json` says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.libraries.files.links import check_link
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.meta import llama4_arrays
from shardctl.libraries.meta.params import PARAMS, build_library_settings, read_params
from shardctl.libraries.meta.parts import BUFFERS, EMBEDDING, MetaRankFile, join_parts
from shardctl.libraries.torch_save.reading import read_weights
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import CheckpointFile, Chunk, Manifest, OpaqueObject, Tensor, TrainingState
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.naming_scheme import NamingScheme, format_rank_prefix

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardctl.libraries.meta.params import MetaParams
    from shardctl.storage import Source

_SCALES: Final = re.compile(r"(fp8|int4)_scales_[0-9]+\.pt")
_LEFT: Final = frozenset({PARAMS, "checklist.chk", "orig_params.json"})
"""Files that describe Meta's own, and would be wrong beside others."""

_LLAMA4: Final = re.compile(r"layers\.[0-9]+\.attention\.wqkv\.weight")
_LLAMA4_BUFFERS: Final = re.compile(
    r"(^|\.)(rope\.freqs|freqs?_cis|(global|running)_gate_stats_3E|expert_activation_DE)$"
)
"""What is computed from the config, and what training counted; the code of neither side loads it."""


def join_meta_files(source: Source, paths: list[str]) -> Manifest:
    """Read the ranks' files, in their order, and `params.json`; raises as `scan_meta`."""
    scales = next((path for path in source.files() if _SCALES.fullmatch(path)), None)
    if scales is not None:
        raise UnsupportedError(
            f"{scales} says that weights are quantized to {4 if 'int4' in scales else 8} bits, in Meta's own way",
            hint="give the same model in bfloat16",
        )
    params = read_params(source)
    parts: list[MetaRankFile] = []
    warnings: list[str] = []
    for path in paths:
        check_link(source, path)
        found = read_weights(source, path)
        parts.append(MetaRankFile(path, found.saved, found.state.views))
        warnings += found.state.warnings
    if any(_LLAMA4.fullmatch(name) for name in parts[0].views):
        return _build_llama4_manifest(source, parts, params, warnings)
    joined = join_parts(parts, params)
    config = params.config(joined.shapes) if params is not None else None
    objects, left = _list_objects(source, parts, BUFFERS & parts[0].views.keys())
    notes = list(joined.notes)
    if config is None:
        what = f"{PARAMS} is unlike that of Llama 2 and 3" if params is not None else f"there is no {PARAMS}"
        notes.append(f"{what}: without --config, names and the order of rows stay Meta's")
    return Manifest(
        format=llama4_arrays.NAME,
        tensors=joined.tensors,
        files={part.path: CheckpointFile(part.path, source.files()[part.path].size) for part in parts},
        objects=objects,
        warnings=(*warnings, *left),
        training=TrainingState(writer="Meta's Llama", ranks=len(parts), notes=tuple(notes)),
        settings=build_library_settings(params),
        own_config=config,
    )


def _build_llama4_manifest(
    source: Source, parts: list[MetaRankFile], params: MetaParams | None, warnings: list[str]
) -> Manifest:
    """Build the manifest of Llama 4, whose arrays the schema takes apart, once the model is known."""
    from shardctl.libraries.meta.llama4_params import build_llama4_config  # for one family

    dropped = {name for name in parts[0].views if _LLAMA4_BUFFERS.search(name)}
    shapes = {name: view.shape for name, view in parts[0].views.items()}
    embedded = EMBEDDING in shapes
    config = build_llama4_config(params, shapes, len(parts)) if params is not None and embedded else None
    arrays = {}
    for rank, part in enumerate(parts):
        for name, view in part.views.items():
            if not _LLAMA4_BUFFERS.search(name):
                chunk = Chunk(Box.whole(view.shape), view.dtype, part.saved.region(view, name), name)
                whole = f"{format_rank_prefix(rank)}{name}"
                arrays[whole] = Tensor(whole, view.dtype, view.shape, (chunk,))
    objects, left = _list_objects(source, parts, dropped)
    notes = () if config is not None or params is None else (f"{PARAMS} is unlike that of Llama 4",)
    return Manifest(
        format=llama4_arrays.NAME,
        tensors=arrays,
        files={part.path: CheckpointFile(part.path, source.files()[part.path].size) for part in parts},
        objects=objects,
        warnings=(*warnings, *left),
        training=TrainingState(writer="Meta's Llama", ranks=len(parts), notes=notes),
        dialect=NamingScheme(
            llama4_arrays.NAME, Mesh.of(tp=len(parts)), {rank: format_rank_prefix(rank) for rank in range(len(parts))}
        ),
        settings=build_library_settings(params),
        own_config=config,
    )


def _list_objects(
    source: Source, parts: list[MetaRankFile], dropped: Collection[str]
) -> tuple[tuple[OpaqueObject, ...], tuple[str, ...]]:
    """List what there is beside weights, and tensors that are left behind; and what to warn of."""
    side, left = list_side_files(source, {part.path for part in parts})
    objects = [OpaqueObject(o.name, "drop", o.file, size=o.size) if o.name in _LEFT else o for o in side]
    objects += [OpaqueObject(name, "drop", file=parts[0].path) for name in sorted(dropped)]
    return tuple(objects), left
