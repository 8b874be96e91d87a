"""Recognizes layers of GPT-NeoX in DeepSpeed's files, and keeps what each tensor-parallel rank has of them apart."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

from shardctl.base.errors import PartitionError, SourceError, UnsupportedError
from shardctl.libraries.arrays.composite import CompositeArray, SchemaEntry, join_arrays
from shardctl.libraries.arrays.schema import ModelParts, Schema, SchemaRank
from shardctl.tensors.mesh import Mesh
from shardctl.tensors.naming_scheme import NamingScheme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from shardctl.libraries.deepspeed.pieces import TensorPieces
    from shardctl.models import Model
    from shardctl.tensors.manifest import Tensor

_FUSED_QKV_PATTERN: Final = re.compile(r"(?:sequential\.)?[0-9]+\.attention\.(?:query_key_value|qkv)\.weight")
_SEQUENTIAL_PREFIX: Final = "sequential."
"""What precedes the number of a layer where the model is not a pipeline (`pipe_parallel_size` 0)."""
_TIED_EMBEDDING_PREFIX: Final = "tied_modules.embed."
_EMBEDDING_NAME: Final = "0.word_embeddings.weight"
_ROTARY_BUFFER_SUFFIX: Final = ".rotary_emb.inv_freq"
"""Computed from the config; no state dict of transformers has it."""


def is_gpt_neox(names: Iterable[str]) -> bool:
    """Return whether GPT-NeoX calls tensors so; Megatron-DeepSpeed's blocks have `self_attention`.

    >>> is_gpt_neox(["2.attention.query_key_value.weight"]), is_gpt_neox(["3.self_attention.query_key_value.weight"])
    (True, False)
    """
    return any(_FUSED_QKV_PATTERN.fullmatch(name) for name in names)


def is_buffer(name: str) -> bool:
    """Return whether it is a table that is computed, and no weight."""
    return name.endswith(_ROTARY_BUFFER_SUFFIX)


def rename_layer(name: str) -> str:
    """Return a tensor's name as the files of a pipeline's layers have it, behind the number of the layer.

    >>> rename_layer("sequential.3.input_layernorm.weight"), rename_layer("tied_modules.embed.word_embeddings.weight")
    ('3.input_layernorm.weight', '0.word_embeddings.weight')
    """
    return name.removeprefix(_SEQUENTIAL_PREFIX).replace(_TIED_EMBEDDING_PREFIX, "0.", 1)


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
    embeddings = (tensors.get(f"{prefix}{_EMBEDDING_NAME}") for prefix in prefixes.values())
    rows = sum(each.shape[0] for each in embeddings if each is not None and each.shape)
    variant = _PRE_V2_VARIANT
    if any(".mlp.linear1." in name for name in tensors):
        variant = _V2_VARIANT
    elif any(".mlp.fc1_" in name for name in tensors):
        variant = _TRANSFORMER_ENGINE_VARIANT
    return NamingScheme(
        _FORMAT_NAME, Mesh.of(tp=ranks), prefixes, facts={_VARIANT_KEY: variant, _VOCABULARY_ROWS_KEY: rows}
    )


def _prefix_rank(rank: int, ranks: int) -> str:
    """Return what stands before the names of a rank's arrays, as in the names of its files."""
    return f"model_{rank:02d}/" if ranks > 1 else ""


