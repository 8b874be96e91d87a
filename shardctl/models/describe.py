"""Finds the family of a config, and describes the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from shardctl.errors import UnsupportedError, UsageError
from shardctl.models.bart import BART, MBART, WHISPER
from shardctl.models.bert import BERT
from shardctl.models.bloom import BLOOM
from shardctl.models.clip import CLIP, CLIP_TEXT, CLIP_VISION, SIGLIP
from shardctl.models.cohere import COHERE, COHERE2
from shardctl.models.config import Config
from shardctl.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE
from shardctl.models.distilbert import DISTILBERT
from shardctl.models.falcon import FALCON
from shardctl.models.gemma import GEMMA, GEMMA2, GEMMA3_TEXT
from shardctl.models.glm import GLM, GLM4
from shardctl.models.gpt2 import GPT2
from shardctl.models.gpt_neox import GPT_NEOX
from shardctl.models.gpt_oss import GPT_OSS
from shardctl.models.gptj import GPTJ
from shardctl.models.granite import GRANITE
from shardctl.models.granite_moe import GRANITE_MOE, GRANITE_MOE_SHARED
from shardctl.models.jamba import JAMBA
from shardctl.models.llama import LLAMA
from shardctl.models.llama4 import LLAMA4_TEXT
from shardctl.models.mamba import FALCON_MAMBA, MAMBA, MAMBA2
from shardctl.models.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from shardctl.models.mixtral import MIXTRAL, PHIMOE
from shardctl.models.olmo import OLMO, OLMO2, OLMO3
from shardctl.models.opt import OPT
from shardctl.models.phi import PHI, PHI3
from shardctl.models.quantisation import quantise
from shardctl.models.qwen import QWEN2, QWEN3
from shardctl.models.qwen3_next import QWEN3_NEXT
from shardctl.models.qwen_moe import OLMOE, QWEN2_MOE, QWEN3_MOE
from shardctl.models.roberta import ROBERTA, XLM_ROBERTA
from shardctl.models.stablelm import STABLELM
from shardctl.models.starcoder2 import STARCODER2
from shardctl.models.t5 import T5
from shardctl.models.table import build
from shardctl.models.transformers_rules import transformers_rules
from shardctl.models.vision_language import GEMMA3, LLAVA, LLAVA_NEXT, MISTRAL3, PALIGEMMA, QWEN2_5_VL, QWEN2_VL
from shardctl.models.vit import VIT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardctl.manifest import Manifest
    from shardctl.models.family import Family
    from shardctl.models.model import Model
    from shardctl.models.rule_file import RuleFile

KvHeads = Literal["replicate", "error"]
"""What to do where there are fewer key/value heads than tp ranks."""

FAMILIES: Final[tuple[Family, ...]] = (
    BART,
    BERT,
    BLOOM,
    CLIP,
    CLIP_TEXT,
    CLIP_VISION,
    COHERE,
    COHERE2,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DISTILBERT,
    FALCON,
    FALCON_MAMBA,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA3_TEXT,
    GLM,
    GLM4,
    GLM4_MOE,
    GPT2,
    GPTJ,
    GPT_NEOX,
    GPT_OSS,
    GRANITE,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    JAMBA,
    LLAMA,
    LLAMA4_TEXT,
    LLAVA,
    LLAVA_NEXT,
    MAMBA,
    MAMBA2,
    MBART,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    MISTRAL3,
    MIXTRAL,
    OLMO,
    OLMO2,
    OLMO3,
    OLMOE,
    OPT,
    PALIGEMMA,
    PHI,
    PHI3,
    PHIMOE,
    QWEN2,
    QWEN2_5_VL,
    QWEN2_MOE,
    QWEN2_VL,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    ROBERTA,
    SIGLIP,
    STABLELM,
    STARCODER2,
    T5,
    VIT,
    WHISPER,
    XLM_ROBERTA,
)
"""Every family; to add one, write its file and name it here."""


def find(config: Mapping[str, object]) -> tuple[Family, str] | None:
    """The family and the class that a config names, or None if no family has it.

    The class is the first of `architectures`; a config without any gets the most usual class of its `model_type`.
    """
    named = Config(config)
    architecture, kind = named.architecture(), named.text("model_type", "")
    for family in FAMILIES:
        current = family.renamed.get(architecture, architecture)
        if current in family.classes:
            return family, current
        if not architecture and kind == family.name:
            return family, next(iter(family.classes))
    return None


def describe(config: Mapping[str, object], *, kv_heads: KvHeads = "error", stored: Manifest | None = None) -> Model:
    """The model that a decoded `config.json` describes.

    What is `stored` decides which weights are quantised where the config leaves it open; see `quantise`.
    Raises UnsupportedError if no family knows its architecture or nobody how its weights are quantised, and SourceError
    if a number it needs is absent or is none.
    """
    found = find(config)
    if found is None:
        named = Config(config)
        what = named.architecture() or named.text("model_type", "")
        raise UnsupportedError(
            f"the architecture {what} is not known" if what else "config.json names no architecture",
            hint="say how its tensors are cut with --rules FILE, or borrow rules with --rules-from transformers; "
            "on one device none are needed",
        )
    family, architecture = found
    model = build(family, architecture, Config(config), share_kv=kv_heads == "replicate")
    return quantise(model, config, stored)


def model_for(
    config: Mapping[str, object] | None,
    stored: Manifest,
    rules: RuleFile | None = None,
    *,
    kv_heads: KvHeads = "error",
    borrow: bool = False,
) -> Model | None:
    """The model of a checkpoint: its family's, with what a rule file says instead, or a rule file's alone.

    None if there is neither a config nor a rule file: then names stay as stored, and only one device can hold it.
    `borrow` takes the rules of an unknown architecture from an installed transformers, and says so in a warning.
    Raises UnsupportedError for an unknown architecture without a rule file, UsageError for a tensor that no rule
    matches, or where there is nothing to borrow for.
    """
    if borrow:
        if config is None or find(config) is not None:
            raise UsageError(
                "--rules-from transformers is for a config whose architecture is not known, and "
                + ("there is no config" if config is None else f"{Config(config).architecture()} is"),
                hint="leave it out" if config is not None else "name a config with --config PATH",
            )
        borrowed = transformers_rules(config, stored)
        return rules.over(borrowed, stored) if rules is not None else borrowed
    if rules is None:
        return None if config is None else describe(config, kv_heads=kv_heads, stored=stored)
    if config is not None and find(config) is not None:
        try:
            return rules.over(describe(config, kv_heads=kv_heads, stored=stored), stored)
        except UnsupportedError:  # quantised in a way that is not known: then the rule file alone speaks
            return rules.model(stored, Config(config).architecture())
    return rules.model(stored, Config(config).architecture() if config is not None else "")
