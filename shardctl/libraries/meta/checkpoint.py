"""Joins what the ranks have of each tensor of Llama 2, 3 and 4, as `params.json` says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError, format_first_few
from shardctl.base.value import value_class
from shardctl.libraries.files.choice import describe_missing
from shardctl.libraries.files.links import check_link
from shardctl.libraries.files.side_files import list_side_files
from shardctl.libraries.meta import llama4_arrays
from shardctl.libraries.meta.params import PARAMS, build_library_settings, read_params
from shardctl.libraries.torch_save.reading import read_weights
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import CheckpointFile, Chunk, Manifest, OpaqueObject, Tensor, TrainingState
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.naming_scheme import NamingScheme, format_rank_prefix

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from shardctl.libraries.meta.params import MetaParams
    from shardctl.libraries.torch_save.tensors import SavedFile, StorageView
    from shardctl.storage import Source

_SCALES_FILE_PATTERN: Final = re.compile(r"(fp8|int4)_scales_[0-9]+\.pt")
_DROPPED_FILE_NAMES: Final = frozenset({PARAMS, "checklist.chk", "orig_params.json"})
"""Files that describe Meta's own, and would be wrong beside others."""

_LLAMA4_TENSOR_PATTERN: Final = re.compile(r"layers\.[0-9]+\.attention\.wqkv\.weight")
_LLAMA4_BUFFERS: Final = re.compile(
    r"(^|\.)(rope\.freqs|freqs?_cis|(global|running)_gate_stats_3E|expert_activation_DE)$"
)
"""What is computed from the config, and what training counted; the code of neither side loads it."""

_BUFFER_NAMES: Final = frozenset({"rope.freqs"})
"""Computed from the config, and stored by older files."""
_EMBEDDING_NAME: Final = "tok_embeddings.weight"
_OUTPUT_HEAD_NAME: Final = "output.weight"
_FINAL_NORM_NAME: Final = "norm.weight"
_COLUMN_PARALLEL_PATTERN: Final = re.compile(
    r"output\.weight|layers\.\d+\.(attention\.w[qkv]|feed_forward\.w[13])\.weight"
)
_ROW_PARALLEL_PATTERN: Final = re.compile(r"layers\.\d+\.(attention\.wo|feed_forward\.w2)\.weight")
_REPLICATED_TENSOR_PATTERN: Final = re.compile(r"norm\.weight|layers\.\d+\.(attention|ffn)_norm\.weight")
_KV_WEIGHT_PATTERN: Final = re.compile(r"layers\.\d+\.attention\.w[kv]\.weight")
_MATRIX_NDIM: Final = 2


@value_class
class _MetaRankFile:
    """The file of one rank."""

    path: str
    saved: SavedFile
    views: Mapping[str, StorageView]
    """By name what it holds of each tensor."""


@value_class
class _JoinedParts:
    """All parts together."""

    tensors: Mapping[str, Tensor]
    """By Meta's names, in the order of the first file."""
    notes: tuple[str, ...]
    """How they were understood."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def join_meta_files(source: Source, paths: list[str]) -> Manifest:
    """Read the ranks' files, in their order, and `params.json`; raises as `scan_meta`."""
    scales = next((path for path in source.files() if _SCALES_FILE_PATTERN.fullmatch(path)), None)
    if scales is not None:
        raise UnsupportedError(
            f"{scales} says that weights are quantized to {4 if 'int4' in scales else 8} bits, in Meta's own way",
            hint="give the same model in bfloat16",
        )
    params = read_params(source)
    parts: list[_MetaRankFile] = []
    warnings: list[str] = []
    for path in paths:
        check_link(source, path)
        found = read_weights(source, path)
        parts.append(_MetaRankFile(path, found.saved, found.state.views))
        warnings += found.state.warnings
    if any(_LLAMA4_TENSOR_PATTERN.fullmatch(name) for name in parts[0].views):
        return _build_llama4_manifest(source, parts, params, warnings)
    joined = _join_parts(parts, params)
    config = params.config(joined.shapes) if params is not None else None
    objects, left = _list_objects(source, parts, _BUFFER_NAMES & parts[0].views.keys())
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
    source: Source, parts: list[_MetaRankFile], params: MetaParams | None, warnings: list[str]
) -> Manifest:
    """Build the manifest of Llama 4, whose arrays the schema takes apart, once the model is known."""
    from shardctl.libraries.meta.llama4_params import build_llama4_config  # for one family

    dropped = {name for name in parts[0].views if _LLAMA4_BUFFERS.search(name)}
    shapes = {name: view.shape for name, view in parts[0].views.items()}
    embedded = _EMBEDDING_NAME in shapes
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
    source: Source, parts: list[_MetaRankFile], dropped: Collection[str]
) -> tuple[tuple[OpaqueObject, ...], tuple[str, ...]]:
    """List what there is beside weights, and tensors that are left behind; and what to warn of."""
    side, left = list_side_files(source, {part.path for part in parts})
    objects = [OpaqueObject(o.name, "drop", o.file, size=o.size) if o.name in _DROPPED_FILE_NAMES else o for o in side]
    objects += [OpaqueObject(name, "drop", file=parts[0].path) for name in sorted(dropped)]
    return tuple(objects), left


