"""Describes GPT-J: unfused and unbiased attention beside an MLP with biases.

Names and shapes follow transformers 5 (`models/gptj/modeling_gptj.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.families.gpt2 import NAMES
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_GPTJ_ROWS: Final = (
    Row(".wte.weight", "vocab hidden", on="first"),
    Row(".h.{layer}.ln_1.weight", "hidden"),
    Row(".h.{layer}.ln_1.bias", "hidden"),
    Row(".h.{layer}.attn.bias", "1 1 * *", buffer="BOOL"),
    Row(".h.{layer}.attn.masked_bias", "", buffer="F32"),
    Row(".h.{layer}.attn.k_proj.weight", "q hidden"),
    Row(".h.{layer}.attn.v_proj.weight", "q hidden"),
    Row(".h.{layer}.attn.q_proj.weight", "q hidden"),
    Row(".h.{layer}.attn.out_proj.weight", "hidden q"),
    Row(".h.{layer}.mlp.fc_in.weight", "ffn hidden"),
    Row(".h.{layer}.mlp.fc_in.bias", "ffn"),
    Row(".h.{layer}.mlp.fc_out.weight", "hidden ffn"),
    Row(".h.{layer}.mlp.fc_out.bias", "hidden"),
    Row(".ln_f.weight", "hidden", on="last"),
    Row(".ln_f.bias", "hidden", on="last"),
    Row("lm_head.weight", "vocab hidden", when="lm", on="last", tie=".wte.weight"),
    Row("lm_head.bias", "vocab", when="lm", on="last"),
    Row("score.weight", "labels hidden", when="score", on="last"),
    Row("qa_outputs.weight", "labels hidden", when="question", on="last"),
    Row("qa_outputs.bias", "labels", when="question", on="last"),
)


def _build_facts(config: ModelConfig) -> ModelDims:
    hidden = config.size("n_embd")
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "hidden": LogicalDim(hidden),
            "q": LogicalDim(hidden, config.divided("n_embd", "n_head"), "tp", noun="attention heads"),
            "ffn": LogicalDim(config.size("n_inner", 4 * hidden), axis="tp"),
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"layer": RowIndex(range(config.size("n_layer")), layer=0)},
        flags={"tied": config.read_flag("tie_word_embeddings", default=False)},
    )


GPTJ: Final = Family(
    name="gptj",
    rows=_GPTJ_ROWS,
    facts=_build_facts,
    classes={
        "GPTJForCausalLM": ModelClass("transformer", "lm"),
        "GPTJModel": ModelClass(),
        "GPTJForSequenceClassification": ModelClass("transformer", "score"),
        "GPTJForQuestionAnswering": ModelClass("transformer", "question"),
    },
    prefixes=("transformer",),
    traits=LayerFeatures(
        activation=("activation_function", "gelu_new"),
        dropout=("resid_pdrop", 0.0),
        side_by_side=("", True),
        fp32_scores=True,
        attention_dropout=("attn_pdrop", 0.0),
    ),
    aliases=NAMES,
    assumed={"vocab_size": 50400, "n_embd": 4096, "n_head": 16, "n_layer": 28},
)
