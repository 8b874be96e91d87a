"""Says which dim of each tensor Meta cuts for tensor-parallel ranks, and how the parts are joined.

Linear layers with many outputs are cut along their outputs (dim 0), those with many inputs along their inputs (dim 1);
norms are on every rank. The embedding is cut along the hidden dim by Llama 2 and along the vocabulary by Llama 3. Where
there are more ranks than key/value heads, each head is on several neighbours (meta-llama/llama `model.py`,
meta-llama/llama-models `models/checkpoint.py`, `reshard_mp`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError, UnsupportedError, format_first_few
from shardctl.base.value import value_class
from shardctl.libraries.files.choice import describe_missing
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import Chunk, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardctl.libraries.meta.params import MetaParams
    from shardctl.libraries.torch_save.tensors import SavedFile, StorageView

BUFFERS: Final = frozenset({"rope.freqs"})
"""Computed from the config, and stored by older files."""
EMBEDDING: Final = "tok_embeddings.weight"
OUTPUT: Final = "output.weight"
NORM: Final = "norm.weight"
_OUTPUTS: Final = re.compile(r"output\.weight|layers\.\d+\.(attention\.w[qkv]|feed_forward\.w[13])\.weight")
_INPUTS: Final = re.compile(r"layers\.\d+\.(attention\.wo|feed_forward\.w2)\.weight")
_WHOLE: Final = re.compile(r"norm\.weight|layers\.\d+\.(attention|ffn)_norm\.weight")
_SHARED: Final = re.compile(r"layers\.\d+\.attention\.w[kv]\.weight")
_MATRIX: Final = 2


@value_class
class MetaRankFile:
    """The file of one rank."""

    path: str
    saved: SavedFile
    views: Mapping[str, StorageView]
    """By name what it holds of each tensor."""


@value_class
class JoinedParts:
    """All parts together."""

    tensors: Mapping[str, Tensor]
    """By Meta's names, in the order of the first file."""
    notes: tuple[str, ...]
    """How they were understood."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def join_parts(parts: Sequence[MetaRankFile], params: MetaParams | None) -> JoinedParts:
    """Return the tensors of the files of all ranks, in the order of ranks.

    Raises:
        SourceError: files have different tensors, parts do not fit together, or a rank's file is missing.
        UnsupportedError: tensors that Llama 2 and 3 have not.
    """
    names = [name for name in parts[0].views if name not in BUFFERS]
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
    return JoinedParts(tensors, tuple(notes))


def _find_cut(name: str, parts: Sequence[MetaRankFile], params: MetaParams | None) -> tuple[int | None, int]:
    """Find the dim along which a tensor is cut, None for not at all, and on how many ranks each part is."""
    if len(parts) == 1 or _WHOLE.fullmatch(name):
        return None, len(parts)
    if name == EMBEDDING:
        dim = _find_embedding_dim(parts, params)
        return dim, 1 if dim is not None else len(parts)
    if _INPUTS.fullmatch(name):
        return 1, 1
    if _SHARED.fullmatch(name) and params is not None and params.kv_heads < len(parts):
        rows, heads = parts[0].views[name].shape[0] * len(parts), params.kv_heads
        if heads and len(parts) % heads == 0 and rows == len(parts) * params.head:
            return 0, len(parts) // heads
    return 0, 1


def _find_embedding_dim(parts: Sequence[MetaRankFile], params: MetaParams | None) -> int | None:
    """Find how the embedding is cut, by its shape alone; raises SourceError if that fits no known way."""
    rows, columns = parts[0].views[EMBEDDING].shape
    hidden = parts[0].views[NORM].shape[0]
    if columns * len(parts) == hidden:
        return 1
    vocabulary = params.vocabulary if params is not None else None
    if vocabulary is None and OUTPUT in parts[0].views:
        vocabulary = parts[0].views[OUTPUT].shape[0] * len(parts)
    if columns == hidden and vocabulary in {rows, rows * len(parts)}:
        return 0 if vocabulary != rows else None
    raise SourceError(
        f"{parts[0].path}: {EMBEDDING} is [{rows}, {columns}], neither one of {len(parts)} parts of {hidden} "
        f"columns nor of {vocabulary} rows",
        hint="a rank's file may be missing, or params.json may belong to another model",
    )


def _describe_embedding_cut(dim: int | None) -> str:
    ways = {1: "along the hidden dim, as Llama 2 does", 0: "along the vocabulary, as Llama 3 does"}
    return f"the embedding is cut {ways[dim]}" if dim is not None else "the embedding is whole on every rank"


def _join_tensor(name: str, parts: Sequence[MetaRankFile], dim: int | None, times: int) -> Tensor:
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
    unknown = [n for n in names if n != EMBEDDING and not any(p.fullmatch(n) for p in (_OUTPUTS, _INPUTS, _WHOLE))]
    if unknown:
        raise UnsupportedError(
            f"{path} has {format_first_few(map(ascii, unknown))}, which Llama 2 and 3 do not have",
            hint="how such tensors are cut is not known; give the model in the layout of transformers",
        )
    lacking = [name for name in (EMBEDDING, NORM) if name not in names]
    if lacking:
        raise SourceError(f"{path} has no {' and no '.join(lacking)}, so it is not a Llama of Meta's")


def _check_same(first: MetaRankFile, other: MetaRankFile) -> None:
    for one, two in ((first, other), (other, first)):
        lacking = [name for name in one.views if name not in two.views and name not in BUFFERS]
        if lacking:
            raise SourceError(
                f"{two.path} has no {lacking[0]}, but {one.path} has", hint="the files belong to different models"
            )


def _check_count(parts: Sequence[MetaRankFile], params: MetaParams | None) -> None:
    """Raise SourceError if the first rank's part of a layer is not one of as many as there are files."""
    views, path = parts[0].views, parts[0].path
    for name, view in views.items():
        dims = 1 if _WHOLE.fullmatch(name) else _MATRIX
        if name not in BUFFERS and len(view.shape) != dims:
            raise SourceError(f"{path}: {name} has {len(view.shape)} dims and not {dims}")
    hidden = views[NORM].shape[0]
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
