"""Describes GPT-2: `Conv1D` weights stored `[in, out]`, and q, k and v fused.

Names and shapes follow transformers 5 (`models/gpt2/modeling_gpt2.py`; `Conv1D` is in `pytorch_utils.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.tables.decoder import build_head_rows
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_HEAD_ROWS: Final = build_head_rows(".wte.weight")
_GPT2_ROWS: Final = (
    Row(".wte.weight", "vocab hidden", on="first"),
    Row(".wpe.weight", "positions hidden", on="first"),
    Row(".h.{layer}.ln_1.weight", "hidden"),
    Row(".h.{layer}.ln_1.bias", "hidden"),
    Row(".h.{layer}.attn.bias", "1 1 * *", buffer="BOOL"),
    Row(".h.{layer}.attn.masked_bias", "", buffer="F32"),
    Row(".h.{layer}.attn.c_attn.weight", "hidden q+kv+kv"),
    Row(".h.{layer}.attn.c_attn.bias", "q+kv+kv"),
    Row(".h.{layer}.attn.c_proj.weight", "q hidden"),
    Row(".h.{layer}.attn.c_proj.bias", "hidden"),
    Row(".h.{layer}.ln_2.weight", "hidden"),
    Row(".h.{layer}.ln_2.bias", "hidden"),
    Row(".h.{layer}.crossattention.bias", "1 1 * *", when="cross", buffer="BOOL"),
    Row(".h.{layer}.crossattention.masked_bias", "", when="cross", buffer="F32"),
    Row(".h.{layer}.crossattention.c_attn.weight", "hidden kv+kv", when="cross"),
    Row(".h.{layer}.crossattention.c_attn.bias", "kv+kv", when="cross"),
    Row(".h.{layer}.crossattention.q_attn.weight", "hidden q", when="cross"),
    Row(".h.{layer}.crossattention.q_attn.bias", "q", when="cross"),
    Row(".h.{layer}.crossattention.c_proj.weight", "q hidden", when="cross"),
    Row(".h.{layer}.crossattention.c_proj.bias", "hidden", when="cross"),
    Row(".h.{layer}.ln_cross_attn.weight", "hidden", when="cross"),
    Row(".h.{layer}.ln_cross_attn.bias", "hidden", when="cross"),
    Row(".h.{layer}.mlp.c_fc.weight", "hidden ffn"),
    Row(".h.{layer}.mlp.c_fc.bias", "ffn"),
    Row(".h.{layer}.mlp.c_proj.weight", "ffn hidden"),
    Row(".h.{layer}.mlp.c_proj.bias", "hidden"),
    Row(".ln_f.weight", "hidden", on="last"),
    Row(".ln_f.bias", "hidden", on="last"),
    *_HEAD_ROWS[:1],
    Row("multiple_choice_head.summary.weight", "choices hidden", when="choice summary", on="last"),
    Row("multiple_choice_head.summary.bias", "choices", when="choice summary", on="last"),
    *_HEAD_ROWS[1:],
)


NAMES: Final = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
"""Keys of GPT-2's and GPT-J's configs, and what else they are called."""


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden = config.size("n_embd")
    head = config.divided("n_embd", "n_head")
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "positions": LogicalDim(config.size("n_positions", 1024)),
            "hidden": LogicalDim(hidden),
            "q": LogicalDim(hidden, head, "tp", noun="attention heads"),
            "kv": LogicalDim(hidden, head, "tp", noun="attention heads"),
            "ffn": LogicalDim(config.size("n_inner", 4 * hidden), axis="tp"),
            "choices": LogicalDim(1 if config.read_flag("summary_proj_to_labels", default=True) else hidden),
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"layer": RowIndex(range(config.size("n_layer")), layer=0)},
        flags={
            "tied": config.read_flag("tie_word_embeddings", default=True),
            "cross": config.read_flag("add_cross_attention", default=False),
            "summary": config.read_flag("summary_use_proj", default=True),
        },
    )


GPT2: Final = Family(
    name="gpt2",
    rows=_GPT2_ROWS,
    transposed=True,
    facts=_build_facts,
    classes={
        "GPT2LMHeadModel": ModelClass("transformer", "lm"),
        "GPT2Model": ModelClass(),
        "GPT2DoubleHeadsModel": ModelClass("transformer", "lm choice"),
        "GPT2ForSequenceClassification": ModelClass("transformer", "score"),
        "GPT2ForTokenClassification": ModelClass("transformer", "classifier"),
        "GPT2ForQuestionAnswering": ModelClass("transformer", "question"),
    },
    prefixes=("transformer",),
    traits=LayerFeatures(
        activation=("activation_function", "gelu_new"),
        dropout=("resid_pdrop", 0.1),
        narrow_softmax=True,
        attention_dropout=("attn_pdrop", 0.1),
    ),
    aliases=NAMES,
    assumed={"n_head": 12, "vocab_size": 50257, "n_embd": 768, "n_layer": 12},
)
