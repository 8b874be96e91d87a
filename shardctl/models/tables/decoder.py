"""Provides the table of Llama and models with its names, whole and in parts that others combine.

Names and shapes follow transformers 5 (`models/llama/modeling_llama.py` and the `modular_*.py` that inherit from it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.tables.family import LogicalDim, ModelClass, ModelDims, Row, RowIndex

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.tables.config import ModelConfig

LAYER: Final = ".layers.{layer}"
EMBEDDING: Final = (Row(".embed_tokens.weight", "vocab hidden", on="first"),)
QKVO: Final = (
    Row(f"{LAYER}.self_attn.q_proj.weight", "q hidden"),
    Row(f"{LAYER}.self_attn.q_proj.bias", "q", when="qkv_bias"),
    Row(f"{LAYER}.self_attn.k_proj.weight", "kv hidden"),
    Row(f"{LAYER}.self_attn.k_proj.bias", "kv", when="qkv_bias"),
    Row(f"{LAYER}.self_attn.v_proj.weight", "kv hidden"),
    Row(f"{LAYER}.self_attn.v_proj.bias", "kv", when="qkv_bias"),
    Row(f"{LAYER}.self_attn.o_proj.weight", "hidden q"),
    Row(f"{LAYER}.self_attn.o_proj.bias", "hidden", when="o_bias"),
    Row(f"{LAYER}.self_attn.rotary_emb.inv_freq", "*", buffer="F32"),
)
HEAD_NORMS: Final = (
    Row(f"{LAYER}.self_attn.q_norm.weight", "head", when="qk_norm"),
    Row(f"{LAYER}.self_attn.k_norm.weight", "head", when="qk_norm"),
)
"""Norms of each head of q and k, which all heads share."""
GATED: Final = (
    Row(f"{LAYER}.mlp.gate_proj.weight", "ffn hidden"),
    Row(f"{LAYER}.mlp.gate_proj.bias", "ffn", when="mlp_bias"),
    Row(f"{LAYER}.mlp.up_proj.weight", "ffn hidden"),
    Row(f"{LAYER}.mlp.up_proj.bias", "ffn", when="mlp_bias"),
    Row(f"{LAYER}.mlp.down_proj.weight", "hidden ffn"),
    Row(f"{LAYER}.mlp.down_proj.bias", "hidden", when="mlp_bias"),
)
FUSED_GATED: Final = (
    Row(f"{LAYER}.mlp.gate_up_proj.weight", "ffn+ffn hidden"),
    Row(f"{LAYER}.mlp.down_proj.weight", "hidden ffn"),
)
"""Gate and up projection in one tensor, the gate's rows first."""
NORMS: Final = (
    Row(f"{LAYER}.input_layernorm.weight", "hidden"),
    Row(f"{LAYER}.post_attention_layernorm.weight", "hidden"),
)
BIASED_NORMS: Final = (
    Row(f"{LAYER}.input_layernorm.weight", "hidden"),
    Row(f"{LAYER}.input_layernorm.bias", "hidden"),
    Row(f"{LAYER}.post_attention_layernorm.weight", "hidden", when="sequential"),
    Row(f"{LAYER}.post_attention_layernorm.bias", "hidden", when="sequential"),
)
"""Norms with biases; only one where attention and MLP run in parallel."""
LAST_NORM: Final = (Row(".norm.weight", "hidden", on="last"),)
BIASED_LAST_NORM: Final = (*LAST_NORM, Row(".norm.bias", "hidden", on="last"))
HEADS: Final = (
    Row(".rotary_emb.inv_freq", "*", on="first", buffer="F32"),
    Row("lm_head.weight", "vocab hidden", when="lm", on="last", tie=".embed_tokens.weight"),
    Row("score.weight", "labels hidden", when="score", on="last"),
    Row("score.bias", "labels", when="score_bias", on="last"),
    Row("qa_outputs.weight", "2 hidden", when="question", on="last"),
    Row("qa_outputs.bias", "2", when="question", on="last"),
)
"""What the classes of a decoder have after the base model."""


