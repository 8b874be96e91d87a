"""Describes BART, mBART, Marian, Pegasus, M2M-100 and Whisper: an encoder and a decoder of the same kind of blocks.

Names and shapes follow transformers 5 (`models/bart/modeling_bart.py`, and those of mBART and Whisper). The layers of
a pipeline are the encoder's and then the decoder's. BART's embedding is on the first stage, on that of the first
decoder layer, and, as the head of a tied model, on the last; Whisper's encoder hears, and has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardctl.models.families.bert import build_norm_rows
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import LayerFeatures

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig


def _build_linear_rows(name: str, dims: str, *, bias: bool = True) -> tuple[Row, ...]:
    rows = (Row(f"{name}.weight", dims), Row(f"{name}.bias", dims.split(maxsplit=1)[0]))
    return rows if bias else rows[:1]


def _build_attention_rows(layer: str, name: str, q: str, *, k_bias: bool) -> tuple[Row, ...]:
    return (
        *_build_linear_rows(f"{layer}.{name}.k_proj", f"{q} hidden", bias=k_bias),
        *_build_linear_rows(f"{layer}.{name}.v_proj", f"{q} hidden"),
        *_build_linear_rows(f"{layer}.{name}.q_proj", f"{q} hidden"),
        *_build_linear_rows(f"{layer}.{name}.out_proj", f"hidden {q}"),
        *build_norm_rows(f"{layer}.{name}_layer_norm"),
    )


def _build_mlp_rows(layer: str, ffn: str) -> tuple[Row, ...]:
    return (
        *_build_linear_rows(f"{layer}.fc1", f"{ffn} hidden"),
        *_build_linear_rows(f"{layer}.fc2", f"hidden {ffn}"),
        *build_norm_rows(f"{layer}.final_layer_norm"),
    )


def _build_encoder_rows(*, k_bias: bool) -> tuple[Row, ...]:
    layer = ".encoder.layers.{encoder}"
    return (
        *_build_attention_rows(layer, "self_attn", "encoder_q", k_bias=k_bias),
        *_build_mlp_rows(layer, "encoder_ffn"),
    )


def _build_decoder_rows(*, k_bias: bool) -> tuple[Row, ...]:
    layer = ".decoder.layers.{decoder}"
    return (
        *_build_attention_rows(layer, "self_attn", "decoder_q", k_bias=k_bias),
        *_build_attention_rows(layer, "encoder_attn", "decoder_q", k_bias=k_bias),
        *_build_mlp_rows(layer, "decoder_ffn"),
    )


_SHARED_EMBEDDING_NAME: Final = ".shared.weight"
_BART_ROWS: Final = (
    Row("final_logits_bias", "1 vocab", "bias_of_logits", on="last"),
    Row(_SHARED_EMBEDDING_NAME, "vocab hidden", on="first"),
    Row(".encoder.embed_tokens.weight", "vocab hidden", on="first", tie=_SHARED_EMBEDDING_NAME),
    Row(".encoder.embed_positions.weight", "positions hidden", on="first"),
    *_build_encoder_rows(k_bias=True),
    *build_norm_rows(".encoder.layernorm_embedding", "first"),
    *build_norm_rows(".encoder.layer_norm", "encoder_end", "norms_at_ends"),
    Row(".decoder.embed_tokens.weight", "vocab hidden", on="decoder_start", tie=_SHARED_EMBEDDING_NAME),
    Row(".decoder.embed_positions.weight", "positions hidden", on="decoder_start"),
    *_build_decoder_rows(k_bias=True),
    *build_norm_rows(".decoder.layernorm_embedding", "decoder_start"),
    *build_norm_rows(".decoder.layer_norm", "last", "norms_at_ends"),
    Row("lm_head.weight", "vocab hidden", "lm", on="last", tie=_SHARED_EMBEDDING_NAME),
    Row("classification_head.dense.weight", "hidden hidden", "sentence", on="last"),
    Row("classification_head.dense.bias", "hidden", "sentence", on="last"),
    Row("classification_head.out_proj.weight", "labels hidden", "sentence", on="last"),
    Row("classification_head.out_proj.bias", "labels", "sentence", on="last"),
    Row("qa_outputs.weight", "2 hidden", "question", on="last"),
    Row("qa_outputs.bias", "2", "question", on="last"),
)
"""mBART has norms at the ends of both stacks too."""
_PEGASUS_ROWS: Final = tuple(
    row
    for row in _BART_ROWS
    if "layernorm_embedding" not in row.name and not {"sentence", "question"} & {*row.when.split()}
)
_M2M_100_ROWS: Final = tuple(
    row for row in _PEGASUS_ROWS if "embed_positions" not in row.name and row.name.startswith((".", "lm"))
)
"""Its positions are computed, as are Pegasus's, which are stored."""
_TARGET_EMBEDDING_NAME: Final = ".decoder.embed_tokens.weight"
_MARIAN_ROWS: Final = (
    Row("final_logits_bias", "1 target", "bias_of_logits", on="last"),
    Row(_SHARED_EMBEDDING_NAME, "vocab hidden", "one_vocabulary", on="first"),
    Row(".encoder.embed_tokens.weight", "vocab hidden", on="first", tie=_SHARED_EMBEDDING_NAME, tied="all_tied"),
    Row(".encoder.embed_positions.weight", "positions hidden", on="first", optional=True),
    *_build_encoder_rows(k_bias=True),
    Row(_TARGET_EMBEDDING_NAME, "target hidden", on="decoder_start", tie=_SHARED_EMBEDDING_NAME, tied="all_tied"),
    Row(".decoder.embed_positions.weight", "positions hidden", on="decoder_start", optional=True),
    *_build_decoder_rows(k_bias=True),
    Row("lm_head.weight", "target hidden", "lm", on="last", tie=_TARGET_EMBEDDING_NAME),
)
"""Its positions are computed, and transformers saves none; early checkpoints have them."""
_WHISPER_ROWS: Final = (
    Row(".encoder.conv1.weight", "hidden mels 3", on="first"),
    Row(".encoder.conv1.bias", "hidden", on="first"),
    Row(".encoder.conv2.weight", "hidden hidden 3", on="first"),
    Row(".encoder.conv2.bias", "hidden", on="first"),
    Row(".encoder.embed_positions.weight", "moments hidden", on="first"),
    *_build_encoder_rows(k_bias=False),
    *build_norm_rows(".encoder.layer_norm", "encoder_end"),
    Row(".decoder.embed_tokens.weight", "vocab hidden", on="decoder_start"),
    Row(".decoder.embed_positions.weight", "positions hidden", on="decoder_start"),
    *_build_decoder_rows(k_bias=False),
    *build_norm_rows(".decoder.layer_norm", "last"),
    Row("proj_out.weight", "vocab hidden", "lm", on="last", tie=".decoder.embed_tokens.weight"),
)
_POSITION_EMBEDDING_OFFSET: Final = 2
"""Rows of the positions before the first (`BartLearnedPositionalEmbedding`)."""
_DEFAULT_LABEL_COUNT: Final = 3
"""Labels that `BartConfig` assumes; mBART's assumes two, as most do."""


