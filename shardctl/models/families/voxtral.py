"""Describes Voxtral and Voxtral Realtime: models that hear, before Llama or a Mistral whose norms know of the delay.

Names and shapes follow transformers 5 (`models/voxtral/modeling_voxtral.py` and its namesake `voxtral_realtime`). What
hears is whole on every tp rank of the first stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.models.families.llama import LLAMA
from shardctl.models.families.mistral import MISTRAL
from shardctl.models.submodels.towers import ModelTower, build_tower_classes, build_tower_family
from shardctl.models.tables.decoder import DECODER, LAYER
from shardctl.models.tables.family import LogicalDim, ModelDims, Row, RowIndex
from shardctl.models.tables.layer_features import FurtherTensor
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig

_DELAY_WIDTH: Final = "32"
"""Between the two matrices that make a scale of the delay (`VoxtralRealtimeTextAdaRmsNorm`)."""
_ENCODER_LAYER_PREFIX: Final = ".layers.{layer}"


def _build_linear_rows(name: str, dims: str, *, bias: bool = True) -> tuple[Row, ...]:
    weight = Row(f"{name}.weight", dims)
    return (weight, Row(f"{name}.bias", dims.split(maxsplit=1)[0])) if bias else (weight,)


_AUDIO_ENCODER_ROWS: Final = (
    *_build_linear_rows(".conv1", "hidden mels 3"),
    *_build_linear_rows(".conv2", "hidden hidden 3"),
    Row(".embed_positions.weight", "moments hidden"),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.self_attn.k_proj", "hidden hidden", bias=False),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.self_attn.v_proj", "hidden hidden"),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.self_attn.q_proj", "hidden hidden"),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.self_attn.out_proj", "hidden hidden"),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.self_attn_layer_norm", "hidden"),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.fc1", "ffn hidden"),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.fc2", "hidden ffn"),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.final_layer_norm", "hidden"),
    *_build_linear_rows(".layer_norm", "hidden"),
)
"""Whisper's encoder."""
_QUICK_EARS: Final = (
    *_build_linear_rows(".embedder.conv1", "hidden mels 3"),
    *_build_linear_rows(".embedder.conv2", "hidden hidden 3"),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.self_attn.q_proj", "heads hidden"),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.self_attn.k_proj", "heads hidden", bias=False),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.self_attn.v_proj", "heads hidden"),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.self_attn.o_proj", "hidden heads"),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.self_attn_layer_norm", "hidden", bias=False),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.final_layer_norm", "hidden", bias=False),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.mlp.gate_proj", "ffn hidden", bias=False),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.mlp.up_proj", "ffn hidden", bias=False),
    *_build_linear_rows(f"{_ENCODER_LAYER_PREFIX}.mlp.down_proj", "hidden ffn"),
    *_build_linear_rows(".norm", "hidden", bias=False),
)
"""An encoder that hears no more than a window before each moment."""
_CONFIG_KEY_ALIASES: Final = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
}


def _build_ear_facts(config: ModelConfig) -> ModelDims:
    config, heads = config.alias_keys(_CONFIG_KEY_ALIASES), 32
    return ModelDims(
        dims={
            "hidden": LogicalDim(config.size("hidden_size", 1280)),
            "ffn": LogicalDim(config.size("intermediate_size", 5120)),
            "mels": LogicalDim(config.size("num_mel_bins", 128)),
            "moments": LogicalDim(config.size("max_source_positions", 1500)),
            "heads": LogicalDim(config.size("num_attention_heads", heads) * config.size("head_dim", 64)),
        },
        indices={"layer": RowIndex(range(config.size("num_hidden_layers", 32)))},
    )


def _add_joined_facts(config: ModelConfig, facts: ModelDims) -> ModelDims:
    """Add what is projected at once: of Realtime some moments together, of the first Voxtral as wide as an MLP."""
    joined = facts.size("audio_hidden") * config.size("downsample_factor", 4)
    return facts.extend_dims(dims={"joined": LogicalDim(joined)})


_DELAY_CONDITIONING_ROWS: Final = (
    Row(f"{LAYER}.ada_rms_norm.linear1.weight", f"{_DELAY_WIDTH} hidden"),
    Row(f"{LAYER}.ada_rms_norm.linear2.weight", f"hidden {_DELAY_WIDTH}"),
)
_FINAL_NORM_ROW_INDEX: Final = next(place for place, row in enumerate(DECODER) if row.name == ".norm.weight")
_TEXT_FAMILY: Final = replace(
    LLAMA,
    assumed={
        **LLAMA.assumed,
        "vocab_size": 131072,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
)
assert MISTRAL.traits is not None  # noqa: S101 - for the type checker
_DELAYED_TEXT: Final = replace(
    MISTRAL,
    rows=(*DECODER[:_FINAL_NORM_ROW_INDEX], *_DELAY_CONDITIONING_ROWS, *DECODER[_FINAL_NORM_ROW_INDEX:]),
    traits=replace(
        MISTRAL.traits,
        window=WindowRule(8192),
        further=(FurtherTensor("input of the MLP, before it is scaled by what is made of the delay", "hidden"),),
    ),
    assumed={
        **MISTRAL.assumed,
        "vocab_size": 131072,
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
)
_LEGACY_NAME_PATTERNS: Final = {"^language_model.lm_head": "lm_head", "^language_model.model": "language_model"}


def _build_projector_rows(joined: str) -> tuple[Row, Row]:
    return (
        Row(".multi_modal_projector.linear_1.weight", f"hidden {joined}", on="first"),
        Row(".multi_modal_projector.linear_2.weight", "hidden hidden", on="first"),
    )


VOXTRAL: Final = build_tower_family(
    "voxtral",
    build_tower_classes("Voxtral"),
    _TEXT_FAMILY,
    (ModelTower("audio_config", "audio_tower", _AUDIO_ENCODER_ROWS, _build_ear_facts),),
    after=_build_projector_rows("audio_ffn"),
    legacy=_LEGACY_NAME_PATTERNS,
)
VOXTRAL_REALTIME: Final = build_tower_family(
    "voxtral_realtime",
    build_tower_classes("VoxtralRealtime"),
    _DELAYED_TEXT,
    (ModelTower("audio_config", "audio_tower", _QUICK_EARS, _build_ear_facts),),
    after=_build_projector_rows("joined"),
    facts=_add_joined_facts,
    legacy=_LEGACY_NAME_PATTERNS,
)