_FORMAT_NAME: Final = "gpt_neox"
_FORMAT_TITLE: Final = "GPT-NeoX"
_VARIANT_KEY: Final = "variant"
"""The fact that says what a block's feed-forward layers are called; a key of `_FEED_FORWARD`."""
_VOCABULARY_ROWS_KEY: Final = "vocabulary"
"""The fact that says how many rows the embedding has on all ranks together, padding included."""
_GPT_NEOX_FAMILY: Final = "gpt_neox"
"""The family of transformers in which q, k and v stay one array, as here."""
_SUPPORTED_FAMILIES: Final = frozenset({_GPT_NEOX_FAMILY, "llama", "mistral"})
_PRE_V2_VARIANT: Final = "before 2.0"
_V2_VARIANT: Final = "2.0"
_TRANSFORMER_ENGINE_VARIANT: Final = "Transformer Engine"
_FIRST_BLOCK: Final = 2
_PARAMETER_NAMES: Final = ("weight", "bias")
_NAME_REPLACEMENTS_BY_VARIANT: Final = {
    _PRE_V2_VARIANT: {},
    _V2_VARIANT: {"mlp.dense_h_to_4h.": "mlp.linear1.", "mlp.dense_4h_to_h.": "mlp.linear2."},
    _TRANSFORMER_ENGINE_VARIANT: {
        "mlp.dense_h_to_4h.": "mlp.fc1_",
        "mlp.dense_4h_to_h.": "mlp.fc2_",
        "attention.query_key_value.": "attention.qkv.",
        "attention.dense.": "attention.proj.",
        "post_attention_layernorm.": "mlp.layer_norm_",
    },
}
"""By variant: what stands in the names of its arrays instead of the words of `GPTNeoXForCausalLM`."""
_NORM_PARAMETER_PATTERN: Final = re.compile(
    r"[0-9]+\.((.*_layernorm|norm)\.(weight|bias|scale)|mlp\.layer_norm_(weight|bias))"
)
_ROW_BIAS: Final = re.compile(r"[0-9]+\.(attention\.(dense|proj)\.|mlp\.(dense_4h_to_h\.|linear2\.|fc2_))bias")


def _choose_reduction(config: Mapping[str, Any], name: str) -> Literal["", "sum", "mean"]:
    """Choose how the arrays that ranks have under one name become one tensor; empty for all that ranks divide or share.

    Gradients of norms are not reduced over ranks, so norms drift apart, and the converter takes their mean. With
    parallel residuals each rank adds its biases before outputs are summed over ranks; else biases are added afterwards,
    and all ranks have the same.
    """
    if _NORM_PARAMETER_PATTERN.fullmatch(name):
        return "mean"
    side_by_side = config.get("model_type") == _GPT_NEOX_FAMILY and config.get("use_parallel_residual", True)
    return "sum" if side_by_side and _ROW_BIAS.fullmatch(name) else ""


def _check_model(model: Model) -> None:
    """Raise UnsupportedError for a model that GPT-NeoX does not have, or whose names there are not known here."""
    if model.family not in _SUPPORTED_FAMILIES or not model.architecture.endswith("ForCausalLM"):
        raise UnsupportedError(
            f"{_FORMAT_TITLE}'s arrays of {model.architecture or 'this model'} are not known here",
            hint="known are those of GPTNeoXForCausalLM, LlamaForCausalLM and MistralForCausalLM",
        )


def _list_entries(model: Model, dialect: NamingScheme, rank: int) -> Iterator[SchemaEntry]:
    own = SchemaRank(ModelParts(model, _FORMAT_TITLE), dialect.mesh.degree("tp"), rank)
    neox = model.family == _GPT_NEOX_FAMILY
    front, last = ("gpt_neox", "final_layer_norm") if neox else ("model", "norm")
    embedding, head = (f"{front}.{'embed_in' if neox else 'embed_tokens'}.weight", "embed_out" if neox else "lm_head")
    yield _build_vocabulary_entry("0.word_embeddings.weight", own, embedding, dialect)
    for number in range(model.layers):
        block = f"{front}.layers.{number}."
        arrays = _list_neox_arrays(own, block) if neox else _list_llama_arrays(own, block, dialect)
        for name, content in arrays:
            yield SchemaEntry(f"{number + _FIRST_BLOCK}.{_rename_array(name, dialect)}", content)
    end = model.layers + _FIRST_BLOCK + 1
    for kind in _PARAMETER_NAMES:
        if f"{front}.{last}.{kind}" in own:
            yield SchemaEntry(f"{end}.norm.{kind if neox else 'scale'}", own[f"{front}.{last}.{kind}"])
    if f"{head}.weight" not in own or own.parts.resolve(f"{head}.weight") == embedding:
        copy = _build_vocabulary_entry(f"{end + 1}.word_embeddings.weight", own, embedding, dialect)
        yield replace(copy, optional=True)
    else:
        yield _build_vocabulary_entry(f"{end + 1}.final_linear.weight", own, f"{head}.weight", dialect)