def _build_facts(config: ModelConfig, positions: int) -> ModelDims:
    hidden = config.size("d_model")
    encoder, decoder = config.size("encoder_layers"), config.size("decoder_layers")
    heads = {side: config.divided("d_model", f"{side}_attention_heads") for side in ("encoder", "decoder")}
    return ModelDims(
        dims={
            "vocab": LogicalDim(config.size("vocab_size"), axis="tp", even=False),
            "positions": LogicalDim(positions),
            "hidden": LogicalDim(hidden),
            **{f"{side}_q": LogicalDim(hidden, head, "tp", noun="attention heads") for side, head in heads.items()},
            **{f"{side}_ffn": LogicalDim(config.size(f"{side}_ffn_dim"), axis="tp") for side in heads},
            "labels": LogicalDim(config.labels(), loose=True),
        },
        indices={"encoder": RowIndex(range(encoder), layer=0), "decoder": RowIndex(range(decoder), layer=encoder)},
        flags={
            "tied": config.read_flag("tie_word_embeddings", default=True),
            "norms_at_ends": False,
        },
        stages={"encoder_end": ("layer", encoder - 1), "decoder_start": ("layer", encoder)},
    )


def _build_bart_facts(config: ModelConfig) -> ModelDims:
    return _build_facts(
        config.over({"num_labels": _DEFAULT_LABEL_COUNT}),
        config.size("max_position_embeddings", 1024) + _POSITION_EMBEDDING_OFFSET,
    )


def _build_mbart_facts(config: ModelConfig) -> ModelDims:
    facts = _build_facts(config, config.size("max_position_embeddings", 1024) + _POSITION_EMBEDDING_OFFSET)
    return facts.extend_dims(flags={"norms_at_ends": True})


def _build_marian_facts(config: ModelConfig) -> ModelDims:
    """Build the facts of two languages, which may have a vocabulary each; then only the head is tied."""
    facts = _build_facts(config, config.size("max_position_embeddings", 1024))
    one = config.read_flag("share_encoder_decoder_embeddings", default=True)
    words = config.size("vocab_size")
    target = words if one else config.count("decoder_vocab_size", 0) or words
    return facts.extend_dims(
        dims={"target": LogicalDim(target, axis="tp", even=False)},
        flags={"one_vocabulary": one, "all_tied": one and bool(facts.flags["tied"])},
    )