def build_head_rows(embedding: str) -> tuple[Row, ...]:
    """Build what the classes of GPT-2's time have after the base model, whose tied embedding is called `embedding`."""
    return (
        Row("lm_head.weight", "vocab hidden", when="lm", on="last", tie=embedding),
        Row("score.weight", "labels hidden", when="score", on="last"),
        Row("classifier.weight", "labels hidden", when="classifier", on="last"),
        Row("classifier.bias", "labels", when="classifier", on="last"),
        Row("qa_outputs.weight", "2 hidden", when="question", on="last"),
        Row("qa_outputs.bias", "2", when="question", on="last"),
    )


DECODER: Final = (
    *EMBEDDING,
    *QKVO,
    *HEAD_NORMS,
    *GATED,
    *NORMS,
    Row(f"{LAYER}.pre_feedforward_layernorm.weight", "hidden", when="sandwich_norm"),
    Row(f"{LAYER}.post_feedforward_layernorm.weight", "hidden", when="sandwich_norm"),
    *LAST_NORM,
    *HEADS,
)
"""Attention may have biases and norms of q and k, and each half of a layer one norm or two (`sandwich_norm`)."""


def build_decoder_classes(
    stem: str,
    *,
    prefix: str = "model",
    question: str | None = "",
    sentences: bool = True,
    tokens: str | None = "score score_bias",
) -> Mapping[str, ModelClass]:
    """Build the classes that transformers generates for such a decoder.

    `prefix` is the base model's, `question` that of the question-answering class if it differs, or None if there is
    no such class; `sentences` says whether there is a class for whole texts, `tokens` what parts that for tokens has,
    if there is one.
    """
    classes = {f"{stem}ForCausalLM": ModelClass(prefix, "lm"), f"{stem}Model": ModelClass()}
    if sentences:
        classes[f"{stem}ForSequenceClassification"] = ModelClass(prefix, "score")
    if tokens:
        classes[f"{stem}ForTokenClassification"] = ModelClass(prefix, tokens)
    if question is not None:
        classes[f"{stem}ForQuestionAnswering"] = ModelClass(question or prefix, "question")
    return classes


def build_decoder_facts(
    config: ModelConfig,
    *,
    tied: bool = False,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sandwich_norm: bool = False,
) -> ModelDims:
    """Build what the table needs to know.

    `tied`, `head_dim` and `kv_heads` are what the family's config class assumes if the config is silent; a
    `head_dim` of None is the hidden size divided by the heads, and so is a null that the config says itself, as engines
    read it; `kv_heads` of None is as many as query heads. The other switches are the family's, which may have read them
    from the config.
    """
    heads = config.size("num_attention_heads")
    share = config.size("hidden_size") // heads
    null = "head_dim" in config.values and config.values["head_dim"] is None
    head = share if null else config.size("head_dim", head_dim or share)
    if not head:
        raise SourceError(f"config.json has {heads} attention heads and a hidden_size of {config.size('hidden_size')}")
    silent = "num_key_value_heads" not in config.values
    groups = config.shared_by(heads, "num_key_value_heads", kv_heads if silent and kv_heads else heads)
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "hidden": LogicalDim(config.size("hidden_size")),
            "q": LogicalDim(heads * head, head, "tp", noun="attention heads"),
            "kv": LogicalDim(groups * head, head, "tp", shared=True, noun="key/value heads"),
            "head": LogicalDim(head),
            "ffn": LogicalDim(config.size("intermediate_size"), axis="tp"),
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers")), layer=0)},
        flags={
            "tied": config.read_flag("tie_word_embeddings", default=tied),
            "qkv_bias": qkv_bias,
            "o_bias": o_bias,
            "mlp_bias": mlp_bias,
            "qk_norm": qk_norm,
            "sandwich_norm": sandwich_norm,
            # Not every family has classes with these; where one has, the class decides.
            "score": False,
            "score_bias": False,
            "question": False,
        },
    )


def build_biased_facts(config: ModelConfig) -> ModelDims:
    """Build the facts of a decoder whose config says which matrices have biases."""
    bias = config.read_flag("attention_bias", default=False)
    return build_decoder_facts(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.read_flag("mlp_bias", default=False))


def assume_sizes(vocab: int, hidden: int, ffn: int, layers: int, heads: int) -> Mapping[str, object]:
    """Return what a config class assumes of its sizes, by their keys."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