def _list_neox_arrays(own: SchemaRank, block: str) -> Iterator[tuple[str, CompositeArray]]:
    """List a block's arrays, each a tensor or a rank's share of it; q, k and v of a head lie together in both."""
    for kind in _PARAMETER_NAMES:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{norm}.{kind}", own[f"{block}{norm}.{kind}"]
    for entry in own.column_layer(f"{block}attention.query_key_value", "attention.query_key_value"):
        yield entry.name, entry.content
    for name in ("attention.dense", "mlp.dense_4h_to_h"):
        for entry in own.row_layer(block + name, name):
            yield entry.name, entry.content
    for entry in own.column_layer(f"{block}mlp.dense_h_to_4h", "mlp.dense_h_to_4h"):
        yield entry.name, entry.content


def _list_llama_arrays(own: SchemaRank, block: str, dialect: NamingScheme) -> Iterator[tuple[str, CompositeArray]]:
    """List a block's arrays of a model whose q, k and v, and gate and up projections, are tensors of their own."""
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{norm}.scale", own[f"{block}{norm}.weight"]
    for kind in _PARAMETER_NAMES:
        if f"{block}self_attn.q_proj.{kind}" in own:
            yield f"attention.query_key_value.{kind}", _join_queries(own, block, kind)
    for entry in own.row_layer(f"{block}self_attn.o_proj", "attention.dense"):
        yield entry.name, entry.content
    gate, up = (own.rows(f"{block}mlp.{part}_proj.weight") for part in ("gate", "up"))
    if dialect.text(_VARIANT_KEY) == _PRE_V2_VARIANT:
        yield "mlp.w1.weight", gate
        yield "mlp.w3.weight", up
        yield "mlp.w2.weight", own.columns(f"{block}mlp.down_proj.weight")
    else:
        yield "mlp.dense_h_to_4h.weight", join_arrays([up, gate])
        yield "mlp.dense_4h_to_h.weight", own.columns(f"{block}mlp.down_proj.weight")


def _join_queries(own: SchemaRank, block: str, kind: str) -> CompositeArray:
    """Return a rank's q, k and v: one after another if queries share keys, else those of each head together."""
    names = [f"{block}self_attn.{part}_proj.{kind}" for part in "qkv"]
    parts = [own.rows(name) for name in names]
    if parts[0].shape != parts[1].shape:
        return join_arrays(parts)
    heads = parts[0].shape[0] // own.parts.unit(names[0])
    return join_arrays([part.share(0, head, heads) for head in range(heads) for part in parts])


def _rename_array(name: str, dialect: NamingScheme) -> str:
    """Return what a variant calls an array."""
    for ours, theirs in _NAME_REPLACEMENTS_BY_VARIANT[dialect.text(_VARIANT_KEY)].items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _build_vocabulary_entry(name: str, own: SchemaRank, tensor: str, dialect: NamingScheme) -> SchemaEntry:
    """Build a rank's rows of the vocabulary, which GPT-NeoX pads."""
    tokens = own[tensor]
    rows = dialect.number(_VOCABULARY_ROWS_KEY) or tokens.shape[0]
    if rows < tokens.shape[0]:
        raise SourceError(
            f"{name} has {rows:,} rows, but the model has {tokens.shape[0]:,} tokens",
            hint="the config may belong to another model, or a rank's files may be missing",
        )
    if rows % own.tp:
        raise PartitionError(f"a vocabulary of {rows} rows cannot be divided over {own.tp} ranks")
    return SchemaEntry(name, tokens.pad_rows(rows).share(0, own.index, own.tp))


SCHEMA: Final = Schema(_FORMAT_NAME, _FORMAT_TITLE, _check_model, _list_entries, reduction=_choose_reduction)
