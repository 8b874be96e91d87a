"""Translates Meta's names for Llama, which older torchtitan also uses, and the order of query and key rows.

Meta rotates neighbouring pairs of a head, transformers its two halves: row ``2 * j + k`` of a head there is row
``k * half + j`` here (transformers `models/llama/convert_llama_weights_to_hf.py`, `permute`; torchtitan
`models/llama3/state_dict_adapter.py`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.tensors.box import Box
from shardctl.tensors.training import format_state_name, split_state_name
from shardctl.tensors.views import ArrayView

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardctl.models.tables.model import Model
    from shardctl.tensors.manifest import Chunk, Manifest, Tensor, TrainingState

_SUPPORTED_FAMILIES: Final = frozenset({"llama", "mistral"})
_TRANSFORMERS_NAMES: Final = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
}
_TRANSFORMERS_MODULE_NAMES: Final = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_META_NAMES: Final = {meant: name for name, meant in _TRANSFORMERS_NAMES.items() if name != "lm_head.weight"}
_OLD_PARTS: Final = {meant: part for part, meant in _TRANSFORMERS_MODULE_NAMES.items()}
_MEANT_LAYER: Final = re.compile(r"model\.layers\.([0-9]+)\.(.+)\.weight")
_LAYER_WEIGHT_PATTERN: Final = re.compile(r"layers\.([0-9]+)\.(.+)\.weight")
_ROTARY_BUFFER_NAMES: Final = frozenset({"rope.freqs", "freqs_cis"})
"""Computed from the config; no state dict of transformers has them."""
_ROTARY_WEIGHT_PATTERN: Final = re.compile(r".+\.self_attn\.[qk]_proj\.weight")
_MATRIX_NDIM: Final = 2
_NAMING_SCHEME_NOTE: Final = "Meta's names and order of rotary rows; read as those of transformers"


def bind_meta_names(model: Model, stored: Manifest) -> Manifest:
    """Return `stored` under the names of transformers and in its order of rows, if all names are Meta's.

    Else as it is.
    """
    if model.family not in _SUPPORTED_FAMILIES or "tok_embeddings.weight" not in stored.tensors:
        return stored
    names = {name: _find_transformers_name(name) for name in stored.tensors if name not in _ROTARY_BUFFER_NAMES}
    if not all(meant in model.tensors or meant in model.aliases for meant in names.values()):
        return stored
    tensors = {meant: _reorder_meta_rows(model, meant, stored.tensors[name]) for name, meant in names.items()}
    training = _bind_meta_training(model, stored.training) if stored.training is not None else None
    return replace(stored, tensors=tensors, training=training)


def find_meta_name(name: str) -> str | None:
    """Find what Meta calls the tensor that transformers calls `name`; None if it has no such tensor.

    >>> (find_meta_name("model.layers.3.mlp.up_proj.weight"), find_meta_name("lm_head.weight"),
    ...  find_meta_name("lm_head.bias"))
    ('layers.3.feed_forward.w3.weight', 'output.weight', None)
    """
    found = _MEANT_LAYER.fullmatch(name)
    if found is None:
        return _META_NAMES.get(name)
    part = _OLD_PARTS.get(found[2])
    return f"layers.{found[1]}.{part}.weight" if part is not None else None


def split_meta_rows(model: Model, name: str, chunk: Chunk) -> Iterable[Chunk]:
    """Return the chunks of tensor `name`, as transformers has it, that lie in a chunk of Meta's order of rows."""
    if _ROTARY_WEIGHT_PATTERN.fullmatch(name) is None:
        return (chunk,)
    return _split_head_rows(chunk, _count_head_rows(model, name))


def _count_head_rows(model: Model, name: str) -> int:
    """Count rows of one head."""
    return model.tensors[name].spec.cuts[0][0].sections[0].unit


def _find_transformers_name(name: str) -> str:
    found = _LAYER_WEIGHT_PATTERN.fullmatch(name)
    if found is None:
        return _TRANSFORMERS_NAMES.get(name, "")
    return f"model.layers.{found[1]}.{_TRANSFORMERS_MODULE_NAMES.get(found[2], '')}.weight"


def _bind_meta_training(model: Model, stored: TrainingState) -> TrainingState:
    states = {}
    for name, tensor in stored.states.items():
        state, parameter = split_state_name(name) or ("", name)
        meant = _find_transformers_name(parameter)
        new = format_state_name(state, meant)
        states[new] = replace(_reorder_meta_rows(model, meant, tensor), name=new)
    groups = tuple(
        replace(group, parameters=tuple(map(_find_transformers_name, group.parameters))) for group in stored.groups
    )
    return replace(stored, states=states, groups=groups, notes=(*stored.notes, _NAMING_SCHEME_NOTE))


def _reorder_meta_rows(model: Model, meant: str, tensor: Tensor) -> Tensor:
    """Return the tensor that is stored, or one alike of an optimizer, under its new name and in the new order."""
    chunks = tensor.chunks
    if _ROTARY_WEIGHT_PATTERN.fullmatch(meant) and len(tensor.shape) == _MATRIX_NDIM:
        chunks = tuple(part for chunk in chunks for part in _split_head_rows(chunk, _count_head_rows(model, meant)))
    return replace(tensor, name=meant, chunks=chunks)


def _split_head_rows(chunk: Chunk, head: int) -> Iterator[Chunk]:
    """Yield the even and the odd rows of each head of `head` rows that a chunk holds some of, where they belong."""
    columns = chunk.box.origin[1] + chunk.box.shape[1]
    half = head // 2
    for number in range(chunk.box.origin[0] // head, -(-chunk.box.stop[0] // head)):
        for odd in range(2):
            view = ArrayView((number * head + odd, 0), (0, 1), (2, 1))
            part = view.map_chunk_part(chunk, Box((number * head + odd * half, 0), (half, columns)))
            if part is not None:
                yield part
