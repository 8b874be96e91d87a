"""Builds the family of a model that sees or hears from that of its text model and the tables of its towers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardctl.base.value import value_class
from shardctl.models.submodels.nesting import join_facts, nest_facts, nest_fused_arrays, nest_rows, nest_tower_rows
from shardctl.models.tables.config import ModelConfig
from shardctl.models.tables.family import Family, ModelClass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardctl.models.tables.family import ModelDims, Row
    from shardctl.models.tables.layer_features import LayerFeatures


@value_class
class ModelTower:
    """A model that sees or hears for a text model: whole on every tp rank of the first stage."""

    key: str
    """The key of its config; the words of its rows begin as that does, `vision_` for a `vision_config`."""
    module: str
    """The module that it is, inside the base model."""
    rows: tuple[Row, ...]
    facts: Callable[[ModelConfig], ModelDims]
    """What its own config says."""
    optional: bool = False
    """Whether a config may have none: then the flag `vision_tower`, or as it is called, is false."""

    @property
    def word(self) -> str:
        """What its words begin with."""
        return self.key.removesuffix("config")


def build_tower_classes(stem: str, **more: ModelClass) -> Mapping[str, ModelClass]:
    """Build the classes that transformers has for such a model."""
    return {f"{stem}ForConditionalGeneration": ModelClass("model", "lm"), f"{stem}Model": ModelClass(), **more}


def build_tower_family(
    name: str,
    classes: Mapping[str, ModelClass],
    text: Family,
    before: Sequence[ModelTower | Row],
    *,
    after: Sequence[ModelTower | Row] = (),
    under: str = "language_model",
    facts: Callable[[ModelConfig, ModelDims], ModelDims] | None = None,
    legacy: Mapping[str, str] | None = None,
    assumed: Mapping[str, object] | None = None,
    hub_modules: tuple[str, ...] = (),
) -> Family:
    """Build the family of a model with the text model `text` in `under`, which is cut as it is by itself.

    `before` and `after` are the towers and the rows that join them to the text model, in the order of the state dict;
    `facts` adds what those rows need to know.
    """
    inner = nest_rows(text.rows, under)
    towers = tuple(part for part in (*before, *after) if isinstance(part, ModelTower))
    return replace(
        text,
        name=name,
        rows=(
            *_list_rows(before),
            *(row for row in inner if row.name.startswith(".")),
            *_list_rows(after),
            *(row for row in inner if not row.name.startswith(".")),
        ),
        facts=partial(_build_facts, text=text, towers=towers, more=facts),
        classes=classes,
        prefixes=("model",),
        legacy=legacy or {},
        fused=nest_fused_arrays(text.fused, under),
        traits=None,
        weightless=nest_rows(text.weightless, under),
        text=partial(_read_text, text=text),
        aliases={},
        inner_kinds={},
        towers=tuple(tower.module for tower in towers),
        assumed={"text_config": {}, **{tower.key: {} for tower in towers if not tower.optional}, **(assumed or {})},
        hub_modules=hub_modules,
    )


def _list_rows(parts: Sequence[ModelTower | Row]) -> Iterator[Row]:
    for part in parts:
        if isinstance(part, ModelTower):
            when = f"{part.word}tower" if part.optional else ""
            yield from nest_tower_rows(part.rows, part.module, word=part.word, when=when)
        else:
            yield part


def _build_facts(
    config: ModelConfig,
    text: Family,
    towers: Sequence[ModelTower],
    more: Callable[[ModelConfig, ModelDims], ModelDims] | None,
) -> ModelDims:
    """Build the facts of all; the outer config says whether the head is tied, else the inner one or its class."""
    facts = text.facts(text.complete_config(config.part("text_config")))
    for tower in towers:
        there = config.values.get(tower.key) is not None or not tower.optional
        seen = tower.facts(config.part(tower.key) if there else ModelConfig({}))
        facts = join_facts(facts, nest_facts(seen, tower.word, whole=True))
        facts = facts.extend_dims(flags={f"{tower.word}tower": there})
    tied = config.read_flag("tie_word_embeddings", default=bool(facts.flags["tied"]))
    facts = facts.extend_dims(flags={"tied": tied})
    return more(config, facts) if more is not None else facts


def _read_text(config: ModelConfig, text: Family) -> tuple[LayerFeatures | None, ModelConfig]:
    return text.traits, text.complete_config(config.part("text_config"))