def _join_parts(parts: Sequence[_MetaRankFile], params: MetaParams | None) -> _JoinedParts:
    """Return the tensors of the files of all ranks, in the order of ranks.

    Raises:
        SourceError: files have different tensors, parts do not fit together, or a rank's file is missing.
        UnsupportedError: tensors that Llama 2 and 3 have not.
    """
    names = [name for name in parts[0].views if name not in _BUFFER_NAMES]
    _check_known(parts[0].path, names)
    for part in parts[1:]:
        _check_same(parts[0], part)
    _check_count(parts, params)
    notes = [] if len(parts) == 1 else [_describe_embedding_cut(_find_embedding_dim(parts, params))]
    tensors = {}
    for name in names:
        dim, times = _find_cut(name, parts, params)
        tensors[name] = _join_tensor(name, parts, dim, times)
        if times > 1 and dim is not None and len(notes) == 1:
            notes.append(f"each key/value head is on {times} ranks; its copies must be equal")
    return _JoinedParts(tensors, tuple(notes))


def _find_cut(name: str, parts: Sequence[_MetaRankFile], params: MetaParams | None) -> tuple[int | None, int]:
    """Find the dim along which a tensor is cut, None for not at all, and on how many ranks each part is."""
    if len(parts) == 1 or _REPLICATED_TENSOR_PATTERN.fullmatch(name):
        return None, len(parts)
    if name == _EMBEDDING_NAME:
        dim = _find_embedding_dim(parts, params)
        return dim, 1 if dim is not None else len(parts)
    if _ROW_PARALLEL_PATTERN.fullmatch(name):
        return 1, 1
    if _KV_WEIGHT_PATTERN.fullmatch(name) and params is not None and params.kv_heads < len(parts):
        rows, heads = parts[0].views[name].shape[0] * len(parts), params.kv_heads
        if heads and len(parts) % heads == 0 and rows == len(parts) * params.head:
            return 0, len(parts) // heads
    return 0, 1


def _find_embedding_dim(parts: Sequence[_MetaRankFile], params: MetaParams | None) -> int | None:
    """Find how the embedding is cut, by its shape alone; raises SourceError if that fits no known way."""
    rows, columns = parts[0].views[_EMBEDDING_NAME].shape
    hidden = parts[0].views[_FINAL_NORM_NAME].shape[0]
    if columns * len(parts) == hidden:
        return 1
    vocabulary = params.vocabulary if params is not None else None
    if vocabulary is None and _OUTPUT_HEAD_NAME in parts[0].views:
        vocabulary = parts[0].views[_OUTPUT_HEAD_NAME].shape[0] * len(parts)
    if columns == hidden and vocabulary in {rows, rows * len(parts)}:
        return 0 if vocabulary != rows else None
    raise SourceError(
        f"{parts[0].path}: {_EMBEDDING_NAME} is [{rows}, {columns}], neither one of {len(parts)} parts of {hidden} "
        f"columns nor of {vocabulary} rows",
        hint="a rank's file may be missing, or params.json may belong to another model",
    )


