"""Describes language models that see: LLaVA, Mistral 3, PaliGemma, Gemma 3, Qwen2-VL and Qwen2.5-VL.

Names and shapes follow transformers 5, whose text model is `model.language_model`; files have older names, which
`conversion_mapping.py` lists. The text model is cut as it is by itself. The vision model and the projector are whole
on every tp rank of the first stage: they are small beside the text, and a picture is looked at once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import UnsupportedError
from shardctl.models.families.clip import CLIP_EYES, SIGLIP_EYES, build_clip_vision_facts, build_siglip_vision_facts
from shardctl.models.families.gemma import GEMMA, GEMMA2, GEMMA3_TEXT
from shardctl.models.families.llama import LLAMA
from shardctl.models.families.mistral import MINISTRAL3, MISTRAL
from shardctl.models.families.qwen import QWEN2, QWEN3
from shardctl.models.families.vision_towers import (
    PIXTRAL_EYES,
    QWEN_EYES,
    build_pixtral_vision_facts,
    build_qwen2_vision_facts,
    build_qwen25_vision_facts,
)
from shardctl.models.submodels.nesting import join_facts, nest_facts, nest_rows, nest_tower_rows
from shardctl.models.tables.decoder import DECODER, assume_sizes
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row
from shardctl.models.tables.layer_features import LayerFeatures
from shardctl.models.tables.windows import WindowRule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardctl.models.tables.config import ModelConfig


_QWEN2_VL_TEXT: Final = replace(
    QWEN2,
    name="qwen2_vl_text",
    assumed={**assume_sizes(152064, 8192, 29568, 80, 64), "num_key_value_heads": 8},
    traits=LayerFeatures(
        activation=("hidden_act", "silu"), norm="rms", window=WindowRule(4096, "last", start=80, switched=True)
    ),
)
_QWEN2_5_VL_TEXT: Final = replace(_QWEN2_VL_TEXT, name="qwen2_5_vl_text")
_TEXT_FAMILIES_BY_TYPE: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        LLAMA,
        MISTRAL,
        MINISTRAL3,
        GEMMA,
        GEMMA2,
        GEMMA3_TEXT,
        QWEN2,
        QWEN3,
        _QWEN2_VL_TEXT,
        _QWEN2_5_VL_TEXT,
    )
}
"""The text models, by `model_type`."""
_VISION_DIMS_BUILDERS: Final[Mapping[str, Callable[[ModelConfig], ModelDims]]] = {
    "clip_vision_model": build_clip_vision_facts,
    "siglip_vision_model": build_siglip_vision_facts,
    "pixtral": build_pixtral_vision_facts,
    "qwen2_vl": build_qwen2_vision_facts,
    "qwen2_vl_vision": build_qwen2_vision_facts,
    "qwen2_5_vl": build_qwen25_vision_facts,
    "qwen2_5_vl_vision": build_qwen25_vision_facts,
}
"""The vision models by `model_type`; Qwen's changed."""
_TEXT_MODEL_ROWS: Final = nest_rows(DECODER, "language_model")
_LEGACY_NAME_PATTERNS: Final = {
    "^language_model.lm_head": "lm_head",
    "^language_model.model": "language_model",
    "vision_tower.vision_model": "vision_tower",
}
"""How files spell what transformers 4.52 moved."""


def _build_projector_row(name: str, dims: str, when: str = "") -> Row:
    return Row(f".multi_modal_projector.{name}", dims, when, on="first")


_TWO_LINEARS: Final = (
    _build_projector_row("linear_1.weight", "joint joined"),
    _build_projector_row("linear_1.bias", "joint", "projector_bias"),
    _build_projector_row("linear_2.weight", "hidden joint"),
    _build_projector_row("linear_2.bias", "hidden", "projector_bias"),
)
_LLAVA_ROWS: Final = (
    *nest_tower_rows(CLIP_EYES, "vision_tower", when="clip_vision_model"),
    *nest_tower_rows(PIXTRAL_EYES, "vision_tower", when="pixtral"),
    *_TWO_LINEARS,
    *_TEXT_MODEL_ROWS,
)
_LLAVA_NEXT: Final = (
    Row(".image_newline", "hidden", on="first"),
    *nest_tower_rows(CLIP_EYES, "vision_tower"),
    *_TWO_LINEARS,
    *_TEXT_MODEL_ROWS,
)
_MISTRAL3_ROWS: Final = (
    *nest_tower_rows(PIXTRAL_EYES, "vision_tower"),
    _build_projector_row("norm.weight", "vision_hidden"),
    _build_projector_row("patch_merger.merging_layer.weight", "vision_hidden merged"),
    *_TWO_LINEARS,
    *_TEXT_MODEL_ROWS,
)
_PALIGEMMA_ROWS: Final = (
    *nest_tower_rows(SIGLIP_EYES, "vision_tower"),
    _build_projector_row("linear.weight", "projection vision_hidden"),
    _build_projector_row("linear.bias", "projection"),
    *_TEXT_MODEL_ROWS,
)
_GEMMA3_ROWS: Final = (
    *nest_tower_rows(SIGLIP_EYES, "vision_tower"),
    _build_projector_row("mm_input_projection_weight", "vision_hidden hidden"),
    _build_projector_row("mm_soft_emb_norm.weight", "vision_hidden"),
    *_TEXT_MODEL_ROWS,
)
_QWEN_VL: Final = (*nest_tower_rows(QWEN_EYES, "visual"), *_TEXT_MODEL_ROWS)


def _find_text(config: ModelConfig, usual: str) -> tuple[Family | None, ModelConfig]:
    """Find the family and the config of the text model; `usual` is its `model_type` where a config is silent.

    Qwen2-VL's first configs have its keys among their own.
    """
    words = config.part("text_config") if config.values.get("text_config") is not None else config
    return _TEXT_FAMILIES_BY_TYPE.get(words.text("model_type", usual) if words is not config else usual), words


