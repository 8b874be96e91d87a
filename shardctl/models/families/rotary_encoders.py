"""Describes encoders with rotary positions that embed texts: NomicBERT, GTE and Jina's third embeddings.

Names and shapes follow transformers 5 (`models/nomic_bert`, `models/gte`, `models/jina_embeddings_v3`). On the Hub
queries, keys and values are one array, behind each other, and of GTE the matrices of the MLP, too;
`conversion_mapping.py` has the names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.families.bert import ENCODER_TRAITS, build_encoder_facts
from shardctl.models.tables.decoder import assume_sizes
from shardctl.models.tables.family import Family, FusedArray, LogicalDim, ModelClass, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.family import ModelDims

_LAYER_PREFIX: Final = ".layers.{layer}"
_WORD_EMBEDDING_NAME: Final = ".embeddings.word_embeddings.weight"
_QKV_MODULE_NAMES: Final = tuple(f"{_LAYER_PREFIX}.self_attn.{name}_proj" for name in "qkv")


def _build_linear_rows(name: str, dims: str, when: str = "", *, on: str = "", bias: bool = True) -> Iterator[Row]:
    yield Row(f"{name}.weight", dims, when, on=on)
    if bias:
        yield Row(f"{name}.bias", dims.split(maxsplit=1)[0], when, on=on)


def _build_norm(name: str, when: str = "", *, on: str = "") -> Iterator[Row]:
    yield from _build_linear_rows(name, "hidden", when, on=on)


_EMBEDDING_ROWS: Final = (
    Row(_WORD_EMBEDDING_NAME, "vocab hidden", on="first"),
    Row(".embeddings.token_type_embeddings.weight", "types hidden", "typed", on="first"),
    *_build_norm(".embeddings.LayerNorm", on="first"),
)
_POOLER_ROWS: Final = tuple(_build_linear_rows(".pooler.dense", "hidden hidden", "pooler", on="last"))
_CLASSIFIER_ROWS: Final = tuple(_build_linear_rows("classifier", "labels hidden", "classifier", on="last"))


def _build_attention(*, bias: bool) -> Iterator[Row]:
    for name in _QKV_MODULE_NAMES:
        yield from _build_linear_rows(name, "q hidden", bias=bias)
    yield from _build_linear_rows(f"{_LAYER_PREFIX}.self_attn.o_proj", "hidden q", bias=bias)


def _build_gated(*, bias: bool) -> Iterator[Row]:
    yield Row(f"{_LAYER_PREFIX}.mlp.gate_proj.weight", "ffn hidden")
    yield Row(f"{_LAYER_PREFIX}.mlp.up_proj.weight", "ffn hidden")
    yield from _build_linear_rows(f"{_LAYER_PREFIX}.mlp.down_proj", "hidden ffn", bias=bias)


_POST_ATTENTION_NORM_ROWS: Final = tuple(_build_norm(f"{_LAYER_PREFIX}.post_attention_layernorm"))
_NORM_AFTER: Final = tuple(_build_norm(f"{_LAYER_PREFIX}.post_mlp_layernorm"))
_NOMIC_BERT_ROWS: Final = (
    *_EMBEDDING_ROWS,
    *_POOLER_ROWS,
    *_POST_ATTENTION_NORM_ROWS,
    *_build_gated(bias=False),
    *_build_attention(bias=False),
    *_NORM_AFTER,
    Row("cls.predictions.bias", "vocab", "mlm", on="last"),
    *_build_linear_rows("cls.predictions.transform.dense", "hidden hidden", "mlm", on="last"),
    *_build_norm("cls.predictions.transform.layer_norm", "mlm", on="last"),
    Row("cls.predictions.decoder.weight", "vocab hidden", "mlm", on="last", tie=_WORD_EMBEDDING_NAME),
    Row("cls.predictions.decoder.bias", "vocab", "mlm", on="last", tie="cls.predictions.bias"),
    *_CLASSIFIER_ROWS,
)
_GTE_ROWS: Final = (
    *_EMBEDDING_ROWS,
    *_POOLER_ROWS,
    *_POST_ATTENTION_NORM_ROWS,
    *_build_gated(bias=True),
    *_build_attention(bias=True),
    *_NORM_AFTER,
    *_build_linear_rows("lm_head.dense", "hidden hidden", "mlm", on="last"),
    *_build_norm("lm_head.layer_norm", "mlm", on="last"),
    Row("lm_head.decoder.weight", "vocab hidden", "mlm", on="last", tie=_WORD_EMBEDDING_NAME),
    Row("lm_head.decoder.bias", "vocab", "mlm", on="last"),
    *_CLASSIFIER_ROWS,
)
_JINA_ROWS: Final = (
    *_EMBEDDING_ROWS,
    *_POOLER_ROWS,
    *_POST_ATTENTION_NORM_ROWS,
    *_build_linear_rows(f"{_LAYER_PREFIX}.mlp.fc1", "ffn hidden"),
    *_build_linear_rows(f"{_LAYER_PREFIX}.mlp.fc2", "hidden ffn"),
    *_build_attention(bias=True),
    *_NORM_AFTER,
    Row("lm_head.bias", "vocab", "mlm", on="last"),
    *_build_linear_rows("lm_head.dense", "hidden hidden", "mlm", on="last"),
    *_build_norm("lm_head.layer_norm", "mlm", on="last"),
    Row("lm_head.decoder.weight", "vocab hidden", "mlm", on="last", tie=_WORD_EMBEDDING_NAME),
    Row("lm_head.decoder.bias", "vocab", "mlm", on="last", tie="lm_head.bias"),
    *_build_linear_rows("classifier.dense", "hidden hidden", "sentence", on="last"),
    *_build_linear_rows("classifier.out_proj", "labels hidden", "sentence", on="last"),
    *_CLASSIFIER_ROWS,
    *_build_linear_rows("qa_outputs", "labels hidden", "question", on="last"),
)


def _build_fused_attention(name: str, *, bias: bool) -> Iterator[FusedArray]:
    for kind in ("weight", "bias") if bias else ("weight",):
        yield FusedArray(
            f"{_LAYER_PREFIX}.{name}.{kind}", tuple(f"{part}.{kind}" for part in _QKV_MODULE_NAMES), stored=True
        )


def _build_facts(config: ModelConfig) -> ModelDims:
    facts = build_encoder_facts(config)
    heads = config.size("num_attention_heads")
    head = config.size("head_dim", facts.size("hidden") // heads)
    return facts.extend_dims(
        dims={"q": LogicalDim(heads * head, head, "tp", noun="attention heads")},
        flags={"typed": facts.size("types") > 0},
    )


def _build_gte_facts(config: ModelConfig) -> ModelDims:
    return _build_facts(config.over({"type_vocab_size": 1}))


_RENAMED_NORM_MODULES: Final = {"norm1": "post_attention_layernorm", "norm2": "post_mlp_layernorm"}
NOMIC_BERT: Final = Family(
    name="nomic_bert",
    rows=_NOMIC_BERT_ROWS,
    facts=_build_facts,
    classes={
        "NomicBertModel": ModelClass(),
        "NomicBertForMaskedLM": ModelClass("nomic_bert", "mlm"),
        "NomicBertForSequenceClassification": ModelClass("nomic_bert", "pooler classifier"),
        "NomicBertForTokenClassification": ModelClass("nomic_bert", "classifier"),
    },
    prefixes=("nomic_bert", "bert"),
    renamed={"NomicBertForPreTraining": "NomicBertForMaskedLM"},
    legacy={
        "encoder.layers": "layers",
        "emb_ln": "embeddings.LayerNorm",
        "attn.out_proj": "self_attn.o_proj",
        "mlp.fc11": "mlp.up_proj",
        "mlp.fc12": "mlp.gate_proj",
        "mlp.fc2": "mlp.down_proj",
        **_RENAMED_NORM_MODULES,
    },
    fused=tuple(_build_fused_attention("attn.Wqkv", bias=False)),
    traits=replace(
        ENCODER_TRAITS,
        activation=("hidden_act", "silu"),
        dropout=("hidden_dropout_prob", 0.0),
        attention_dropout=("attention_probs_dropout_prob", 0.0),
    ),
    aliases={
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
    },
    assumed=assume_sizes(30528, 768, 3072, 12, 12),
)
GTE: Final = Family(
    name="gte",
    rows=_GTE_ROWS,
    facts=_build_gte_facts,
    classes={
        "GteModel": ModelClass(),
        "GteForMaskedLM": ModelClass("gte", "mlm"),
        "GteForSequenceClassification": ModelClass("gte", "pooler classifier"),
        "GteForTokenClassification": ModelClass("gte", "classifier"),
    },
    prefixes=("gte", "new"),
    renamed={
        "NewModel": "GteModel",
        "NewForMaskedLM": "GteForMaskedLM",
        "NewForSequenceClassification": "GteForSequenceClassification",
        "NewForTokenClassification": "GteForTokenClassification",
    },
    legacy={
        "encoder.layer": "layers",
        "attention.o_proj": "self_attn.o_proj",
        "attn_ln": "post_attention_layernorm",
        "mlp_ln": "post_mlp_layernorm",
        "lm_head.norm": "lm_head.layer_norm",
    },
    fused=(
        *_build_fused_attention("attention.qkv_proj", bias=True),
        FusedArray(
            f"{_LAYER_PREFIX}.mlp.up_gate_proj.weight",
            (f"{_LAYER_PREFIX}.mlp.up_proj.weight", f"{_LAYER_PREFIX}.mlp.gate_proj.weight"),
            stored=True,
        ),
    ),
    traits=replace(
        ENCODER_TRAITS,
        attention_dropout=("attention_probs_dropout_prob", 0.0),
        inner_dropout=("hidden_dropout_prob", 0.1),
    ),
    assumed=assume_sizes(250048, 768, 3072, 12, 12),
)
JINA_EMBEDDINGS_V3: Final = Family(
    name="jina_embeddings_v3",
    rows=_JINA_ROWS,
    facts=_build_gte_facts,
    classes={
        "JinaEmbeddingsV3Model": ModelClass("", "pooler?"),
        "JinaEmbeddingsV3ForMaskedLM": ModelClass("roberta", "mlm"),
        "JinaEmbeddingsV3ForSequenceClassification": ModelClass("roberta", "sentence"),
        "JinaEmbeddingsV3ForTokenClassification": ModelClass("roberta", "classifier"),
        "JinaEmbeddingsV3ForQuestionAnswering": ModelClass("roberta", "question"),
    },
    prefixes=("roberta",),
    legacy={
        "encoder.layers": "layers",
        "emb_ln": "embeddings.LayerNorm",
        "mixer.out_proj": "self_attn.o_proj",
        **_RENAMED_NORM_MODULES,
    },
    fused=tuple(_build_fused_attention("mixer.Wqkv", bias=True)),
    traits=ENCODER_TRAITS,
    assumed=assume_sizes(250002, 1024, 4096, 24, 16),
)
