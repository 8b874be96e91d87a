"""Describes GPT-BigCode (StarCoder 1, SantaCoder): GPT-2 in `nn.Linear`, mostly with one key/value head.

Names and shapes follow transformers 5 (`models/gpt_bigcode/modeling_gpt_bigcode.py`). With as many key/value heads as
query heads, q, k and v are interleaved head by head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.families.gpt2 import GPT2, NAMES
from shardctl.models.tables.decoder import build_decoder_classes
from shardctl.models.tables.family import Family, LogicalDim, Row
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims


def _turn_row(row: Row) -> Row:
    """Return a row of GPT-2 as `nn.Linear` has it: `[out, in]`."""
    dims = row.dims.replace("q+kv+kv", "qkv").split()
    return replace(row, dims=" ".join(dims[::-1] if row.name.startswith(".h.") else dims))


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden, head = config.size("n_embd"), config.divided("n_embd", "n_head")
    q = LogicalDim(hidden, head, "tp", noun="attention heads")
    kv = LogicalDim(head, head, "tp", shared=True, noun="key/value heads")
    many = LogicalDim(3 * hidden, 3 * head, "tp", noun="attention heads")
    qkv = (q, kv, kv) if config.read_flag("multi_query", default=True) else many
    return GPT2.facts(config).extend_dims(dims={"qkv": qkv})


GPT_BIGCODE: Final = Family(
    name="gpt_bigcode",
    rows=tuple(
        _turn_row(row)
        for row in GPT2.rows
        if not row.buffer and not {"cross", "choice", "question"} & {*row.when.split()}
    ),
    facts=_build_facts,
    classes=build_decoder_classes("GPTBigCode", prefix="transformer", question=None, tokens="classifier"),
    prefixes=("transformer",),
    traits=LayerFeatures(
        activation=("activation_function", "gelu_pytorch_tanh"),
        dropout=("resid_pdrop", 0.1),
        attention_dropout=("attn_pdrop", 0.1),
    ),
    aliases=NAMES,
    assumed=GPT2.assumed,
)