def _describe_embedding_cut(dim: int | None) -> str:
    ways = {1: "along the hidden dim, as Llama 2 does", 0: "along the vocabulary, as Llama 3 does"}
    return f"the embedding is cut {ways[dim]}" if dim is not None else "the embedding is whole on every rank"


def _join_tensor(name: str, parts: Sequence[_MetaRankFile], dim: int | None, times: int) -> Tensor:
    """Return the whole tensor; `times` ranks have the same part."""
    first = parts[0].views[name]
    shape = list(first.shape)
    if dim is not None:
        shape[dim] *= len(parts) // times
    chunks = []
    for rank, part in enumerate(parts):
        view = part.views[name]
        if (view.shape, view.dtype) != (first.shape, first.dtype):
            raise SourceError(
                f"{name} is {view.dtype} {list(view.shape)} in {part.path}, but {first.dtype} {list(first.shape)} in "
                f"{parts[0].path}",
                hint="the files belong to different models",
            )
        origin = [0] * len(shape)
        if dim is not None:
            origin[dim] = rank // times * view.shape[dim]
        chunks.append(Chunk(Box(tuple(origin), view.shape), view.dtype, part.saved.region(view, name), name))
    return Tensor(name, first.dtype, tuple(shape), tuple(chunks))


# What must hold before parts can be joined


def _check_known(path: str, names: Sequence[str]) -> None:
    unknown = [
        n
        for n in names
        if n != _EMBEDDING_NAME
        and not any(
            p.fullmatch(n) for p in (_COLUMN_PARALLEL_PATTERN, _ROW_PARALLEL_PATTERN, _REPLICATED_TENSOR_PATTERN)
        )
    ]
    if unknown:
        raise UnsupportedError(
            f"{path} has {format_first_few(map(ascii, unknown))}, which Llama 2 and 3 do not have",
            hint="how such tensors are cut is not known; give the model in the layout of transformers",
        )
    lacking = [name for name in (_EMBEDDING_NAME, _FINAL_NORM_NAME) if name not in names]
    if lacking:
        raise SourceError(f"{path} has no {' and no '.join(lacking)}, so it is not a Llama of Meta's")


def _check_same(first: _MetaRankFile, other: _MetaRankFile) -> None:
    for one, two in ((first, other), (other, first)):
        lacking = [name for name in one.views if name not in two.views and name not in _BUFFER_NAMES]
        if lacking:
            raise SourceError(
                f"{two.path} has no {lacking[0]}, but {one.path} has", hint="the files belong to different models"
            )


def _check_count(parts: Sequence[_MetaRankFile], params: MetaParams | None) -> None:
    """Raise SourceError if the first rank's part of a layer is not one of as many as there are files."""
    views, path = parts[0].views, parts[0].path
    for name, view in views.items():
        dims = 1 if _REPLICATED_TENSOR_PATTERN.fullmatch(name) else _MATRIX_NDIM
        if name not in _BUFFER_NAMES and len(view.shape) != dims:
            raise SourceError(f"{path}: {name} has {len(view.shape)} dims and not {dims}")
    hidden = views[_FINAL_NORM_NAME].shape[0]
    whole = params.heads * params.head if params is not None else hidden
    name = next((n for n in views if n.endswith("attention.wo.weight")), "")
    if not name:
        return
    rows, columns = views[name].shape
    if rows == hidden and columns * len(parts) == whole:
        return
    if rows == hidden and columns and whole % columns == 0 and len(parts) < whole // columns:
        count = whole // columns
        width = len(path) - len("consolidated..pth")
        gaps = [f"consolidated.{n:0{width}}.pth" for n in range(len(parts), count)]
        raise SourceError(
            f"{describe_missing(gaps)}: {name} is [{rows}, {columns}] in {path}, one of {count} parts",
            hint="every rank's file is needed; fetch the rest",
        )
    raise SourceError(
        f"{name} is [{rows}, {columns}] in {path}, which is not one of {len(parts)} parts of [{hidden}, {whole}]",
        hint="params.json may belong to another model",
    )
