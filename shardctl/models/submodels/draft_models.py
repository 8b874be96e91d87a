"""Recognizes draft models, which propose tokens for another model (speculative decoding), by their configs and names.

Classes, keys and names are those of vLLM 0.32 (`model_executor/models/registry.py`, `config/speculative.py`,
`transformers_utils/configs/speculators`) and of the projects that train them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from shardctl.models.tables.predicting import list_predicting_names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_DRAFT_MODEL_TITLES: Final = {
    "dflash": "DFlash",
    "dspark": "DSpark",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "medusa": "Medusa",
    "mlp_speculator": "MLP speculator",
    "mtp": "MTP",
}
"""What a config's kind of speculator is called."""
_KINDS_BY_CLASS_PATTERN: Final = (
    (re.compile(r"DFlash"), "dflash"),
    (re.compile(r"Eagle(?!3|2_5_VL).*MTP"), "eagle"),
    (re.compile(r"^Eagle3|Eagle3$|Eagle3Model$"), "eagle3"),
    (re.compile(r"^P[Ee]agle"), "peagle"),
    (re.compile(r"^Eagle(?!3|2_5_VL|VL)[A-Z]\w*(ForCausalLM|Model)$|ForCausalLMEagle$"), "eagle"),
    (re.compile(r"^Medusa"), "medusa"),
    (re.compile(r"^MLPSpeculator"), "mlp_speculator"),
    (re.compile(r"MTP(Model)?$"), "mtp"),
)
"""What classes of draft models are called; Eagle 2.5-VL is a vision-language model."""
_KINDS_BY_CONFIG_KEY: Final = (("dflash_config", "dflash"), ("eagle_config", "eagle3"), ("medusa_num_heads", "medusa"))
"""Keys that only configs of such draft models have."""
_VOCABULARY_MAP_NAMES: Final = frozenset({"d2t", "t2d"})
"""Tables between the vocabulary of the draft model and its target's, which only EAGLE-3 has."""
_FC_WEIGHT_PATTERN: Final = re.compile(r"(model\.)?fc\.weight")
_KINDS_BY_INPUT_COUNT: Final = {2: "eagle", 3: "eagle3"}
"""How many streams are joined: the embedding and one hidden state, or hidden states of three layers."""


def name_draft_model(config: Mapping[str, Any] | None, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Name the kind of draft model that has this config and tensors of these names and shapes; empty for other models.

    >>> name_draft_model({"architectures": ["LlamaForCausalLMEagle3"]}, {})
    'EAGLE-3'
    >>> shapes = {"fc.weight": (64, 128), "layers.0.up.weight": (8, 8)}
    >>> name_draft_model({"architectures": ["LlamaForCausalLM"]}, shapes)
    'EAGLE'
    """
    kind = _find_declared_kind(config or {}) or _find_kind_by_names(config or {}, shapes)
    return _DRAFT_MODEL_TITLES.get(kind, kind)


def _find_declared_kind(config: Mapping[str, Any]) -> str:
    declared = config.get("speculators_model_type")
    if isinstance(declared, str):
        return declared
    listed = config.get("architectures")
    for architecture in listed if isinstance(listed, list) else ():
        for pattern, kind in _KINDS_BY_CLASS_PATTERN:
            if pattern.search(str(architecture)):
                return kind
    return next((kind for key, kind in _KINDS_BY_CONFIG_KEY if config.get(key) is not None), "")


def _find_kind_by_names(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    names: Collection[str] = shapes.keys()
    if not _VOCABULARY_MAP_NAMES.isdisjoint(name.rpartition(".")[2] for name in names) or any(
        "midlayer." in n for n in names
    ):
        return "eagle3"
    if any(re.match(r"(medusa_head|medusa_heads)\.", name) for name in names):
        return "medusa"
    for name, shape in shapes.items():
        if (
            _FC_WEIGHT_PATTERN.fullmatch(name)
            and len(shape) == len(("out", "in"))
            and shape[0]
            and shape[1] % shape[0] == 0
        ):
            return _KINDS_BY_INPUT_COUNT.get(shape[1] // shape[0], "")
    if names and len(list_predicting_names(config, names)) == len(names):
        return "mtp"
    return ""
