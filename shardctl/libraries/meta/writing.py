"""Plans Llama as Meta's own code loads it: one `consolidated.NN.pth` per rank, and `params.json`.

Names, order of rows and cuts are those that `formats/meta` reads. Unless `--meta-embedding` says otherwise, the
embedding is cut along the vocabulary, as by the code of Llama 3, if `rope_theta` is that of Llama 3 or the head is tied
to it, as in no Llama 2; else along the hidden dim, as by the code of Llama 2.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import PartitionError, UnsupportedError, UsageError
from shardctl.libraries.meta import llama4_arrays
from shardctl.libraries.meta.params import LLAMA3_THETA, PARAMS
from shardctl.libraries.torch_save.item_writer import build_archive, build_tensor_value
from shardctl.libraries.writer import Layout
from shardctl.models.names.meta_names import find_meta_name, split_meta_rows
from shardctl.models.tables.rope import parse_rope
from shardctl.tensors.box import Box
from shardctl.tensors.manifest import CheckpointFile, Chunk, Manifest, Region, compute_dense_strides

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardctl.libraries.writer import PackRequest
    from shardctl.models import Model
    from shardctl.tensors.manifest import Tensor
    from shardctl.tensors.naming_scheme import NamingScheme
    from shardctl.tensors.pieces import PlacedCheckpoint

NAME: Final = "meta"
_EMBEDDING_NAME: Final = "model.embed_tokens.weight"
_EMBEDDING_OPTION: Final = "meta_embedding"
_HIDDEN_DIM_CHOICE: Final = "hidden"
_MULTIPLE_OF_VALUES: Final = (256, 1_024, 4_096)
_FFN_DIM_MULTIPLIERS: Final = (None, 1.3, 1.5, 1.0, 1.2, 1.4)
"""What the published `params.json` have for `multiple_of` and `ffn_dim_multiplier`."""


def pack_meta(request: PackRequest) -> Manifest:
    """Return the file of every tp rank, or of the only one.

    Raises:
        UnsupportedError: a model that Meta's code has no place for.
        PartitionError: a mesh of more than tp, or parts that would not be equal.
    """
    have, dtypes, placed = request.have, request.dtypes, request.placed
    model, config = request.model, request.config
    if model.family in llama4_arrays.FAMILIES:
        from shardctl.libraries.meta.llama4_writing import pack_llama4  # for one family

        return pack_llama4(request, _number_file)
    if model.family != "llama":
        raise UnsupportedError(f"Meta's code is for Llama 2, 3 and 4, not for {model.architecture or 'this model'}")
    theta, positions = _describe_rope(config)
    content = (json.dumps(_build_params(config, model, have, positions), indent=2) + "\n").encode()
    names = {t.name: [_name_for_meta(name, model) for name in (t.name, *t.ties)] for t in have.tensors.values()}
    if placed is not None and placed.mesh.degree("tp") != placed.mesh.world:
        raise PartitionError(
            f"Meta's files are those of tp ranks, but the mesh is {placed.mesh}", hint="use --tp alone"
        )
    builder: dict[str, list[Chunk]] = {}
    files: dict[str, CheckpointFile] = {}
    tied = any(tensor.ties for tensor in have.tensors.values())
    cut = request.options.get(_EMBEDDING_OPTION)
    if cut not in (None, _HIDDEN_DIM_CHOICE, "vocabulary"):
        raise UsageError(f"unknown --meta-embedding {cut!r}", hint="use vocabulary or hidden")
    hidden = theta != LLAMA3_THETA and not tied if cut is None else cut == _HIDDEN_DIM_CHOICE
    for rank, held in _list_rank_boxes(have, placed, hidden=hidden):
        path = f"{_number_file(rank)}pth"
        arrays = [(name, tensor, box) for tensor, box in held for name in names[tensor.name]]
        sizes = [dtypes[tensor.name].nbytes(box.shape) for _, tensor, box in arrays]
        state = {n: build_tensor_value(dtypes[t.name], box.shape, number) for number, (n, t, box) in enumerate(arrays)}
        item = build_archive(state, sizes)
        for (name, tensor, box), start in zip(arrays, item.starts, strict=True):
            dtype = dtypes[tensor.name]
            stored = Chunk(box, dtype, Region(path, start, compute_dense_strides(dtype, box.shape)), name)
            builder.setdefault(tensor.name, []).extend(split_meta_rows(model, tensor.name, stored))
        files[path] = CheckpointFile(path, item.size, item.literals)
    files[PARAMS] = CheckpointFile(PARAMS, len(content), ((0, content),))
    tensors = {
        name: replace(tensor, dtype=dtypes[name], chunks=tuple(builder.get(name, ())))
        for name, tensor in have.tensors.items()
    }
    return Manifest(NAME, tensors, files, have.objects)


def _format_file_prefix(dialect: NamingScheme, rank: int) -> str:
    del dialect
    return _number_file(rank)


def _number_file(rank: int) -> str:
    """Return what the name of a rank's file begins with."""
    return f"consolidated.{rank:02d}."