def _build_pegasus_facts(config: ModelConfig) -> ModelDims:
    return _build_facts(config, config.size("max_position_embeddings", 1024)).extend_dims(flags={"norms_at_ends": True})


def _build_whisper_facts(config: ModelConfig) -> ModelDims:
    return _build_facts(config, config.size("max_target_positions", 448)).extend_dims(
        dims={
            "mels": LogicalDim(config.size("num_mel_bins", 80)),
            "moments": LogicalDim(config.size("max_source_positions", 1500)),
        }
    )


_CONFIG_KEY_ALIASES: Final = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
}
_CONFIG_DEFAULTS: Final = {
    "vocab_size": 50265,
    "d_model": 1024,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "encoder_layers": 12,
}
_LAYER_FEATURES: Final = LayerFeatures(
    activation=("activation_function", "gelu"), dropout=("dropout", 0.1), narrow_softmax=True
)
BART: Final = Family(
    name="bart",
    rows=_BART_ROWS,
    facts=_build_bart_facts,
    classes={
        "BartForConditionalGeneration": ModelClass("model", "lm bias_of_logits?"),
        "BartModel": ModelClass(),
        "BartForSequenceClassification": ModelClass("model", "sentence"),
        "BartForQuestionAnswering": ModelClass("model", "question"),
    },
    prefixes=("model",),
    traits=_LAYER_FEATURES,
    aliases=_CONFIG_KEY_ALIASES,
    assumed=_CONFIG_DEFAULTS,
)
MBART: Final = Family(
    name="mbart",
    rows=_BART_ROWS,
    facts=_build_mbart_facts,
    classes={
        "MBartForConditionalGeneration": ModelClass("model", "lm bias_of_logits?"),
        "MBartModel": ModelClass(),
        "MBartForSequenceClassification": ModelClass("model", "sentence"),
        "MBartForQuestionAnswering": ModelClass("model", "question"),
    },
    prefixes=("model",),
    traits=_LAYER_FEATURES,
    aliases=_CONFIG_KEY_ALIASES,
    assumed=_CONFIG_DEFAULTS,
)
WHISPER: Final = Family(
    name="whisper",
    rows=_WHISPER_ROWS,
    facts=_build_whisper_facts,
    classes={"WhisperForConditionalGeneration": ModelClass("model", "lm"), "WhisperModel": ModelClass()},
    prefixes=("model",),
    traits=LayerFeatures(activation=("activation_function", "gelu"), dropout=("dropout", 0.0), narrow_softmax=True),
    aliases={**_CONFIG_KEY_ALIASES, "num_key_value_heads": "encoder_attention_heads"},
    assumed={
        "decoder_attention_heads": 6,
        "encoder_attention_heads": 6,
        "vocab_size": 51865,
        "d_model": 384,
        "decoder_ffn_dim": 1536,
        "decoder_layers": 4,
        "encoder_ffn_dim": 1536,
        "encoder_layers": 4,
    },
)
PEGASUS: Final = Family(
    name="pegasus",
    rows=_PEGASUS_ROWS,
    facts=_build_pegasus_facts,
    classes={
        "PegasusForConditionalGeneration": ModelClass("model", "lm bias_of_logits?"),
        "PegasusModel": ModelClass(),
    },
    prefixes=("model",),
    traits=_LAYER_FEATURES,
    aliases=_CONFIG_KEY_ALIASES,
    assumed=_CONFIG_DEFAULTS,
)
MARIAN: Final = Family(
    name="marian",
    rows=_MARIAN_ROWS,
    facts=_build_marian_facts,
    classes={
        "MarianMTModel": ModelClass("model", "lm bias_of_logits?"),
        "MarianModel": ModelClass(),
    },
    prefixes=("model",),
    traits=_LAYER_FEATURES,
    aliases=_CONFIG_KEY_ALIASES,
    assumed={**_CONFIG_DEFAULTS, "vocab_size": 58101},
)
M2M_100: Final = Family(
    name="m2m_100",
    rows=_M2M_100_ROWS,
    facts=_build_pegasus_facts,
    classes={"M2M100ForConditionalGeneration": ModelClass("model", "lm"), "M2M100Model": ModelClass()},
    prefixes=("model",),
    traits=LayerFeatures(
        activation=("activation_function", "relu"),
        dropout=("dropout", 0.1),
        narrow_softmax=True,
        attention_dropout=("attention_dropout", 0.1),
    ),
    aliases=_CONFIG_KEY_ALIASES,
    assumed={**_CONFIG_DEFAULTS, "vocab_size": 128112},
)