def _read_text(config: ModelConfig, usual: str) -> tuple[LayerFeatures | None, ModelConfig]:
    family, words = _find_text(config, usual)
    return (None, words) if family is None else (family.traits, family.complete_config(words))


def _build_facts(config: ModelConfig, text: str, vision: str, *, bias: bool, either: bool) -> ModelDims:
    """Build the facts of both models; `text` and `vision` are their `model_type` where a config is silent.

    The outer config says whether the head is tied, else the inner one or what its class assumes; with `either`, one of
    the two is enough. (`Mistral3Config` itself assumes a tie, but the Hub's older configs are silent and their
    checkpoints have a head.)
    """
    family, words = _find_text(config, text)
    eyes = config.part("vision_config")
    sight = eyes.text("model_type", vision)
    if family is None or sight not in _VISION_DIMS_BUILDERS:
        kind = words.text("model_type", text)
        raise UnsupportedError(
            f"config.json has a text model of type {kind} and a vision model of type {sight}, a "
            "combination that shardctl does not know",
            hint="say how its tensors are cut with --rules FILE; on one device no rules are needed",
        )
    language = family.facts(family.complete_config(words))
    seen = _VISION_DIMS_BUILDERS[sight](eyes)
    facts = join_facts(language, nest_facts(seen, "vision_", whole=True))
    chosen = config.values.get("vision_feature_layer")
    taken = len(chosen) if isinstance(chosen, list) else 1
    inner_tie = bool(language.flags["tied"])
    tied = config.read_flag("tie_word_embeddings", default=inner_tie)
    return facts.extend_dims(
        dims={
            "joined": LogicalDim(seen.size("hidden") * taken),
            "joint": LogicalDim(facts.size("hidden"), tower_axis="tp"),
            "merged": LogicalDim(seen.size("hidden") * config.size("spatial_merge_size", 2) ** 2),
            "projection": LogicalDim(config.size("projection_dim", 2048)),
        },
        flags={
            "tied": tied or (either and inner_tie),
            "projector_bias": config.read_flag("multimodal_projector_bias", default=bias),
            **{name: name == sight for name in _VISION_DIMS_BUILDERS},
        },
    )


def _build_family(
    name: str,
    stem: str,
    rows: tuple[Row, ...],
    text: str,
    vision: str,
    *,
    legacy: Mapping[str, str] = _LEGACY_NAME_PATTERNS,
    bias: bool = True,
    either: bool = False,
    assumed: Mapping[str, object] | None = None,
    **more: ModelClass,
) -> Family:
    classes = {f"{stem}ForConditionalGeneration": ModelClass("model", "lm"), f"{stem}Model": ModelClass(), **more}
    return Family(
        name=name,
        rows=rows,
        facts=partial(_build_facts, text=text, vision=vision, bias=bias, either=either),
        classes=classes,
        prefixes=("model",),
        legacy=legacy,
        text=partial(_read_text, usual=text),
        towers=("visual",) if "qwen" in vision else ("vision_tower",),
        assumed=assumed or {"vision_config": {}},
    )


_QWEN_SPELLINGS: Final = {
    "^layers": "language_model.layers",
    "^embed_tokens": "language_model.embed_tokens",
    "^norm": "language_model.norm",
}
_CLIP_LARGE: Final = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_SIGLIP_SO: Final = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4096,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "vision_use_head": False,
}
_MISTRAL_SMALL: Final = {
    "model_type": "mistral",
    **assume_sizes(131072, 5120, 32768, 40, 32),
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": None,
}
_GEMMA_2B: Final = {
    "model_type": "gemma",
    **assume_sizes(257152, 2048, 16384, 18, 8),
    "num_key_value_heads": 1,
}
_LLAVA_ASSUMED: Final = {"text_config": {}, "vision_config": _CLIP_LARGE}
LLAVA: Final = _build_family(
    "llava", "Llava", _LLAVA_ROWS, "llama", "clip_vision_model", either=True, assumed=_LLAVA_ASSUMED
)
LLAVA_NEXT: Final = _build_family(
    "llava_next", "LlavaNext", _LLAVA_NEXT, "llama", "clip_vision_model", assumed=_LLAVA_ASSUMED
)
MISTRAL3: Final = _build_family(
    "mistral3",
    "Mistral3",
    _MISTRAL3_ROWS,
    "mistral",
    "pixtral",
    bias=False,
    assumed={"text_config": _MISTRAL_SMALL, "vision_config": {"patch_size": 14}},
)
PALIGEMMA: Final = _build_family(
    "paligemma",
    "PaliGemma",
    _PALIGEMMA_ROWS,
    "gemma",
    "siglip_vision_model",
    assumed={"text_config": _GEMMA_2B, "vision_config": _SIGLIP_SO},
)
GEMMA3: Final = _build_family(
    "gemma3",
    "Gemma3",
    _GEMMA3_ROWS,
    "gemma3_text",
    "siglip_vision_model",
    assumed={"text_config": {}, "vision_config": {}},
    Gemma3ForSequenceClassification=ModelClass("model", "score"),
)
QWEN2_VL: Final = _build_family(
    "qwen2_vl", "Qwen2VL", _QWEN_VL, "qwen2_vl_text", "qwen2_vl_vision", legacy=_QWEN_SPELLINGS, either=True
)
QWEN2_5_VL: Final = _build_family(
    "qwen2_5_vl", "Qwen2_5_VL", _QWEN_VL, "qwen2_5_vl_text", "qwen2_5_vl_vision", legacy=_QWEN_SPELLINGS, either=True
)