def _list_rank_boxes(
    have: Manifest, placed: PlacedCheckpoint | None, *, hidden: bool
) -> Iterator[tuple[int, list[tuple[Tensor, Box]]]]:
    """List every rank with its box of each tensor; `hidden` cuts the embedding along the hidden dim."""
    if placed is None:
        yield 0, [(tensor, Box.whole(tensor.shape)) for tensor in have.tensors.values()]
        return
    ranks = placed.mesh.world
    for rank, held in placed.ranks():
        boxes = []
        for piece in held:
            box = piece.boxes[0]
            if piece.tensor.name == _EMBEDDING_NAME and hidden:
                rows, columns = piece.tensor.shape
                box = Box((0, rank * (columns // ranks)), (rows, columns // ranks))
            if any(part != whole and whole % part for part, whole in zip(box.shape, piece.tensor.shape, strict=True)):
                raise PartitionError(
                    f"{piece.tensor.name} {list(piece.tensor.shape)} cannot be divided into {ranks} equal parts"
                )
            boxes.append((piece.tensor, box))
        yield rank, boxes


def _name_for_meta(name: str, model: Model) -> str:
    meant = find_meta_name(name)
    if meant is None:
        raise UnsupportedError(
            f"Meta's Llama has no place for {name} of {model.architecture or 'this model'}",
            hint="it holds Llama 2 and 3 without biases",
        )
    return meant


def _describe_rope(config: Mapping[str, object]) -> tuple[float, dict[str, object]]:
    """Return the theta, and what `params.json` says of rotary embeddings.

    Raises UnsupportedError for other scalings.
    """
    said = parse_rope(config)
    scaled: dict[str, object] = {"use_scaled_rope": True, "rope_scaling_factor": said.settings.get("factor", 8.0)}
    if said.part != 1.0 or not (said.kind == "default" or said.as_llama3):
        raise UnsupportedError(f"Meta's code does not support this config's rotary embeddings of type {said.kind!r}")
    return said.theta, {"rope_theta": said.theta, **(scaled if said.as_llama3 else {})}


def _build_params(
    config: Mapping[str, object], model: Model, have: Manifest, positions: Mapping[str, object]
) -> dict[str, object]:
    """Build the content of `params.json`."""
    vocabulary, dim = model.tensors[_EMBEDDING_NAME].shape
    inner = model.tensors["model.layers.0.mlp.up_proj.weight"].shape[0]
    heads = config.get("num_attention_heads")
    q, k = (model.tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in ("q", "k"))
    head = q.spec.cuts[0][0].sections[0].unit
    if q.shape[0] != dim or heads != dim // head:
        raise UnsupportedError(f"Meta's code has heads that together are as wide as the model, {dim}, not {q.shape[0]}")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"Meta's code has the activation silu, not {config.get('hidden_act')}")
    missing = [t.name for t in model.own() if t.name not in have.tensors]
    if missing:
        raise UnsupportedError(f"Meta's code needs every tensor, but {missing[0]} was left out")
    multiple, multiplier = _solve_ffn_settings(dim, inner)
    return {
        "dim": dim,
        "n_layers": model.layers,
        "n_heads": heads,
        "n_kv_heads": k.shape[0] // head,
        "vocab_size": vocabulary,
        "multiple_of": multiple,
        **({"ffn_dim_multiplier": multiplier} if multiplier is not None else {}),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        **positions,
    }


def _solve_ffn_settings(dim: int, inner: int) -> tuple[int, float | None]:
    """Return `multiple_of` and `ffn_dim_multiplier` from which Meta's `FeedForward` makes `inner`.

    >>> _solve_ffn_settings(4096, 11008), _solve_ffn_settings(4096, 14336)
    ((256, None), (256, 1.3))
    """
    base = int(8 * dim / 3)
    for multiple, multiplier in _list_multiplier_pairs():
        hidden = int(base * multiplier) if multiplier is not None else base
        if -(-hidden // multiple) * multiple == inner:
            return multiple, multiplier
    return (inner, None) if base <= inner else (inner, inner / base / 1.05)


def _list_multiplier_pairs() -> Iterable[tuple[int, float | None]]:
    return ((multiple, multiplier) for multiplier in _FFN_DIM_MULTIPLIERS for multiple in _MULTIPLE_OF_VALUES)


LAYOUT: Final = Layout(
    NAME, pack_meta, ranks="optional", options=frozenset({_EMBEDDING_OPTION}), prefix=_format_file_prefix
)
