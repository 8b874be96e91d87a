"""The table of Llama and of those who took over its names: Mistral, Qwen, Gemma.

Names and shapes follow transformers 5 (`models/llama/modeling_llama.py` and the `modular_*.py` that inherit from it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.family import Dim, Facts, Index, ModelClass, Row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.models.config import Config

DECODER: Final = (
    Row(".embed_tokens.weight", "vocab hidden", on="first"),
    Row(".layers.{layer}.self_attn.q_proj.weight", "q hidden"),
    Row(".layers.{layer}.self_attn.q_proj.bias", "q", when="qkv_bias"),
    Row(".layers.{layer}.self_attn.k_proj.weight", "kv hidden"),
    Row(".layers.{layer}.self_attn.k_proj.bias", "kv", when="qkv_bias"),
    Row(".layers.{layer}.self_attn.v_proj.weight", "kv hidden"),
    Row(".layers.{layer}.self_attn.v_proj.bias", "kv", when="qkv_bias"),
    Row(".layers.{layer}.self_attn.o_proj.weight", "hidden q"),
    Row(".layers.{layer}.self_attn.o_proj.bias", "hidden", when="o_bias"),
    Row(".layers.{layer}.self_attn.q_norm.weight", "head", when="qk_norm"),
    Row(".layers.{layer}.self_attn.k_norm.weight", "head", when="qk_norm"),
    Row(".layers.{layer}.self_attn.rotary_emb.inv_freq", "*", buffer="F32"),
    Row(".layers.{layer}.mlp.gate_proj.weight", "ffn hidden"),
    Row(".layers.{layer}.mlp.gate_proj.bias", "ffn", when="mlp_bias"),
    Row(".layers.{layer}.mlp.up_proj.weight", "ffn hidden"),
    Row(".layers.{layer}.mlp.up_proj.bias", "ffn", when="mlp_bias"),
    Row(".layers.{layer}.mlp.down_proj.weight", "hidden ffn"),
    Row(".layers.{layer}.mlp.down_proj.bias", "hidden", when="mlp_bias"),
    Row(".layers.{layer}.input_layernorm.weight", "hidden"),
    Row(".layers.{layer}.post_attention_layernorm.weight", "hidden"),
    Row(".layers.{layer}.pre_feedforward_layernorm.weight", "hidden", when="sandwich_norm"),
    Row(".layers.{layer}.post_feedforward_layernorm.weight", "hidden", when="sandwich_norm"),
    Row(".norm.weight", "hidden", on="last"),
    Row(".rotary_emb.inv_freq", "*", on="first", buffer="F32"),
    Row("lm_head.weight", "vocab hidden", when="lm", on="last", tie=".embed_tokens.weight"),
    Row("score.weight", "labels hidden", when="score", on="last"),
    Row("score.bias", "labels", when="score_bias", on="last"),
    Row("qa_outputs.weight", "2 hidden", when="question", on="last"),
    Row("qa_outputs.bias", "2", when="question", on="last"),
)
"""Attention may have biases and norms of q and k, and each half of a layer one norm or two (`sandwich_norm`)."""


def decoder_classes(stem: str, *, question: str | None = "model", text: str = "Model") -> Mapping[str, ModelClass]:
    """The classes that transformers generates for such a decoder.

    `question` is the base model's prefix in the question-answering class, or None if there is no such class;
    `text` ends the name of the base model.
    """
    asked = {f"{stem}ForQuestionAnswering": ModelClass(question, "question")} if question else {}
    return {
        f"{stem}ForCausalLM": ModelClass("model", "lm"),
        f"{stem}{text}": ModelClass(),
        f"{stem}ForSequenceClassification": ModelClass("model", "score"),
        f"{stem}ForTokenClassification": ModelClass("model", "score score_bias"),
        **asked,
    }


def decoder_facts(
    config: Config,
    *,
    tied: bool = False,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sandwich_norm: bool = False,
) -> Facts:
    """What the table needs to know.

    `tied`, `head_dim` and `kv_heads` are what the family's config class assumes if the config is silent; a
    `head_dim` of None is the hidden size divided by the heads, `kv_heads` of None as many as query heads. The other
    switches are the family's, which may have read them from the config.
    """
    heads = config.size("num_attention_heads")
    head = config.size("head_dim", head_dim or config.size("hidden_size") // heads)
    silent = "num_key_value_heads" not in config.values
    groups = config.size("num_key_value_heads", kv_heads if silent and kv_heads else heads)
    return Facts(
        dims={
            "vocab": Dim(config.size("vocab_size"), axis="tp", even=False),
            "hidden": Dim(config.size("hidden_size")),
            "q": Dim(heads * head, head, "tp", noun="attention heads"),
            "kv": Dim(groups * head, head, "tp", shared=True, noun="key/value heads"),
            "head": Dim(head),
            "ffn": Dim(config.size("intermediate_size"), axis="tp"),
            "labels": Dim(config.labels(), loose=True),
        },
        indices={"layer": Index(range(config.size("num_hidden_layers")), layer=0)},
        flags={
            "tied": config.switch("tie_word_embeddings", default=tied),
            "qkv_bias": qkv_bias,
            "o_bias": o_bias,
            "mlp_bias": mlp_bias,
            "qk_norm": qk_norm,
            "sandwich_norm": sandwich_norm,
            # Gemma has no class with these; where a class has them, the class decides.
            "score_bias": False,
            "question": False,
        },
    )
