"""Describes vLLM's arrays of GPT-2, GPT-NeoX, BLOOM and Falcon, which store q, k and v in one array.

Names and orders are those of vLLM 0.25.1, `model_executor/models/` (`gpt2.py`, `gpt_neox.py`, `bloom.py`,
`falcon.py`): whatever order the file has, a rank has its queries, then its keys, then its values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.libraries.arrays.composite import SchemaEntry
from shardctl.libraries.vllm.rank import HeadRun, QkvRows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.libraries.vllm.rank import VllmRank
    from shardctl.models import Model

_KINDS: Final = ("weight", "bias")
_HEAD: Final = "lm_head.weight"


def list_gpt2_entries(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    """List GPT-2, whose weights lie transposed in the file."""
    if _HEAD not in model.aliases:
        yield here.vocabulary("transformer.wte.weight")
    yield here.vocabulary(_HEAD)
    yield from here.same("transformer.wpe.weight", *(f"transformer.ln_f.{kind}" for kind in _KINDS))
    for number in here.layers:
        layer = f"transformer.h.{number}"
        yield from here.same(*(f"{layer}.ln_{norm}.{kind}" for norm in (1, 2) for kind in _KINDS))
        qkv = f"{layer}.attn.c_attn"
        weights = ((part.transposed, unit) for part, unit in here.sections(f"{qkv}.weight", 1))
        yield here.attention(f"{qkv}.weight", QkvRows(*(HeadRun((part,), unit) for part, unit in weights)))
        biases = here.sections(f"{qkv}.bias")
        yield here.attention(f"{qkv}.bias", QkvRows(*(HeadRun((part,), unit) for part, unit in biases)))
        yield from here.scales(f"{layer}.attn.attn")
        wide = here[f"{layer}.mlp.c_fc.weight"].transposed
        yield SchemaEntry(f"{layer}.mlp.c_fc.weight", wide.share(0, here.index, here.tp))
        yield SchemaEntry(f"{layer}.mlp.c_fc.bias", here.rows(f"{layer}.mlp.c_fc.bias"))
        for name in (f"{layer}.attn.c_proj", f"{layer}.mlp.c_proj"):
            yield SchemaEntry(f"{name}.weight", here[f"{name}.weight"].transposed.share(1, here.index, here.tp))
            yield from here.same(f"{name}.bias")


def list_gpt_neox_entries(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    """List GPT-NeoX and Pythia; since 0.32 as the class of transformers has them, each head's q, k and v together."""
    new, head = ("model", _HEAD) if here.latest else ("gpt_neox", "embed_out.weight")
    if here.begins and (_HEAD not in model.aliases or not here.asks):
        yield here.vocabulary("gpt_neox.embed_in.weight", f"{new}.embed_in.weight")
    if here.ends:
        yield here.vocabulary(_HEAD if _HEAD in here else "embed_out.weight", head)
        for kind in _KINDS:
            name = f"final_layer_norm.{kind}"
            yield SchemaEntry(f"{new}.{name}", here[f"gpt_neox.{name}"])
    for number in here.layers:
        have, layer = f"gpt_neox.layers.{number}", f"{new}.layers.{number}"
        for entry in _list_layer(here, have, f"{have}.attention", in_order=not here.latest):
            yield replace(entry, name=entry.name.replace(have, layer, 1))


def list_bloom_entries(here: VllmRank, model: Model) -> Iterator[SchemaEntry]:
    """List BLOOM and Falcon."""
    if _HEAD not in model.aliases:
        yield here.vocabulary("transformer.word_embeddings.weight")
    yield here.vocabulary(_HEAD)
    yield from here.same(*(f"transformer.word_embeddings_layernorm.{kind}" for kind in _KINDS))
    yield from here.same(*(f"transformer.ln_f.{kind}" for kind in _KINDS))
    for number in here.layers:
        layer = f"transformer.h.{number}"
        yield from _list_layer(here, layer, f"{layer}.self_attention")


def _list_layer(here: VllmRank, layer: str, attention: str, *, in_order: bool = True) -> Iterator[SchemaEntry]:
    """List a layer; `in_order` has queries, then keys, then values, else they take turns as in the file."""
    for norm in ("input_layernorm", "post_attention_layernorm", "ln_attn", "ln_mlp"):
        yield from here.same(*(f"{layer}.{norm}.{kind}" for kind in _KINDS))
    for kind in _KINDS:
        name = f"{attention}.query_key_value.{kind}"
        if name in here:
            whole = SchemaEntry(name, here.rows(name))
            yield here.attention(name, _build_heads(here, name, attention)) if in_order else whole
    yield from here.scales(f"{attention}.attn")
    yield from here.row_layer(f"{attention}.dense")
    yield from here.column_layer(f"{layer}.mlp.dense_h_to_4h")
    yield from here.row_layer(f"{layer}.mlp.dense_4h_to_h")


def _build_heads(here: VllmRank, name: str, attention: str) -> QkvRows:
    """Build the heads of a fused array: sections of queries, keys and values, or groups with one key and value each.

    In the first, `Dim` says how many rows a head has; in the second, a group has two heads more than it has queries.
    """
    parts = list(here.sections(name))
    if len(parts) > 1:
        return QkvRows(*(HeadRun((part,), unit) for part, unit in parts))
    (whole, group), queries = parts[0], here.parts.unit(f"{attention}.dense.weight", 1)
    head = (group - queries) // 2
    groups = whole.shares(0, whole.shape[0] // group)

    def rows(start: int, stop: int) -> HeadRun:
        return HeadRun(tuple(each.part(0, start, stop) for each in groups), head)

    return QkvRows(rows(0, queries), rows(queries, queries + head), rows(queries + head, group))
