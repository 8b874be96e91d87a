"""Describes Kimi-K2.5 and K3: DeepSeek-V3 and Kimi-Linear behind the vision model MoonViT, with the names of the Hub.

transformers 5 has a class of its own for K2.5, into which it takes `wqkv` apart and turns its rows (`kimi_k25` in
`conversion_mapping.py`); it saves the names of the Hub again. Names and shapes are those of vLLM's modules
(`kimi_k25.py`, `kimi_k25_vit.py`, `models/kimi_k3`), to which files are loaded as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardctl.base.errors import SourceError
from shardctl.models.families.deepseek import DEEPSEEK_V3
from shardctl.models.families.kimi_linear import KIMI_LINEAR
from shardctl.models.submodels.nesting import join_facts, nest_facts, nest_tower_rows
from shardctl.models.tables.family import Family, LogicalDim, ModelClass, ModelDims, Row, RowIndex

if TYPE_CHECKING:
    from shardctl.models.tables.config import ModelConfig
    from shardctl.models.tables.layer_features import LayerFeatures

_BLOCK_PREFIX: Final = ".encoder.blocks.{layer}"
_VISION_ENCODER_ROWS: Final = (
    Row(".patch_embed.proj.weight", "hidden 3 patch patch"),
    Row(".patch_embed.proj.bias", "hidden", "patch_bias"),
    Row(".patch_embed.pos_emb.weight", "height width hidden"),
    Row(f"{_BLOCK_PREFIX}.norm0.weight", "hidden"),
    Row(f"{_BLOCK_PREFIX}.norm0.bias", "hidden", "norm_bias"),
    Row(f"{_BLOCK_PREFIX}.norm1.weight", "hidden"),
    Row(f"{_BLOCK_PREFIX}.norm1.bias", "hidden", "norm_bias"),
    Row(f"{_BLOCK_PREFIX}.mlp.fc0.weight", "ffn hidden"),
    Row(f"{_BLOCK_PREFIX}.mlp.fc0.bias", "ffn", "linear_bias"),
    Row(f"{_BLOCK_PREFIX}.mlp.fc1.weight", "hidden ffn"),
    Row(f"{_BLOCK_PREFIX}.mlp.fc1.bias", "hidden", "linear_bias"),
    Row(f"{_BLOCK_PREFIX}.wqkv.weight", "heads+heads+heads hidden"),
    Row(f"{_BLOCK_PREFIX}.wqkv.bias", "heads+heads+heads", "attention_bias"),
    Row(f"{_BLOCK_PREFIX}.wo.weight", "hidden heads"),
    Row(f"{_BLOCK_PREFIX}.wo.bias", "hidden", "attention_bias"),
    Row(".encoder.final_layernorm.weight", "hidden"),
    Row(".encoder.final_layernorm.bias", "hidden", "norm_bias"),
)
"""MoonViT, whose later version has no biases, RMS norms, and heads that are wider than its states together."""
MOON_TOWER: Final = (
    *nest_tower_rows(_VISION_ENCODER_ROWS, "vision_tower"),
    Row(".mm_projector.pre_norm.weight", "vision_hidden", when="!second", on="first"),
    Row(".mm_projector.pre_norm.bias", "vision_hidden", when="!second", on="first"),
    Row(".mm_projector.proj.0.weight", "merged merged", on="first"),
    Row(".mm_projector.proj.0.bias", "merged", when="!second", on="first"),
    Row(".mm_projector.proj.2.weight", "hidden merged", on="first"),
    Row(".mm_projector.proj.2.bias", "hidden", when="!second", on="first"),
    Row(".mm_projector.post_norm.weight", "hidden", when="second", on="first"),
)
"""The vision model and the projector that joins patches; the `second` version of that norms its results."""
_SIZE_KEYS: Final = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
_CONFIG_KEY_ALIASES: Final = {f"vt_{key}": key for key in _SIZE_KEYS} | {
    f"init_pos_emb_{key}": f"pos_emb_{key}" for key in ("height", "width")
}


def add_moon_facts(facts: ModelDims, config: ModelConfig) -> ModelDims:
    """Return `facts`, and those of the vision model and the projector; raises SourceError for patches that are none."""
    eyes = config.part("vision_config").alias_keys(_CONFIG_KEY_ALIASES)
    hidden, merging = eyes.size("hidden_size", 1152), eyes.values.get("merge_kernel_size", [2, 2])
    if not isinstance(merging, list) or not all(isinstance(one, int) and one > 0 for one in merging):
        raise SourceError(f"config.json has merge_kernel_size = {merging!r} where a list of two numbers is expected")
    joined = 1
    for one in merging:
        joined *= one
    seen = ModelDims(
        dims={
            "hidden": LogicalDim(hidden),
            "heads": LogicalDim(eyes.size("qkv_hidden_size", hidden)),
            "ffn": LogicalDim(eyes.size("intermediate_size", 4304)),
            "patch": LogicalDim(eyes.size("patch_size", 14)),
            "height": LogicalDim(eyes.size("pos_emb_height", 64)),
            "width": LogicalDim(eyes.size("pos_emb_width", 64)),
        },
        indices={"layer": RowIndex(range(eyes.size("num_hidden_layers", 27)))},
        flags={
            "patch_bias": eyes.read_flag("patch_embed_proj_bias", default=True),
            "norm_bias": eyes.text("norm_type", "layernorm") == "layernorm",
            "linear_bias": eyes.read_flag("linear_bias", default=True),
            "attention_bias": eyes.read_flag("attn_bias", default=True),
        },
    )
    return join_facts(facts, nest_facts(seen, "vision_", whole=True)).extend_dims(
        dims={"merged": LogicalDim(hidden * joined)},
        flags={"second": eyes.text("mm_projector_type", "patchmerger") == "patchmergerv2"},
    )


def nest_text_rows(text: Family) -> tuple[Row, ...]:
    """Return the rows of a text model in `language_model`, with a base model and a head as by itself."""
    return tuple(
        replace(
            row,
            name=f".language_model{'.model' if row.name.startswith('.') else '.'}{row.name}",
            tie=f".language_model.model{row.tie}" if row.tie else "",
        )
        for row in text.rows
    )


def _build_kimi_family(name: str, stem: str, text: Family, **renamed: str) -> Family:
    """Build the family of a `text` model behind MoonViT; `renamed` are other names of its class."""

    def build_facts(config: ModelConfig) -> ModelDims:
        facts = add_moon_facts(text.facts(text.complete_config(config.part("text_config"))), config)
        tied = config.read_flag("tie_word_embeddings", default=bool(facts.flags["tied"]))
        return facts.extend_dims(flags={"tied": tied})

    def read_text(config: ModelConfig) -> tuple[LayerFeatures | None, ModelConfig]:
        return text.traits, text.complete_config(config.part("text_config"))

    return Family(
        name=name,
        rows=(*MOON_TOWER, *nest_text_rows(text)),
        facts=build_facts,
        classes={f"{stem}ForConditionalGeneration": ModelClass("", "lm")},
        prefixes=(),
        legacy={
            "^language_model.layers": "language_model.model.layers",
            "^language_model.model.blocks": "language_model.model.layers",  # as transformers 5.23 writes them
            "^model.mm_projector": "mm_projector",
            "^vision_tower.encoder.patch_embed": "vision_tower.patch_embed",
            "^mm_projector.linear_1": "mm_projector.proj.0",
            "^mm_projector.linear_2": "mm_projector.proj.2",
        },
        renamed=renamed,
        text=read_text,
        towers=("vision_tower",),
        hub_modules=("",),
        assumed={"text_config": {}, "vision_config": {}},
    )


KIMI_K25: Final = _build_kimi_family(
    "kimi_k25", "KimiK25", DEEPSEEK_V3, Kimi_K25ForConditionalGeneration="KimiK25ForConditionalGeneration"
)
KIMI_K3: Final = _build_kimi_family("kimi_k3", "KimiK3", KIMI_LINEAR)
