"""Recognizes layers of GPT-NeoX in DeepSpeed's files, and keeps what each tensor-parallel rank has of them apart."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.libraries.deepspeed.gpt_neox_arrays import FUSED, NAME, NEW, OLD, VARIANT, VOCABULARY
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.naming_scheme import NamingScheme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardctl.libraries.deepspeed.pieces import TensorPieces
    from shardctl.tensors.manifest import Tensor

_MARK: Final = re.compile(r"(?:sequential\.)?[0-9]+\.attention\.(?:query_key_value|qkv)\.weight")
_SEQUENTIAL: Final = "sequential."
"""What precedes the number of a layer where the model is not a pipeline (`pipe_parallel_size` 0)."""
_TIED: Final = "tied_modules.embed."
_EMBEDDING: Final = "0.word_embeddings.weight"
_BUFFER: Final = ".rotary_emb.inv_freq"
"""Computed from the config; no state dict of transformers has it."""


def is_gpt_neox(names: Iterable[str]) -> bool:
    """Return whether GPT-NeoX calls tensors so; Megatron-DeepSpeed's blocks have `self_attention`.

    >>> is_gpt_neox(["2.attention.query_key_value.weight"]), is_gpt_neox(["3.self_attention.query_key_value.weight"])
    (True, False)
    """
    return any(_MARK.fullmatch(name) for name in names)


def is_buffer(name: str) -> bool:
    """Return whether it is a table that is computed, and no weight."""
    return name.endswith(_BUFFER)


def rename_layer(name: str) -> str:
    """Return a tensor's name as the files of a pipeline's layers have it, behind the number of the layer.

    >>> rename_layer("sequential.3.input_layernorm.weight"), rename_layer("tied_modules.embed.word_embeddings.weight")
    ('3.input_layernorm.weight', '0.word_embeddings.weight')
    """
    return name.removeprefix(_SEQUENTIAL).replace(_TIED, "0.", 1)


def collect_rank_tensors(
    names: Iterable[str], choose_pieces: Callable[[str], TensorPieces], ranks: int
) -> dict[str, Tensor]:
    """Collect what each of `ranks` tensor-parallel ranks has, by names of its own.

    Model-parallel ranks are those of each pipeline stage in turn; what several stages have, such as a tied embedding,
    has a chunk of each.
    """
    found: dict[str, Tensor] = {}
    for name in names:
        pieces = choose_pieces(name)
        for rank in pieces.held[name]:
            called = f"{_prefix_rank(rank % ranks, ranks)}{rename_layer(name)}"
            tensor, known = pieces.rank_tensor(name, rank, called), found.get(called)
            found[called] = tensor if known is None else replace(tensor, chunks=(*known.chunks, *tensor.chunks))
    return found


def build_dialect(tensors: Mapping[str, Tensor], ranks: int) -> NamingScheme:
    """Build what decides how the arrays of a checkpoint are made."""
    prefixes = {rank: _prefix_rank(rank, ranks) for rank in range(ranks)}
    embeddings = (tensors.get(f"{prefix}{_EMBEDDING}") for prefix in prefixes.values())
    rows = sum(each.shape[0] for each in embeddings if each is not None and each.shape)
    variant = OLD
    if any(".mlp.linear1." in name for name in tensors):
        variant = NEW
    elif any(".mlp.fc1_" in name for name in tensors):
        variant = FUSED
    return NamingScheme(NAME, Mesh.of(tp=ranks), prefixes, facts={VARIANT: variant, VOCABULARY: rows})


def _prefix_rank(rank: int, ranks: int) -> str:
    """Return what stands before the names of a rank's arrays, as in the names of its files."""
    return f"model_{rank:02d}/" if ranks > 1 else ""
